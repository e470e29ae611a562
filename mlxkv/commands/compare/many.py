"""`mlxkv compare --prompts`: one comparison a prompt, then the overview; and the long sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxkv.commands.compare import overview, prompts
from mlxkv.commands.compare.ask import Request
from mlxkv.commands.compare.prompts import Prompt
from mlxkv.commands.compare.run import Compared, judged, run
from mlxkv.judge.many import Prompts
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.model.checkpoint import resolve


@dataclass(frozen=True, slots=True)
class Overview:
    """The verdict on all prompts, each prompt's comparison, and the files of all.

    `value` is what `compare.json` of the overview holds.
    """

    prompts: Prompts
    compared: tuple[Compared, ...]
    value: dict[str, Any]
    files: dict[str, str]


def report(request: Request, source: str, *, out: Path, command: str) -> Report:
    """Runs and judges each prompt of a file, or the built-in ones: a report of each, one of all."""
    found = compare(request, prompts.named(source), commands=[command])
    where, sides = str(out / "compare.md"), found.compared[0].sides
    text = overview.console(found.prompts, sides=(sides[0], sides[1]), report=where)
    names = found.prompts.verdicts
    # What the engine's processes took is shared by all.
    took = {name: one.took for name, one in zip(names, found.compared, strict=True)}
    return Report(found.files, text, pretty(found.value | {"took": took}), found.prompts.exit_code)


def compare(request: Request, given: Sequence[Prompt], *, commands: Sequence[str]) -> Overview:
    """The comparison of each prompt; its files by name, the overview last, as it links to them."""
    requests = [
        replace(
            request, name=p.name, prompt=p.text, tokens=p.tokens, steps=p.steps or request.steps
        )
        for p in given
    ]
    with run(requests) as runs:
        compared = tuple(judged(one, commands=commands) for one in runs)
        engine, oracle = runs[0].engine, runs[0].case.manifest.surroundings
    names = [prompt.name for prompt in given]
    found = Prompts({name: one.verdict for name, one in zip(names, compared, strict=True)})
    files = {
        f"{name}/{file}": text
        for name, one in zip(names, compared, strict=True)
        for file, text in one.files.items()
    }
    environment = {engine: compared[0].environment, "oracle": oracle}
    value = found.to_json(names) | {"environment": environment}
    files["compare.json"] = pretty(value)
    files["compare.md"] = overview.markdown(
        found, sides=compared[0].sides[:2], commands=commands, folders=names
    )
    return Overview(found, compared, value, files)


def long(request: Request, *, commands: Sequence[str]) -> Compared:
    """The comparison over one long sequence of drawn ids."""
    length, chunks = prompts.LONG.length, prompts.LONG.chunks
    vocab_size = resolve(request.model, revision=request.revision).vocab_size
    given = replace(
        request,
        prompt=None,
        tokens=prompts.drawn(length, vocab_size=vocab_size),
        prompt_tokens=sum(chunks),
        chunks=chunks,
        steps=None,
    )
    note = (
        f"no text: {length:,} ids, each the sha256 of its place modulo the vocabulary; "
        f"the last {length - sum(chunks)} are decoded"
    )
    with run([given]) as (runs,):
        return judged(runs, commands=commands, notes=[note])
