"""Speed and size: the port beside mlx-lm, and what a comparison takes.

The two engines live in processes of their own (mlx-lm brings transformers with it) and take turns, so that a machine
whose speed drifts slows both alike. What counts is the ratio of a pair of turns, not a single figure.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mlxkv.engines.progress import bar
from mlxkv.report.text import columns
from oracle.formats import child
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.model.checkpoint import require_llama, resolve

ENGINES = ("mlxkv", "mlx-lm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What to time: prompts of so many tokens, `decode` tokens after each, in `rounds` turns of each engine."""

    model: str | None = None
    revision: str | None = None
    ignore_keys: tuple[str, ...] = ()
    dtype: str = "float32"
    device: str = "auto"
    prefill: tuple[int, ...] = (128, 1024)
    decode: int = 32
    rounds: int = 3
    with_compare: bool = True


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second of both engines in turns taken side by side: the medians, and the ratios of each pair."""

    what: str
    port: float
    other: float
    ratios: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Port over mlx-lm; above 1 the port is faster."""
        return median(self.ratios)


def speeds(
    folder: Path,
    *,
    dtype: str,
    device: str,
    lengths: tuple[int, ...],
    decode: int,
    rounds: int,
    ignore_keys: tuple[str, ...] = (),
) -> tuple[list[Speed], dict[str, Any]]:
    """Prefill of each length and decoding after it, in turns; and the environment of the port's process."""
    results: dict[str, dict[str, list[float]]] = {}
    given = (str(folder), dtype, device, *ignore_keys)
    with _worker("mlxkv", *given) as port, _worker("mlx-lm", *given) as other:
        workers = dict(zip(ENGINES, (port, other), strict=True))
        environment = _ask(port, "environment")
        for worker in workers.values():
            _ask(worker, [min(lengths), 2])  # the first calls of a process are slower
        with bar("bench", len(lengths) * rounds * 2) as advance:
            for length in lengths:
                for _ in range(rounds):
                    for name, worker in workers.items():
                        seconds = _ask(worker, [length, decode])
                        turn = {
                            f"prefill {length}": length / seconds[0],
                            f"decode after {length}": decode / seconds[1],
                        }
                        for what, speed in turn.items():
                            results.setdefault(what, {e: [] for e in ENGINES})[name].append(speed)
                        advance(1)
    return [
        _speed(what, turns["mlxkv"], turns["mlx-lm"]) for what, turns in results.items()
    ], environment


def _speed(what: str, port: list[float], other: list[float]) -> Speed:
    return Speed(
        what, median(port), median(other), tuple(p / o for p, o in zip(port, other, strict=True))
    )


@contextmanager
def _worker(*given: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        child.command("mlxkv.commands.bench", *given),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
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


@dataclass(frozen=True, slots=True)
class Take:
    """What one comparison took: seconds in all and in the port's forward calls, seconds and peak bytes by process."""

    what: str
    seconds: float
    forward: float
    processes: dict[str, dict[str, float]]


def compare_takes(arguments: list[str]) -> list[Take]:
    """A first comparison, which asks the oracle afresh, and a second, which uses its answer again."""
    takes = []
    for what, more in (("first", ["--fresh"]), ("second", [])):
        with tempfile.TemporaryDirectory() as out:
            begun = time.perf_counter()
            given = ["compare", *arguments, "--json", "--out", out, *more]
            command = child.command("mlxkv", *given)
            ended = subprocess.run(command, stdout=subprocess.PIPE, check=False)
            seconds = time.perf_counter() - begun
        if ended.returncode == 2:
            raise AlreadySaid
        took = {name: t for name, t in json.loads(ended.stdout)["took"].items() if t is not None}
        takes.append(Take(what, seconds, sum(t["forward"] for t in took.values()), took))
    return takes


def to_json(speeds: list[Speed], takes: list[Take], environment: dict[str, Any]) -> dict[str, Any]:
    """`mlxkv-bench/1`"""
    return {
        "format": "mlxkv-bench/1",
        "environment": environment,
        "speeds": [asdict(s) | {"ratio": s.ratio} for s in speeds],
        "compare": [asdict(t) for t in takes],
    }


def text(model: str, speeds: list[Speed], takes: list[Take], environment: dict[str, Any]) -> str:
    """The tables that a person reads."""
    lines = [
        f"{model}  mlx {environment['mlx']} {environment['device']} ({environment['blas'].split(' (')[0]})  {environment['cpu']}",
        "",
    ]
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
    lines += columns(("tokens per second", "port", "mlx-lm", "ratio", "its range"), rows, left={0})
    for take in takes:
        rest = take.seconds - take.forward
        lines += [
            "",
            f"{take.what} compare: {take.seconds:.1f} s, of which {take.forward:.1f} s forward calls of the port and {rest:.1f} s else",
        ]
        cells = [
            (name, f"{t['seconds']:.1f}", f"{t['peak_bytes'] / 1e9:.2f}")
            for name, t in take.processes.items()
        ]
        lines += columns(("process", "seconds", "peak GB"), cells, left={0})
    return "\n".join(lines) + "\n"


def serve(engine: str, folder: str, dtype: str, device: str, *ignore_keys: str) -> None:
    """A worker: answers each [prefill, decode] with the two times in seconds, on the same made-up tokens."""
    from mlxkv.engines import machine as runtime

    environment = runtime.prepare(device)
    turn = _port(folder, dtype, ignore_keys) if engine == "mlxkv" else _mlx_lm(folder, dtype)
    for line in sys.stdin:
        question = json.loads(line)
        answer = environment if question == "environment" else turn(*question)
        print(json.dumps(answer), flush=True)


def _port(folder: str, dtype: str, ignore_keys: tuple[str, ...]) -> Any:
    from mlxkv.port.cache import Cache
    from mlxkv.port.weights import load

    model = load(folder, dtype, ignore_keys=ignore_keys)
    V = model.config.vocab_size

    def turn(prefill: int, decode: int) -> list[float]:
        cache = Cache(model.config, dtype=dtype, max_length=prefill + decode)
        begun = time.perf_counter()
        token = _best(model([_tokens(prefill, V)], cache=cache)[0])
        prefilled = time.perf_counter()
        for _ in range(decode):
            token = _best(model([[token]], cache=cache)[0])
        return [prefilled - begun, time.perf_counter() - prefilled]

    return turn


def _mlx_lm(folder: str, dtype: str) -> Any:
    import mlx.core as mx

    from mlxkv.engines.mlx_lm import load, prompt_cache

    model = load(folder, dtype)
    V = model.args.vocab_size

    def turn(prefill: int, decode: int) -> list[float]:
        cache = prompt_cache(model, "KVCache")
        ids = mx.array([_tokens(prefill, V)])
        begun = time.perf_counter()
        # As mlx_lm's own generate_step does: the prompt but its last token fills the cache and needs no logits.
        if prefill > 1:
            model(ids[:, :-1], cache=cache)
            mx.eval([c.state for c in cache])
        token = _best(model(ids[:, -1:], cache=cache)[0, -1])
        prefilled = time.perf_counter()
        for _ in range(decode):
            token = _best(model(mx.array([[token]]), cache=cache)[0, -1])
        return [prefilled - begun, time.perf_counter() - prefilled]

    return turn


def _best(logits: Any) -> int:
    import mlx.core as mx

    return int(mx.argmax(logits).item())  # type: ignore[arg-type]


def _tokens(n: int, vocab: int) -> list[int]:
    return [(3 + 7919 * i) % vocab for i in range(n)]


def run(request: Request, *, as_json: bool) -> str:
    """The speed of the port beside mlx-lm, and what a first and a second compare take."""
    checkpoint = resolve(request.model, revision=request.revision, ignore_keys=request.ignore_keys)
    require_llama(checkpoint)
    measured, environment = speeds(
        checkpoint.folder,
        dtype=request.dtype,
        device=request.device,
        lengths=request.prefill,
        decode=request.decode,
        rounds=request.rounds,
        ignore_keys=checkpoint.without,
    )
    arguments = [checkpoint.source, f"--dtype={request.dtype}", f"--device={request.device}"]
    arguments += ["--revision", request.revision] if request.revision else []
    arguments += [f"--ignore-key={key}" for key in checkpoint.without]
    takes = compare_takes(arguments) if request.with_compare else []
    if as_json:
        return json.dumps(to_json(measured, takes, environment), indent=1) + "\n"
    return text(checkpoint.name, measured, takes, environment)


if __name__ == "__main__":
    try:
        serve(*sys.argv[1:])
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
