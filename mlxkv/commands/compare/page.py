"""What `compare` shows of one sequence: the page, the plot, the JSON, and lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxkv.commands.compare.follow import Runs
from mlxkv.judge.delta import Pair
from mlxkv.judge.limits import WORST
from mlxkv.judge.result import EXIT_CODES, Verdict, join
from mlxkv.report import page, phrases, plots, terminal
from mlxkv.report.phrases import Side
from mlxkv.report.text import pretty, wrapped
from oracle.model import tokenizer as tokenizers
from oracle.model.default import is_original


@dataclass(frozen=True, slots=True)
class Compared:
    """The verdict on one sequence, and what else its report shows.

    `third` is the verdict on a third engine's traces, `pairs` are those of `delta.three_way`.
    """

    runs: Runs
    verdict: Verdict
    third: Verdict | None
    pairs: tuple[Pair, ...]
    sides: tuple[Side, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[join(v.outcome for v in (self.verdict, self.third) if v is not None)]


def console(compared: Compared, out: Path) -> str:
    """What a person reads in the terminal, the third engine's verdict last."""
    manifest, third, where = compared.runs.case.manifest, compared.third, str(out / "compare.md")
    text = terminal.console(compared.verdict, manifest, sides=compared.sides, report=where)
    if third is None:
        return text
    name, unseen = third.subject.engine, phrases.unseen(third)
    lines = wrapped(f"{name}: {unseen}") if unseen else []
    return text + "\n".join([*lines, f"{name}: {phrases.sentence(third)}"]) + "\n"


def files(compared: Compared, *, commands: Sequence[str]) -> dict[str, str]:
    """The report's files by name; the Markdown last, since it links to the others."""
    verdict, runs = compared.verdict, compared.runs
    manifest, ids = runs.case.manifest, _generated(runs)
    title = f"{manifest.name}, {manifest.dtype}: error by position"
    tokenizer = tokenizers.load(runs.checkpoint.folder)
    prompt = manifest.tokens[: manifest.prompt_tokens]
    return {
        "compare.svg": plots.error_by_position(
            verdict.curves,
            verdict.floor,
            at=verdict.floor_at,
            limit=WORST,
            texts=manifest.texts,
            title=title,
        ),
        "compare.json": pretty(to_json(compared)),
        "compare.md": page.markdown(
            verdict,
            manifest,
            sides=compared.sides,
            commands=commands,
            continuation=(ids, "".join(tokenizer.stream(prompt, ids)) if tokenizer else None),
            svg="compare.svg",
            third=compared.pairs,
            other=compared.third,
            page_values=is_original(runs.checkpoint),
        ),
    }


def to_json(compared: Compared) -> dict[str, Any]:
    """`mlxkv-verdict/1`, with what was generated and what went wrong while the engine ran."""
    runs, third = compared.runs, compared.third
    return page.to_json(compared.verdict, runs.case.manifest, runs.environments) | {
        "generated": _generated(runs),
        "errors": list(_errors(runs)),
        "third": third.to_json() if third else None,
    }


def _errors(runs: Runs) -> Iterator[dict[str, Any]]:
    for meta in (trace.meta for trace in (*runs.arithmetic, *runs.algebra)):
        about = {"engine": meta.engine, "dtype": meta.dtype, "plan": meta.plan.name}
        for i, outcome in enumerate(meta.outcomes):
            if outcome.error is not None:
                yield about | {"step": i, "error": outcome.error}


def _generated(runs: Runs) -> list[int]:
    """The greedy tokens, or those that were given after the prompt."""
    manifest = runs.case.manifest
    return manifest.generated or manifest.tokens[manifest.prompt_tokens :]
