"""How a process of ours ends: one ladder of exit codes for every command, and no longer life than
its parent's.

0 agree or done, 1 differ, 2 could not tell, 130 interrupted. A fault of ours shows its traceback
and is 2 too: 1 means that the engines differ.
"""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from oracle.formats.errors import AlreadySaid, Refusal

if TYPE_CHECKING:
    import click

PARENT = "MLXKV_PARENT"
"""The environment variable in which mlxkv tells a process who started it."""


def code_of(work: Callable[[], object]) -> int:
    """Does the work and gives its exit code; a refusal is printed as one line on stderr."""
    try:
        work()
        return 0
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 2 if ended.code else 0
    except KeyboardInterrupt:
        return 130
    except AlreadySaid:
        return 2
    except Refusal as error:
        return _refused(str(error))
    except BrokenPipeError:
        # Whoever read our output has gone, as `head` does: Python must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 2
    except MemoryError:
        return _refused(
            "too little memory for this model and sequence; take fewer tokens or another machine"
        )
    except OSError as error:
        what = f"{error.filename or 'this system'}: {error.strerror or error}"
        return _refused(f"{what}; free some space or name another folder")
    except Exception:
        traceback.print_exc()
        return 2


def invoke(command: click.Command, arguments: Sequence[str] | None = None) -> int:
    """Runs a command line (None: this process's own) and gives its exit code."""
    import click

    def run() -> None:
        try:
            command.main(args=None if arguments is None else list(arguments), standalone_mode=False)
        except click.exceptions.Abort:
            raise KeyboardInterrupt from None
        except click.ClickException as error:
            raise Refusal(error.format_message()) from error

    return code_of(run)


def console(command: click.Command) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold bytes that are no text
    try:
        code = invoke(command)
    finally:
        # Python answers an interrupt on its way out with a traceback too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(code)


def answer_signals() -> None:
    """From here on a signal, kill's too, lets this process remove what it has half written."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent()


def end_with_parent() -> None:
    """Ends this process once the one named in MLXKV_PARENT is gone; if none is, does nothing."""
    parent = os.environ.get(PARENT, "")
    if parent.isdecimal():
        threading.Thread(target=_watch, args=[int(parent)], daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGTERM)


def _refused(text: str) -> int:
    print(f"error: {' '.join(text.split())}", file=sys.stderr)
    return 2
