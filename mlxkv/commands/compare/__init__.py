"""`mlxkv compare`: the oracle, the engine, the verdict, the report."""
