"""The steps of `mlxkv compare --prompts`: one comparison a prompt, then the overview; and the long sequence of the reports."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mlxkv.commands.compare import overview as pages
from mlxkv.commands.compare import prompts as sources
from mlxkv.commands.compare import run as reporting
from mlxkv.commands.compare import session
from mlxkv.commands.compare.prompts import Prompt
from mlxkv.judge.many import Prompts
from mlxkv.report import plots
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.model.checkpoint import resolve


@dataclass(frozen=True, slots=True)
class Overview:
    """Every prompt's comparison and what is said of all of them."""

    prompts: Prompts
    compared: tuple[reporting.Compared, ...]
    files: dict[str, str]

    @property
    def exit_code(self) -> int:
        """Of the worst prompt."""
        return self.prompts.exit_code

    def as_json(self) -> str:
        """`mlxkv-prompts/1`, with what each prompt's processes took; the engine's are shared by all."""
        took = {
            name: each.spent
            for name, each in zip(self.prompts.verdicts, self.compared, strict=True)
        }
        return pretty(json.loads(self.files["compare.json"]) | {"took": took})

    def text(self, out: Path) -> str:
        """What a person reads in the terminal."""
        first, second = self.compared[0].sides[:2]
        return pages.console(self.prompts, sides=(first, second), report=str(out / "compare.md"))


def report(request: session.Request, source: str, *, out: Path, command: str) -> Report:
    """Runs and judges every prompt of a file, or the built-in ones: a report of each, and one of all."""
    overview = judged(request, sources.named(source), commands=[command])
    return Report(overview.files, overview.text(out), overview.as_json(), overview.exit_code)


def judged(
    request: session.Request, prompts: Sequence[Prompt], *, commands: Sequence[str]
) -> Overview:
    """The comparison of each prompt; the files by name, the overview last, since it links to the others."""
    requests = [
        replace(
            request, name=p.name, prompt=p.text, tokens=p.tokens, steps=p.steps or request.steps
        )
        for p in prompts
    ]
    with session.run_all(requests, meanwhile=plots.load) as runs:
        compared = tuple(reporting.judged(each, commands=commands) for each in runs)
        oracle = runs[0].case.manifest.surroundings
        environment = {runs[0].engine: compared[0].environment, "oracle": oracle}
    names = [prompt.name for prompt in prompts]
    found = Prompts({name: each.verdict for name, each in zip(names, compared, strict=True)})
    files = {
        f"{name}/{file}": text
        for name, each in zip(names, compared, strict=True)
        for file, text in each.files.items()
    }
    value = found.to_json(names) | {"environment": environment}
    files["compare.json"] = pretty(value)
    files["compare.md"] = pages.markdown(
        found, sides=compared[0].sides[:2], commands=commands, folders=names
    )
    return Overview(found, compared, files)


def long(request: session.Request, *, commands: Sequence[str]) -> reporting.Compared:
    """The comparison over one long sequence of drawn ids."""
    of = sources.LONG
    ids = sources.drawn(
        of.length, vocab_size=resolve(request.model, revision=request.revision).vocab_size
    )
    given = replace(
        request, prompt=None, tokens=ids, prompt_tokens=sum(of.chunks), chunks=of.chunks, steps=None
    )
    note = f"no text: {of.length:,} ids, each the sha256 of its place modulo the vocabulary; the last {of.length - sum(of.chunks)} are decoded"
    with session.run(given, meanwhile=plots.load) as runs:
        return reporting.judged(runs, commands=commands, notes=[note])
