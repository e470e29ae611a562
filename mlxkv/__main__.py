"""The command `mlxkv`, also as `python -m mlxkv`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Imports the command line; an interrupt meanwhile ends the process at once, as there is nothing yet to remove."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from mlxkv import cli

    cli.main()


if __name__ == "__main__":
    main()
