"""From traces to a verdict: agree, differ, or cannot tell.

All gates are joined by AND, and the worst plan decides. A failed gate counts where what it was
measured with can be trusted; whatever else is odd makes the verdict "cannot tell", never "agree".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mlxkv.judge import delta
from mlxkv.judge.admission import engine_reasons
from mlxkv.judge.case import PROBE, Case, Probed
from mlxkv.judge.finding import finding
from mlxkv.judge.measure import Measures
from mlxkv.judge.notes import notes
from mlxkv.judge.result import (
    SCOPES,
    Control,
    Curve,
    FirstWrong,
    Gate,
    Outcome,
    Rows,
    Scope,
    Subject,
    Verdict,
    subject,
)
from mlxkv.judge.sequence import Judged, sequence
from mlxkv.judge.unseen import NOTHING, unseen
from oracle.formats.trace import Trace


def judge(
    case: Case,
    candidates: Mapping[str, Trace],
    *,
    algebra: Mapping[str, Trace] | None = None,
    repeats: Mapping[str, Trace] | None = None,
    probe: Probed | None = None,
) -> Verdict:
    """The verdict on an engine's runs of the judged plans, by plan.

    `candidates` are in the run's dtype, which the noise floor judges; `algebra` in float64, where
    there is no noise; `repeats` are plans of `candidates` that the same process followed again. The
    gates of `probe` join the others; if it was not run, `Verdict.unseen` says so.
    """
    exact = algebra or {}
    again = repeats or {}
    about = subject(case.manifest, [*candidates.values(), *exact.values(), *again.values()])
    main = sequence(case, candidates, exact, again)
    if not isinstance(main, Judged):
        return Verdict("cannot tell", (), (), about, reasons=tuple(main), unseen=NOTHING)
    probed, doubts = _probed(case, probe)
    sequences = [main, probed] if probed is not None else [main]
    reasons = [*_of_all(sequences), *main.doubts, *doubts]
    if not candidates and not exact:
        reasons.append("candidate: nothing to compare, expected a trace of one judged plan or more")
    verdict = _verdict(case, sequences, about, reasons)
    why_no_probe = _why_no_probe(case, probe)
    lines = unseen(main, probed, verdict.rows, why_no_probe=why_no_probe)
    return replace(verdict, unseen=tuple(lines))


def _verdict(
    case: Case, sequences: Sequence[Judged], about: Subject, reasons: Sequence[str]
) -> Verdict:
    """All but what was not seen; the first of the sequences is the main one."""
    main, probed = sequences[0], len(sequences) > 1
    gates = [gate for one in sequences for gate in _named(one)]
    outcome = _outcome(sequences, gates, reasons)
    return Verdict(
        outcome=outcome,
        scopes=_covered(gates),
        plans=tuple(one.shown(plan) for one in sequences for plan in one.runs or one.exact),
        subject=about,
        gates=tuple(gates),
        controls=tuple(control for one in sequences for control in _controls(one)),
        reasons=tuple(reasons),
        notes=(*_notes(sequences), *notes(main, outcome, probed=probed)),
        found=finding(sequences) if outcome == "differ" else "",
        first_wrong=_first_wrong(sequences) if outcome == "differ" else None,
        figures=tuple(figure for one in sequences for figure in _figures(one)),
        tables=delta.page_tables(case, main.runs),
        floor=tuple(main.yardstick.floors.rms.tolist()),
        floor_at=tuple(case.truth.positions.tolist()),
        curves=tuple(_curve(plan, run) for plan, run in main.measures.items()),
        distinct=case.pool.distinct,
        against="truth" if case.has_truth else "transformers",
        rows=_rows(main),
    )


def _rows(main: Judged) -> Rows:
    """Those that any plan's run has, in either lane, beside the truth's."""
    kept = set(main.case.truth.positions.tolist())
    runs = [*main.runs.values(), *main.exact.values()]
    compared = {at for run in runs for at in run.positions.tolist()} & kept
    return Rows(len(compared), len(kept), main.case.length)


def _probed(case: Case, probe: Probed | None) -> tuple[Judged | None, list[str]]:
    """The probe judged, if there are runs of it, and what of it leaves the verdict open."""
    if probe is None or not (probe.candidates or probe.algebra):
        return None, []
    of = ("fingerprint", "config_digest", "dtype")
    found: Judged | list[str] = [
        f"manifest.json: {name} is {mine}, expected {its} as the run folder's; make it again"
        for name in of
        if (mine := getattr(probe.case.manifest, name)) != (its := getattr(case.manifest, name))
    ]
    if not probe.case.manifest.probe:
        found = ["manifest.json: it is not that of a probe; make the folder again"]
    if not found:
        found = sequence(probe.case, probe.candidates, probe.algebra, {}, name=PROBE)
    if isinstance(found, list):
        return None, [f"{PROBE}: {reason}" for reason in found]
    return found, found.doubts


def _why_no_probe(case: Case, probe: Probed | None) -> str:
    if probe is not None:
        return "no trace of its plans that could be compared"
    if not case.has_truth:
        return "there is none without a truth"
    return "left out, so a long sequence, and ids that span the vocabulary, were not tried"


def _of_all(sequences: Sequence[Judged]) -> list[str]:
    """What leaves the verdict open of the traces together, and of their tokens."""
    main = sequences[0]
    lanes = [lane for one in sequences for lane in (one.runs, one.exact)]
    found = engine_reasons([trace for lane in lanes for trace in lane.values()])
    if main.case.length == 1:
        what = "with one token nothing comes before it, so neither RoPE nor a mask is seen"
        found.append(f"tokens: {what}; give a prompt of two or more")
    return found


def _notes(sequences: Sequence[Judged]) -> list[str]:
    """What is said of each sequence's runs, and once of how a cache is kept in both."""
    main, *others = sequences
    kept = [
        f"{one.name}: {note}" for one in others for note in one.layouts if note not in main.layouts
    ]
    return [*main.layouts, *kept, *(note for one in sequences for note in one.notes)]


def _named(one: Judged) -> list[Gate]:
    """The gates, under the names of the plans in the verdict.

    Of the probe only those that ran: what could not, `unseen` says.
    """
    if not one.name:
        return list(one.gates)
    return [replace(gate, plan=one.shown(gate.plan)) for gate in one.gates if gate.ran]


def _controls(one: Judged) -> list[Control]:
    return [replace(control, name=one.shown(control.name)) for control in one.trusted.controls]


def _outcome(sequences: Sequence[Judged], gates: Sequence[Gate], reasons: Sequence[str]) -> Outcome:
    if any(one.differs for one in sequences):
        return "differ"
    return "cannot tell" if reasons or not any(g.ran for g in gates) else "agree"


def _covered(gates: Sequence[Gate]) -> tuple[Scope, ...]:
    of = {scope: [g for g in gates if g.scope == scope] for scope in SCOPES}
    return tuple(scope for scope in SCOPES if of[scope] and all(g.ran for g in of[scope]))


def _first_wrong(sequences: Sequence[Judged]) -> FirstWrong | None:
    """Of the main sequence where it differs: positions of two sequences have no order."""
    for one in sequences:
        wrong = [(g.first, g) for g in one.gates if g.failed and g.first is not None]
        if one.differs and wrong:
            first, gate = min(wrong, key=lambda w: (w[0], w[1].about, w[1].after is not None))
            where = one.shown(gate.plan), gate.name, gate.layer
            return FirstWrong(first, one.case.text(first), *where, gate.about, gate.after)
    return None


def _figures(one: Judged) -> list[delta.Figures]:
    return [replace(of, plan=one.shown(plan)) for plan, of in one.survey.figures.items()]


def _curve(plan: str, run: Measures) -> Curve:
    return Curve(plan, tuple(run.positions.tolist()), tuple(run.rms.tolist()))
