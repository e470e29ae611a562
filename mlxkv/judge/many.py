"""Several prompts' verdicts as one: the worst prompt decides, never an average."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mlxkv.judge.result import EXIT_CODES, SCOPES, Outcome, Scope, Verdict, join, plain

FORMAT = "mlxkv-prompts/1"
_WORST_FIRST: tuple[Outcome, ...] = ("differ", "cannot tell", "agree")


@dataclass(frozen=True, slots=True)
class Prompts:
    """The verdict on each prompt, by name, in the order in which they were given."""

    verdicts: dict[str, Verdict]

    @property
    def outcome(self) -> Outcome:
        return join(v.outcome for v in self.verdicts.values())

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.outcome]

    @property
    def worst(self) -> str:
        return self.worst_first[0]

    @property
    def worst_first(self) -> list[str]:
        """The names by outcome, then by how near to its limit, or how far beyond, a gate came."""
        return sorted(self.verdicts, key=lambda name: _rank(self.verdicts[name]))

    @property
    def longest(self) -> str:
        """That of the longest sequence judged: what it does not exercise, few of the others do."""
        by = {name: (bool(v.gates), len(v.subject.tokens)) for name, v in self.verdicts.items()}
        return max(by, key=lambda name: by[name])

    @property
    def scopes(self) -> tuple[Scope, ...]:
        return tuple(s for s in SCOPES if all(s in v.scopes for v in self.verdicts.values()))

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-prompts/1`: each verdict's main figures; all of it is in the folder named."""
        worst, of_one = self.verdicts[self.worst], ("tokens", "prompt_tokens")
        value = {name: getattr(self, name) for name in ("outcome", "exit_code", "scopes", "worst")}
        value |= {
            "format": FORMAT,
            "against": worst.against,
            "subject": {k: v for k, v in asdict(worst.subject).items() if k not in of_one},
            "prompts": [
                {"name": name, "folder": name} | _figures(one)
                for name, one in self.verdicts.items()
            ],
        }
        return dict(plain(value))


def _rank(verdict: Verdict) -> tuple[int, float]:
    worst = max((gate.badness for gate in verdict.gates), default=0.0)
    return _WORST_FIRST.index(verdict.outcome), -worst


def _figures(verdict: Verdict) -> dict[str, Any]:
    names = ("name", "plan", "value", "limit", "position", "failed", "reason")
    whole = ("outcome", "scopes", "plans", "reasons", "found", "first_wrong", "cause")
    return {name: getattr(verdict, name) for name in whole} | {
        "not_exercised": verdict.unseen,
        "tokens": len(verdict.subject.tokens),
        "prompt_tokens": verdict.subject.prompt_tokens,
        "gates": [{name: getattr(gate, name) for name in names} for gate in verdict.worst],
    }
