"""What a comparison found, as Markdown for a file and as lines for a terminal.

Pure functions of the verdict and the facts: no clock, no file, no machine is read, so the same run gives the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxkv.judge.delta import Figures, Pair, Run
from mlxkv.judge.result import Control, Verdict
from mlxkv.report.text import (
    clip,
    code,
    columns,
    environment_rows,
    gate_cells,
    markdown_table,
    number,
    power,
    quoted,
    side_by_side,
)
from oracle.formats.run_folder import Manifest
from oracle.formats.trace import Meta

GATES = ("gate", "plan", "value", "limit", "headroom", "where")
PAIRS = ("a", "b", "max abs delta", "first", "last", "rms", "top-1", "max abs b")
# Of the page, with the original weights: by (a, b), where "ours" is candle 0.11.0 on the page and the engine judged here.
PAGE = {
    ("theirs cached", "theirs full"): "8.01e-05",
    ("ours cached", "ours nocache"): "6.25e-05",
    ("ours cached", "theirs full"): "8.20e-05",
    ("theirs chunked", "theirs cached"): "4.67e-05 (first)",
    ("ours chunked", "ours cached"): "2.91e-05",
}
_MOST_IDS = 64
_MOST_TEXT = 400
WORDS = (
    (
        "the page",
        "the article on KV caches in transformers and candle whose experiments this project repeats",
    ),
    ("full", "the whole sequence in one call"),
    ("step", "the prompt, then single tokens through the cache (the page's *cached*)"),
    ("prefixes", "no cache, the growing prefix at every step (the page's *nocache*)"),
    ("chunked", "the prompt in several calls, then single tokens"),
    (
        "noise floor",
        "how far transformers itself, in up to five orders of evaluation, is from the float64 truth at a position",
    ),
    ("algebra", "the engine in float64 against the truth, where there is no noise"),
    ("sigma", "rms error over all positions, in noise floors; correct engines read about 1"),
    (
        "worst position, peak",
        "the worst position's rms, and the largest single logit's error, in their floors",
    ),
    ("shift", "a common offset of all logits of a position, which sigma leaves out, in its floor"),
    (
        "decisive flips",
        "positions whose highest token changed although the truth's margin is far above the noise",
    ),
    (
        "cached against uncached",
        "step against full within the engine, in units of the same difference within transformers",
    ),
    (
        "keys, values",
        "rows of the step plan's cache, per layer and head, in floors: median, 95th percentile and worst over positions",
    ),
)


# What is said instead, or besides, where there is no truth.
MEAN_WORDS = {
    "noise floor": "how far transformers' own runs, in three to five orders of evaluation, are from their mean at a position, times "
    "sqrt(n / (n - 1)) for n of them",
    "decisive flips": "positions whose highest token changed although the mean's margin is far above the noise",
    "agrees with transformers": "within the noise of transformers' own runs; what is true is not known for this architecture, and an "
    "error that all of its runs share is not seen",
}


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's surroundings, as text: a line for the title, and names and values for the table."""

    title: str
    headline: str
    rows: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The greedy tokens after the prompt."""

    ids: tuple[int, ...]
    text: str | None


def side(meta: Meta) -> Side:
    """Of a trace."""
    version, blas = (
        meta.environment.get("mlx"),
        str(meta.environment.get("blas", "")).split(" (")[0],
    )
    named = f"{meta.engine} {meta.engine_version}".strip()
    # The port is part of this program; whose Llama else runs on MLX must be said.
    engine = (
        named
        if not version
        else f"mlx {version}"
        if meta.engine.startswith("mlxkv")
        else f"{named}, mlx {version}"
    )
    first = [("engine", named), ("device", meta.device), ("dtype", meta.dtype)]
    return Side(
        meta.engine,
        f"{engine} {meta.device}" + (f" ({blas})" if blas else ""),
        (*first, *environment_rows(meta.environment)),
    )


def oracle_side(manifest: Manifest) -> Side:
    """Of an oracle folder."""
    version = manifest.environment.get("torch")
    what = (
        "transformers and strict float64 truth"
        if manifest.has_truth
        else "transformers alone: no truth for this architecture"
    )
    first = [("engine", what), ("device", "cpu"), ("dtype", manifest.dtype)]
    rows = [
        (k, v)
        for k, v in environment_rows(manifest.surroundings)
        if k not in ("device", "dtype", "engine")
    ]
    return Side("oracle", f"torch {version}" if version else "transformers", (*first, *rows))


def sentence(verdict: Verdict) -> str:
    """The verdict in one line."""
    alone = verdict.against == "transformers"
    if verdict.outcome == "agree":
        return f"{'agrees with transformers' if alone else 'agree'} ({', '.join(verdict.scopes)})"
    if verdict.outcome == "cannot tell":
        more = f" (and {len(verdict.reasons) - 1} more)" if len(verdict.reasons) > 1 else ""
        return (
            f"cannot tell: {verdict.reasons[0] if verdict.reasons else 'no gate could run'}{more}"
        )
    failed = [g for g in verdict.worst if g.failed]
    scopes = list(dict.fromkeys(g.scope for g in failed))
    what = "differs from transformers" if alone else "differ"
    line, first = (
        f"{what} ({', '.join(scopes)}): {', '.join(g.name for g in failed)}",
        verdict.first_wrong,
    )
    if first is None:
        return line
    token = f" {quoted(first.token)}" if first.token is not None else ""
    layer = f", layer {first.layer}" if first.layer is not None else ""
    return f"{line}; first wrong position {first.position}{token} (plan {first.plan}, {first.gate}{layer})"


def cause(verdict: Verdict) -> str | None:
    """The usual mistake that explains the difference, in one line."""
    found = verdict.cause
    return (
        f"looks like {found.words} (sigma {found.sigma:.2f} against a truth with that mistake)"
        if found
        else None
    )


def console_report(
    verdict: Verdict, manifest: Manifest, *, sides: tuple[Side, Side], report: str | None = None
) -> str:
    """What `compare` prints. `report` is where the Markdown went."""
    n, shown = len(manifest.tokens), clip(_prompt(manifest), 42)
    lines = [f"{_model(manifest)}  {manifest.dtype}  {sides[0].headline} vs {sides[1].headline}"]
    lines += [f"{n} tokens: {shown} + {n - manifest.prompt_tokens}        {_proofs(manifest)}", ""]
    if verdict.gates:
        lines += [*columns(GATES, [gate_cells(g) for g in verdict.worst], left={0, 1, 5}), ""]
    if verdict.controls:
        lines += [f"controls: {_controls(verdict)}", ""]
    ours = verdict.subject.engine
    against = [
        p
        for p in _pairs(verdict)
        if p.a.engine == ours and p.b.engine != ours and p.b.plan == "full"
    ]
    if against:
        head = (
            "plan",
            "max |d|",
            "first",
            "last",
            "rms",
            "top-1",
            "(against transformers, as on the page)",
        )
        cells = [
            [str(p.a).removeprefix(f"{p.a.engine} "), *_pair_cells(p)[2:-1], ""] for p in against
        ]
        lines += [*columns(head, cells, left={0, 6}), ""]
    lines += [
        f"cannot tell: {reason}" if verdict.outcome != "differ" else f"also: {reason}"
        for reason in verdict.reasons
    ]
    lines += [f"note: {note}" for note in verdict.notes]
    lines += [f"hint: {verdict.hint}"] if verdict.hint else []
    lines += [f"cause: {cause(verdict)}"] if verdict.cause else []
    # The port is part of this program; whose verdict else this is must be said.
    whose = "" if ours.startswith("mlxkv") else f"{ours}: "
    lines.append(
        whose
        + (
            "cannot tell"
            if verdict.outcome == "cannot tell" and verdict.reasons
            else sentence(verdict)
        )
    )
    if report is not None:
        lines[-1:] = (
            [f"{lines[-1]}    report: {report}"]
            if verdict.outcome != "differ"
            else [lines[-1], f"report: {report}"]
        )
    return "\n".join(lines) + "\n"


def compare_report(
    verdict: Verdict,
    manifest: Manifest,
    *,
    sides: Sequence[Side],
    commands: Sequence[str],
    continuation: Continuation | None = None,
    svg: str | None = None,
    third: Sequence[Pair] = (),
    other: Verdict | None = None,
    page: bool = False,
) -> str:
    """The Markdown report. `third` are the pairs of `delta.three_way` with a third engine, whose own verdict is `other`.

    `page` puts the page's values beside ours.
    """
    parts = [
        [
            f"# {verdict.subject.engine} against transformers: {_model(manifest)}, {manifest.dtype}",
            "",
            f"**{sentence(verdict)}**",
        ],
        [
            f"- {line}"
            for line in (cause(verdict), *verdict.reasons, *verdict.notes, verdict.hint)
            if line
        ],
        _gates(verdict),
        _pair_section(
            "Cached against uncached", "Table 3 of the page", verdict.tables.cached, verdict, page
        ),
        _pair_section(
            "Chunked prefill", "Table 4 of the page", verdict.tables.chunked, verdict, page
        ),
        _pair_section("Three engines", "The same rows", tuple(third), verdict, False),
        _other(other),
        _tokens(manifest, continuation),
        [
            "## Error by position",
            "",
            f"![rms error of each plan, position by position, beside the noise floor]({svg})",
        ]
        if svg
        else [],
        _figures(verdict.figures, verdict.against),
        _environment(sides),
        _inputs(manifest),
        ["## Reproduce", "", "```sh", *commands, "```"] if commands else [],
        ["## Words", "", *_words(verdict)],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _other(other: Verdict | None) -> list[str]:
    if other is None:
        return []
    return [
        f"By the same gates {other.subject.engine}: **{sentence(other)}**."
        + (f" It {cause(other)}." if other.cause else "")
    ]


def _gates(verdict: Verdict) -> list[str]:
    if not verdict.gates:
        return []
    cells = [gate_cells(g) for g in verdict.worst]
    cells = [[*row[:5], code(row[5]) if row[5] != "-" else row[5]] for row in cells]
    how = "Each gate on the plan that did worst; values in units of the noise floor, algebra relative to the largest value."
    table = markdown_table(GATES, cells, left={0, 1, 5})
    return ["## Gates", "", how, "", *table, "", f"Controls: {_controls(verdict)}."]


def _controls(verdict: Verdict) -> str:
    def told(control: Control) -> str:
        other = {"agree": "differs", "differ": "agrees"}[control.expected]
        did = f"{control.expected}s" if control.passed else f"{other}, must {control.expected}"
        return f"{control.name}: {did} ({control.quantity} {control.value:.3g})"

    return "; ".join([*map(told, verdict.controls), f"{verdict.distinct} distinct pool members"])


def _pair_section(
    title: str, what: str, pairs: tuple[Pair, ...], verdict: Verdict, page: bool
) -> list[str]:
    if not pairs:
        return []
    rows = [[*_pair_cells(p), PAGE.get(_as_on_page(p, verdict), "-")] for p in pairs]
    head: tuple[str, ...] = (*PAIRS, "on the page")
    how = f"{what}: a minus b in logits, from the prompt's last token on; first and last row's largest, rms over all."
    if not page:
        head, rows = PAIRS, [row[:-1] for row in rows]
    beside = (
        ["", "On the page, candle 0.11.0 stands where this engine stands here."] if page else []
    )
    return [f"## {title}", "", how, *beside, "", *markdown_table(head, rows, left={0, 1})]


def _pair_cells(p: Pair) -> list[str]:
    deltas = [number(x) for x in (p.max_abs, p.first_max, p.last_max, p.rms)]
    return [str(p.a), str(p.b), *deltas, f"{p.top1_equal}/{p.rows}", f"{p.max_abs_ref:.3f}"]


def _as_on_page(p: Pair, verdict: Verdict) -> tuple[str, str]:
    a, b = (
        Run("ours" if run.engine == verdict.subject.engine else "theirs", run.plan)
        for run in (p.a, p.b)
    )
    return str(a), str(b)


def _pairs(verdict: Verdict) -> tuple[Pair, ...]:
    return (*verdict.tables.cached, *verdict.tables.chunked)


def _tokens(manifest: Manifest, continuation: Continuation | None) -> list[str]:
    ids = manifest.tokens[: manifest.prompt_tokens]
    rows = [["prompt", code(clip(_prompt(manifest), _MOST_TEXT)), code(_ids(ids))]]
    if continuation is not None:
        text = (
            code(clip(quoted(continuation.text), _MOST_TEXT))
            if continuation.text is not None
            else "-"
        )
        rows.append(["generated", text, code(_ids(continuation.ids))])
    return ["## Tokens", "", *markdown_table(("", "text", "ids"), rows, left={0, 1, 2})]


def _words(verdict: Verdict) -> list[str]:
    """Where there is no truth, those that speak of it have another meaning, or none."""
    meanings = dict(WORDS)
    if verdict.against == "transformers":
        meanings = {
            word: meaning for word, meaning in (meanings | MEAN_WORDS).items() if word != "algebra"
        }
    return [f"- **{word}**: {meaning}" for word, meaning in meanings.items()]


def _figures(figures: Sequence[Figures], against: str) -> list[str]:
    if not figures:
        return []
    head = (
        "plan",
        "max abs delta",
        "rms",
        "NMSE (dB)",
        "1 - cosine",
        "KL (nats)",
        "top-1",
        "top-5",
    )
    rows = [
        [
            f.plan,
            *(number(x) for x in (f.max_abs, f.rms)),
            f"{f.nmse_db:.1f}",
            *(number(x) for x in (1 - f.cosine, f.kl)),
        ]
        + [f"{count}/{f.rows}" for count in (f.top1_equal, f.top5_equal)]
        for f in figures
    ]
    what = "float64 truth" if against == "truth" else "mean of transformers' runs"
    how = f"Against the {what}, over all rows of each plan: what other tools look at. They pass most faults that the gates catch."
    return ["## Shown, not judged", "", how, "", *markdown_table(head, rows, left={0})]


def _environment(sides: Sequence[Side]) -> list[str]:
    return ["## Environment", "", *side_by_side([(one.title, one.rows) for one in sides])]


def _inputs(manifest: Manifest) -> list[str]:
    rows = [
        ["model", code(manifest.source)],
        ["weights fingerprint", code(manifest.fingerprint)],
        ["config digest", code(manifest.config_digest)],
        _proofs(manifest).split(": ", 1),
    ]
    if manifest.revision is not None:
        rows.insert(1, ["revision", code(manifest.revision)])
    rows += [[f"plan {name}", code(digest)] for name, digest in sorted(manifest.plans.items())]
    return ["## Inputs", "", *markdown_table(("", ""), rows, left={0, 1})]


def _proofs(manifest: Manifest) -> str:
    return _truth(manifest) if manifest.has_truth else _mean(manifest)


def _mean(manifest: Manifest) -> str:
    apart, double = (manifest.proofs.get(name) for name in ("members_apart", "mean_double"))
    words = f"mean of {manifest.pool_distinct} runs of transformers"
    first = f"each within {power(apart, digits=2)}" if apart is not None else "not measured"
    return f"no truth: {words}, {first}, float64 " + (
        f"within {power(double, digits=2)}" if double is not None else "not measured"
    )


def _truth(manifest: Manifest) -> str:
    plans = " = ".join(name for name in ("step", "full", "chunked") if name in manifest.plans)
    within, double = (
        manifest.proofs.get("truth_agreement"),
        manifest.proofs.get("transformers_double"),
    )
    first = (
        f"{plans} to {power(within, digits=2)}" if within is not None else "agreement not measured"
    )
    return f"truth: {first}, " + (
        f"transformers within {power(double, digits=2)}"
        if double is not None
        else "transformers not measured"
    )


def _model(manifest: Manifest) -> str:
    return f"{manifest.name} ({manifest.note})" if manifest.note else manifest.name


def _prompt(manifest: Manifest) -> str:
    if manifest.prompt is not None or manifest.texts:
        return quoted(
            manifest.prompt
            if manifest.prompt is not None
            else "".join(manifest.texts[: manifest.prompt_tokens])
        )
    return f"{manifest.prompt_tokens} ids"


def _ids(ids: Sequence[int]) -> str:
    shown = " ".join(map(str, ids[:_MOST_IDS]))
    return shown if len(ids) <= _MOST_IDS else f"{shown} ... ({len(ids)} in all)"
