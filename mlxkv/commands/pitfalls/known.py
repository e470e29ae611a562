"""What is known to come of the lives of caches that are built in, so that news stands out.

A finding is something that is silently wrong: which caches and lives show it, why, whether it is
known publicly, and ten lines that show it with nothing of ours. A test runs each of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from mlxkv.commands.pitfalls.scenarios import LOSSY, NO, REFUSED, RIGHT, UNSEEN, WRONG, Behaviour
from mlxkv.commands.pitfalls.trial import Came
from mlxkv.engines.kinds import Kind


@dataclass(frozen=True, slots=True)
class Finding:
    """`caches` are their names, or names without options, which stand for all of them."""

    title: str
    caches: tuple[str, ...]
    lives: tuple[str, ...]
    cause: str
    public: str
    code: str


FINDINGS: tuple[Finding, ...] = ()
NEEDED = ("singles", "alone")
"""What every cache must be able to."""
DOCUMENTED: dict[str, dict[str, Behaviour]] = {}
"""By cache and life what is known beside: what it refuses or has no call for."""


def expected(kind: Kind, life: str) -> tuple[Behaviour, ...]:
    """What may come of a life, the usual first. A cache of one's own may be anything but wrong."""
    lossy: tuple[Behaviour, ...] = (LOSSY, UNSEEN) if kind.lossy else ()
    if kind.whose == "own":
        return (RIGHT, *lossy) if life in NEEDED else (RIGHT, *lossy, REFUSED, NO, UNSEEN)
    if finding(kind, life) is not None:
        return (WRONG,)
    for name in (kind.name, kind.base):
        if life in DOCUMENTED.get(name, {}):
            return (DOCUMENTED[name][life],)
    return (RIGHT, *lossy)


def odd(kind: Kind, came: Came) -> bool:
    """Whether what came was not to be expected."""
    crashed = kind.whose == "own" and came.crashed
    return crashed or not (came.reason or came.behaviour in expected(kind, came.life))


def finding(kind: Kind, life: str) -> Finding | None:
    """What is known to be silently wrong there."""
    names = (kind.name, kind.base)
    return next(
        (f for f in FINDINGS if life in f.lives and any(name in f.caches for name in names)), None
    )
