"""What is judged by: one oracle folder, read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oracle.formats import contents
from oracle.formats.plan import JUDGED
from oracle.formats.run_folder import PROBE as PROBE
from oracle.formats.run_folder import Manifest, Pool, read_manifest
from oracle.formats.tensors import Array
from oracle.formats.trace import Trace

CACHE = "a"
"""The name that judged plans give their one cache."""

ORDER = JUDGED


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
        return self.kept(self.cached)

    def kept(self, plan: str) -> str:
        """The member whose run of a plan is kept."""
        return f"{self.pool.kinds[-1]}-{plan}"

    @property
    def cached(self) -> str:
        """The plan whose cache is judged: step, which the probe has not."""
        return "chunked" if self.manifest.probe else "step"

    @property
    def sampled(self) -> bool:
        """Whether some positions have no row of logits: keys and values are there of all."""
        return len(self.truth.positions) < self.length

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
    """The oracle folder, its arrays mapped; a Refusal where a file is missing, damaged or not of
    the same run as the others.
    """
    return _case(contents.read(folder))


def read_probe(folder: Path) -> Case | None:
    """The probe of an oracle folder, None where it was made without one."""
    found = contents.read_probe(folder, read_manifest(folder))
    return None if found is None else _case(found)


def _case(found: contents.Contents) -> Case:
    return Case(found.manifest, found.measure, found.references, found.pool, found.floors)
