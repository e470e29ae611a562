"""mlx.launch starts an engine on several ranks: `python -m mlxkv.engines.ranks JOB.json MODULE`.

This process waits for all of them, says in one line what became of a run that failed, and leaves
none of them behind.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxkv.engines.job import Job, answer, read
from mlxkv.engines.lanes import Lane
from mlxkv.engines.launch import SSH
from mlxkv.engines.progress import say
from mlxkv.engines.rank import ALIVE
from oracle.formats import child, strict_json
from oracle.formats.errors import Refusal, brief
from oracle.formats.exits import DEBUG, PARENT
from oracle.model.checkpoint import resolve

HERE = "127.0.0.1"
"""What mlx.launch takes for this machine; it reaches any other name by ssh."""

_PORTS = range(20000, 32000)
"""Below those that systems give to connections of their own."""

MEETING = 60
"""Seconds that a rank waits for the others. On two busy cores three met in 1.2 to 4 s; MLX itself
tries for 15 s to reach a rank that does not listen, and would wait for ever to be reached."""

PATIENCE = 5.0
"""Seconds in which mlx.launch may end the other ranks when one has failed. Here it takes 0.3; it
would wait for a host that does not answer any more."""

QUIET, TIMES = 120, 3
"""A run in which no rank ends a call for QUIET seconds and TIMES the estimate of all of it is
ended: no call takes longer than the whole, and the estimate is that of one process. MLX waits for
ever for a host that says nothing more; ssh notices within a minute one that is gone (`launch`).
"""

_WARNING = b"[WARN]"
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
    for i, host in enumerate(hosts):
        if not host.ips:
            raise Refusal(f"host {i} has no ips, expected one or more", where=path, remedy=remedy)
    here = f'let the first be {{"ssh": "{HERE}", "ips": [...]}}'
    if len(hosts) < 2:
        what = f"{len(hosts)} hosts, expected two or more of which the first is this machine"
        raise Refusal(what, where=path, remedy=here)
    if hosts[0].ssh != HERE:
        what = f"host 0 has ssh {brief(hosts[0].ssh)}, expected {HERE!r}, as it is this machine"
        raise Refusal(what, where=path, remedy=here)
    return hosts


def count(ranks: int, hostfile: Path | str) -> int:
    """How many ranks a request has; 0 for a run in one process."""
    return len(hosts_of(Path(hostfile))) if hostfile else ranks


def launch(job: Job, path: str, module: str) -> None:
    """Runs the job on its ranks to the end; a Refusal says which rank failed, and how."""
    hosts = hosts_of(Path(job.hostfile)) if job.hostfile else [Host(HERE, (HERE,))] * job.ranks
    port = free_ports(sum(len(host.ips) for host in hosts))
    beside = max(sum(other.ssh == host.ssh for other in hosts) for host in hosts)
    threads = max(1, (job.threads or os.cpu_count() or 1) // beside)
    where = ["--hostfile", job.hostfile] if job.hostfile else ["-n", str(job.ranks)]
    words = ["--backend", "ring", "--starting-port", str(port), *where, "--"]
    words += child.command("mlxkv.engines.rank", path, module, job.device, str(threads))
    say(f"{module}: on {len(hosts)} ranks")
    text = _run([*words, str(MEETING)], job.out, _quiet(job, module), hosts)
    if os.environ.get(DEBUG):
        sys.stderr.write(text)
    if _ENDED.search(text) or not (job.out / "forward.txt").exists():
        raise _failure(text, hosts, port, job.out / SSH)


def _quiet(job: Job, module: str) -> float:
    """Seconds for which the run may be silent."""
    checkpoint = resolve(job.folder, ignore_keys=job.ignore_keys)
    return QUIET + TIMES * Lane(job, module, checkpoint).seconds


def _run(words: list[str], out: Path, quiet: float, hosts: list[Host]) -> str:
    """mlx.launch with these words until all ranks have ended: what it and they printed.

    `out` is for its own files too, which it leaves where they are. A Refusal where for `quiet`
    seconds no rank goes on.
    """
    environment = os.environ | {PARENT: str(os.getpid()), "TMPDIR": str(out)}
    with (out / "ranks.txt").open("w+b") as said:
        # A session of its own: ssh finds no terminal to ask at, and all can be ended together.
        process = subprocess.Popen(
            child.command("mlxkv.engines.launch", *words),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,
            env=environment,
        )
        try:
            if not _wait(process, out / "ranks.txt", out / ALIVE, quiet):
                others = ", ".join(sorted({host.ssh for host in hosts[1:]}))
                what = f"no rank ended a call for {quiet:.0f} s, expected one"
                remedy = f"see whether each host still answers ({others})"
                raise Refusal(what, where="ranks", remedy=remedy)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return _COLOURS.sub("", (out / "ranks.txt").read_text(encoding="utf-8", errors="replace"))


def _wait(process: subprocess.Popen[bytes], said: Path, alive: Path, quiet: float) -> bool:
    """Until mlx.launch ends, or PATIENCE after a rank failed; False where for `quiet` seconds none
    went on.
    """
    failed: float | None = None
    last, since = 0, time.monotonic()
    while failed is None or time.monotonic() < failed + PATIENCE:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            return True
        if failed is None and _WARNING in said.read_bytes():
            failed = time.monotonic()
        now = alive.stat().st_mtime_ns if alive.exists() else 0
        if now != last:
            last, since = now, time.monotonic()
        elif failed is None and time.monotonic() > since + quiet + (0 if last else MEETING):
            return False
    return True


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


def _failure(text: str, hosts: list[Host], port: int, ssh: Path) -> Refusal:
    """Why the ranks ended, as they or mlx.launch said it, or what is in the file of ssh's words."""
    refusals = [line.removeprefix("error: ") for line in text.splitlines() if "error: " in line[:7]]
    if refusals:
        # All refuse what all see; rank 0 says it without its name.
        return Refusal(min(refusals, key=lambda line: line.startswith("rank ")))
    codes = [(int(rank), int(code)) for rank, code in _ENDED.findall(text)]
    if not codes:
        return Refusal("they ended without a result", where="ranks", remedy=_last(text))
    # mlx.launch ends the others by SIGTERM, and may say so first.
    rank, code = next((pair for pair in codes if pair[1] != -signal.SIGTERM), codes[0])
    where = f"rank {rank}" + (f" on {hosts[rank].ssh}" if hosts[rank].ssh != HERE else "")
    if code == 255 and hosts[rank].ssh != HERE:  # which no rank of ours ends with
        said = _last(ssh.read_text(errors="replace") if ssh.exists() else "")
        what = "ssh ended with exit code 255, expected a connection until the run ends"
        remedy = f"see that `ssh {hosts[rank].ssh} true` works without a password"
        return Refusal(what, where=where, remedy=said or f"it said nothing; {remedy}")
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


def _main() -> None:
    path, module = sys.argv[1:]
    # So that what is begun is ended: an exception goes through every `finally`.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    answer(lambda: launch(read(Path(path)), path, module))


if __name__ == "__main__":
    _main()
