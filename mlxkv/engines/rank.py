"""One rank of a sharded run.

`python -m mlxkv.engines.rank JOB.json MODULE DEVICE THREADS SECONDS`: the last are those in which
the ranks must meet. `mlxkv.engines.ranks` has mlx.launch start one such process for each rank. All
follow the same plans, each on its part of the model; rank 0 alone reads the job's file and writes
the traces.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlxkv.engines import machine
from mlxkv.engines.job import answer, decoded
from mlxkv.engines.runner import PlanRunner
from oracle.formats import strict_json
from oracle.formats.errors import Refusal, one_line
from oracle.formats.trace import Meta

if TYPE_CHECKING:
    import mlx.core as mx

    from oracle.model.checkpoint import Checkpoint

R = TypeVar("R", bound=PlanRunner)
ALIVE = "alive.txt"
"""The file beside the job's that rank 0 touches whenever the ranks have ended a call."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """The processes that share a model, as one of them sees them; rank 0 works in `out`."""

    group: mx.distributed.Group
    out: Path = Path()

    @property
    def rank(self) -> int:
        return self.group.rank()

    @property
    def facts(self) -> dict[str, Any]:
        """What a report must say of them."""
        return {"ranks": self.group.size(), "backend": "ring"}

    def runner(self, kind: type[R]) -> type[R]:
        """A runner on all ranks, of which rank 0's writes the trace."""
        ranks = self

        class OnRanks(kind):  # type: ignore[misc, valid-type]
            # What fails on one rank alone leaves the others waiting, so nothing that fails goes on.
            failures = ()

            def forward(self, *given: Any) -> Any:
                found = super().forward(*given)
                ranks.go_on()
                return found

            def kept(self) -> Iterator[tuple[str, int, Any, Any]]:
                for name, i, *pair in super().kept():
                    yield name, i, *map(ranks.gathered, pair)

            def write(self, path: Path, meta: Meta) -> None:
                ranks.require_same("tokens that they chose", str(self.outcomes))
                if ranks.rank == 0:
                    super().write(path, meta)
                else:
                    ranks.compute(array for _, array in self.held_rows())

        return OnRanks

    def go_on(self) -> None:
        """Says that the run is alive."""
        if self.rank == 0:
            (self.out / ALIVE).touch()

    def gathered(self, rows: mx.array) -> mx.array:
        """Every rank's heads: [B, K / ranks, S, D] -> [B, K, S, D]

        The ranks speak with one another when it is computed, which all must do in one order.
        """
        import mlx.core as mx

        B, heads, S, D = rows.shape
        with mx.stream(mx.cpu):
            every = mx.distributed.all_gather(mx.contiguous(rows), group=self.group)
            gathered: mx.array = every.reshape(-1, B, heads, S, D).swapaxes(0, 1)
            return gathered.reshape(B, -1, S, D)

    def compute(self, arrays: Iterable[mx.array]) -> None:
        """One after the other, as rank 0 computes what it writes."""
        import mlx.core as mx

        for array in arrays:
            mx.eval(array)

    def require_same(self, what: str, text: str) -> None:
        """A Refusal on every rank where one has another text than rank 0."""
        import mlx.core as mx
        import numpy as np

        mine = np.frombuffer(hashlib.sha256(text.encode()).digest(), np.uint8)
        every = np.array(mx.distributed.all_gather(mx.array(mine[None]), group=self.group))
        other = [rank for rank, row in enumerate(every) if (row != every[0]).any()]
        if other:
            found = f"{what}: rank {other[0]} has others than rank 0, expected the same on all"
            raise Refusal(found, where="ranks", remedy="see that the hosts are set up alike")

    def told(self, data: bytes) -> bytes:
        """Rank 0's bytes, on every rank; the other ranks' are not asked."""
        import mlx.core as mx
        import numpy as np

        mine = np.frombuffer(data if self.rank == 0 else b"", np.uint8)
        length = int(np.array(self._sum(mx.array([len(mine)], mx.int32)))[0])
        padded = np.zeros(length, np.uint8)
        padded[: len(mine)] = mine
        return np.array(self._sum(mx.array(padded))).tobytes()

    def _sum(self, array: mx.array) -> mx.array:
        import mlx.core as mx

        total: mx.array = mx.distributed.all_sum(array, group=self.group, stream=mx.cpu)
        return total

    def require_alike(self, checkpoint: Checkpoint) -> None:
        """A Refusal where a rank has other weights, or other versions of what computes."""
        self.go_on()
        self.require_same("weights", checkpoint.fingerprint + checkpoint.config_digest)
        versions = [f"{name} {machine.version(name)}" for name in ("mlx", "mlx-lm", "mlxkv")]
        self.require_same("versions of MLX, mlx-lm or mlxkv", " ".join(versions))


def meet(seconds: int) -> Ranks:
    """The ranks, once all are there; the process ends by SIGALRM if they are not in time."""
    import mlx.core as mx

    # Not by a thread: MLX waits in C++, and Python with it.
    signal.alarm(seconds)
    try:
        group = mx.distributed.init(strict=True, backend="ring")
    except RuntimeError as error:
        what = f"cannot reach the other ranks ({one_line(error)})"
        remedy = "see that each host answers and that nobody else has its ports"
        raise Refusal(what, where="ranks", remedy=remedy) from error
    signal.alarm(0)
    return Ranks(group)


def main(path: str, module: str, device: str, threads: int, seconds: int) -> None:
    """Meets the other ranks and follows with them what rank 0 reads in the job's file."""
    machine.prepare(device, threads=threads)
    ranks = replace(meet(seconds), out=Path(path).parent)
    ranks.require_same("runs", path)
    text = ranks.told(Path(path).read_bytes() if ranks.rank == 0 else b"")
    with tempfile.TemporaryDirectory() as nowhere:
        out = Path(nowhere) if ranks.rank else Path(path).parent
        job = decoded(strict_json.decode(text), out, where="job")
        engine: Any = importlib.import_module(module)
        engine.follow(replace(job, device=device, threads=threads), ranks)


def _main() -> None:
    path, module, device, *numbers = sys.argv[1:]
    rank = os.environ.get("MLX_RANK", "0")
    who = "" if rank == "0" else f"rank {rank}"
    answer(lambda: main(path, module, device, *map(int, numbers)), who)


if __name__ == "__main__":
    _main()
