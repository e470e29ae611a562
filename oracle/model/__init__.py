"""Where a model comes from, and what its files hold. No torch."""
