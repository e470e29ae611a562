"""What a comparison did not exercise: the list that stands beside every verdict.

"Agree" speaks of the calls that were made, and a cache has a longer life than they do. Each line is
what was left out, a colon, and what that means or what shows it; the part before the colon stands
alone in a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from mlxkv.judge.admission import layers
from mlxkv.judge.case import ORDER
from mlxkv.judge.repeats import calls
from mlxkv.judge.result import Rows
from mlxkv.judge.sequence import Judged
from mlxkv.judge.words import listed, plans_of
from oracle.formats.plan import PROBE_LENGTH, Feed, Plan, left_out
from oracle.formats.trace import SHARED, Trace

NOTHING = ("everything: nothing was compared",)
_BUFFER = 256
"""Caches grow by blocks of so many rows, and windows, tables and RoPE's switches are multiples."""
_MOST = 8
_LIFE = (
    "batches, clone, crop and reset: no comparison has them; `mlxkv pitfalls` tries those of the "
    "port and of mlx-lm"
)


def unseen(main: Judged, probe: Judged | None, rows: Rows, *, why_no_probe: str) -> list[str]:
    """Each line without a full stop; `why_no_probe` is said where none was compared.

    `rows` are those of the main sequence.
    """
    sequences = [one for one in (main, probe) if one is not None and (one.runs or one.exact)]
    if not sequences:
        return list(NOTHING)
    plans = [t.meta.plan for one in sequences for t in (one.runs or one.exact).values()]
    lines = [_sample(rows), _positions(sequences, probe)]
    lines += [_ids(sequences, main.case.truth.logits.shape[1])]
    lines += [*_shapes(plans), _absent_plan(main), *_prefixes(main)]
    lines += [*_rows(sequences), *_caches(sequences), _LIFE, _repeats(sequences)]
    lines += [f"the probe: {why_no_probe}"] if probe is None else _of_probe(probe)
    return [line for line in lines if line]


def _sample(rows: Rows) -> str | None:
    """That logits were compared at a sample of the positions."""
    if not rows.sampled:
        return None
    left = f"{rows.of - rows.compared:,} of {rows.of:,} rows of logits"
    how = "keys and values are kept of every position; --all-rows keeps all"
    return f"{left}: {rows.compared:,} of {rows.of:,} rows compared, {how}"


def _positions(sequences: Sequence[Judged], probe: Judged | None) -> str | None:
    last = max(one.case.length for one in sequences) - 1
    if probe is not None and last + 1 >= probe.case.length < PROBE_LENGTH:
        return None  # a probe is cut only by the context, which has no positions beyond
    boundary = _BUFFER
    while boundary <= last:
        boundary *= 2
    what = f"rows, masks and RoPE that go wrong there, as at {boundary}, were not seen"
    return f"positions beyond {last}: {what}; give --tokens with more"


def _ids(sequences: Sequence[Judged], vocab: int) -> str | None:
    fed = {token for one in sequences for token in one.case.manifest.tokens}
    if len(fed) >= vocab:
        return None
    tried = f"{len(fed)} were fed, the largest {max(fed)}; give --tokens with others"
    return f"{vocab - len(fed):,} of {vocab:,} token ids: {tried}"


def _shapes(plans: Sequence[Plan]) -> list[str]:
    """Which sizes of calls were made, and which kinds of calls no plan has."""
    feeds = [list(plan.calls()) for plan in plans]
    kinds = {
        "several tokens after single ones": any(map(_after_single, feeds)),
        "a chunk longer than what is held": any(f.width > f.held > 0 for of in feeds for f in of),
        "a third chunk": any(sum(f.width > 1 for f in of if f.keeps) > 2 for of in feeds),
    }
    absent = [kind for kind, tried in kinds.items() if not tried]
    sizes = sorted({feed.width for of in feeds for feed in of})
    some = [str(size) for size in sizes[:_MOST]] + ([f"up to {sizes[-1]}"] * (len(sizes) > _MOST))
    made = f"calls of other sizes: those made have {', '.join(some)} tokens; {_longest(feeds)}"
    return [made, *([f"{listed(absent)}: no plan compared has such calls"] if absent else [])]


def _longest(feeds: Sequence[Sequence[Feed]]) -> str:
    """How often a cache was fed: what goes wrong at a later call was not seen."""
    chunks, singles = [0], [0]  # by cache
    for feed in (feed for of in feeds for feed in of):
        if not feed.held:
            chunks.append(0)
            singles.append(0)
        (chunks if feed.width > 1 else singles)[-1] += 1
    return f"at most {max(chunks)} of several tokens and {max(singles)} single ones in one cache"


def _after_single(feeds: Sequence[Feed]) -> bool:
    """Whether several tokens are fed to a cache after a single one."""
    return any(a.width == 1 and b.width > 1 and b.held == a.held + 1 for a, b in pairwise(feeds))


def _prefixes(main: Judged) -> list[str]:
    """That lane A was fed fewer of the growing prefixes than lane B."""
    both = [lane.get("prefixes") for lane in (main.exact, main.runs)]
    fed, every = (len(list(t.meta.plan.calls())) if t is not None else 0 for t in both)
    if not 0 < fed < every:
        return []
    what = "without a cache each is a run of its own; the run's dtype had all"
    return [f"{every - fed} of {every} growing prefixes in float64: {what}"]


def _absent_plan(main: Judged) -> str | None:
    """The plan mixed, which traces of an earlier version lack, and short sequences."""
    plan, about = ORDER[-1], main.case.manifest
    if plan in main.runs or plan in main.exact:
        return None
    if plan in about.plans:
        return f"plan {plan}: no usable trace of it"
    n, prompt = main.case.length, about.prompt_tokens
    why = left_out(n, prompt=prompt, original=about.original).get(plan, "not in the run folder")
    return f"plan {plan}: {why}"


def _rows(sequences: Sequence[Judged]) -> list[str]:
    """Rows that a plan asks for and a trace does not have."""
    found = []
    for one in sequences:
        for plan, trace in (one.runs or one.exact).items():
            kept = {p for feed in trace.meta.plan.calls() for p in trace.meta.plan.kept(feed)}
            missing = sorted(kept - set(trace.positions.tolist()))
            if missing:
                where = f"position {missing[0]}" + (f" to {missing[-1]}" * (len(missing) > 1))
                what = f"the trace lacks {len(missing)} of {len(kept)} rows"
                found.append(f"logits of plan {one.shown(plan)} at {where}: {what}")
    return found


def _caches(sequences: Sequence[Judged]) -> list[str]:
    """Which plans' keys and values no trace holds, though the plan keeps a cache.

    Of the plan whose cache is needed (`Case.cached`) the gates say it.
    """
    lacking = [
        one.shown(plan)
        for one in sequences
        for plan, trace in (one.runs or one.exact).items()
        if plan != one.case.cached and layers(one.case.truth) and not layers(trace)
        if any(feed.keeps for feed in trace.meta.plan.calls())
    ]
    if not lacking:
        return []
    hold = "its trace holds none" if len(lacking) == 1 else "their traces hold none"
    return [f"keys and values of {plans_of(lacking)}: {hold}"]


def _repeats(sequences: Sequence[Judged]) -> str:
    every = sum(calls(one.runs or one.exact) for one in sequences)
    twice = sum(calls(_repeated(one)) for one in sequences)
    if not twice:
        return "repeats: no call was made twice, so results that change were not looked for"
    if twice == every:
        return f"further repeats: each of {every} calls was made twice"
    what = f"{twice} were made twice, and a fault that comes and goes shows in those only"
    return f"repeats of {every - twice} of {every} calls: {what}"


def _repeated(one: Judged) -> Mapping[str, Trace]:
    return {plan: trace for plan, trace in one.repeats.items() if plan in one.runs}


def _of_probe(probe: Judged) -> Iterable[str]:
    """Parts of the probe that were not compared."""
    compared = set(probe.runs) | set(probe.exact)
    for plan in (plan for plan in ORDER if plan in probe.case.manifest.plans):
        if plan not in compared:
            yield f"plan {probe.shown(plan)}: no usable trace of it"
        elif probe.exact and plan not in probe.exact:
            other = listed(list(probe.exact))
            yield f"{probe.shown(plan)} in float64: {other} feeds the same tokens there"
        elif plan in probe.exact and SHARED in probe.exact[plan].meta.environment:
            yield f"the first call of {probe.shown(plan)} in float64: another plan's serves for it"
    whys = dict.fromkeys(g.reason for g in probe.gates if g.reason and g.scope == "cache")
    for why in whys:
        yield f"the probe's cache: {why.removeprefix('not run: ')}"
