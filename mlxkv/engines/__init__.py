"""Plan -> trace, one file per engine, each in a process of its own."""
