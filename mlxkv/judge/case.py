"""What is judged by: one oracle folder, read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oracle.formats.run_folder import FLOORS, Manifest, Pool, read_floors, read_manifest
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace, read

PROBE = "probe"
"""The probe's run folder inside a run folder, and its name in a verdict."""

CACHE = "a"
"""The name that judged plans give their one cache."""

ORDER = ("full", "step", "prefixes", "chunked", "mixed")
"""The judged plans, in the order in which they are shown."""


@dataclass(frozen=True, slots=True)
class Case:
    """One oracle folder: the truth, the transformers runs by plan, and the pool's raw errors.

    Where the folder has no truth, `truth` is the mean of the pool, and the errors are the members'
    deviations from it.
    """

    manifest: Manifest
    truth: Trace
    references: Mapping[str, Trace]
    pool: Pool
    floors: Mapping[str, Array]

    @property
    def length(self) -> int:
        """The number of tokens judged, n."""
        return len(self.manifest.tokens)

    @property
    def has_truth(self) -> bool:
        """Whether `truth` is the truth, and not the mean of the pool."""
        return self.manifest.has_truth

    @property
    def measure_name(self) -> str:
        return "truth" if self.has_truth else "mean"

    @property
    def held_out(self) -> str:
        """The member whose logits are kept as a reference: of the last kind of attention."""
        return f"{self.pool.kinds[-1]}-{self.cached}"

    @property
    def cached(self) -> str:
        """The plan whose cache is judged: step, which the probe has not."""
        return "chunked" if self.manifest.probe else "step"

    @property
    def rows(self) -> list[int]:
        """The positions that the tables show: of the truth's from the prompt's last token on."""
        first = self.manifest.prompt_tokens - 1
        return [position for position in self.truth.positions.tolist() if position >= first]

    def text(self, position: int) -> str | None:
        """The token at a position as text, None where the oracle had no tokenizer."""
        return self.manifest.texts[position] if 0 <= position < len(self.manifest.texts) else None


@dataclass(frozen=True, slots=True)
class Probed:
    """The probe: an oracle folder of its own, and the engine's runs of its plans, as in `judge`."""

    case: Case
    candidates: Mapping[str, Trace]
    algebra: Mapping[str, Trace]


def read_case(folder: Path) -> Case:
    """The oracle folder, its arrays mapped into memory; a Refusal if one is missing or damaged."""
    manifest = read_manifest(folder)
    pool, floors = read_floors(folder / FLOORS)
    plans = [
        name.removeprefix("reference-").removesuffix(".safetensors")
        for name in sorted(manifest.files)
        if name.startswith("reference-")
    ]
    references = {plan: read(folder / f"reference-{plan}.safetensors") for plan in plans}
    return Case(manifest, read(folder / manifest.measure), references, pool, floors)


def read_probe(folder: Path) -> Case | None:
    """The probe of an oracle folder, None where it was made without one."""
    inside = folder / PROBE
    return read_case(inside) if inside.exists() else None
