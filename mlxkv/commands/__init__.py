"""One room for each command."""
