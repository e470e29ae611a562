"""`mlxkv cost`: a text's truth is computed once, and every variant is measured against it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mlxkv.commands.cost import ask, metrics, page, picture, scoring
from mlxkv.commands.cost.ask import Passage, Request
from mlxkv.commands.cost.metrics import Known
from mlxkv.commands.cost.probe import Probe, probe
from mlxkv.commands.cost.result import Cost, Measured
from mlxkv.commands.cost.rows import Rows
from mlxkv.commands.cost.scoring import Facts, Job
from mlxkv.commands.cost.variants import PLAIN, Variant
from mlxkv.engines import machine, oracle, process
from mlxkv.engines.own import heads_of
from mlxkv.engines.process import Process
from mlxkv.engines.progress import announce, say, steps
from mlxkv.report import plots
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import stored, strict_json, text
from oracle.formats.disk import write_text
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.model.checkpoint import Checkpoint

PREFILLED, DECODED, ORACLE = 7e-11, 4.3e-10, 6e-11
"""Seconds for each parameter of the model and each token: of a prefilled one and a decoded one of a
variant, its rows reduced, and of one of each pass of the oracle's. From the default model's
134,515,008 on two quiet cores: 160 and 18 tokens a second, 0.003 s a row, 65 s for the truth and
three known answers.
"""
BESIDE = 0.8
"""What the variants take, of that, where some run beside the others. On two quiet cores the 16
default ones took 465 s; one after another, a whole run took 771 s, of which 75 are the oracle's.
"""
_SCORING = "mlxkv.commands.cost.scoring"
_ONE_THREAD = ("QuantizedKVCache", "SplitKVCache", "SwitchedKVCache")


def report(request: Request, *, out: Path, command: str) -> Report:
    cost = run(request)
    made = files(cost, commands=[command])
    text = page.console(cost, report=str(out / "cost.md"))
    return Report(made, text, made["cost.json"], cost.exit_code)


def files(cost: Cost, *, commands: Sequence[str]) -> dict[str, str]:
    """The picture, the JSON, and the page, which links to the picture, last."""
    svg = {"cost.svg": picture.kl_against_bytes(cost)} if len(cost.shown) > 1 else {}
    text = page.markdown(cost, commands=commands, svg=next(iter(svg), None))
    return svg | {"cost.json": pretty(cost.to_json()), "cost.md": text}


def run(request: Request) -> Cost:
    """Asks for the truth, runs every variant, and reduces what came."""
    asked = request.variants()
    machine.require_device(request.device)
    machine.require_mlx_lm()
    oracle.require_torch()
    checkpoint = request.checkpoint(steps())
    fed = ask.passage(request, checkpoint)
    asked = tuple(_without_misfit(one, checkpoint) for one in asked)
    specs = [one.known for one in asked if one.known]
    probed = _probe(asked, checkpoint, fed)
    beside = _beside(request, checkpoint, asked)
    seconds = _seconds(checkpoint, fed, asked, specs, probed, beside)
    announce(f"cost: {len(asked)} variants", seconds)
    plots.load_aside()
    say(f"oracle: the truth of {len(fed.tokens)} tokens and {len(specs)} known answers")
    kept = oracle.text_folder(checkpoint, fed.tokens, specs, fresh=request.fresh)
    with kept as folder, process.scratch() as room:
        truth = text.read(folder)
        found = _followed(request, checkpoint, folder, room, asked, fed, probed, beside)
        measured = _reduced(room, asked, found, truth, fed, probed)
    engine = next(facts.environment for facts in found if facts.environment)
    return Cost(
        model=checkpoint.name,
        source=checkpoint.source,
        fingerprint=checkpoint.fingerprint,
        title=fed.title,
        tokens=fed.tokens,
        length=fed.length,
        chunk=request.chunk,
        measured=measured,
        distances=tuple(sorted(set(probed.distances))) if probed else (),
        beside=beside,
        environment={"mlx-lm": engine, "oracle": truth.manifest.environment},
    )


def _without_misfit(one: Variant, checkpoint: Checkpoint) -> Variant:
    """A variant whose groups do not fit the heads has no known answer: it will be refused."""
    if not one.known:
        return one
    spec, (_, size) = stored.parse(one.known), heads_of(checkpoint.config)
    misfit = isinstance(spec, stored.Affine) and size % spec.group_size
    return replace(one, known="") if misfit else one


def _probe(asked: Sequence[Variant], checkpoint: Checkpoint, fed: Passage) -> Probe | None:
    windows = [window for one in asked if (window := one.window)]
    sizes = {"vocab": checkpoint.vocab_size, "limit": checkpoint.max_positions}
    return probe(windows, fed.tokens, **sizes)


def _seconds(
    checkpoint: Checkpoint,
    fed: Passage,
    asked: Sequence[Variant],
    specs: Sequence[str],
    probed: Probe | None,
    beside: Sequence[str],
) -> float:
    prefilled = fed.length + (len(probed.tokens) if probed else 0)
    decoded, truths = len(fed.tokens) - fed.length, 3 + len(set(specs))
    each = PREFILLED * prefilled + DECODED * decoded
    whole = each * len(asked) * (BESIDE if beside else 1) + ORACLE * truths * len(fed.tokens)
    return whole * checkpoint.parameters


def _followed(
    request: Request,
    checkpoint: Checkpoint,
    folder: Path,
    room: Path,
    asked: Sequence[Variant],
    fed: Passage,
    probed: Probe | None,
    beside: Sequence[str],
) -> list[Facts]:
    """What became of each variant; their rows are in `room`."""
    numbered = {str(i): one for i, one in enumerate(asked)}
    aside = {number: one for number, one in numbered.items() if one.name in beside}
    job = Job(
        folder=str(checkpoint.folder),
        truth=str(folder),
        out=str(room),
        variants=aside,
        length=fed.length,
        chunk=request.chunk,
        probe=probed.tokens if probed else (),
        asked=probed.asked if probed else (),
        device=request.device,
        threads=1 if aside else None,
    )
    with _begun(job, room / "aside", silent=True) if aside else nullcontext():
        threads = max(1, (os.cpu_count() or 1) - 1) if aside else None
        rest = {number: one for number, one in numbered.items() if number not in aside}
        for i, group in enumerate(_groups(rest)):
            with _begun(replace(job, variants=group, threads=threads), room / f"group-{i}"):
                pass
    return [_facts(scoring.facts_file(room, number)) for number in numbered]


def _facts(path: Path) -> Facts:
    value = strict_json.read(path, remedy="run again")
    return strict_json.typed(value, Facts, where=path, remedy="run again")


def _beside(request: Request, checkpoint: Checkpoint, asked: Sequence[Variant]) -> tuple[str, ...]:
    """The names of the variants that run in a process beside the others, if any do.

    MLX computes affine groups on one thread of a CPU, whose others would wait. A GPU is not shared,
    nor is memory that two copies of the weights would fill by half.
    """
    weights = 4 * checkpoint.parameters
    if machine.uses_gpu(request.device) or not machine.holds_together(2 * weights):
        return ()
    slow = (one for one in asked if one.kind.base in _ONE_THREAD and one.rounds_cache_alone)
    return tuple(one.name for one in slow)


def _groups(asked: Mapping[str, Variant]) -> Iterator[dict[str, Variant]]:
    """Those that one process can run, by their numbers; each of a person's own has its own."""
    groups: dict[Any, dict[str, Variant]] = {}
    for number, one in asked.items():
        own = number if one.kind.whose == "own" else ""
        groups.setdefault((one.dtype, one.bits, one.group_size, own), {})[number] = one
    yield from groups.values()


@contextmanager
def _begun(job: Job, path: Path, *, silent: bool = False) -> Iterator[None]:
    """Runs a job beside the `with`, at whose end it waits for it.

    A variant that left nothing is written down as failed, with the reason.
    """
    write_text(path, msgspec.json.encode(job).decode())
    first, failed = next(iter(job.variants.values())).kind, "its process left no result"
    name = os.path.basename(first.file) if first.file else ""
    stderr = path.with_suffix(".stderr") if silent else None
    with Process([_SCORING, str(path)], file=name, stderr=stderr) as running:
        yield
        try:
            running.wait()
        except AlreadySaid:
            failed = "its process refused to run it, and said why on stderr"
        except Refusal as error:
            failed = str(error)
    for number in job.variants:
        left = scoring.facts_file(Path(job.out), number)
        if not left.exists():
            write_text(left, msgspec.json.encode(Facts(failed=failed)).decode())


def _reduced(
    room: Path,
    asked: Sequence[Variant],
    found: Sequence[Facts],
    truth: text.Text,
    fed: Passage,
    probed: Probe | None,
) -> tuple[Measured, ...]:
    plain = asked.index(PLAIN)
    if found[plain].failed:
        raise Refusal(found[plain].failed, where="the full cache in float32")
    noise = _rows(room, plain)
    made = []
    for i, (one, facts) in enumerate(zip(asked, found, strict=True)):
        if facts.failed:
            made.append(Measured(one, facts.failed))
            continue
        rows = _rows(room, i)
        known = _known(one, rows, noise, truth)
        hits = probed.rates(facts.hits) if probed else {}
        made.append(Measured.of(one, facts, rows, noise, fed.length, known, hits))
    return tuple(made)


def _known(one: Variant, rows: Rows, noise: Rows, truth: text.Text) -> Known | None:
    """How a variant stands to its known answer, None where it has none."""
    if one.known:
        spec = stored.parse(one.known).name
        return metrics.known(spec, np.asarray(truth.stored[spec].kl), rows, noise)
    judged = one != PLAIN and one.keeps_everything
    return metrics.nothing_lost(rows, noise) if judged else None


def _rows(room: Path, number: int) -> Rows:
    with np.load(scoring.rows_file(room, str(number))) as arrays:
        return Rows(**arrays)
