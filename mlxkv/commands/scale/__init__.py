"""`mlxkv reports --only scale`: the comparison at size, with its memory measured from outside."""
