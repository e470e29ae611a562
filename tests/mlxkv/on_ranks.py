"""What each rank of a test does; `mlxkv.engines.rank` calls `follow` as it calls an engine's.

The job's `custom` is JSON: the folder that the ranks share, and what is asked. Each rank writes
what it saw into `rank-<n>.json` there.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import models
import numpy as np

from mlxkv.engines.job import Job
from mlxkv.engines.rank import Ranks
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import resolve

TOKENS = models.ids(9)


def follow(job: Job, ranks: Ranks) -> None:
    asked = json.loads(job.custom)
    if "dies" in asked:
        ranks.require_alike(resolve(job.folder))
        die(ranks, signal.SIGSTOP if asked["dies"] == "stops" else signal.SIGKILL)
    shared = Path(asked["shared"])
    seen = {f"{Path(f).name} {dtype}": look(f, dtype, ranks, shared) for f, dtype in asked["of"]}
    if "large" in asked:
        seen["large"] = memory(asked["large"], ranks)
    (shared / f"rank-{ranks.rank}.json").write_text(json.dumps(seen))
    job.write_seconds(0.0)


def die(ranks: Ranks, how: int) -> None:
    """Rank 1 ends, or stops, while the others wait for it."""
    import mlx.core as mx

    if ranks.rank == 1:
        os.kill(os.getpid(), how)
    mx.eval(mx.distributed.all_sum(mx.array([1.0]), group=ranks.group))


def look(folder: str, dtype: str, ranks: Ranks, shared: Path) -> dict[str, Any]:
    """The facts of a model on this rank, beside those of the whole model, which each rank has too.

    `off` are distances of logits and of keys, in units of the largest of the whole model's.
    """
    from mlxkv.port.cache import Cache
    from mlxkv.port.weights import from_checkpoint

    checkpoint = resolve(folder)
    whole, part = (from_checkpoint(checkpoint, dtype, group=g) for g in (None, ranks.group))
    caches = [
        Cache(whole.config, dtype=dtype),
        Cache(part.config, dtype=dtype, part=part.part),
        Cache(part.config, dtype=dtype, part=part.part),
    ]
    expected = rows(whole, caches[0], TOKENS)
    at_once = rows(part, caches[1], TOKENS)
    split = np.concatenate([rows(part, caches[2], some) for some in (TOKENS[:4], TOKENS[4:])])
    keys = np.array(ranks.gathered(caches[1].layers[1].keys))
    seen = {
        "repr": repr(caches[1]),
        "bytes": [caches[0].nbytes, caches[1].nbytes],
        "off": [
            off(at_once, expected),
            off(split, expected),
            off(keys, np.array(caches[0].layers[1].keys)),
        ],
        "refused": refusals(whole, part, caches),
        **lives(part, caches[1], ranks, shared / f"{Path(folder).name}-{dtype}"),
    }
    whole.shard(ranks.group)
    seen["same parts"] = same(whole, part)
    return seen


def rows(model: Any, cache: Any, tokens: list[int]) -> Any:
    return np.array(model([tokens], cache=cache, all_positions=True)[0])


def off(found: Any, expected: Any) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def same(one: Any, other: Any) -> bool:
    """Whether a model cut after it was loaded is one that was loaded in parts."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    a, b = (dict(tree_flatten(model.parameters())) for model in (one, other))
    with mx.stream(mx.cpu):
        return a.keys() == b.keys() and all(mx.array_equal(a[n], b[n]).item() for n in a)


def lives(part: Any, cache: Any, ranks: Ranks, path: Path) -> dict[str, Any]:
    """Crop, clone, save and load; whether what follows is the same, bit by bit."""
    from mlxkv.port.cache import Cache

    cache.crop(6)
    clone = cache.clone()
    cache.save(f"{path}-{ranks.rank}")
    after = rows(part, clone, TOKENS[6:8])
    held = [len(cache), len(clone)]
    again = Cache.load(f"{path}-{ranks.rank}", part)
    found = rows(part, again, TOKENS[6:8])
    ranks.require_same("caches on disk", "")  # all are there now
    other = (ranks.rank + 1) % ranks.group.size()
    return {
        "held": held,
        "loaded": [repr(again), bool((found == after).all())],
        "another rank's": said(lambda: Cache.load(f"{path}-{other}", part)).partition(": ")[2],
    }


def refusals(whole: Any, part: Any, caches: list[Any]) -> list[str]:
    """Of a rank's model with a whole one's cache, the other way round, and of a second shard."""
    return [
        said(lambda: part([TOKENS], cache=caches[0].clone())),
        said(lambda: whole([TOKENS], cache=caches[1].clone())),
        said(lambda: again(part)),
    ]


def again(part: Any) -> None:
    import mlx.core as mx

    part.shard(mx.distributed.init())


def said(call: Any) -> str:
    try:
        call()
    except Refusal as error:
        return str(error)
    return "nothing"


def memory(folder: str, ranks: Ranks) -> dict[str, int]:
    """Bytes of the rank's weights, of all, of the largest tensor, and the most that was held."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlxkv.port.weights import from_checkpoint

    checkpoint = resolve(folder)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model = from_checkpoint(checkpoint, group=ranks.group)
    peak, held = mx.get_peak_memory() - before, mx.get_active_memory() - before
    sizes = [4 * int(np.prod(shape)) for shape in checkpoint.weights.values()]
    mine = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    return {"part": mine, "held": held, "peak": peak, "all": sum(sizes), "largest": max(sizes)}
