"""`python -m mlxkv` is the command `mlxkv`."""

from mlxkv.cli import main

main()
