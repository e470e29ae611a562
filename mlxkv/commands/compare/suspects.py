"""The cause of a difference in words: the usual suspects, made by the oracle when first needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from mlxkv.commands.compare.follow import Runs
from mlxkv.engines import machine, oracle
from mlxkv.engines.progress import say
from mlxkv.judge.cause import Suspect, find, read_suspects
from mlxkv.judge.result import Verdict
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.formats.trace import Trace
from oracle.model.checkpoint import resolve


class Suspects:
    """The usual suspects of what was run: read or made once, when the first verdict asks."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def explain(self, verdict: Verdict, traces: Mapping[str, Trace]) -> Verdict:
        """The verdict on `traces`; if they differ, with the cause or a note why none is named."""
        if verdict.outcome != "differ":
            return verdict
        found = self._listed
        cause = found if isinstance(found, str) else find(self.runs.case, traces, found)
        if isinstance(cause, str):
            return replace(verdict, notes=(*verdict.notes, cause))
        return replace(verdict, cause=cause)

    @cached_property
    def _listed(self) -> list[Suspect] | str:
        """The suspects, or why there are none: the verdict stands without them."""
        unsought, manifest = "the cause was not looked for", self.runs.case.manifest
        if not manifest.has_truth:
            return f"{unsought}: the usual suspects are mistakes in a Llama, tried on its truth"
        try:
            kept = oracle.suspects_folder(manifest)
            found = read_suspects(kept, manifest.fingerprint)
            os.utime(kept)
            return found
        except Refusal:
            pass  # absent, unfinished or damaged: made anew below
        if not machine.has("torch"):
            return f"{unsought}: torch is not installed"
        try:
            return self._made()
        except AlreadySaid:
            return f"{unsought}: the oracle refused, see above"
        except Refusal as error:
            return f"{unsought}: {error}"

    def _made(self) -> list[Suspect]:
        checkpoint, manifest = self.runs.checkpoint, self.runs.case.manifest
        kept = oracle.suspects_folder(manifest)
        if checkpoint.config_digest != manifest.config_digest:
            checkpoint = resolve(manifest.source, revision=manifest.revision)
        say("oracle: the usual suspects")
        self.runs.took["suspects"] = oracle.make_suspects(checkpoint, self.runs.folder, kept)
        return read_suspects(kept, manifest.fingerprint)
