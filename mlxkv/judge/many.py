"""Several prompts' verdicts as one: the worst prompt decides, never an average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxkv.judge.result import SCOPES, Outcome, Scope, Verdict, join, plain

FORMAT = "mlxkv-prompts/1"
_WORST_FIRST: tuple[Outcome, ...] = ("differ", "cannot tell", "agree")


@dataclass(frozen=True, slots=True)
class Prompts:
    """The verdict on each prompt, by name, in the order in which they were given."""

    verdicts: dict[str, Verdict]

    @property
    def outcome(self) -> Outcome:
        """Of the worst prompt."""
        return join(v.outcome for v in self.verdicts.values())

    @property
    def exit_code(self) -> int:
        """Of the worst prompt."""
        return self.verdicts[self.worst].exit_code

    @property
    def worst(self) -> str:
        """Its name."""
        return self.worst_first[0]

    @property
    def worst_first(self) -> list[str]:
        """The names by outcome, then by how near a gate came to its limit, or how far it went beyond."""
        return sorted(self.verdicts, key=lambda name: _rank(self.verdicts[name]))

    @property
    def scopes(self) -> tuple[Scope, ...]:
        """Those that every prompt covers."""
        return tuple(
            scope for scope in SCOPES if all(scope in v.scopes for v in self.verdicts.values())
        )

    def to_json(self, folders: Sequence[str]) -> dict[str, Any]:
        """`mlxkv-prompts/1`: each verdict's main figures, and the folder where all of it is."""
        about = asdict(next(iter(self.verdicts.values())).subject)
        prompts = [
            {"name": name, "folder": folder} | _figures(verdict)
            for (name, verdict), folder in zip(self.verdicts.items(), folders, strict=True)
        ]
        value = {
            "format": FORMAT,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "against": self.verdicts[self.worst].against,
            "scopes": self.scopes,
            "worst": self.worst,
            "subject": {
                key: of for key, of in about.items() if key not in ("tokens", "prompt_tokens")
            },
            "prompts": prompts,
        }
        return dict(plain(value))


def _rank(verdict: Verdict) -> tuple[int, float]:
    return _WORST_FIRST.index(verdict.outcome), -max(
        (gate.badness for gate in verdict.gates), default=0.0
    )


def _figures(verdict: Verdict) -> dict[str, Any]:
    return {
        "outcome": verdict.outcome,
        "scopes": verdict.scopes,
        "plans": verdict.plans,
        "tokens": len(verdict.subject.tokens),
        "prompt_tokens": verdict.subject.prompt_tokens,
        "gates": [
            {
                "name": g.name,
                "plan": g.plan,
                "value": g.value,
                "limit": g.limit,
                "position": g.position,
                "failed": g.failed,
                "reason": g.reason,
            }
            for g in verdict.worst
        ],
        "reasons": verdict.reasons,
        "first_wrong": asdict(verdict.first_wrong) if verdict.first_wrong else None,
        "cause": asdict(verdict.cause) if verdict.cause else None,
    }
