"""Whether two stored traces of any engines may be compared, and over which positions.

Rows may stand side by side only where both computed the same thing: the logits after the same
tokens, of the same weights. Which calls a plan makes does not matter for that, so a cached run can
be compared with an uncached one. Nothing is judged here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import combinations

from mlxkv.judge import delta
from mlxkv.judge.measure import truth_rows
from oracle.formats.errors import Refusal
from oracle.formats.plan import Feed
from oracle.formats.trace import Trace

_Ids = tuple[int, ...]
_ONE = "compare runs of one sequence"


@dataclass(frozen=True, slots=True)
class Aligned:
    """Trace number `a` against number `b`, counted from 0, over the positions that both have."""

    a: int
    b: int
    positions: tuple[int, ...]
    pair: delta.Pair
    figures: delta.Figures


def align(traces: list[Trace]) -> list[Aligned]:
    """Every pair in turn; a Refusal where one may not be compared."""
    found = []
    for a, b in combinations(range(len(traces)), 2):
        of, its = traces[a], traces[b]
        positions = common(of, its)
        pair, rows = delta.pair(of, its, positions), truth_rows(its)
        figures = delta.figures(of, its, rows, plan=of.meta.plan.name, positions=positions)
        found.append(Aligned(a, b, tuple(positions), pair, figures))
    return found


def common(a: Trace, b: Trace) -> list[int]:
    """The positions that both have, in order.

    Raises a Refusal where the rows there are not of the same weights, vocabulary and tokens.
    """
    mine, its = a.meta.fingerprint, b.meta.fingerprint
    if mine is not None and its is not None and mine != its:
        what = f"weights fingerprint is {mine[:16]}, expected {its[:16]} as in {b.label}"
        raise Refusal(what, where=a.label, remedy="run both on the same weights")
    columns, expected = a.logits.shape[1], b.logits.shape[1]
    if columns != expected:
        what = f"vocabulary is {columns}, expected {expected} as in {b.label}"
        raise Refusal(what, where=a.label, remedy="keep all columns")
    tokens = [_sequence(a), _sequence(b)]
    both = sorted(set(a.positions.tolist()) & set(b.positions.tolist()))
    if not both:
        what = f"no position that {b.label} has too, expected one or more"
        raise Refusal(what, where=a.label, remedy=_ONE)
    # A row depends on the tokens up to its own, not on those after.
    for position in range(both[-1] + 1):
        ids = [one[position] if position < len(one) else None for one in tokens]
        if ids[0] != ids[1] or None in ids:
            digests = f"{a.meta.plan.digest[:12]} and {b.meta.plan.digest[:12]}"
            found = f"token at position {position} is {ids[0]}, expected {ids[1]}"
            what = f"{found} as in {b.label} (plan digests {digests})"
            raise Refusal(what, where=a.label, remedy=_ONE)
    return both


def _sequence(trace: Trace) -> _Ids:
    """The one sequence that all rows are of.

    Raises a Refusal where there are several sequences, or several rows of one position.
    """
    twice = [p for p, times in Counter(trace.positions.tolist()).items() if times > 1]
    if twice:
        what = f"more than one row for position {min(twice)}, expected one"
        remedy = "keep the plan's last call that gives it"
        raise Refusal(what, where=trace.label, remedy=remedy)
    plan, outcomes = trace.meta.plan, trace.meta.outcomes
    failed = {i for i, outcome in enumerate(outcomes) if outcome.error is not None}
    longest: _Ids = ()
    for call in plan.calls(without=failed):
        if call.start != call.held:
            what = f"step {call.index} is at index_pos {call.start}, expected {call.held}"
            remedy = "compare a plan without such a step"
            raise Refusal(f"{what}, the tokens cached", where=trace.label, remedy=remedy)
        # Every cache so far holds a beginning of the one sequence.
        ids = longest[: call.held] + call.batch[0] + _chosen(trace, call)
        short, long = sorted((longest, ids), key=len)
        if long[: len(short)] != short:
            what = f"its plan {plan.name!r} feeds several sequences, expected one"
            raise Refusal(what, where=trace.label, remedy="compare a plan of one")
        longest = long
    return longest


def _chosen(trace: Trace, call: Feed) -> _Ids:
    """The tokens that a greedy step chose and fed: all but its last."""
    more = call.fed - call.width
    outcomes = trace.meta.outcomes[call.index : call.index + 1]
    chosen = tuple(outcomes[0].tokens or ()) if outcomes else ()
    if more and len(chosen) != more + 1:
        what = f"step {call.index} chose {len(chosen)} tokens, expected {more + 1}"
        raise Refusal(what, where=trace.label, remedy="write the trace again")
    return chosen[:more]
