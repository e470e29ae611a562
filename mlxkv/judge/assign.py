"""What each trace is to a judgement: a run of the sequence, of the probe, or a run once more."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlxkv.judge.admission import by_plan
from mlxkv.judge.case import Case, Probed
from mlxkv.judge.result import Verdict
from mlxkv.judge.verdict import judge
from oracle.formats.errors import Refusal
from oracle.formats.run_folder import Manifest
from oracle.formats.trace import Trace


@dataclass(frozen=True, slots=True)
class Assigned:
    """What `judge` takes, by plan."""

    case: Case
    candidates: Mapping[str, Trace]
    algebra: Mapping[str, Trace]
    repeats: Mapping[str, Trace]
    probe: Probed | None

    def judge(self) -> Verdict:
        how = {"algebra": self.algebra, "repeats": self.repeats}
        return judge(self.case, self.candidates, probe=self.probe, **how)


def assign(
    case: Case,
    traces: Iterable[Trace],
    *,
    algebra: Iterable[Trace] = (),
    probe: Case | None = None,
) -> Assigned:
    """Traces in the run's dtype, and those in float64, each by its plan's digest.

    `probe` is the run folder's own probe. Raises a Refusal where a trace is of no plan that is
    judged, is the second of one and does not say that it is a repeat, or repeats the probe.
    """
    arithmetic = list(traces)
    mine, probed = _apart(case.manifest, probe, [t for t in arithmetic if not t.meta.repeat])
    exact, exact_probed = _apart(case.manifest, probe, algebra)
    again, unread = _apart(case.manifest, probe, [t for t in arithmetic if t.meta.repeat])
    for trace in unread:
        what = "a repeat of the probe's plan, expected one of the run folder's own"
        raise Refusal(what, where=trace.label, remedy="leave it out")
    return Assigned(
        case=case,
        candidates=by_plan(case.manifest, mine),
        algebra=by_plan(case.manifest, exact),
        repeats=by_plan(case.manifest, again),
        probe=_probed(probe, probed, exact_probed) if probe is not None else None,
    )


def _probed(case: Case, traces: list[Trace], exact: list[Trace]) -> Probed:
    return Probed(case, by_plan(case.manifest, traces), by_plan(case.manifest, exact))


def _apart(
    manifest: Manifest, probe: Case | None, traces: Iterable[Trace]
) -> tuple[list[Trace], list[Trace]]:
    """Those of the sequence's plans, and of no plan that is known; then those of the probe's."""
    its = set(probe.manifest.plans.values()) if probe else set[str]()
    its -= set(manifest.plans.values())
    parts: tuple[list[Trace], list[Trace]] = [], []
    for trace in traces:
        parts[trace.meta.plan.digest in its].append(trace)
    return parts
