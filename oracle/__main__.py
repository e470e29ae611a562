"""The command `mlxkv-oracle`, also as `python -m oracle`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Imports the command line; an interrupt meanwhile ends the process at once, as there is nothing yet to remove."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from oracle import cli

    cli.main()


if __name__ == "__main__":
    main()
