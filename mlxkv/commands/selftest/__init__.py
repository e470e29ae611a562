"""`mlxkv selftest` and `mlxkv calibrate`: the judge on trial."""
