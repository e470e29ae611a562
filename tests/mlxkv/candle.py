"""Rows that the real candle returned -> a trace, so that a report can show candle beside the port
and the oracle.

A folder of goldens holds `plans.json` (a list of plans in candle's spelling: a call's tokens lie
under `call`, a greedy step's under `prompt`), `outcomes.json` (per step: greedy tokens, an error's
text, or neither) and `rows.safetensors` (one (rows, vocab) float32 tensor per plan that keeps rows:
what each call returned, in call order; a failed call has none).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from oracle.formats.disk import sha256
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Plan, from_json
from oracle.formats.trace import Meta, Outcome, Trace

PLANS = {"cached": "step", "nocache": "prefixes", "chunked": "chunked"}
"""candle's names of the plans that a comparison judges -> ours."""


def read(folder: Path, name: str, *, fingerprint: str | None = None) -> Trace:
    """The trace of one golden plan. `fingerprint` is that of the weights the rows were made with,
    where it is known.
    """
    for entry in _json(folder / "plans.json"):
        if entry["name"] == name:
            break
    else:
        raise Refusal(
            f"{folder / 'plans.json'}: no plan {name!r}, expected one of "
            f"{', '.join(e['name'] for e in _json(folder / 'plans.json'))}"
        )
    plan = plan_of(entry)
    outcomes = outcomes_of(folder, name, len(plan.steps))
    logits = _rows(folder / "rows.safetensors", name)
    positions, steps = _places(plan, outcomes)
    if len(logits) != len(positions):
        raise Refusal(
            f"{folder}: plan {name} has {len(logits)} rows, expected {len(positions)} (one per "
            f"call that went well)"
        )
    meta = Meta(
        plan=plan,
        engine="candle",
        engine_version="0.11.0",
        dtype=entry["dtype"],
        weights_dtype=entry["dtype"],
        fingerprint=fingerprint,
        outcomes=outcomes,
        environment={"rows": f"sha256 {sha256(folder / 'rows.safetensors')[:16]}"},
    )
    return Trace(meta, {"logits": logits, "positions": positions, "steps": steps})


def plan_of(entry: dict[str, Any]) -> Plan:
    """A golden's plan in our spelling, under our name for it."""
    base, _, dtype = entry["name"].partition("-float")
    name = PLANS.get(base, base) + (f"-float{dtype}" if dtype else "")
    steps = [_step(s) for s in entry["steps"]]
    return from_json(
        {"format": "mlxkv-plan/1", "name": name, "rows": "last", "steps": steps},
        where=f"plan {entry['name']}",
    )


def outcomes_of(folder: Path, name: str, steps: int) -> list[Outcome]:
    """What became of each step of a golden plan."""
    kept = next(o["outcomes"] for o in _json(folder / "outcomes.json") if o["plan"] == name)
    by_step = {o["step"]: Outcome(o.get("tokens"), o.get("error")) for o in kept}
    return [by_step.get(i, Outcome()) for i in range(steps)]


def _step(step: dict[str, Any]) -> dict[str, Any]:
    rest = dict(step)
    if step["do"] == "call":
        call: dict[str, Any] = rest.pop("call")
        return rest | call
    if step["do"] == "greedy":
        return rest | {"tokens": rest.pop("prompt")}
    return rest


def _places(plan: Plan, outcomes: list[Outcome]) -> tuple[Any, Any]:
    """The place of each kept row in its cache's sequence, and its step."""
    failed = [i for i, outcome in enumerate(outcomes) if outcome.error is not None]
    calls = [c for c in plan.calls(without=failed) if isinstance(c.step, Call)]
    positions = [call.held + call.fed - 1 for call in calls]
    return np.array(positions, np.int32), np.array([call.index for call in calls], np.int32)


def _rows(path: Path, name: str) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), "numpy") as file:
            if name not in file.keys():  # noqa: SIM118 (not a dict)
                raise Refusal(
                    f"{path}: no rows for plan {name!r}, expected one of {', '.join(file.keys())}"
                )
            return file.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise Refusal(f"{path}: cannot be read ({' '.join(str(error).split())})") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Refusal(
            f"{path}: cannot be read ({' '.join(str(error).split())}); a folder of goldens holds it"
        ) from error


__all__ = ["PLANS", "outcomes_of", "plan_of", "read"]
