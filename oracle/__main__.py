"""The command `mlxkv-oracle`, also as `python -m oracle`."""

from __future__ import annotations

import sys


def main() -> None:
    """Imports the command line where an interrupt is already caught."""
    try:
        from oracle import cli

        cli.main()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
