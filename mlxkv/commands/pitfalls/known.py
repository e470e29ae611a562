"""What is known to come of the lives of caches that are built in, so that news stands out.

A finding is something that is silently wrong: which caches and lives show it, why, whether it is
known publicly, and ten lines that show it with nothing of ours. A test runs each of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxkv.commands.pitfalls.lives import FACTS, ONLY_FED
from mlxkv.commands.pitfalls.scenarios import LOSSY, NO, REFUSED, RIGHT, UNSEEN, WRONG, Behaviour
from mlxkv.commands.pitfalls.trial import Came
from mlxkv.engines import kinds
from mlxkv.engines.kinds import Kind

EVERY = (
    "KVCache",
    "ConcatenateKVCache",
    "ChunkedKVCache",
    "BatchKVCache",
    "RotatingKVCache:size=10",
    "RotatingKVCache:size=10,keep=2",
    "BatchRotatingKVCache:size=10",
    "QuantizedKVCache:bits=8",
    "QuantizedKVCache:bits=4",
    "SwitchedKVCache:bits=8",
    "StoredKVCache",
    "SplitKVCache",
    "port:mode=guarded",
    "port:mode=candle",
    "DynamicCache",
    "StaticCache",
    "DynamicSlidingCache:size=10",
    "StaticSlidingCache:size=10",
    "QuantizedCache",
)
"""What `--cache all` stands for. A window of 10 lets 24 tokens go twice through it, and a prompt
with a few tokens after it be trimmed."""
_EVERY = {kinds.parse(name).name for name in EVERY}


@dataclass(frozen=True, slots=True)
class Finding:
    """`caches` are names without options, or with the one option that must not be 0."""

    title: str
    caches: tuple[str, ...]
    lives: tuple[str, ...]
    cause: str
    public: str
    code: str
    behaviour: Behaviour = WRONG

    def of(self, kind: Kind) -> bool:
        """Whether it is one of this cache's."""
        for name in self.caches:
            base, _, option = name.partition(":")
            if kind.base == base and (not option or kind.options.get(option) not in (None, 0)):
                return True
        return False


FINDINGS: tuple[Finding, ...] = (
    Finding(
        title="ConcatenateKVCache.trim forgets nothing",
        caches=("ConcatenateKVCache",),
        lives=("trim", "draft", "nothing", "more", "cut-saved", "stored", "broken", "lengths"),
        cause="`trim` lowers `offset` and leaves `keys` and `values` as they are; the next "
        "`update_and_fetch` appends to all of them and sets `offset` by their shape. The tokens "
        "that were trimmed are attended to, and every position after them is off.",
        public="Known: ml-explore/mlx-lm issue 1494, and pull request 1502, which was closed "
        "without being merged.",
        code="""
import mlx.core as mx
from mlx_lm.models.cache import ConcatenateKVCache, trim_prompt_cache

cache = ConcatenateKVCache()
for n in range(5):
    row = mx.full((1, 1, 1, 4), n)
    cache.update_and_fetch(row, row)
trim_prompt_cache([cache], 3)
row = mx.full((1, 1, 1, 4), 9)
keys, _ = cache.update_and_fetch(row, row)
print(keys[0, 0, :, 0].tolist())  # [0, 1, 2, 3, 4, 9], expected [0, 1, 9]
""",
    ),
    Finding(
        title="RotatingKVCache hides its sinks from several tokens in one call",
        caches=("RotatingKVCache:keep",),
        lives=(
            *("chunks", "several", "batch", "ragged", "draft", "saved", "stored"),
            *("ends", "ends-chunks", "wide", "late", "late-saved", "late-copy"),
        ),
        cause="With `keep` > 0 single tokens attend to the first `keep` tokens and the newest "
        "`max_size - keep`. For a call of several, `make_mask` gives `create_causal_mask` the "
        "window alone, which ends at the newest `max_size` rows: the sinks are stored, and are "
        "masked, or were never kept for the tokens of a first call longer than the window. So the "
        "same tokens give other logits in chunks (a prompt in steps of `prefill_step_size`, "
        "speculative decoding) than one by one. `make_prompt_cache(max_kv_size=...)` makes these "
        "caches with `keep=4`.",
        public="Not found publicly. ml-explore/mlx-lm issue 1631 (open) says that the sinks are "
        "lost in `to_quantized`, issue 1914 (closed) is about the size in calls of several tokens.",
        code="""
import mlx.core as mx
from mlx_lm.models.cache import RotatingKVCache


def seen(sizes):
    cache, start = RotatingKVCache(max_size=8, keep=2), 0
    for n in sizes:
        rows = mx.arange(start, start + n).reshape(1, 1, n, 1)
        mask, start = cache.make_mask(n, return_array=True), start + n
        keys = cache.update_and_fetch(rows, rows)[0][0, 0, :, 0]
    row = mask[-1].tolist() if mask is not None else [True] * keys.size
    return sorted(k for k, shown in zip(keys.tolist(), row) if shown)


print(seen([1] * 13))  # [0, 1, 7, 8, 9, 10, 11, 12]
print(seen([8, 5]))  # [5, 6, 7, 8, 9, 10, 11, 12], expected the same
""",
    ),
    Finding(
        title="BatchRotatingKVCache cannot go on after load_prompt_cache",
        caches=("BatchRotatingKVCache",),
        lives=("saved", "cut-saved", "late-saved"),
        cause="`from_state` makes the object without `__init__`, and `state` does not set "
        "`_lengths`, which `update_and_fetch` reads. (`BatchKVCache` has `_right_padding`, which "
        "`finalize` reads, in the same way.)",
        public="Not found publicly for these attributes. The same cause was mended for "
        "`ArraysCache` in ml-explore/mlx-lm pull request 807.",
        code="""
import mlx.core as mx
from mlx_lm.models.cache import BatchRotatingKVCache, load_prompt_cache, save_prompt_cache

cache, rows = BatchRotatingKVCache(8, [0, 1]), mx.zeros((2, 1, 3, 4))
cache.update_and_fetch(rows, rows)
save_prompt_cache("cache.safetensors", [cache])
(loaded,) = load_prompt_cache("cache.safetensors")
loaded.update_and_fetch(rows, rows)  # AttributeError: ... no attribute '_lengths'
""",
        behaviour=REFUSED,
    ),
    Finding(
        title="An empty ConcatenateKVCache cannot be loaded",
        caches=("ConcatenateKVCache",),
        lives=("empty-saved",),
        cause="Its `state` takes `offset` from the shape of `keys`, which are None.",
        public="Not found publicly.",
        code="""
from mlx_lm.models.cache import ConcatenateKVCache, load_prompt_cache, save_prompt_cache

save_prompt_cache("cache.safetensors", [ConcatenateKVCache()])
load_prompt_cache("cache.safetensors")  # AttributeError: 'NoneType' ... no attribute 'shape'
""",
        behaviour=REFUSED,
    ),
    Finding(
        title="StaticCache.crop goes below zero",
        caches=("StaticCache",),
        lives=("more",),
        cause="`StaticLayer.crop` takes any number from `cumulative_length`. The length that it "
        "then says is negative, and the next call fails by its index, late and far from the cause.",
        public="Not found publicly here. Of DynamicCache it is huggingface/transformers "
        "issue 47433; pull request 45745 (open) would clamp it here too.",
        code="""
import torch
from transformers import LlamaConfig, StaticCache

cache = StaticCache(config=LlamaConfig(num_hidden_layers=1), max_cache_len=16)
rows = torch.zeros(1, 32, 3, 128)
cache.update(rows, rows, 0)
cache.crop(-5)  # two more than it holds
print(int(cache.get_seq_length()))  # -2
cache.update(rows, rows, 0)  # IndexError: index -2 is out of bounds
""",
        behaviour=REFUSED,
    ),
    Finding(
        title="The port in candle's mode undoes no broken call",
        caches=("port",),
        lives=("broken",),
        cause="As in candle's llama.rs, layers that a broken call reached keep its rows. The port "
        "does so in candle's mode alone; the guarded one puts its layers back.",
        public="Documented: that mode exists to show what candle's cache does.",
        code="""
import mlxkv
from mlxkv.port.cache import Cache

model = mlxkv.load()
cache = Cache(model.config, dtype=model.dtype, guarded=False)
model([[504, 3575]], cache=cache)


def tap(layer, name, array):
    if layer == 15:
        raise InterruptedError
    return array


try:
    model([[282]], cache=cache, tap=tap)
except InterruptedError:
    print([layer.length for layer in cache.layers])  # [3, 3, ..., 2, 2], expected 2 throughout
""",
    ),
    Finding(
        title="The port says the bytes of its rows",
        caches=("port",),
        lives=("bytes",),
        cause="`Cache.nbytes` counts the rows held; the buffers behind them are up to 255 rows "
        "larger, and a clone shares them until one side writes. mlx-lm's caches count buffers.",
        public="Documented in its docstring.",
        code="""
import mlxkv
from mlxkv.port.cache import Cache

model = mlxkv.load()
cache = Cache(model.config, dtype=model.dtype)
model([[504, 3575]], cache=cache)
buffers = sum(b.nbytes for layer in cache.layers for b in layer.buffers)
print(cache.nbytes, buffers)
""",
    ),
)

NEEDED = ("singles", "alone")
"""What every cache must be able to."""
_SAVED = ("saved", "empty-saved", "cut-saved", "late-saved")
_CUT = ("trim", "draft", "nothing", "more", "cut-saved", "late-trim")
_INSIDE = dict.fromkeys(("ragged",), NO)
_ROLLED: dict[str, Behaviour] = {"broken": NO, "late-trim": NO}
_OTHER: dict[str, Behaviour] = dict.fromkeys((*_SAVED, "stored", "bytes"), NO)
DOCUMENTED: dict[str, dict[str, Behaviour]] = {
    **dict.fromkeys(("KVCache", "ConcatenateKVCache", "ChunkedKVCache"), _INSIDE),
    **dict.fromkeys(("QuantizedKVCache", "SwitchedKVCache", "StoredKVCache"), _INSIDE),
    "SplitKVCache": _INSIDE,
    "RotatingKVCache": _INSIDE | _ROLLED,
    "BatchKVCache": {"empty-saved": NO},
    "BatchRotatingKVCache": {"empty-saved": NO} | _ROLLED,
    "port": {"ragged": NO, "more": REFUSED, "stored": NO},
    "DynamicCache": _OTHER,
    "StaticCache": _OTHER,
    "DynamicSlidingCache": _OTHER | {"broken": REFUSED, "late-trim": REFUSED},
    "StaticSlidingCache": _OTHER | dict.fromkeys((*_CUT, "broken"), NO),
    "QuantizedCache": _OTHER | dict.fromkeys(_CUT, NO) | {"broken": REFUSED},
}
"""By cache and life what is known beside: what it refuses or has no call for. mlx-lm takes rows of
different lengths in its batch caches alone, and trims no window that tokens have left;
transformers saves no cache, and says no bytes; the port has no store."""


def expected(kind: Kind, life: str) -> tuple[Behaviour, ...]:
    """What may come of a life, the usual first.

    A cache of one's own may be anything but wrong. One that is built in, with other options than
    those of `EVERY`, may also be right where these are not: a larger window may not be reached.
    """
    lossy: tuple[Behaviour, ...] = (LOSSY, UNSEEN) if kind.lossy else ()
    if kind.whose == "own":
        return (RIGHT, *lossy) if life in NEEDED else (RIGHT, *lossy, REFUSED, NO, UNSEEN)
    wrong = finding(kind, life)
    known = wrong.behaviour if wrong is not None else DOCUMENTED.get(kind.base, {}).get(life)
    if known is None:
        return (RIGHT, *lossy)
    return (known,) if kind.name in _EVERY else (known, RIGHT, *lossy)


def odd(kind: Kind, came: Came) -> bool:
    """Whether what came was not to be expected."""
    crashed = kind.whose == "own" and came.crashed
    return crashed or not (came.reason or came.behaviour in expected(kind, came.life))


def depends(kind: Kind, came: Sequence[Came]) -> str:
    """That a cache may depend on its calls by design, where that would explain all that is wrong;
    else "".
    """
    wrong = [one for one in came if one.behaviour == WRONG and one.life not in FACTS]
    fed = any(one.life in ONLY_FED for one in wrong)
    if kind.whose != "own" or kind.lossy != "quantised" or not fed:
        return ""
    if not all(one.otherwise for one in wrong):
        return ""
    return (
        "wrong only where it is fed in other calls than it is measured by: if what it keeps "
        "depends on the calls by design, say so with --lossy depends"
    )


def finding(kind: Kind, life: str) -> Finding | None:
    """What is known to go wrong there."""
    candle = kind.options.get("mode") == "candle"
    for one in FINDINGS:
        if (
            life in one.lives
            and one.of(kind)
            and (candle or life != "broken" or kind.base != "port")
        ):
            return one
    return None
