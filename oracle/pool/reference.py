"""transformers' own model on the CPU follows a plan. Beside `neighbour_model.py` the only file that touches transformers' API.

The model is built from the checkpoint's config and tensors alone: no folder is searched, no code of a checkpoint is run,
nothing is fetched. Supported from transformers 5.0 on, which calls the cache `past_key_values` and from 5.24 on `cache`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import platform
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import transformers
from safetensors import safe_open
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.utils import logging

from oracle.formats.errors import Inexpressible, Refusal, one_line
from oracle.formats.plan import Call, Clone, Crop, Greedy, New, Plan, Reset, Step
from oracle.formats.tensors import Array
from oracle.formats.trace import Meta, Outcome, Trace
from oracle.model.checkpoint import Checkpoint, is_neighbour
from oracle.pool import neighbour_model
from oracle.truth.config import check_weights, config_of, effective
from oracle.truth.llama import Weights

Attention = Literal["eager", "sdpa"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_CACHE = (
    "cache"
    if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters
    else "past_key_values"
)


def set_up(threads: int | None = None) -> None:
    """Threads (default: one a core) and full float32 precision, for the whole process; before anything is computed."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads or os.cpu_count() or 1)
    with contextlib.suppress(
        RuntimeError
    ):  # too late where torch is in use already; it orders operations, not sums
        torch.set_num_interop_threads(1)
    torch.set_float32_matmul_precision("highest")
    mode = os.environ.get(
        "ONEDNN_DEFAULT_FPMATH_MODE", os.environ.get("DNNL_DEFAULT_FPMATH_MODE", "STRICT")
    )
    if mode.upper() != "STRICT":
        raise Refusal(
            f"environment: ONEDNN_DEFAULT_FPMATH_MODE is {mode}, expected STRICT, as float32 would be rounded; unset it"
        )


def environment() -> dict[str, Any]:
    """What the numbers depend on beside the inputs, as plain values."""
    return {
        "host": _processor(),
        "os": " ".join([platform.system(), *platform.libc_ver()]),
        "arch": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }


class Reference:
    """transformers' class for one checkpoint, a LlamaForCausalLM or a neighbour's, with its weights in one dtype.

    `kinds` are the kinds of attention that it has; the last is the one whose runs stay as references.
    """

    def __init__(self, checkpoint: Checkpoint, *, dtype: str = "float32") -> None:
        self.checkpoint, self.dtype = checkpoint, dtype
        neighbour = is_neighbour(checkpoint)
        if not neighbour:
            check_weights(config_of(checkpoint), checkpoint)
        try:
            build = neighbour_model.build if neighbour else _llama
            model = build(checkpoint, _tensors(checkpoint, dtype), DTYPES[dtype])
        except Refusal:
            raise
        except Exception as error:  # its validators raise whatever they like
            name = f"transformers {transformers.__version__}"
            raise Refusal(
                f"{checkpoint.folder}: {name} refuses this model ({one_line(error, 300)})"
            ) from error
        self._model: Any = model.eval()
        self.kinds: tuple[Attention, ...] = (
            neighbour_model.kinds(model) if neighbour else ("eager", "sdpa")
        )

    @torch.inference_mode()
    def run(self, plan: Plan, *, attention: Attention = "sdpa") -> Trace:
        """The plan's trace, in memory: logits in float32 whatever the dtype, keys and values of the caches left at the end.

        A step that fails leaves its error in the outcomes and no row, and the next step goes on with what there is.
        """
        self._model.set_attn_implementation(attention)
        run = _Run(self._model, plan, self.checkpoint.vocab_size)
        outcomes = [run.follow(i, step) for i, step in enumerate(plan.steps)]
        arrays, lacks = run.arrays()
        meta = Meta(
            plan=plan,
            engine="transformers",
            engine_version=transformers.__version__,
            dtype=self.dtype,
            weights_dtype=self.dtype,
            fingerprint=self.checkpoint.fingerprint,
            config_digest=self.checkpoint.config_digest,
            outcomes=outcomes,
            environment=environment() | {"attention": attention},
            no_cache=lacks,
        )
        return Trace(meta, arrays)

    @torch.inference_mode()
    def double(
        self, tokens: list[int], *, rows: int | None = None, attention: Attention = "sdpa"
    ) -> Array:
        """(n, V) logits of one uncached call after the weights, already rounded to the dtype, were widened to float64.

        Packed weights are unpacked once more, without rounding, since the truth's are exact. `rows` keeps the first ones only.
        Eager attention leaves softmax in float32.
        The model stays so: nothing else can be run on it afterwards.
        """
        self._model.set_attn_implementation(attention)
        self._model.double()
        exact = Weights(self.checkpoint, dtype=self.dtype)
        for name, parameter in self._model.named_parameters():
            if name in self.checkpoint.packed:
                parameter.copy_(exact(name))
        kept = torch.arange(min(len(tokens), rows or len(tokens)))
        logits: Array = (
            self._model(torch.tensor([tokens]), use_cache=False, logits_to_keep=kept)
            .logits[0]
            .numpy()
        )
        return logits


def _llama(checkpoint: Checkpoint, tensors: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """A parameter that the checkpoint lacks would be random, one that the model lacks would be dropped: both are refused."""
    config = LlamaConfig.from_dict(copy.deepcopy(effective(checkpoint.model_config)))
    model = LlamaForCausalLM.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
    )
    odd = set(config_of(checkpoint).shapes()) ^ {name for name, _ in model.named_parameters()}
    if odd:
        raise Refusal(
            f"{checkpoint.folder}: transformers {transformers.__version__} and the checkpoint disagree on {min(odd)}"
        )
    return model


class _Run:
    """One plan under way: its caches by name (None: without a cache) and the rows so far."""

    def __init__(self, model: Any, plan: Plan, vocab_size: int) -> None:
        self._model, self._last = model, plan.rows == "last"
        self._caches: dict[str, DynamicCache | None] = {}
        most = sum(
            call.fed + (1 - len(call.step.tokens) if self._last else 0) for call in plan.calls()
        )
        self._logits = np.empty((most, vocab_size), np.float32)
        self._places: list[tuple[int, int]] = []  # (position, step) of each row

    def follow(self, i: int, step: Step) -> Outcome:
        """One step, to its outcome; its rows are kept."""
        chosen: list[int] = []
        try:
            if isinstance(step, New):
                self._caches[step.cache] = self._fresh() if step.use_kv_cache else None
            elif isinstance(step, Call):
                self._call(i, step.cache, step.tokens, step.index_pos)
            elif isinstance(step, Greedy):
                self._greedy(i, step, chosen)
            elif isinstance(step, Clone):
                self._caches[step.target] = copy.deepcopy(self._caches[step.source])
            elif isinstance(step, Crop):
                self._caches[step.cache] = self._cropped(self._caches[step.cache], step.length)
            elif isinstance(step, Reset):
                self._caches[step.cache] = (
                    self._fresh() if self._caches[step.cache] is not None else None
                )
        except Exception as error:
            return Outcome.failed(error, chosen or None)
        return Outcome(chosen or None)

    def arrays(self) -> tuple[dict[str, Array], str]:
        """The trace's arrays, and why a cache's keys and values are not among them ("" where they are)."""
        positions, steps = zip(*self._places, strict=True) if self._places else ((), ())
        arrays: dict[str, Array] = {"logits": self._logits[: len(self._places)]}
        arrays |= {"positions": np.array(positions, np.int32), "steps": np.array(steps, np.int32)}
        lacks = ""
        for name, cache in self._caches.items():
            layers = cache.layers if cache is not None and _length(cache) else []
            odd = _partial(layers, _length(cache))
            lacks = lacks or odd
            for i, layer in enumerate([] if odd else layers):
                arrays[f"kv/{name}/{i:03d}/keys"] = layer.keys[0].float().numpy()
                arrays[f"kv/{name}/{i:03d}/values"] = layer.values[0].float().numpy()
        return arrays, lacks

    def _call(self, i: int, name: str, tokens: tuple[int, ...], index_pos: int | None) -> Array:
        """Keeps the rows of one forward call; returns the last."""
        cache = self._caches[name]
        held = _length(cache)
        given = {_CACHE: cache, "use_cache": cache is not None, "logits_to_keep": int(self._last)}
        if index_pos not in (None, held):
            if held:
                where = f"index_pos {index_pos} with {held} tokens cached"
                raise Inexpressible(f"{where}, as transformers takes the position from its cache")
            # Where nothing is cached a caller may say position_ids, and only them.
            given["position_ids"] = torch.arange(index_pos, index_pos + len(tokens))[None]
        rows: Tensor = self._model(torch.tensor([tokens]), **given).logits[0]
        first = len(self._places)
        self._places += [(held + place, i) for place in range(len(tokens) - len(rows), len(tokens))]
        self._logits[first : len(self._places)] = rows.float().numpy()
        last: Array = self._logits[len(self._places) - 1]
        return last

    def _greedy(self, i: int, step: Greedy, chosen: list[int]) -> None:
        tokens, position = step.tokens, step.index_pos
        while True:
            chosen.append(int(self._call(i, step.cache, tokens, position).argmax()))
            if len(chosen) == step.n:
                return
            if position is not None:
                position += {"right": len(tokens), "zero": 0, "by_calls": 1}[step.advance]
            tokens = (chosen[-1],)

    def _cropped(self, cache: DynamicCache | None, length: int) -> DynamicCache | None:
        """A new cache of the first tokens; `DynamicCache.crop` has meant different things in different versions."""
        held = _length(cache)
        if length > held:
            raise Refusal(f"crop: length is {length}, expected at most the {held} tokens cached")
        if cache is None:
            return None
        kept = self._fresh()
        for i, layer in enumerate(cache.layers if length else []):
            kept.update(layer.keys[:, :, :length], layer.values[:, :, :length], i)
        return kept

    def _fresh(self) -> DynamicCache:
        return DynamicCache(config=self._model.config)


def _length(cache: DynamicCache | None) -> int:
    return 0 if cache is None else int(cache.get_seq_length())


def _partial(layers: list[Any], length: int) -> str:
    """Why the layers do not hold keys and values of one shape for every token, or ""; a Llama's always do."""
    first: tuple[int, ...] | None = None
    for i, layer in enumerate(layers):
        for kind in ("keys", "values"):
            array = getattr(layer, kind, None)
            if not isinstance(array, Tensor) or array.ndim != 4:
                return f"layer {i} of transformers' cache has no {kind}"
            if array.shape[2] != length:
                return f"layer {i} of transformers' cache keeps {array.shape[2]} of {length} tokens"
            first = first or tuple(array.shape)
            if tuple(array.shape) != first:
                return f"{kind} of layer {i} have shape {list(array.shape[1:])}, expected {list(first[1:])} as its neighbours'"
    return ""


def _tensors(checkpoint: Checkpoint, dtype: str) -> dict[str, Tensor]:
    """The tensors that the fingerprint covers, mapped from their files; packed ones unpacked and rounded once."""
    plain = [
        name
        for name in checkpoint.weights
        if name not in checkpoint.packed and not name.endswith(".rotary_emb.inv_freq")
    ]
    found: dict[str, Tensor] = {}
    for file in sorted({checkpoint.tensors[name].file for name in plain}):
        with safe_open(str(file), framework="pt") as stored:
            found |= {
                name: stored.get_tensor(name)
                for name in plain
                if checkpoint.tensors[name].file == file
            }
    exact = Weights(checkpoint, dtype=dtype)
    return found | {name: exact(name).to(DTYPES[dtype]) for name in checkpoint.packed}


def _processor() -> str:
    """The processor's name, without the machine's."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
