"""A verdict as the Markdown page of a report, and as the JSON beside it. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mlxkv.judge.delta import Figures, Key, Pair, Run
from mlxkv.judge.result import Verdict
from mlxkv.report import phrases
from mlxkv.report.phrases import Side
from mlxkv.report.text import clip, code, gate_cells, markdown_table, number, quoted, side_by_side
from oracle.formats.run_folder import Manifest

_PAIRS = ("a", "b", "max abs delta", "first", "last", "rms", "top-1", "max abs b")

# What the article reports with the original weights. "ours" is candle 0.11.0 there, and the engine
# judged here.
_PAGE: dict[tuple[Key, Key], str] = {
    (("theirs", "step"), ("theirs", "full")): "8.01e-05",
    (("ours", "step"), ("ours", "prefixes")): "6.25e-05",
    (("ours", "step"), ("theirs", "full")): "8.20e-05",
    (("theirs", "chunked"), ("theirs", "step")): "4.67e-05 (first)",
    (("ours", "chunked"), ("ours", "step")): "2.91e-05",
}
_PLOT = "rms error of each plan, position by position, beside the noise floor"
_MOST_IDS = 64
_MOST_TEXT = 400
_WORDS = {
    "the page": "the article on KV caches in transformers and candle whose experiments this "
    "project repeats",
    "full": "the whole sequence in one call",
    "step": "the prompt, then single tokens through the cache (the page's *cached*)",
    "prefixes": "no cache, the growing prefix at every step (the page's *nocache*)",
    "chunked": "the prompt in several calls, then single tokens",
    "mixed": "a small chunk, one longer than what is held, single tokens, several again, to the "
    "end",
    "probe": "a sequence of up to 300 ids that span the vocabulary, judged beside the prompt's own "
    "in the plans full and chunked, at a sample of its positions",
    "first wrong position": "the first that is beyond the limit of a single row; *about*: only "
    "several rows from there on are together, beyond that of their median; *between*: those before "
    "it were not compared",
    "noise floor": "how far transformers itself, in up to six orders of evaluation, is from the "
    "float64 truth at a position",
    "algebra": "the engine in float64 against the truth, where there is no noise",
    "sigma": "rms error over all positions, in noise floors; correct engines read about 1",
    "worst position, peak": "the worst position's rms, and the largest single logit's error, in "
    "their floors",
    "shift": "a common offset of all logits of a position, which sigma leaves out, in its floor",
    "decisive flips": "positions whose highest token changed although the truth's margin is far "
    "above the noise",
    "repeat": "positions at which the same plan, followed a second time, gave other bits; of an "
    "engine that is not deterministic, the difference in the floors of cached against uncached",
    "cached against uncached": "step against full within the engine, in units of the same "
    "difference within transformers",
    "keys, values": "rows of the cache that a plan leaves, per layer and head, in floors: median, "
    "95th percentile and worst over positions; prefixes leaves none",
}

# Where there is no truth these have another meaning, and "algebra" none.
_MEAN_WORDS = {
    "noise floor": "how far transformers' own runs, in three to five orders of evaluation, are "
    "from their mean at a position, times sqrt(n / (n - 1)) for n of them",
    "decisive flips": "positions whose highest token changed although the mean's margin is far "
    "above the noise",
    "agrees with transformers": "within the noise of transformers' own runs; what is true is not "
    "known for this architecture, and an error that all of its runs share is not seen",
}


def markdown(
    verdict: Verdict,
    manifest: Manifest,
    *,
    sides: Sequence[Side],
    commands: Sequence[str],
    continuation: tuple[Sequence[int], str | None] | None = None,
    svg: str | None = None,
    third: Sequence[Pair] = (),
    other: Verdict | None = None,
    page_values: bool = False,
) -> str:
    """The page. `continuation` are the greedy tokens after the prompt, and their text.

    `third` are the pairs of `delta.three_way` with a third engine, whose own verdict is `other`.
    `page_values` puts the article's values beside ours.
    """
    ours, tables = verdict.subject.engine, verdict.tables
    values = _PAGE if page_values else {}
    parts = [
        [f"# {ours} against transformers: {manifest.title}, {manifest.dtype}"],
        [f"**{phrases.sentence(verdict)}**"],
        _rows(verdict),
        _lines(verdict),
        _gates(verdict),
        not_exercised(verdict),
        _pairs("Cached against uncached", "Table 3 of the page", tables.cached, ours, values),
        _pairs("Chunked prefill", "Table 4 of the page", tables.chunked, ours, values),
        _pairs("Three engines", "The same rows", third, ours, {}),
        _other(other) if other else [],
        _tokens(manifest, continuation),
        ["## Error by position", "", f"![{_PLOT}]({svg})"] if svg else [],
        _figures(verdict.figures, verdict.against),
        ["## Environment", "", *side_by_side([(one.title, one.rows) for one in sides])],
        _inputs(manifest),
        ["## Reproduce", "", "```sh", *commands, "```"] if commands else [],
        _words(verdict),
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def to_json(
    verdict: Verdict, manifest: Manifest, environments: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The verdict as `mlxkv-verdict/1`, with the model, the prompt and each side's environment."""
    names = ("name", "source", "revision", "note")
    return verdict.to_json() | {
        "model": {name: getattr(manifest, name) for name in names},
        "prompt": manifest.prompt,
        "environment": dict(environments),
    }


def _rows(verdict: Verdict) -> list[str]:
    """Which rows of logits a long sequence is judged by."""
    compared = phrases.rows(verdict.rows)
    if not compared:
        return []
    which = (
        "the first, the prompt's end, each border of calls and of blocks with its neighbours, a "
        "geometric ladder, and what is decoded"
    )
    return [f"Of the logits {compared}: {which}. Keys and values are compared at every position."]


def _lines(verdict: Verdict) -> list[str]:
    lines = (*verdict.reasons, *verdict.notes, verdict.hint)
    return [f"- {line}" for line in lines if line]


def not_exercised(
    verdict: Verdict, how: str = "What this comparison does not speak of."
) -> list[str]:
    """The section on what the comparison says nothing of; no lines where the verdict lists none.

    `how` is said before the list.
    """
    if not verdict.unseen:
        return []
    return ["## Not exercised", "", how, "", *(f"- {line}" for line in verdict.unseen)]


def _gates(verdict: Verdict) -> list[str]:
    if not verdict.gates:
        return []
    cells = [gate_cells(g) for g in verdict.worst]
    cells = [[*row[:5], code(row[5]) if row[5] != "-" else row[5]] for row in cells]
    how = (
        "Each gate on the plan that did worst; values in units of the noise floor, algebra "
        "relative to the largest value."
    )
    table = markdown_table(phrases.GATES, cells, left={0, 1, 5})
    return ["## Gates", "", how, "", *table, "", f"Controls: {phrases.controls(verdict)}."]


def _pairs(
    title: str, what: str, pairs: Sequence[Pair], ours: str, values: Mapping[tuple[Key, Key], str]
) -> list[str]:
    """A table of pairs; where there are `values` of the article's, they stand beside ours."""
    if not pairs:
        return []
    how = (
        f"{what}: a minus b in logits, from the prompt's last token on; "
        "first and last row's largest, rms over all."
    )
    head: tuple[str, ...] = _PAIRS
    text = ["", how, ""]
    rows = [[str(p.a), str(p.b), *phrases.pair_cells(p), f"{p.max_abs_ref:z.3f}"] for p in pairs]
    if values:
        text += ["On the page, candle 0.11.0 stands where this engine stands here.", ""]
        head = (*_PAIRS, "on the page")
        there = [values.get((_key(p.a, ours), _key(p.b, ours)), "-") for p in pairs]
        rows = [[*row, value] for row, value in zip(rows, there, strict=True)]
    return [f"## {title}", *text, *markdown_table(head, rows, left={0, 1})]


def _key(run: Run, ours: str) -> Key:
    return ("ours" if run.engine == ours else "theirs", run.plan)


def _other(other: Verdict) -> list[str]:
    return [f"By the same gates {other.subject.engine}: **{phrases.sentence(other)}**."]


def _tokens(manifest: Manifest, continuation: tuple[Sequence[int], str | None] | None) -> list[str]:
    rows = [
        _sequence("prompt", phrases.prompt(manifest), manifest.tokens[: manifest.prompt_tokens])
    ]
    if continuation is not None:
        ids, text = continuation
        rows.append(_sequence("generated", None if text is None else quoted(text), ids))
    return ["## Tokens", "", *markdown_table(("", "text", "ids"), rows, left={0, 1, 2})]


def _sequence(name: str, text: str | None, ids: Sequence[int]) -> list[str]:
    more = f" ... ({len(ids)} in all)" if len(ids) > _MOST_IDS else ""
    listed = " ".join(map(str, ids[:_MOST_IDS])) + more
    return [name, code(clip(text, _MOST_TEXT)) if text is not None else "-", code(listed)]


def _figures(figures: Sequence[Figures], against: str) -> list[str]:
    if not figures:
        return []
    distances = ("max abs delta", "rms", "NMSE (dB)", "1 - cosine", "KL (nats)")
    rows = [
        [f.plan, number(f.max_abs), number(f.rms), *phrases.figure_cells(f)]
        + [f"{equal}/{f.rows}" for equal in (f.top1_equal, f.top5_equal)]
        for f in figures
    ]
    what = "float64 truth" if against == "truth" else "mean of transformers' runs"
    how = (
        f"Against the {what}, over all rows of each plan: what other tools look at. "
        "They pass most faults that the gates catch."
    )
    table = markdown_table(("plan", *distances, "top-1", "top-5"), rows, left={0})
    return ["## Shown, not judged", "", how, "", *table]


def _inputs(manifest: Manifest) -> list[str]:
    model = {"model": manifest.source, "revision": manifest.revision}
    model |= {"weights fingerprint": manifest.fingerprint, "config digest": manifest.config_digest}
    rows = [[name, code(value)] for name, value in model.items() if value is not None]
    rows += [list(phrases.proofs(manifest))]
    rows += [[f"plan {name}", code(digest)] for name, digest in sorted(manifest.plans.items())]
    return ["## Inputs", "", *markdown_table(("", ""), rows, left={0, 1})]


def _words(verdict: Verdict) -> list[str]:
    meanings = dict(_WORDS)
    if verdict.against == "transformers":
        meanings |= _MEAN_WORDS
        del meanings["algebra"]
    return ["## Words", "", *(f"- **{word}**: {meaning}" for word, meaning in meanings.items())]
