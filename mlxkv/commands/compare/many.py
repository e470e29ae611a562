"""`mlxkv compare --prompts`: one comparison a prompt, then the overview; and the long sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxkv.commands.compare import overview, page, prompts
from mlxkv.commands.compare.ask import Request
from mlxkv.commands.compare.page import Compared
from mlxkv.commands.compare.prompts import Prompt
from mlxkv.commands.compare.run import judged, run
from mlxkv.engines.progress import steps
from mlxkv.judge.many import Prompts
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.model.checkpoint import resolve


@dataclass(frozen=True, slots=True)
class Overview:
    """The verdict on all prompts, and each prompt's comparison, by name."""

    prompts: Prompts
    compared: Mapping[str, Compared]

    @property
    def first(self) -> Compared:
        """The first, whose engine and machine are those of all."""
        return next(iter(self.compared.values()))

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-prompts/1`, with the environment of all."""
        return self.prompts.to_json() | {"environment": self.first.runs.environments}

    def files(self, *, commands: Sequence[str]) -> dict[str, str]:
        """Every prompt's in its folder, and the overview last, as it links to them."""
        found = {
            f"{name}/{file}": text
            for name, one in self.compared.items()
            for file, text in page.files(one, commands=commands).items()
        }
        found["compare.json"] = pretty(self.to_json())
        sides = self.first.sides
        found["compare.md"] = overview.markdown(self.prompts, sides=sides, commands=commands)
        return found


def report(request: Request, source: str, *, out: Path, command: str) -> Report:
    """Runs and judges each prompt of a file, or the built-in ones: a report of each, one of all."""
    found = compare(request, prompts.named(source))
    where, sides = str(out / "compare.md"), found.first.sides
    text = overview.console(found.prompts, sides=sides, report=where)
    # What the engine's processes took is shared by all.
    took = {"took": {name: one.runs.took for name, one in found.compared.items()}}
    files = found.files(commands=[command])
    return Report(files, text, pretty(found.to_json() | took), found.prompts.exit_code)


def compare(request: Request, given: Sequence[Prompt]) -> Overview:
    requests = [
        replace(request, name=p.name, prompt=p.prompt or None, tokens=p.tokens or None)
        for p in given
    ]
    requests = [
        replace(one, steps=p.steps or one.steps) for one, p in zip(requests, given, strict=True)
    ]
    with run(requests) as runs:
        # What the longest cannot show, the others hardly do; the oracle takes seconds for each.
        longest = max(runs, key=lambda one: one.case.length)
        compared = {
            p.name: judged(one, unseen=one is longest) for p, one in zip(given, runs, strict=True)
        }
    return Overview(Prompts({name: one.verdict for name, one in compared.items()}), compared)


def long(request: Request) -> Compared:
    length, chunks = prompts.LONG, prompts.LONG_CHUNKS
    vocab_size = resolve(request.model, revision=request.revision, progress=steps()).vocab_size
    ids = prompts.drawn(length, vocab_size=vocab_size)
    given = replace(request, prompt=None, tokens=ids, prompt_tokens=sum(chunks), steps=None)
    given = replace(given, chunks=chunks)
    note = (
        f"no text: {length:,} ids, each the sha256 of its place modulo the vocabulary; "
        f"the last {length - sum(chunks)} are decoded"
    )
    with run([given]) as (runs,):
        return judged(runs, notes=[note])
