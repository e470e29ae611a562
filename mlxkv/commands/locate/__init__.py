"""`mlxkv locate`: where something first goes wrong."""
