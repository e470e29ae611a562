"""`mlxkv bench`: the speed of the port beside mlx-lm's, and what a GPU would run of each."""
