"""What no life of a cache has tried, said beside what came of them: the rest is unknown."""

from __future__ import annotations

from mlxkv.commands.pitfalls.lives import WINDOW
from mlxkv.commands.pitfalls.trial import Trial

COST = "what its format must cost: `mlxkv cost --known SPEC` says whether it costs that"


def lines(trial: Trial) -> tuple[str, ...]:
    """What was not exercised of a cache; what stands before a colon is the line in short."""
    depends = (
        "rows of a cache that is only fed: they depend on its calls, and nothing else has them"
    )
    found = [
        "batches of more than two rows",
        f"positions from {max(trial.ends.values(), default=0)} on: no life is longer",
        ends_missed(trial),
        depends if trial.depends else "",
        COST if trial.kind.lossy else "",
    ]
    return tuple(line for line in found if line)


def ends_missed(trial: Trial) -> str:
    """That the lives at a window's ends were not tried, and why; "" where they were."""
    tried = any(life.plan is not None and life.name in WINDOW for life in trial.lives)
    asked = not trial.only or set(trial.only) & set(WINDOW)
    if trial.kind.lossy != "window" or tried or not asked:
        return ""
    size, most = trial.window, max(map(len, trial.talks.tokens.values()))
    if size is None:
        reached = f"window not reached in {most} tokens"
    elif size < 4:
        reached = f"window of {size} is shorter than 4 tokens"
    elif size < most:
        reached = f"window of {size} not gone through twice in {most} tokens"
    else:
        reached = f"window of {size} not reached in {most} tokens"
    return f"{reached}: its ends were not tried"
