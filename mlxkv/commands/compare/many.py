"""`mlxkv compare --prompts`: one comparison a prompt, then the overview; and the long sequence."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mlxkv.commands.compare import overview, page, prompts
from mlxkv.commands.compare.ask import Request, Untold
from mlxkv.commands.compare.batches import batches
from mlxkv.commands.compare.follow import Runs
from mlxkv.commands.compare.page import Compared
from mlxkv.commands.compare.prompts import Prompt
from mlxkv.commands.compare.run import judged, run
from mlxkv.engines import memory
from mlxkv.engines.process import Finished
from mlxkv.engines.progress import steps
from mlxkv.judge.many import Prompts
from mlxkv.judge.result import Verdict, plain
from mlxkv.judge.unseen import NOTHING
from mlxkv.report import plots
from mlxkv.report.phrases import Side, sentence
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import disk
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import resolve

LINE = "mlxkv-prompt/1"


@dataclass(frozen=True, slots=True)
class Judged:
    """What stays of one prompt once its traces are gone: its verdict and its report's files.

    `model` and `environments` are what it ran on, `took` what each process took that it shared with
    others.
    """

    name: str
    verdict: Verdict
    files: dict[str, str]
    sides: tuple[Side, ...]
    model: str
    environments: dict[str, dict[str, Any]]
    took: dict[str, Finished | None]

    def untold(self, one: Untold) -> Judged:
        """What stands for a prompt of the same run that could not be judged."""
        its = self.verdict.subject
        subject = replace(its, tokens=one.tokens, prompt_tokens=one.prompt_tokens)
        reasons, against = (one.reason,), self.verdict.against
        verdict = Verdict(
            "cannot tell", (), (), subject, reasons=reasons, unseen=NOTHING, against=against
        )
        title = f"# {its.engine} against transformers: {its.model}, {its.dtype}, {one.name}"
        page = f"{title}\n\n**{sentence(verdict)}**\n"
        files = {"compare.json": pretty(verdict.to_json()), "compare.md": page}
        took: dict[str, Finished | None] = dict.fromkeys(self.took)
        return replace(self, name=one.name, verdict=verdict, files=files, took=took)


@dataclass(frozen=True, slots=True)
class Overview:
    """The verdict on all prompts, and what stays of each, by name."""

    prompts: Prompts
    judged: Mapping[str, Judged]

    @property
    def stale(self) -> tuple[str, ...]:
        """Files of an earlier run that no prompt of this one has."""
        svg = "compare.svg"
        return tuple(f"{name}/{svg}" for name, of in self.judged.items() if svg not in of.files)

    @property
    def first(self) -> Judged:
        """The first, whose engine and machine are those of all."""
        return next(iter(self.judged.values()))

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-prompts/1`, with the environment of all."""
        return self.prompts.to_json() | {"environment": self.first.environments}

    def files(self, *, commands: Sequence[str]) -> dict[str, str]:
        """Every prompt's in its folder, and the overview last, as it links to them."""
        found = {
            f"{name}/{file}": text
            for name, one in self.judged.items()
            for file, text in one.files.items()
        }
        sides, svg = self.first.sides, "compare.svg"
        found[svg] = overview.picture(self.prompts)
        found["compare.json"] = pretty(self.to_json())
        page = overview.markdown(self.prompts, sides=sides, commands=commands, svg=svg)
        return found | {"compare.md": page}


def report(
    request: Request, source: str, *, out: Path, command: str, lines: Path | None = None
) -> Report:
    """Runs and judges each prompt of a file, or the built-in ones: a report of each, one of all.

    A line of JSON for each goes into the file `lines` as soon as it is judged, or could not be.
    """
    with _written(lines) as write:
        commands, given = [command], prompts.named(source)
        found = compare(request, given, commands=commands, each=lambda one: write(line(one)))
    where, sides = str(out / "compare.md"), found.first.sides
    text = overview.console(found.prompts, sides=sides, report=where)
    # What the engine's processes took is shared by all.
    took: dict[str, Any] = {"took": {name: one.took for name, one in found.judged.items()}}
    took["together_bytes"] = memory.together()
    files = found.files(commands=commands)
    code = found.prompts.exit_code
    return Report(files, text, pretty(found.to_json() | took), code, found.stale)


def line(one: Judged | Untold) -> str:
    """One line of JSON: the outcome and what leaves it open, and the gate that is nearest to its
    limit or farthest beyond, with its place.

    `ratio` is value over limit: up to 1 the gate passes. Of a gate whose limit is 0, as that of
    `finite`, it is the value, a number of positions. It is null where the value is no number, as of
    keys or values that are not finite.
    """
    worst = one.verdict.nearest if isinstance(one, Judged) else None
    value: dict[str, Any] = {"format": LINE, "name": one.name}
    if isinstance(one, Untold):
        value |= {"outcome": "cannot tell", "reasons": [one.reason], "tokens": len(one.tokens)}
    else:
        verdict = one.verdict
        value |= {"outcome": verdict.outcome, "reasons": verdict.reasons}
        value |= {"tokens": len(verdict.subject.tokens)}
    value |= {
        "gate": worst and worst.name,
        "plan": worst and worst.plan,
        "ratio": worst and worst.badness,
        "position": worst and worst.position,
        "layer": worst and worst.layer,
        "head": worst and worst.head,
        "took": one.took if isinstance(one, Judged) else None,
    }
    return json.dumps(plain(value), allow_nan=False, ensure_ascii=False) + "\n"


@contextmanager
def _written(path: Path | None) -> Iterator[Callable[[str], object]]:
    """What writes a line into the file, to be read at once; the first empties it.

    It is opened before: what cannot be written is refused before anything runs.
    """
    if path is None:
        yield lambda _: None
        return
    with disk.writing(path), path.open("a", encoding="utf-8", buffering=1) as file:
        begun: list[str] = []

        def write(line: str) -> None:
            if not begun:
                with suppress(OSError):  # a pipe holds nothing to be emptied
                    file.truncate(0)
            begun.append(line)
            file.write(line)

        yield write


def compare(
    request: Request,
    given: Sequence[Prompt],
    *,
    commands: Sequence[str],
    each: Callable[[Judged | Untold], object] = lambda _: None,
) -> Overview:
    """Judges the prompts, and shows `each` as it is judged; `commands` stand in their reports.

    One that cannot be judged is "cannot tell" beside the others; a Refusal where none can be.
    """

    def judge(name: str, runs: Runs, longest: bool) -> Judged:
        # What the longest cannot show, the others hardly do; the oracle takes seconds for each.
        compared = judged(runs, unseen=longest)
        files = page.files(compared, commands=commands)
        return _judged(name, compared, files)

    plots.load_aside()
    made = list[Judged | Untold]()
    with closing(batches(_requests(request, given), judge, kind=Judged, about=commands)) as some:
        for one in some:
            made.append(one)
            each(one)
    return _overview(made, [one.name for one in given])


def _overview(made: Sequence[Judged | Untold], names: Sequence[str]) -> Overview:
    """All of them, in the order of the names."""
    first = next((one for one in made if isinstance(one, Judged)), None)
    if first is None:
        untold = [one for one in made if isinstance(one, Untold)]
        more = f" (and {len(untold) - 1} more prompts)" if untold[1:] else ""
        raise Refusal(f"{untold[0].reason}{more}", where=f"prompt {untold[0].name}")
    known = {one.name: one if isinstance(one, Judged) else first.untold(one) for one in made}
    found = {name: known[name] for name in names}
    return Overview(Prompts({name: one.verdict for name, one in found.items()}), found)


def requests(request: Request, source: str) -> list[Request]:
    """Of each prompt of a file, or of the built-in ones, what is asked."""
    return _requests(request, prompts.named(source))


def _requests(request: Request, given: Sequence[Prompt]) -> list[Request]:
    return [
        replace(
            request,
            name=one.name,
            prompt=one.prompt or None,
            tokens=one.tokens or None,
            steps=one.steps or request.steps,
        )
        for one in given
    ]


def _judged(name: str, compared: Compared, files: dict[str, str]) -> Judged:
    runs = compared.runs
    return Judged(
        name=name,
        verdict=compared.verdict,
        files=files,
        sides=compared.sides,
        model=runs.case.manifest.name,
        environments=runs.environments,
        took=runs.took,
    )


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
