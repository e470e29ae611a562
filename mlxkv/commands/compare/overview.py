"""Several prompts at a glance, as Markdown and for a terminal. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from mlxkv.judge.limits import SIGMA
from mlxkv.judge.many import Prompts
from mlxkv.judge.result import GateName, Rows, Verdict
from mlxkv.report import plots
from mlxkv.report.page import not_exercised
from mlxkv.report.phrases import Side, rows, sentence, unseen
from mlxkv.report.text import columns, gate_cells, markdown_table, several, side_by_side, wrapped

_GATES = {
    GateName.SIGMA: "sigma",
    GateName.WORST: "worst position",
    GateName.ALGEBRA: "algebra",
    GateName.CACHED: "cached against uncached",
}
_HEAD = ("prompt", "tokens", *_GATES.values(), "verdict")


def sentence_on_all(prompts: Prompts) -> str:
    """The worst prompt's verdict in one line; if all agree, with the scopes that each covers."""
    worst, n = prompts.verdicts[prompts.worst], len(prompts.verdicts)
    of = f"of {several(n, 'prompt')} the worst is {prompts.worst}"
    if prompts.outcome != "agree":
        return f"{of}: {sentence(worst)}"
    all_of_it = sentence(replace(worst, scopes=prompts.scopes, rows=Rows()))
    return f"{all_of_it}{_sampled(prompts)}; {of}"


def _sampled(prompts: Prompts) -> str:
    """Of which prompts only some rows of logits were compared."""
    found = {name: rows(one.rows) for name, one in prompts.verdicts.items() if one.rows.sampled}
    if len(found) > 1:
        return f", of {len(found)} prompts some of the rows compared"
    return "".join(f", of {name} {words}" for name, words in found.items())


def console(prompts: Prompts, *, sides: Sequence[Side], report: str) -> str:
    """What `compare --prompts` prints: a line for each prompt, the worst first, and the verdict."""
    verdicts, longest = prompts.verdicts, prompts.longest
    about = verdicts[prompts.worst].subject
    cells = [[name, *_cells(verdicts[name])] for name in prompts.worst_first]
    lines = [
        f"{about.model}  {about.dtype}  {sides[0].headline} vs {sides[1].headline}",
        "",
        *columns(_HEAD, cells, left={0, 6}),
        "",
        *(wrapped(f"{longest}: {line}") if (line := unseen(verdicts[longest])) else []),
        sentence_on_all(prompts),
        f"report: {report}",
    ]
    return "\n".join(lines) + "\n"


def picture(prompts: Prompts) -> str:
    """Each prompt's sigma against its limit, the worst prompt first.

    That of its own plans: the probe is the same beside every prompt.
    """
    about = prompts.verdicts[prompts.worst].subject
    values = {name: _sigma(prompts.verdicts[name]) for name in prompts.worst_first}
    title = f"{about.model}, {about.dtype}: {several(len(values), 'prompt')}"
    return plots.worst_first(values, limit=SIGMA, title=title)


def _sigma(verdict: Verdict) -> float:
    """NaN where it was not measured."""
    own = [
        gate.value
        for gate in verdict.gates
        if gate.name == GateName.SIGMA and gate.ran and not gate.plan.startswith("probe ")
    ]
    return max(own, key=lambda value: (math.isnan(value), value), default=math.nan)


def markdown(prompts: Prompts, *, sides: Sequence[Side], commands: Sequence[str], svg: str) -> str:
    """The overview; each prompt's own report is in the folder of its name."""
    about, n = prompts.verdicts[prompts.worst].subject, len(prompts.verdicts)
    cells = [
        [name, *_cells(prompts.verdicts[name]), f"[report]({name}/compare.md)"]
        for name in prompts.worst_first
    ]
    how = (
        "Every prompt is a comparison of its own, and the worst decides. Values in noise floors, "
        "algebra relative to the largest logit."
    )
    longest = prompts.longest
    unseen_of = (
        f"What the comparison of {longest}, the longest prompt, does not speak of. Each prompt's "
        "own report has the list of its own."
    )
    parts = [
        [f"# {about.engine} against transformers: {about.model}, {about.dtype}, {n} prompts"],
        [f"**{sentence_on_all(prompts)}**"],
        [how],
        ["## Prompts", "", *markdown_table((*_HEAD, "all of it"), cells, left={0, 6, 7})],
        [f"![Sigma of each prompt, the worst first]({svg})"],
        not_exercised(prompts.verdicts[longest], unseen_of),
        ["## Environment", "", *side_by_side([(one.title, one.rows) for one in sides])],
        ["## Reproduce", "", "```sh", *commands, "```"],
    ]
    return "\n\n".join("\n".join(part) for part in parts if part) + "\n"


def _cells(verdict: Verdict) -> list[str]:
    """tokens, the gates' values (a dash where one did not run), the verdict."""
    values = {gate.name: gate_cells(gate)[2] for gate in verdict.worst}
    return [
        str(len(verdict.subject.tokens)),
        *(values.get(name, "-") for name in _GATES),
        sentence(verdict),
    ]
