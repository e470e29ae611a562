"""The command `mlxkv-oracle`, also as `python -m oracle`."""

from __future__ import annotations

import os
import signal


def main() -> None:
    """Runs the command line. An interrupt while it is imported ends the process at once."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # there is nothing yet to remove
    from oracle import cli

    cli.main()


if __name__ == "__main__":
    main()
