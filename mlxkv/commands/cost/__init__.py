"""`mlxkv cost`: what a smaller cache costs on a text, against the float64 truth."""
