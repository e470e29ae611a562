"""The usual suspects, made by the oracle when first needed: they name a difference's cause.

Where the runs agree and nothing was judged in float64, they name what these runs cannot see.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mlxkv.commands.compare.follow import Runs
from mlxkv.engines import machine, oracle
from mlxkv.engines.progress import say
from mlxkv.judge import cause
from mlxkv.judge.case import ORDER, Case
from mlxkv.judge.result import Verdict
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.formats.trace import Trace
from oracle.model.checkpoint import resolve


class Suspects:
    """The usual suspects of what was run: read or made once for each plan that asks."""

    def __init__(self, runs: Runs, *, unseen: bool = True) -> None:
        self.runs, self.unseen = runs, unseen
        self._known: dict[str, cause.Suspects | str] = {}

    def explain(self, verdict: Verdict, traces: Mapping[str, Trace]) -> Verdict:
        """The verdict on `traces`; if they differ, with the cause or a note why none is named.

        If they agree without float64, with a note that names the mistakes that do not show here,
        unless `unseen` is false.
        """
        case, agree = self.runs.case, verdict.outcome == "agree"
        exact = any(gate.scope == "algebra" and gate.ran for gate in verdict.gates)
        silent = exact or not (self.unseen and case.has_truth)
        if verdict.outcome == "cannot tell" or (agree and silent):
            return verdict
        suspects = self._of(_plan(verdict))
        if agree:
            if isinstance(suspects, str):
                unseen = [f"what this run cannot see was not looked for: {suspects}"]
            else:
                blind = cause.blind(case, traces, verdict.gates, suspects)
                unseen = _unseen(blind, case, probed=self.runs.probe is not None)
            return replace(verdict, notes=(*verdict.notes, *unseen))
        unsought = f"the cause was not looked for: {suspects}"
        found = unsought if isinstance(suspects, str) else cause.find(case, traces, suspects)
        if isinstance(found, str):
            return replace(verdict, notes=(*verdict.notes, found))
        return replace(verdict, cause=found)

    def _of(self, plan: str) -> cause.Suspects | str:
        if plan not in self._known:
            self._known[plan] = self._listed(plan)
        return self._known[plan]

    def _listed(self, plan: str) -> cause.Suspects | str:
        """The suspects, or why there are none: the verdict stands without them."""
        manifest = self.runs.case.manifest
        if not manifest.has_truth:
            return "the usual suspects are mistakes in a Llama, tried on its truth"
        try:
            kept = oracle.suspects_folder(manifest, plan)
            found = cause.read_suspects(kept, manifest.fingerprint)
            os.utime(kept)
            return found
        except Refusal:
            pass  # absent, unfinished or damaged: made anew below
        if not machine.has("torch"):
            return "torch is not installed"
        try:
            return self._made(plan)
        except AlreadySaid:
            return "the oracle refused, see above"
        except Refusal as error:
            return str(error)

    def _made(self, plan: str) -> cause.Suspects:
        checkpoint, manifest = self.runs.checkpoint, self.runs.case.manifest
        kept = oracle.suspects_folder(manifest, plan)
        if checkpoint.config_digest != manifest.config_digest:
            checkpoint = resolve(manifest.source, revision=manifest.revision)
        say("oracle: the usual suspects")
        took = oracle.make_suspects(checkpoint, self.runs.folder, kept, plan=plan)
        self.runs.took["suspects"] = took
        return cause.read_suspects(kept, manifest.fingerprint)


def _plan(verdict: Verdict) -> str:
    """The plan at the borders of whose calls mistakes are tried: the one that fails where full does
    not, else that of the most calls.
    """
    failed = [plan for plan in ORDER if any(g.failed and g.plan == plan for g in verdict.gates)]
    plans = failed if failed and failed[0] != "full" else verdict.plans
    cached = [plan for plan in ORDER if plan in plans and plan != "prefixes"]
    return (cached[0] if plans is failed else cached[-1]) if cached else "full"


def _unseen(blind: Sequence[str], case: Case, *, probed: bool) -> list[str]:
    """A note on the mistakes that the case's own tokens could not show.

    Of the probe, if there was one, it was not looked for which it shows.
    """
    whose = "this run cannot see"
    if probed:
        whose = "these mistakes can show in the probe alone, if at all"
    at = f"at {case.length} tokens in {case.manifest.dtype}"
    return [f"{at} {whose}: {', '.join(blind)}"] if blind else []
