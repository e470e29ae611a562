"""About the memory that the oracle's work takes, in bytes that are no file's.

By the shapes of what lives at once, and by the blocks in which the truth goes through attention,
the MLP and the head. Of nine heads of 64 in two layers (tests/oracle/test_many.py) all of it was
548 MB at 1,000 tokens; of the default model it was 2.45 GB at 8,191 (reports/scale), of which 2.5
are said. torch is not imported. Axes as in `oracle.truth.llama`.
"""

from __future__ import annotations

import math

from oracle.formats.rows import WHOLE
from oracle.pool.neighbour import Neighbour
from oracle.truth.config import Config

PROCESS = 400e6
"""Of a process with torch and transformers that has computed nothing."""
BLOCK, LONG_BLOCK, WIDE, SHORT, HEAD = 2**23, 2**21, 2**24, 1024, 2**25
"""Those of `oracle.truth.llama` and `oracle.truth.weights`, which import torch."""


def layer(config: Config | Neighbour) -> int:
    """Numbers of the largest layer's weights."""
    layers: dict[str, int] = {}
    for name, shape in config.shapes().items():
        if ".layers." in name:
            which = name.split(".layers.")[1].split(".")[0]
            layers[which] = layers.get(which, 0) + math.prod(shape)
    return max(layers.values(), default=0)


def truth(c: Config, n: int, *, ways: int, rows: int) -> int:
    """Of the truth of n tokens in so many ways, with `rows` of logits; not its weights.

    Hidden states, twice in each way; of one layer, keys and values of two ways, and of one way two
    blocks of scores and ten arrays of the queries' width (projected, turned, mixed, joined, added),
    or five of the MLP's; or a block of the head, and of its logits three.
    """
    wide, narrow = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    scores = min(BLOCK if n <= SHORT else LONG_BLOCK, c.n_heads * n * n)
    mlp = c.mlp * min(n, max(SHORT, WIDE // c.mlp))
    inside = max(2 * scores + 10 * n * wide, 5 * mlp + 2 * n * wide) + 6 * n * narrow
    head = min(HEAD, c.vocab_size * c.hidden) + 3 * min(BLOCK, rows * c.vocab_size)
    return 8 * (2 * ways * n * c.hidden + max(inside, head))


def pool(c: Config | Neighbour, n: int, *, item: int, masked: int) -> int:
    """Of a run of transformers: eager attention writes out all scores, of which three are there at
    once in float32; a chunk after others has a mask of `masked` places, as bool and as float; keys
    and values are repeated for each query head.
    """
    if not isinstance(c, Config):
        return 0
    wide = c.n_heads * c.head_dim
    scores = 3 * 4 * c.n_heads * n * n if n <= WHOLE else 0
    return scores + 5 * masked + item * n * (4 * wide + 3 * c.mlp + 4 * c.hidden)
