"""`mlxkv bench`: the speed of the port beside mlx-lm's.

The two engines live in processes of their own (mlx-lm brings transformers with it) and take turns,
so that a machine whose speed drifts slows both alike. What counts is the ratio of a pair of turns,
not a single figure. The seconds and bytes of a comparison are in what `compare --json` prints.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from mlxkv.engines import machine
from mlxkv.engines.progress import bar, say, steps
from mlxkv.report.text import columns
from oracle.formats import child
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.formats.exits import code_of
from oracle.model.checkpoint import Checkpoint, Named

Begin = Callable[[int], Callable[[list[int]], int]]
"""A new cache for so many tokens: the function that feeds it ids and gives the greedy next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request(Named):
    """What to time: prompts of so many tokens, `decode` tokens after each, in `rounds` of turns."""

    dtype: str = "float32"
    device: str = "auto"
    prefill: tuple[int, ...] = (128, 1024)
    decode: int = 32
    rounds: int = 3


@dataclass(frozen=True, slots=True)
class Speed:
    """Both engines' tokens per second: medians, and the ratio of each pair of turns."""

    what: str
    port: float
    other: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Port over mlx-lm; above 1 the port is faster."""
        return median(self.ratios)


def run(request: Request, *, as_json: bool) -> str:
    machine.require_device(request.device)
    machine.require_mlx_lm()
    checkpoint = request.checkpoint(steps())
    _require_room(checkpoint, request)
    turns = f"{request.rounds} turns of each engine at {len(request.prefill)} lengths"
    say(f"bench: {turns} on {checkpoint.name}, after both have loaded it")
    measured, environment = speeds(checkpoint, request)
    if not as_json:
        return text(checkpoint.name, measured, environment)
    found = [asdict(speed) | {"ratio": speed.ratio} for speed in measured]
    value = {"format": "mlxkv-bench/1", "environment": environment, "speeds": found}
    return json.dumps(value, indent=1) + "\n"


def _require_room(checkpoint: Checkpoint, request: Request) -> None:
    """Refuses turns that are longer than the model's sequences."""
    longest, most = max(request.prefill), checkpoint.max_positions
    if longest + request.decode > most:
        raise Refusal(
            f"{longest} tokens and {request.decode} after them, expected at most {most} in all "
            f"(max_position_embeddings of {checkpoint.name})",
            where=f"--prefill {longest} --decode {request.decode}",
            remedy="give smaller ones",
        )


def speeds(checkpoint: Checkpoint, request: Request) -> tuple[list[Speed], dict[str, Any]]:
    """Prefill of each length and decoding after it; and the surroundings of the port's process."""
    turns: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    given = (str(checkpoint.folder), request.dtype, request.device, *checkpoint.without)
    lengths, decode, rounds = request.prefill, request.decode, request.rounds
    with _worker("mlxkv", *given) as first, _worker("mlx-lm", *given) as second:
        workers = first, second
        environment = _ask(first, "environment")
        for worker in workers:
            _ask(worker, [min(lengths), min(2, decode)])  # the first calls of a process are slower
        with bar("bench", len(lengths) * rounds * 2) as advance:
            for length in [length for length in lengths for _ in range(rounds)]:
                for engine, worker in enumerate(workers):
                    prefill, rest = _ask(worker, [length, decode])
                    turns[f"prefill {length}"][engine].append(length / prefill)
                    turns[f"decode after {length}"][engine].append(decode / rest)
                    advance(1)
    found = []
    for what, (port, other) in turns.items():
        ratios = tuple(p / o for p, o in zip(port, other, strict=True))
        found.append(Speed(what, median(port), median(other), ratios))
    return found, environment


@contextmanager
def _worker(*given: str) -> Iterator[subprocess.Popen[str]]:
    command = child.command("mlxkv.commands.bench", *given)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def _ask(worker: subprocess.Popen[str], question: Any) -> Any:
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        worker.stdin.write(json.dumps(question) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
    except BrokenPipeError:
        answer = ""
    if not answer:
        if worker.wait() == 2:
            raise AlreadySaid
        raise Refusal(
            f"bench: an engine's process ended with exit code {worker.returncode}; see above"
        )
    return json.loads(answer)


def text(model: str, speeds: Sequence[Speed], environment: dict[str, Any]) -> str:
    blas, cpu = environment["blas"].split(" (")[0], environment["cpu"]
    rows = [
        (
            s.what,
            f"{s.port:.1f}",
            f"{s.other:.1f}",
            f"{s.ratio:.2f}",
            f"{min(s.ratios):.2f} to {max(s.ratios):.2f}",
        )
        for s in speeds
    ]
    head = ("tokens per second", "port", "mlx-lm", "ratio", "its range")
    first = f"{model}  mlx {environment['mlx']} {environment['device']} ({blas})  {cpu}"
    return "\n".join([first, "", *columns(head, rows, left={0})]) + "\n"


def serve(engine: str, folder: str, dtype: str, device: str, *ignore_keys: str) -> None:
    """An engine's process: answers each line of stdin, `[prefill, decode]`, with a turn's times.

    Both engines are fed the same made-up tokens.
    """
    environment = machine.prepare(device)
    vocab, begin = (
        _port(folder, dtype, ignore_keys) if engine == "mlxkv" else _mlx_lm(folder, dtype)
    )

    def turn(prefill: int, decode: int) -> list[float]:
        feed, ids = begin(prefill + decode), [(3 + 7919 * i) % vocab for i in range(prefill)]
        begun = time.perf_counter()
        token = feed(ids)
        prefilled = time.perf_counter()
        for _ in range(decode):
            token = feed([token])
        return [prefilled - begun, time.perf_counter() - prefilled]

    for line in sys.stdin:
        question = json.loads(line)
        answer = environment if question == "environment" else turn(*question)
        print(json.dumps(answer), flush=True)


def _port(folder: str, dtype: str, ignore_keys: tuple[str, ...]) -> tuple[int, Begin]:
    """The vocabulary's size, and how a sequence begins."""
    from mlxkv.port.cache import Cache
    from mlxkv.port.weights import load

    model = load(folder, dtype, ignore_keys=ignore_keys)

    def begin(length: int) -> Callable[[list[int]], int]:
        cache = Cache(model.config, dtype=dtype, max_length=length)
        return lambda ids: _best(model([ids], cache=cache)[0])

    return model.config.vocab_size, begin


def _mlx_lm(folder: str, dtype: str) -> tuple[int, Begin]:
    import mlx.core as mx

    from mlxkv.engines.mlx_lm import KVCACHE, caches_for, load

    model = load(folder, dtype)

    def begin(_: int) -> Callable[[list[int]], int]:
        cache = caches_for(model, KVCACHE)

        def feed(ids: list[int]) -> int:
            # As mlx_lm's own generate_step does: all of the prompt but its last token only fills
            # the cache, and needs no logits.
            if len(ids) > 1:
                model(mx.array([ids[:-1]]), cache=cache)
                mx.eval([c.state for c in cache])
            return _best(model(mx.array([ids[-1:]]), cache=cache)[0, -1])

        return feed

    return model.args.vocab_size, begin


def _best(logits: Any) -> int:
    import mlx.core as mx

    return int(mx.argmax(logits).item())  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(code_of(lambda: serve(*sys.argv[1:])))
