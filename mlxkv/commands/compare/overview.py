"""Several prompts at a glance, as Markdown and for a terminal. Pure functions, as in markdown.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlxkv.judge.many import Prompts
from mlxkv.judge.result import Verdict
from mlxkv.report.page import Side, cause, sentence
from mlxkv.report.text import columns, gate_cells, markdown_table, side_by_side

GATES = ("sigma", "worst position", "algebra (float64)", "cached against uncached")
HEAD = (
    "prompt",
    "tokens",
    "sigma",
    "worst position",
    "algebra",
    "cached against uncached",
    "verdict",
)


def told(prompts: Prompts) -> str:
    """The verdict on all in one line: the worst prompt's, with what every prompt covers where they agree."""
    worst = prompts.verdicts[prompts.worst]
    return sentence(replace(worst, scopes=prompts.scopes) if prompts.outcome == "agree" else worst)


def console(prompts: Prompts, *, sides: tuple[Side, Side], report: str) -> str:
    """What `compare --prompts` prints: a line for each prompt, the worst first, and the verdict."""
    about, n = prompts.verdicts[prompts.worst].subject, len(prompts.verdicts)
    rows = [[name, *_cells(prompts.verdicts[name])] for name in prompts.worst_first]
    lines = [
        f"{about.model}  {about.dtype}  {sides[0].headline} vs {sides[1].headline}",
        "",
        *columns(HEAD, rows, left={0, 6}),
        "",
        f"{told(prompts)}; of {n} prompts the worst is {prompts.worst}",
        f"report: {report}",
    ]
    return "\n".join(lines) + "\n"


def markdown(
    prompts: Prompts, *, sides: Sequence[Side], commands: Sequence[str], folders: Sequence[str]
) -> str:
    """The overview; each prompt's own report is in its folder."""
    about = prompts.verdicts[prompts.worst].subject
    link = dict(zip(prompts.verdicts, folders, strict=True))
    rows = [
        [name, *_cells(prompts.verdicts[name]), f"[report]({link[name]}/compare.md)"]
        for name in prompts.worst_first
    ]
    parts = [
        [
            f"# {about.engine} against transformers: {about.model}, {about.dtype}, {len(rows)} prompts",
            "",
            f"**{told(prompts)}**",
        ],
        [
            "Every prompt is a comparison of its own, and the worst decides. Values in noise floors, algebra relative to the largest logit."
        ],
        ["## Prompts", "", *markdown_table((*HEAD, "all of it"), rows, left={0, 6, 7})],
        ["## Environment", "", *side_by_side([(one.title, one.rows) for one in sides])],
        ["## Reproduce", "", "```sh", *commands, "```"],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _cells(verdict: Verdict) -> list[str]:
    """tokens, the gates' values (a dash where one did not run), the verdict."""
    values = {gate.name: gate_cells(gate)[2] for gate in verdict.worst}
    found = cause(verdict)
    return [
        str(len(verdict.subject.tokens)),
        *(values.get(name, "-") for name in GATES),
        sentence(verdict) + (f"; {found}" if found else ""),
    ]
