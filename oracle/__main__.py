"""The command `mlxkv-oracle`, also as `python -m oracle`."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` put the working folder first, and a checkpoint's folder may hold a random.py.
    del sys.path[0]

import os
import signal


def main() -> None:
    """Runs the command line. An interrupt while it is imported ends the process at once."""
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # there is nothing yet to remove
    from oracle import cli

    cli.main()


if __name__ == "__main__":
    main()
