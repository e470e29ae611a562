"""Python with slow libraries loaded already, for processes that tests start by the dozen.

`command(...)` is a command line that does what `python ...` does, seconds sooner: a small
client hands its arguments, folder, environment and open streams to a server, which forks. The
child is as a fresh process is: the server has only imported, and computed nothing (a child forked
after torch's first operation would hang). The client passes signals on and ends as the child did;
if the client is killed, so is the child. Where the environment would have changed the imports, the
client becomes the true `python ...` instead.

There are two kinds: "torch" for the oracle, which saves four seconds a process, and "mlx" for what
imports mlx-lm, which saves one: it has what mlx-lm imports but MLX, whose BLAS a run chooses, and
torch cannot be found in it, as in the engine's own process. One server of a kind serves a whole
test session, both halves of it: `start` makes it where none listens, and it ends when its socket's
file is gone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time

IMPORTS = {
    "torch": (
        *("transformers", "oracle.answer", "oracle.cli", "oracle.folder"),
        "oracle.truth.suspects",
    ),
    "mlx": (
        *("transformers.models.auto.tokenization_auto", "huggingface_hub.hf_api", "tokenizers"),
        *("transformers.tokenization_utils_tokenizers", "mlxkv.engines.prompt_cache"),
        *("mlxkv.engines.runner", "oracle.model.checkpoint", "safetensors.numpy"),
    ),
}
# What the imported libraries read of the environment; the threads of a BLAS are set anew by a run.
READ = ("HF_", "TRANSFORMERS_", "TORCH", "PYTORCH_", "OMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_")
READ += ("ATEN_", "LD_", "PYTHON")
IDLE = 300.0
"""Seconds without a child after which the server ends, should a test session have been killed."""
LEFT_OUT = ("MKL_NUM_THREADS", "PYTEST_", "PYTHONHASHSEED")
# mlx-lm and torch set these where they are imported, a worker of pytest too. One silences advice,
# the other names a folder for code that nobody here compiles.
LEFT_OUT += ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "TORCHINDUCTOR_CACHE_DIR")


def command(room: os.PathLike[str] | str, *arguments: str, kind: str = "torch") -> list[str]:
    """What to start in place of `python -P ARGUMENTS`, with `-m MODULE`, `-c CODE` or a file.

    Off Linux that very process: macOS's frameworks do not outlive a fork.
    """
    if sys.platform != "linux":
        return [sys.executable, "-P", *arguments]
    return [sys.executable, "-S", __file__, kind, os.fspath(room), *arguments]


def read_by_imports(environment: dict[str, str]) -> dict[str, str]:
    """The part of an environment that a process's imports may depend on."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(READ) and not name.startswith(LEFT_OUT)
    }


# The client: imports next to nothing.


def client(kind: str, room: str, arguments: list[str]) -> None:
    """Hands the arguments over and ends as the child does."""
    import json

    connection = connect(kind, room)
    asked = {"arguments": arguments, "cwd": os.getcwd(), "environment": dict(os.environ)}
    text = json.dumps(asked).encode()
    socket.send_fds(connection, [len(text).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(text)
    answer = _line(connection)
    if answer == "cold":
        os.execv(sys.executable, [sys.executable, "-P", *arguments])
    child = int(answer)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda n, _: os.kill(child, n))
    parent = int(os.environ.get("MLXKV_PARENT") or 0)
    if parent:
        # Within the child it could not be seen: its parent is the server.
        connection.settimeout(0.5)
    status = int(_line(connection, lambda: os.getppid() == parent or os.kill(child, 15)))
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def connect(kind: str, room: str) -> socket.socket:
    """A connection to the server, which is made if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_address(kind, room))
    except OSError:
        start(kind, room)
        connection.connect(_address(kind, room))
    return connection


def _line(connection: socket.socket, meanwhile: object = None) -> str:
    text = b""
    while not text.endswith(b"\n"):
        try:
            more = connection.recv(1)
        except TimeoutError:
            meanwhile()  # type: ignore[operator]
            continue
        if not more:
            sys.exit("the warm server is gone")
        text += more
    return text.decode().strip()


def _address(kind: str, room: str) -> str:
    """A socket's address has at most 107 bytes: by way of the folder's open handle."""
    handle = os.open(room, os.O_RDONLY | os.O_DIRECTORY)
    return f"/proc/self/fd/{handle}/warm-{kind}"


def start(kind: str, room: str) -> None:
    """Starts the server, unless another process is just doing so, and waits until it listens."""
    import fcntl
    import subprocess

    os.makedirs(room, exist_ok=True)
    with open(os.path.join(room, f"warm-{kind}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        probe = socket.socket(socket.AF_UNIX)
        if probe.connect_ex(_address(kind, room)) == 0:
            return
        environment = {k: v for k, v in os.environ.items() if not k.startswith(LEFT_OUT)}
        environment.pop("MLXKV_PARENT", None)
        with open(os.path.join(room, f"warm-{kind}.log"), "ab") as log:
            server = subprocess.Popen(
                [sys.executable, __file__, "--serve", kind, room],
                cwd="/",
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while server.poll() is None:
            if socket.socket(socket.AF_UNIX).connect_ex(_address(kind, room)) == 0:
                return
            time.sleep(0.02)
        sys.exit(f"the warm server ended with {server.returncode}; see {room}/warm-{kind}.log")


# The server.


def serve(kind: str, room: str) -> None:
    """Imports, then forks a child for each connection until the room is gone."""
    import importlib
    import threading

    # As the command line does before it imports torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    mine = read_by_imports(dict(os.environ))
    mine.pop("OMP_WAIT_POLICY")
    if kind == "mlx":
        sys.modules["torch"] = None  # type: ignore[assignment]
    for name in IMPORTS[kind]:
        importlib.import_module(name)
    if kind == "mlx":
        del sys.modules["torch"]  # a run hides it itself
    if threading.active_count() > 1:
        sys.exit(f"threads before the first fork: {threading.enumerate()}")
    listener = socket.socket(socket.AF_UNIX)
    place = os.path.join(room, f"warm-{kind}")
    if os.path.exists(place):
        os.unlink(place)  # of a server that ended
    listener.bind(_address(kind, room))
    listener.listen(64)
    _loop(listener, place, mine)


def _loop(listener: socket.socket, place: str, mine: dict[str, str]) -> None:
    """One thread for all of it, since a process that forks should have no other."""
    import selectors

    children: dict[int, socket.socket] = {}
    signal.signal(signal.SIGCHLD, lambda *_: None)
    wakes, wake = os.pipe()
    for handle in (wakes, wake):
        os.set_blocking(handle, False)
    signal.set_wakeup_fd(wake)
    with selectors.DefaultSelector() as waiting:
        waiting.register(listener, selectors.EVENT_READ)
        waiting.register(wakes, selectors.EVENT_READ)
        busy = time.monotonic()
        while os.path.exists(place) and (children or time.monotonic() - busy < IDLE):
            for key, _ in waiting.select(timeout=2):
                if key.fileobj is listener:
                    connection, _ = listener.accept()
                    child = _fork(connection, mine, [listener.fileno(), wakes, wake])
                    if child:
                        children[child] = connection
                        waiting.register(connection, selectors.EVENT_READ, child)
                elif key.fileobj == wakes:
                    os.read(wakes, 512)
                else:
                    # Nothing is sent from there: the client is gone, and with it goes the child.
                    waiting.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
            busy = time.monotonic() if children else busy
            for child, status in _ended(children):
                connection = children.pop(child)
                if connection in (key.fileobj for key in waiting.get_map().values()):
                    waiting.unregister(connection)
                _send(connection, f"{status}\n")
                connection.close()
    listener.close()
    if os.path.exists(place):
        os.unlink(place)
    for child in children:
        os.kill(child, signal.SIGKILL)


def _ended(children: dict[int, socket.socket]) -> list[tuple[int, int]]:
    found = []
    for child in list(children):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            found.append((child, status))
    return found


def _send(connection: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError):  # the client was killed
        connection.sendall(text.encode())


def _fork(connection: socket.socket, mine: dict[str, str], handles: list[int]) -> int | None:
    """The child's number, or None where this run must be a true process."""
    import json

    try:
        first, streams, _, _ = socket.recv_fds(connection, 8, 3)
        size, text = int.from_bytes(first, "little"), b""
        while size and len(text) < size and (more := connection.recv(size - len(text))):
            text += more
        asked = json.loads(text)
    except (OSError, ValueError):
        connection.close()
        return None
    its = read_by_imports(asked["environment"])
    its.pop("OMP_WAIT_POLICY", None)
    child = os.fork() if its == mine else None
    if child == 0:
        for handle in (connection.fileno(), *handles):
            os.close(handle)
        _run(asked, streams)
    for stream in streams:
        os.close(stream)
    _send(connection, f"{child or 'cold'}\n")
    if child is None:
        connection.close()
    return child


def _run(asked: dict[str, object], streams: list[int]) -> None:
    """What `python ARGUMENTS` does, to its end."""
    import runpy
    import traceback

    code = 1
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The server may have been started where interrupts are ignored, as in a job's background.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        # Made anew, since those of the server know the kind of file that its own streams go to.
        sys.stdin = os.fdopen(0, closefd=False)
        sys.stdout = os.fdopen(1, "w", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.chdir(str(asked["cwd"]))
        os.environ.clear()
        os.environ.update(asked["environment"])  # type: ignore[call-overload]
        # The client looks after its own parent; this process's is the server.
        os.environ.pop("MLXKV_PARENT", None)
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        kind, *rest = asked["arguments"]  # type: ignore[misc]
        if kind == "-m":
            sys.argv = rest
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.argv = ["-c", *rest[1:]]
            exec(rest[0], {"__name__": "__main__"})
        else:
            sys.argv = [kind, *rest]
            sys.path.insert(0, os.path.dirname(kind))
            runpy.run_path(kind, run_name="__main__")
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1 if ended.code else 0
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        except OSError:
            code = 120
        os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "--serve":
        serve(*sys.argv[2:])
    else:
        client(*sys.argv[1:3], sys.argv[3:])
