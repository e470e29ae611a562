"""What page and terminal both say of a verdict: the sentence, what it does not cover, the sides,
the oracle's proofs.

Pure functions: no clock, no file and no machine is read, so the same run gives the same text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mlxkv.judge.delta import Figures, Pair
from mlxkv.judge.result import Control, Rows, Verdict
from mlxkv.judge.words import plans_of
from mlxkv.report.text import environment_rows, number, power, quoted, several
from oracle.formats.run_folder import Manifest
from oracle.formats.trace import Meta

GATES = ("gate", "plan", "value", "limit", "headroom", "where")


@dataclass(frozen=True, slots=True)
class Side:
    """One engine's surroundings as text.

    `title` heads its column, `headline` stands in the first line of the terminal.
    """

    title: str
    headline: str
    rows: tuple[tuple[str, str], ...]


def side(meta: Meta) -> Side:
    named, mlx = f"{meta.engine} {meta.engine_version}".strip(), meta.environment.get("mlx")
    blas = str(meta.environment.get("blas", "")).split(" (")[0]
    # The port is part of this program; whose model else runs on MLX must be said.
    known = [] if mlx and meta.engine.startswith("mlxkv") else [named]
    engine = ", ".join([*known, *([f"mlx {mlx}"] if mlx else [])])
    first = (("engine", named), ("device", meta.device), ("dtype", meta.dtype))
    headline = f"{engine} {meta.device}" + (f" ({blas})" if blas else "")
    return Side(meta.engine, headline, (*first, *environment_rows(meta.environment)))


def oracle_side(manifest: Manifest) -> Side:
    version = manifest.environment.get("torch")
    what = "transformers alone: no truth for this architecture"
    if manifest.has_truth:
        what = "transformers and strict float64 truth"
    first = {"engine": what, "device": "cpu", "dtype": manifest.dtype}
    rest = [row for row in environment_rows(manifest.surroundings) if row[0] not in first]
    headline = f"torch {version}" if version else "transformers"
    return Side("oracle", headline, (*first.items(), *rest))


def sentence(verdict: Verdict) -> str:
    alone = verdict.against == "transformers"
    if verdict.outcome == "agree":
        agree = f"{'agrees with transformers' if alone else 'agree'} ({', '.join(verdict.scopes)})"
        return agree + (f", {compared}" if (compared := rows(verdict.rows)) else "")
    if verdict.outcome == "cannot tell":
        first, *rest = verdict.reasons or ("no gate could run",)
        return f"cannot tell: {first}" + (f" (and {len(rest)} more)" if rest else "")
    failed = [g for g in verdict.worst if g.failed]
    scopes = ", ".join(dict.fromkeys(g.scope for g in failed))
    what = "differs from transformers" if alone else "differ"
    clauses = [verdict.found, cause(verdict), _first_wrong(verdict), _alone(verdict)]
    clauses.append(rows(verdict.rows))  # of which the first wrong position may be one
    clauses.append(f"gates: {', '.join(g.name for g in failed)}")
    return f"{what} ({scopes}): {'; '.join(clause for clause in clauses if clause)}"


def _first_wrong(verdict: Verdict) -> str:
    first = verdict.first_wrong
    if first is None:
        measured = all(math.isfinite(gate.value) for gate in verdict.gates if gate.failed)
        return "no position is wrong by itself" if measured else ""
    layer = f", layer {first.layer}" if first.layer is not None else ""
    where = f"plan {first.plan}, {first.gate}{layer}"
    place = position(first.position, first.token, about=first.about, after=first.after)
    return f"first wrong position {place} ({where})"


def position(at: int, token: str | None, *, about: bool, after: int | None) -> str:
    """A first wrong position, as exactly as it is known (`FirstWrong`)."""
    text = f" {quoted(token)}" if token is not None else ""
    if after is not None:
        return f"between {after + 1} and {at}{text}"
    return f"{'about ' if about else ''}{at}{text}"


def _alone(verdict: Verdict) -> str:
    """Which plans are right, where some are: that tells what a wrong one does otherwise."""
    wrong = {g.plan for g in verdict.gates if g.failed}
    right = [plan for plan in verdict.plans if plan not in wrong]
    return f"{plans_of(right)} agree{'s' * (len(right) == 1)}" if right else ""


def rows(of: Rows) -> str:
    """How many rows of logits were compared, where that is a sample; else ""."""
    return f"{of.compared:,} of {of.of:,} rows compared" if of.sampled else ""


def unseen(verdict: Verdict) -> str | None:
    """What was not exercised, in one line: what stands before each colon."""
    if not verdict.unseen:
        return None
    return f"not exercised: {'; '.join(line.split(': ')[0] for line in verdict.unseen)}"


def cause(verdict: Verdict) -> str | None:
    """The usual mistake that explains the difference, in one line."""
    found = verdict.cause
    if found is None:
        return None
    against = f"sigma {found.sigma:.2f} against {found.against}"
    return f"looks like {found.words} ({against})"


def controls(verdict: Verdict, *, most: int | None = None) -> str:
    """What became of the controls, and how much the pool is worth.

    Beyond the first `most`, those that passed are only counted.
    """
    every = verdict.controls
    shown = [c for i, c in enumerate(every) if most is None or i < most or not c.passed]
    passed = len(every) - len(shown)
    more = [f"{passed} more passed"] if passed else []
    return "; ".join(
        [*map(_control, shown), *more, several(verdict.distinct, "distinct pool member")]
    )


def _control(control: Control) -> str:
    other = {"agree": "differs", "differ": "agrees"}[control.expected]
    did = f"{control.expected}s" if control.passed else f"{other}, must {control.expected}"
    return f"{control.name}: {did} ({control.quantity} {control.value:z.3g})"


def figure_cells(figures: Figures) -> list[str]:
    """NMSE in dB, 1 - cosine, KL in nats."""
    f, equal = figures, figures.nmse_db == -math.inf
    return ["exact" if equal else f"{f.nmse_db:z.1f}", number(1 - f.cosine), number(f.kl)]


def pair_cells(pair: Pair) -> list[str]:
    """max |d|, that of the first and of the last row, rms, top-1."""
    deltas = (pair.max_abs, pair.first_max, pair.last_max, pair.rms)
    return [*map(number, deltas), f"{pair.top1_equal}/{pair.rows}"]


def prompt(manifest: Manifest) -> str:
    if manifest.prompt is not None:
        return quoted(manifest.prompt)
    if manifest.texts:
        return quoted("".join(manifest.texts[: manifest.prompt_tokens]))
    return several(manifest.prompt_tokens, "id")


def proofs(manifest: Manifest) -> tuple[str, str]:
    """What the folder measures by, and how well that is proved."""
    if manifest.has_truth:
        plans = " = ".join(
            name for name in ("step", "full", "chunked", "mixed") if name in manifest.plans
        )
        agreement = _measured(manifest, "truth_agreement", f"{plans} to ", "agreement ")
        double = _measured(manifest, "transformers_double", "transformers within ", "transformers ")
        return "truth", f"{agreement}, {double}"
    runs = f"mean of {manifest.pool_distinct} runs of transformers"
    apart = _measured(manifest, "members_apart", "each within ", "")
    double = _measured(manifest, "mean_double", "float64 within ", "float64 ")
    return "no truth", f"{runs}, {apart}, {double}"


def _measured(manifest: Manifest, name: str, before: str, instead: str) -> str:
    value = manifest.proofs.get(name)
    return f"{instead}not measured" if value is None else f"{before}{power(value, digits=2)}"
