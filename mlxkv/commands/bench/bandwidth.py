"""Bytes that decoding must read, and how fast this machine moves bytes at all."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import numpy as np

from oracle.model.checkpoint import Checkpoint

COPIED = 2**28
"""Bytes that are copied, far more than a CPU's caches hold: 256 MB beside a last level of 32."""
_TURNS = 7
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
_EMBEDDING = "model.embed_tokens."


def copied(*, on_gpu: bool = False, size: int = COPIED) -> float:
    """Bytes per second, read and written: the median of some copies, by all cores or the GPU."""
    seconds = _gpu_seconds(size) if on_gpu else _cpu_seconds(size)
    return 2 * size / median(seconds)


def _cpu_seconds(size: int) -> list[float]:
    threads, found = os.cpu_count() or 1, []
    source = np.ones(size // 8, np.float64)
    target = np.zeros_like(source)
    pieces = list(
        zip(np.array_split(target, threads), np.array_split(source, threads), strict=True)
    )
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_TURNS):
            begun = time.perf_counter()
            list(pool.map(lambda piece: np.copyto(*piece), pieces))
            found.append(time.perf_counter() - begun)
    return found


def _gpu_seconds(size: int) -> list[float]:
    import mlx.core as mx

    source, found = mx.ones(size // 4), []
    mx.eval(source)
    for _ in range(_TURNS):
        begun = time.perf_counter()
        mx.eval(source + 1)
        found.append(time.perf_counter() - begun)
    return found


def read_by_step(checkpoint: Checkpoint, dtype: str, batch: int, held: float) -> int:
    """Bytes of the weights and of `held` tokens' keys and values, each read once.

    A batch reads the weights once. Of an embedding that is not the head too only some rows are
    read, which do not count.
    """
    from mlxkv.port.config.llama import LlamaConfig

    config, size = LlamaConfig.of(checkpoint), _SIZES[dtype]
    row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * size
    tied = config.tie_word_embeddings
    left_out = ("lm_head." if tied else _EMBEDDING, "rotary_emb")
    weights = sum(
        math.prod(tensor.shape) * (4 if tensor.dtype == "U32" else size)
        for name, tensor in checkpoint.tensors.items()
        if not any(part in name for part in left_out)
    )
    return weights + round(row * batch * held)
