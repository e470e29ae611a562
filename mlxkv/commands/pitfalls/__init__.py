"""`mlxkv pitfalls`: every use and misuse of a cache, on several systems."""
