"""What was measured as a Markdown page and as lines for a terminal. Pure functions."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mlxkv.commands.cost import metrics
from mlxkv.commands.cost.held import Errors
from mlxkv.commands.cost.metrics import Figures, Known, Value
from mlxkv.commands.cost.probe import TELLS
from mlxkv.commands.cost.result import Cost, Measured
from mlxkv.commands.cost.scoring import FAR
from mlxkv.report.text import (
    clip,
    code,
    columns,
    environment_table,
    markdown_table,
    number,
    power,
)

_HEAD = (
    "cache",
    "mean KL",
    "+-",
    "99 %",
    "same top",
    "flips",
    "PPL ratio",
    "+-",
    "B/token",
    "known",
)
_WIDTH = 100
_PLOT = f"mean KL against bytes of the cache per token, after {FAR:,} tokens"
_WORDS = {
    "KL, KLD": "KL(truth || variant) of the next token's distribution at a position, in nats; the "
    "truth is the checkpoint's own weights in strict float64",
    "float32": "mlx-lm's KVCache and float32 throughout: its KL is rounding alone, the noise "
    "beside which all others stand",
    "none": f"a mean KL of up to {metrics.NOISE:g} times the noise; what a cache does not show is "
    "*not seen*, which is not 0",
    "+-": "one standard error; positions taken as independent, ratios and differences paired, as "
    "llama.cpp's `--kl-divergence` does, whose names these are",
    "same top": "share of positions at which the most probable token is the truth's (Same top p); "
    "of the five most probable: the mean share that are the truth's five",
    "flips": "positions at which the most probable token changed although the truth's margin is "
    f"more than {metrics.FLIP_MARGIN:g} times the largest error that float32 makes there",
    "dp": "change of the right token's probability",
    "PPL ratio": "perplexity over the truth's perplexity on the same tokens (PPL(Q)/PPL(base)); "
    "below 1 is not better: this text's tokens happened to gain, while the KL counts every change "
    "of the distribution as a loss",
    "B/token": f"bytes allocated by all layers after {FAR:,} tokens of zeros, for each of them; at "
    "a short text's end most of them may be rows that are allocated ahead and empty (*Bytes and "
    "speed* has both)",
    "known": "mean KL over what the oracle computes, in float64 and apart from mlx-lm, for a cache "
    f"that keeps just that: within {100 * metrics.WITHIN:g} % it is as it should be; of a cache "
    f"that keeps everything over the noise: *none* up to {metrics.NOISE:g} times; ! is a fault",
}


def console(cost: Cost, *, report: str) -> str:
    """What `mlxkv cost` prints."""
    env, n = cost.environment["mlx-lm"], len(cost.tokens)
    engine = f"mlx-lm {env.get('mlx-lm')}, mlx {env.get('mlx')} {env.get('device')}"
    fed = f"{cost.length:,} in chunks of {cost.chunk}, {n - cost.length:,} decoded"
    lines = [f"{cost.model}  {engine}", f"{n:,} tokens of {cost.title}: {fed}", ""]
    lines += _narrow(_HEAD, [_row(one) for one in cost.shown])
    for one in _failed(cost):
        line = f"{_name(one)}  not measured: {one.failed}"
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent="  ")
    lines.append("")
    for line in _findings(cost):
        lines += textwrap.wrap(line, _WIDTH, subsequent_indent="  ")
    return "\n".join([*lines, f"report: {report}"]) + "\n"


def _narrow(head: Sequence[str], rows: Sequence[list[str]]) -> list[str]:
    """A table of at most 100 columns: a name that has no room beside its numbers stands above."""
    room = _WIDTH - 2 - len(columns(head[1:], [row[1:] for row in rows], left=set())[0])
    fit = [row if len(row[0]) <= room else ["", *row[1:]] for row in rows]
    first, *lines = columns(head, fit, left={0})
    made = [first]
    for line, row, one in zip(lines, rows, fit, strict=True):
        made += [line] if one is row else [clip(row[0], _WIDTH), line]
    return made


def _findings(cost: Cost) -> list[str]:
    """What is to be said in words."""
    others = [one for one in cost.shown if one is not cost.noise and one not in cost.away]
    none = [_name(one) for one in others if one.none]
    lines = [f"nothing lost that float32's noise would show: {', '.join(none)}"] if none else []
    lines += [f"{_name(one)}: {known(one)}" for one in cost.away]
    return [*lines, _retrieval(cost)]


def known(one: Measured) -> str:
    """How a variant stands to its known answer, in words."""
    found = one.known
    if found is None:
        return "no known answer"
    if found.met:
        return "as it should be"
    if found.spec == metrics.NOTHING:
        said, remedy = "keeps every row", ""
        if one.variant.kind.whose == "own":
            said, remedy = "not declared lossy", ", or declare it with --lossy"
        return f"{said}, and loses {_lost(one, found)}: a fault{remedy}"
    of = f" ({one.variant.fault})" if one.variant.fault else ""
    return f"{_missed(one, found)}: not the format's cost but a fault{of}"


def _lost(one: Measured, found: Known) -> str:
    """What a cache that should keep everything loses."""
    if found.ratio > metrics.NOISE:
        mean, times = _power(one.all.mean_kld.mean, digits=3), f"{found.ratio:.2g} times the noise"
        return f"{mean} nats on average, {times} (none is up to {metrics.NOISE:g})"
    most = _power(one.all.maximum_kld, digits=3)
    limit = f"(none is up to {found.most_apart:g})"
    return f"{most} nats at one position, {found.apart:.2g} times the largest noise {limit}"


def _missed(one: Measured, found: Known) -> str:
    """By what a variant missed its known answer: its mean, or what lies at each position."""
    errors = f"{found.errors:.1f} standard errors"
    if not abs(found.ratio - 1) <= metrics.WITHIN:
        limit = f"expected within {100 * metrics.WITHIN:g} %"
        real = np.isclose(found.ratio * found.mean_kld, one.all.mean_kld.mean)
        of = "its known answer" if real else "what noise hides (its known answer is none)"
        return f"mean KL is {found.ratio:.3g} of {of}, {limit} ({errors})"
    far = f"differs from its known answer by {found.apart:.3g} of it at a position on average"
    limit = f"rounding explains {found.most_apart:.3g}"
    return f"{far}, {limit} ({errors}; its mean KL is {found.ratio:.3f} of it)"


def _retrieval(cost: Cost) -> str:
    if not cost.distances:
        return "retrieval probe: not run, the model has too few positions"
    full = ", ".join(f"{rate:.2f} at {far:,}" for far, rate in cost.noise.rates.items())
    said = [f"retrieval probe: the full cache finds {full} tokens back"]
    if unknown := [f"{far:,}" for far in cost.distances if far not in cost.tells]:
        said.append(f"this model cannot tell at {', '.join(unknown)} back")
    if cost.tells:
        lost = [(one, far) for one in cost.shown if (far := cost.forgets(one))]
        names = [f"{_name(one)} (at {', '.join(f'{n:,}' for n in far)})" for one, far in lost]
        said.append(f"forgotten by {', '.join(names) or 'none'}")
    return "; ".join(said)


def _failed(cost: Cost) -> list[Measured]:
    return [one for one in cost.measured if one.failed]


def _name(one: Measured) -> str:
    return one.variant.name


def _row(one: Measured) -> list[str]:
    all = one.all
    return [
        _name(one),
        _number(all.mean_kld.mean),
        _power(all.mean_kld.error),
        _power(all.kld_99, digits=2),
        f"{all.same_top_p.mean:.4f}",
        str(all.decisive_flips),
        *_pair(all.ppl_ratio, 4),
        f"{one.per_token:,.0f}",
        _ratio(one.known, 3),
    ]


def _ratio(found: Known | None, digits: int) -> str:
    """A variant's mean KL over its known answer; with an exclamation mark where it misses it."""
    if found is None:
        return "-"
    far = f"{found.ratio:.{digits}f}" if found.ratio < 1e3 else _power(found.ratio)
    text = "none" if np.isnan(found.ratio) else far
    return text if found.met else f"{text}!"


def _pair(value: Value, digits: int) -> list[str]:
    return [
        _number(one) if np.isnan(one) or one >= 1e4 else f"{one:.{digits}f}"
        for one in (value.mean, value.error)
    ]


def _number(value: float) -> str:
    """As `number`; a dash for what there is not, as the error of a single position."""
    return "-" if np.isnan(value) else number(value)


def _power(value: float, *, digits: int = 1) -> str:
    return "-" if np.isnan(value) else power(value, digits=digits)


def markdown(cost: Cost, *, commands: Sequence[str], svg: str | None) -> str:
    """The page; `svg` is the picture's file."""
    parts = [
        [f"# What a smaller cache costs: {cost.model}"],
        _head(cost),
        _table(cost, "All positions", _HEAD, _row),
        [f"- not measured: {_name(one)}: {one.failed}" for one in _failed(cost)],
        [f"![{_PLOT}]({svg})"] if svg else [],
        _known(cost),
        _table(cost, "KL and probabilities", _MORE, _more),
        _parts(cost),
        _positions(cost),
        _windows(cost),
        _probe(cost),
        _errors(cost),
        _sizes(cost),
        ["## Environment", "", *environment_table(cost.environment)],
        ["## Reproduce", "", "```sh", *commands, "```"],
        ["## Words", "", *(f"- **{word}**: {meaning}" for word, meaning in _WORDS.items())],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _head(cost: Cost) -> list[str]:
    n = len(cost.tokens)
    first = (
        f"{n:,} tokens of {cost.title}, teacher-forced: {cost.length:,} in chunks of {cost.chunk}, "
        f"then {n - cost.length:,} one by one. Every variant runs inside mlx-lm's Llama and stands "
        "against the same float64 truth, that of the checkpoint's own weights. Nothing is judged "
        "as right: this says what is lost."
    )
    return [first, "", *(f"- {line}" for line in _findings(cost))]


def _table(
    cost: Cost, title: str, head: Sequence[str], row: Callable[[Measured], list[str]]
) -> list[str]:
    table = markdown_table(head, [row(one) for one in cost.shown], left={0})
    return [f"## {title}", "", *table]


def _known(cost: Cost) -> list[str]:
    some = [one for one in cost.shown if one.known]
    head = ("cache", "known answer", "mean KL", "known", "ratio", "in errors", "apart", "limit", "")
    rows = []
    for one in some:
        if (found := one.known) is None:
            continue
        numbers = [_number(one.all.mean_kld.mean), _number(found.mean_kld), _ratio(found, 4)]
        verdict = "as it should be" if found.met else "a fault"
        numbers += [f"{found.errors:.1f}", _number(found.apart), _number(found.most_apart), verdict]
        spec = found.spec if found.spec == metrics.NOTHING else code(found.spec)
        rows.append([_name(one), spec, *numbers])
    how = (
        "What the oracle computes in float64 for a cache that keeps just that. *apart* is the mean "
        "size of the difference at a position, of the known mean, and *limit* what rounding "
        "explains of it; *in errors* counts standard errors, of the mean difference or of its size "
        f"beyond that limit. Where the known answer is *{metrics.NOTHING}*, as of a cache that is "
        "not declared lossy, the noise stands in its place, and *apart* and *limit* are of the "
        "largest KL at a position over the noise's largest."
    )
    table = markdown_table(head, rows, left={0, 1, 8})
    return ["## Known answers", "", how, "", *table] if rows else []


_MORE = (
    *("cache", "median KL", "90 %", "99 %", "max", "mean dp", "+-", "RMS dp", "+-"),
    *("top 5 kept", "PPL"),
)


def _more(one: Measured) -> list[str]:
    all = one.all
    kl = [all.median_kld, all.kld_90, all.kld_99, all.maximum_kld]
    dp = [_number(value) for pair in (all.mean_dp, all.rms_dp) for value in (pair.mean, pair.error)]
    return [
        _name(one),
        *map(_number, kl),
        *dp,
        f"{all.same_top_5.mean:.4f}",
        f"{all.ppl_q.mean:.2f}",
    ]


def _parts(cost: Cost) -> list[str]:
    names = [name for name in ("prefilled", "decoded") if name in cost.noise.parts]
    head = ["cache"]
    for name in names:
        head += [f"{name}: mean KL", "+-", "same top", "PPL ratio"]
    rows = [[_name(one), *(c for n in names for c in _short(one.parts[n]))] for one in cost.shown]
    return ["## Prefilled and decoded", "", *markdown_table(head, rows, left={0})]


def _short(part: Figures) -> list[str]:
    kl, ratio = part.mean_kld, _pair(part.ppl_ratio, 4)[0]
    return [_number(kl.mean), _number(kl.error), f"{part.same_top_p.mean:.4f}", ratio]


def _positions(cost: Cost) -> list[str]:
    head = ["cache", *(f"{b.first:,} to {b.last:,}" for b in cost.noise.bins)]
    rows = [[_name(one), *(_number(b.kld.mean) for b in one.bins)] for one in cost.shown]
    how = "Mean KL by position in the text."
    return ["## By position", "", how, "", *markdown_table(head, rows, left={0})]


def _windows(cost: Cost) -> list[str]:
    of = ("mean KL", "+-", "same top", "PPL ratio")
    head = ("cache", *(f"within: {name}" for name in of), *(f"beyond: {name}" for name in of))
    rows = []
    for one in cost.shown:
        if "within" not in one.parts:
            continue
        beyond = one.parts.get("beyond")
        after = _short(beyond) if beyond else ["no such token", "-", "-", "-"]
        rows.append([_name(one), *_short(one.parts["within"]), *after])
    how = "The first tokens, which a window still holds all of, and those after them."
    return ["## Windows", "", how, "", *markdown_table(head, rows, left={0})] if rows else []


def _probe(cost: Cost) -> list[str]:
    title = ["## Retrieval probe", ""]
    if not cost.distances:
        return [*title, "Not run: the model has too few positions."]
    how = (
        "Lists of random ids come again so many tokens later; the share of their tokens that are "
        "the most probable ones, beside the full cache's."
    )
    if set(cost.distances) - set(cost.tells):
        how += (
            f" Where the full cache finds less than {TELLS:g} of them this model cannot tell (*)."
        )
    head = [
        "cache",
        *(f"{far:,} back{'' if far in cost.tells else ' (*)'}" for far in cost.distances),
    ]
    rows = [[_name(one), *(f"{rate:.2f}" for rate in one.rates.values())] for one in cost.shown]
    return [*title, how, "", *markdown_table(head, rows, left={0})]


def _errors(cost: Cost) -> list[str]:
    """Of keys and of values: the median of all heads, and the worst, with its layer and head."""
    head = ("cache", "keys: median", "worst", "where", "values: median", "worst", "where")
    rows = []
    for one in cost.shown:
        assert one.held is not None
        sides = [_worst(side) for side in (one.held.keys, one.held.values)]
        seen = [cell for side in sides for cell in side]
        rows.append([_name(one), *seen])
    how = (
        "Relative rms error of the rows held at the text's end against the truth's, by layer and "
        "head; all of them are in `cost.json`. A layer's rows carry what the layers before it lost."
    )
    unseen = [f"- not seen: {_name(one)}: {why}" for one in cost.shown if (why := _why(one))]
    table = markdown_table(head, rows, left={0, 3, 6})
    return ["## Keys and values", "", how, "", *table, *([""] if unseen else []), *unseen]


def _why(one: Measured) -> str:
    return one.held.why if one.held else ""


def _worst(side: Errors | None) -> list[str]:
    if side is None:
        return ["not seen", "-", "-"]
    values = np.array(side, np.float64)  # None becomes NaN
    layer, head = np.unravel_index(int(np.nanargmax(values)), values.shape)
    worst = float(values[layer, head])
    return [_number(float(np.nanmedian(values))), _number(worst), f"layer {layer} head {head}"]


def _sizes(cost: Cost) -> list[str]:
    far = f"after {FAR:,}"
    head = ("cache", "B/token at the text's end", "said", far, "said", "prefill", "decode")
    rows = []
    for one in cost.shown:
        assert one.held is not None
        assert one.far is not None
        cells: list[Any] = []
        for held in (one.held.bytes, one.far):
            cells += [held.allocated / held.tokens, held.said and held.said / held.tokens]
        sizes = ["not seen" if cell is None else f"{cell:,.0f}" for cell in cells]
        rows.append([_name(one), *sizes, *_speeds(one)])
    how = (
        f"Bytes of all layers' arrays for each token: at the text's end, {len(cost.tokens):,} "
        f"tokens, rows that are allocated and empty included, and {far} tokens of zeros, as in the "
        "first table. *said* is what the caches say themselves. Tokens per second of this run's "
        "calls."
    )
    if cost.beside:
        how += (
            f" {', '.join(cost.beside)} ran on one thread, beside the others, which had the rest: "
            "such speeds compare only among themselves."
        )
    return ["## Bytes and speed", "", how, "", *markdown_table(head, rows, left={0})]


def _speeds(one: Measured) -> list[str]:
    return [f"{one.prefill_speed:.1f}", f"{one.decode_speed:.1f}"]
