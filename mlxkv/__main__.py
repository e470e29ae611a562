"""The command `mlxkv`, also as `python -m mlxkv`."""

import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` put the working folder first, and a checkpoint's folder may hold a random.py.
    del sys.path[0]

import os
import signal


def main() -> None:
    """Imports and runs the command line.

    An interrupt meanwhile ends the process at once, as there is nothing yet to remove.
    """
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from mlxkv import require_oracle

    try:
        require_oracle()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    from mlxkv import cli

    cli.main()


if __name__ == "__main__":
    main()
