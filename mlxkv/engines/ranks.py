"""mlx.launch starts an engine on several ranks: `python -m mlxkv.engines.ranks JOB.json MODULE`.

This process waits for all of them, says in one line what became of a run that failed, and leaves
none of them behind.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from mlxkv.engines.job import Job, answer, read
from mlxkv.engines.rank import MEETING
from oracle.formats import strict_json
from oracle.formats.errors import Refusal, brief
from oracle.formats.exits import DEBUG, PARENT

HERE = "127.0.0.1"
"""What mlx.launch takes for this machine; it reaches any other name by ssh."""

_PORTS = range(20000, 32000)
"""Below those that systems give to connections of their own."""

_ENDED = re.compile(r"Node with rank (\d+) exited with code (-?\d+)")
_COLOURS = re.compile(r"\x1b\[\d+m")


@dataclass(frozen=True, slots=True)
class Host:
    """A host of mlx.launch's hostfile: its name for ssh, and the addresses that ranks meet at."""

    ssh: str
    ips: tuple[str, ...] = ()
    rdma: Any = None


def hosts_of(path: Path) -> list[Host]:
    """One host for each rank, in a hostfile as mlx.launch takes it; a Refusal for what is none."""
    remedy = "see `mlx.launch --hostfile` in MLX's documentation"
    value = strict_json.read(path, remedy=remedy)
    backend = value.get("backend", "") if isinstance(value, dict) else ""
    if backend not in ("", "ring"):
        what = f"backend is {brief(backend)}, expected 'ring'"
        raise Refusal(what, where=path, remedy="judge it on a ring")
    listed = value.get("hosts") if isinstance(value, dict) else value
    if not isinstance(listed, list):
        raise Refusal("no list of hosts, expected one", where=path, remedy=remedy)
    hosts = [
        strict_json.typed(entry, Host, where=f"{path}: host {i}", remedy=remedy)
        for i, entry in enumerate(listed)
    ]
    if lacks := next((i for i, host in enumerate(hosts) if not host.ips), None):
        raise Refusal(f"host {lacks} has no ips, expected one or more", where=path, remedy=remedy)
    if len(hosts) < 2 or hosts[0].ssh != HERE or not hosts[0].ips:
        what = f"{len(hosts)} hosts, expected two or more of which the first is this machine"
        raise Refusal(what, where=path, remedy=f'let it be {{"ssh": "{HERE}", "ips": [...]}}')
    return hosts


def count(ranks: int, hostfile: Path | str) -> int:
    """How many ranks a request has; 0 for a run in one process."""
    return len(hosts_of(Path(hostfile))) if hostfile else ranks


def launch(job: Job, path: str, module: str) -> None:
    """Runs the job on its ranks to the end; a Refusal says which rank failed, and how."""
    program = _launcher()
    hosts = hosts_of(Path(job.hostfile)) if job.hostfile else [Host(HERE, (HERE,))] * job.ranks
    port = free_ports(sum(len(host.ips) for host in hosts))
    beside = max(sum(other.ssh == host.ssh for other in hosts) for host in hosts)
    threads = max(1, (job.threads or os.cpu_count() or 1) // beside)
    where = ["--hostfile", job.hostfile] if job.hostfile else ["-n", str(job.ranks)]
    rank = [sys.executable, "-P", "-m", "mlxkv.engines.rank", path, module, job.device]
    words = ["--backend", "ring", "--starting-port", str(port), *where, "--", *rank, str(threads)]
    os.environ[PARENT] = str(os.getpid())
    # mlx.launch's own files, which it leaves where they are.
    os.environ["TMPDIR"] = str(job.out)
    # ssh must not ask for a password where nobody can be seen to answer.
    os.environ |= {"SSH_ASKPASS": "false", "SSH_ASKPASS_REQUIRE": "force"}
    with open(job.out / "ranks.txt", "w+b") as said:
        _run(program, words, said)
        said.seek(0)
        text = _COLOURS.sub("", said.read().decode(errors="replace"))
    if os.environ.get(DEBUG):
        sys.stderr.write(text)
    if (why := _failure(text, hosts, port)) or not (job.out / "forward.txt").exists():
        raise why or Refusal("they ended without a result", where="ranks", remedy=_last(text))


def free_ports(n: int) -> int:
    """The first of `n` ports in a row that nobody on this machine listens at.

    mlx.launch's own are the same for all: where two runs met there, MLX would join them to one.
    """
    for first in random.sample(_PORTS, 100):
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in range(first, first + n):
                stack.enter_context(socket.socket()).bind(("", port))
            return first
    raise Refusal(f"no {n} ports in a row are free", where="ranks", remedy="end what listens there")


def _launcher() -> Callable[[], None]:
    """What the command mlx.launch runs."""
    for found in entry_points(group="console_scripts", name="mlx.launch"):
        program: Callable[[], None] = found.load()
        return program
    what = "this MLX has no mlx.launch, expected MLX 0.32 or another that has it"
    raise Refusal(what, where="ranks", remedy="install a newer MLX")


def _run(program: Callable[[], None], words: list[str], said: io.BufferedRandom) -> None:
    """mlx.launch in this process; what it and its ranks print goes to `said`."""
    before = sys.argv, sys.stdin, sys.stdout, sys.stderr
    with open(os.devnull) as nothing, _patient(program, nothing):
        sys.argv, sys.stdin = ["mlx.launch", *words], nothing
        sys.stdout = sys.stderr = io.TextIOWrapper(said, write_through=True)
        try:
            program()
        except SystemExit as ended:  # it does not know one of the words
            print(f"error: mlx.launch ended with {ended.code}")
        finally:
            sys.stdout.detach()
            sys.argv, sys.stdin, sys.stdout, sys.stderr = before


@contextmanager
def _patient(program: Callable[[], None], stdin: Any) -> Iterator[None]:
    """Has mlx.launch wait where there is nothing to do.

    It asks whether ranks can be written to, which they always can, and so turns in circles: beside
    three ranks that slept it took 1.4 of two cores.
    """

    def waiting(reads: list[int], _: list[int], errors: list[int], seconds: float) -> Any:
        reads = [file for file in reads if file != stdin.fileno()]
        return select.select(reads, [], errors, min(seconds, 0.05))

    names = vars(sys.modules[program.__module__])
    before = names.get("select")
    if before is select.select:
        names["select"] = waiting
    try:
        yield
    finally:
        if before is select.select:
            names["select"] = before


def _failure(text: str, hosts: list[Host], port: int) -> Refusal | None:
    """Why the ranks ended, as they or mlx.launch said it; None if all ended well."""
    refusals = [line.removeprefix("error: ") for line in text.splitlines() if "error: " in line[:7]]
    if refusals:
        # All refuse what all see; rank 0 says it without its name.
        return Refusal(min(refusals, key=lambda line: line.startswith("rank ")))
    codes = [(int(rank), int(code)) for rank, code in _ENDED.findall(text)]
    if not codes:
        return None
    # mlx.launch ends the others by SIGTERM, and may say so first.
    rank, code = next((pair for pair in codes if pair[1] != -signal.SIGTERM), codes[0])
    where = f"rank {rank}" + (f" on {hosts[rank].ssh}" if hosts[rank].ssh != HERE else "")
    if code == -signal.SIGALRM:
        what = f"waited {MEETING} s for the others, expected every host to answer"
        remedy = f"see that they can reach each other at ports {port} and above"
        return Refusal(what, where=where, remedy=remedy)
    died = f"was ended by signal {-code}" if code < 0 else f"ended with exit code {code}"
    remedy = _last(text) or "there may be too little memory, or it is a fault of ours"
    return Refusal(f"its process {died}, expected a result", where=where, remedy=remedy)


def _last(text: str) -> str:
    """The last line that was not mlx.launch's own."""
    lines = [" ".join(line.split()) for line in text.splitlines()]
    lines = [line for line in lines if line and not _ENDED.search(line) and "[WARN]" not in line]
    return f"its last line was: {lines[-1][:300]}" if lines else ""


def _end_all(*_: object) -> None:
    """Nothing of ours is to run on; the ranks are in this process's group."""
    os.killpg(0, signal.SIGKILL)


def _main() -> None:
    path, module = sys.argv[1:]
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, _end_all)
    answer(lambda: launch(read(Path(path)), path, module))


if __name__ == "__main__":
    _main()
