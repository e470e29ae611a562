"""transformers' own model on the CPU follows a plan.

Beside `neighbour_model.py` the only file that touches transformers' API. The model is built from
the checkpoint's config and tensors alone: no folder is searched, no code of a checkpoint is run,
nothing is fetched. Supported from transformers 5.0 on, which calls the cache `past_key_values`, and
from 5.24 on `cache`.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM
from transformers.utils import logging

from oracle.formats import dither as dithers
from oracle.formats.cache_name import CacheName
from oracle.formats.errors import Inexpressible, Refusal, one_line
from oracle.formats.plan import (
    Call,
    Clone,
    Crop,
    Fail,
    Greedy,
    Ids,
    New,
    Pad,
    Plan,
    Recall,
    Reload,
    Reset,
    Step,
    Trim,
    require,
)
from oracle.formats.progress import Progress, silent
from oracle.formats.tensors import Array
from oracle.formats.trace import CACHES, Meta, Outcome, Trace
from oracle.model.checkpoint import Checkpoint, is_neighbour
from oracle.pool import caches, converted, neighbour_model, orders, widened
from oracle.truth.config import checked, config_of, effective
from oracle.truth.weights import DTYPES, Rows, Weights

_TAKEN = inspect.signature(LlamaForCausalLM.forward).parameters
_CACHE = "cache" if "cache" in _TAKEN else "past_key_values"
_USUAL = CacheName("DynamicCache")
_PRECISION = ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE")


def set_up(threads: int | None = None) -> None:
    """Threads (default: one a core) and full float32 precision, before anything is computed."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(threads or os.cpu_count() or 1)
    # Too late where torch is in use already; it orders operations, not sums.
    with contextlib.suppress(RuntimeError):
        torch.set_num_interop_threads(1)
    torch.set_float32_matmul_precision("highest")
    mode = next((os.environ[name] for name in _PRECISION if name in os.environ), "STRICT")
    if mode.upper() != "STRICT":
        what = f"{_PRECISION[0]} is {mode}, expected STRICT, as float32 would be rounded"
        raise Refusal(what, where="environment", remedy="unset it")


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
    """transformers' class for one checkpoint, a LlamaForCausalLM or a neighbour's, in one dtype.

    `kinds` are the kinds of attention that it has; the runs of the last one stay as references.
    `widest` is the longest row that a norm has added up in order so far. `dither` is the seed of
    `oracle.formats.dither`, 0 for none.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: str = "float32",
        dither: int = 0,
        progress: Progress = silent,
    ) -> None:
        self.checkpoint, self.dtype, self.widest = checkpoint, dtype, 0
        self._model: Any = _built(checkpoint, dtype, progress).eval()
        if dither:
            _dither(self._model.get_input_embeddings().weight, dither)
        self.kinds: tuple[str, ...] = ("eager", "sdpa")
        if is_neighbour(checkpoint):
            self.kinds = neighbour_model.kinds(self._model)

    @torch.inference_mode()
    def run(
        self,
        plan: Plan,
        *,
        attention: str = "sdpa",
        in_order: bool = False,
        cache: CacheName | None = None,
    ) -> Trace:
        """The plan's trace: logits (float32 whatever the dtype), and keys and values at the end.

        A step that fails leaves its error and no row; the next step goes on with what there is.
        Norms add up `in_order` if so asked. If `cache` is given, the trace names it, and has what
        the caches say of themselves.
        """
        self._model.set_attn_implementation(attention)
        run = _Run(self._model, plan, self.checkpoint.vocab_size, cache or _USUAL)
        order = orders.Sequential()
        with order if in_order else contextlib.nullcontext():
            outcomes = [run.follow(i, step) for i, step in enumerate(plan.steps)]
        self.widest = max(self.widest, order.widest)
        arrays, lacks = run.arrays()
        sums = "sequential" if in_order else attention
        says = {} if cache is None else {"cache": str(cache), CACHES: run.says()}
        meta = Meta(
            plan=plan,
            engine="transformers",
            engine_version=transformers.__version__,
            dtype=self.dtype,
            weights_dtype=self.dtype,
            fingerprint=self.checkpoint.fingerprint,
            config_digest=self.checkpoint.config_digest,
            outcomes=outcomes,
            environment=environment() | {"attention": sums} | says,
            no_cache=lacks,
        )
        return Trace(meta, arrays)

    @torch.inference_mode()
    def double(
        self,
        tokens: list[int],
        *,
        rows: int | None = None,
        attention: str = "sdpa",
        exact: bool = True,
    ) -> Array:
        """(n, V) logits of one uncached call in float64; `rows` keeps the first ones only.

        The weights, already rounded to the dtype, are widened. Packed ones are unpacked once more,
        without rounding, since the truth's are exact. What the class computes in float32 whatever
        its weights are is float64 too if it is to be `exact`; of a neighbour all but RoPE's
        frequencies. The model is as it was afterwards.
        """
        self._model.set_attn_implementation(attention)
        kept = torch.arange(min(len(tokens), rows or len(tokens)))
        given = torch.tensor([tokens])
        with ExitStack() as stack:
            if not is_neighbour(self.checkpoint):
                stack.enter_context(_exact_frequencies(self._model))
            stack.enter_context(widened.widened(self._model, given, self._wide()))
            if exact:
                stack.enter_context(orders.Float64())
            made = self._model(given, use_cache=False, logits_to_keep=kept)
        logits: Array = made.logits[0].numpy()
        return logits

    def _wide(self) -> widened.Wide:
        """A parameter in float64: one that is stored packed as it was before it was rounded."""
        weights, parameters = Weights(self.checkpoint, dtype=self.dtype), dict[int, str]()
        for name, parameter in self._model.named_parameters():
            if name in self.checkpoint.packed:
                parameters[id(parameter)] = name

        def wide(tensor: Tensor, rows: Rows | None = None, out: Tensor | None = None) -> Tensor:
            # It is called within the model's call, whose float32 may mean float64.
            with torch._C.DisableTorchFunction():
                if id(tensor) in parameters:
                    return weights(parameters[id(tensor)], rows=rows, out=out)
                stored = tensor if rows is None else tensor[rows]
                return stored.double() if out is None else out[: len(stored)].copy_(stored)

        return wide


@contextlib.contextmanager
def _exact_frequencies(model: Any) -> Iterator[None]:
    """RoPE's frequencies are computed in float64, and not in float32 and widened."""
    inner = model.model
    kept = inner.rotary_emb
    with orders.Float64():
        inner.rotary_emb = type(kept)(model.config)
    try:
        yield
    finally:
        inner.rotary_emb = kept


def _built(checkpoint: Checkpoint, dtype: str, progress: Progress) -> Any:
    build = neighbour_model.build if is_neighbour(checkpoint) else _llama
    if not is_neighbour(checkpoint):
        checked(checkpoint)
    tensors = converted.tensors(checkpoint, dtype, progress=progress)
    try:
        return build(checkpoint, tensors, DTYPES[dtype])
    except Refusal:
        raise
    except Exception as error:  # its validators raise whatever they like
        name = f"transformers {transformers.__version__}"
        what = f"{name} refuses this model ({one_line(error, 300)})"
        raise Refusal(what, where=checkpoint.folder) from error


def _dither(weight: Tensor, seed: int) -> None:
    by = torch.from_numpy(dithers.factors(tuple(weight.shape), seed))
    with torch.no_grad():
        weight.copy_((weight.double() * by).to(weight.dtype))


def _llama(checkpoint: Checkpoint, tensors: dict[str, Tensor], dtype: torch.dtype) -> Any:
    """A missing parameter would be random and an unknown tensor dropped: both are refused."""
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
        both = f"transformers {transformers.__version__} and the checkpoint"
        raise Refusal(f"{both} disagree on {min(odd)}", where=checkpoint.folder)
    return model


class _Run:
    """One plan under way: its caches by name (None: without a cache) and the rows so far."""

    def __init__(self, model: Any, plan: Plan, vocab_size: int, cache: CacheName) -> None:
        self._model, self._plan, self._cache = model, plan, cache
        self._caches: dict[str, Any] = {}
        self._batched: set[str] = set()  # the caches that hold a batch
        self._left: dict[str, tuple[int, ...]] = {}  # the padding of each row, where there is any
        most = sum(len(call.batch) * len(plan.kept(call)) for call in plan.calls())
        self._logits = np.empty((most, vocab_size), np.float32)
        self._places: list[tuple[int, int, int]] = []  # position, step, row of the batch

    def follow(self, i: int, step: Step) -> Outcome:
        chosen: list[int] = []
        caches = self._caches
        try:
            require(step, caches)
            match step:
                case New(cache, use_kv_cache):
                    caches[cache] = self._fresh() if use_kv_cache else None
                    self._left.pop(cache, None)
                case Call(cache, _, index_pos):
                    (self._batched.add if step.batched else self._batched.discard)(cache)
                    self._call(i, cache, step.batch, index_pos)
                case Greedy():
                    self._greedy(i, step, chosen)
                case Clone(source, target):
                    caches[target] = copy.deepcopy(caches[source])
                    held = self._batched - {target}
                    self._batched = held | ({target} if source in self._batched else set())
                    self._left[target] = self._left.get(source, ())
                case Crop(cache, length):
                    _crop(caches[cache], length)
                case Trim(cache, tokens):
                    _trim(caches[cache], tokens)
                case Reset(cache):
                    if caches[cache] is not None:
                        caches[cache].reset()
                    self._left.pop(cache, None)
                case Pad(cache, left):
                    self._left[cache] = left
                case Fail(cache, tokens):
                    self._fail(caches[cache], tokens)
                case Reload():
                    raise Inexpressible("transformers has no way to save a cache")
                case Recall():
                    raise Inexpressible("transformers has no store of caches")
        except Exception as error:
            return Outcome.failed(error, chosen or None)
        return Outcome(chosen or None)

    def arrays(self) -> tuple[dict[str, Array], str]:
        """The trace's arrays, and why a cache's keys and values are missing ("" if none are)."""
        places = np.array(self._places, np.int32).reshape(-1, 3).T
        arrays: dict[str, Array] = {"logits": self._logits[: len(self._places)]}
        arrays |= dict(zip(("positions", "steps", "batch"), places, strict=True))
        if not self._plan.batched:
            del arrays["batch"]
        lacks = ""
        for name, cache in self._caches.items():
            layers = cache.layers if cache is not None and caches.length(cache) else []
            pairs = [caches.rows(layer) for layer in layers]
            odd = _partial(pairs, caches.length(cache))
            lacks = lacks or odd
            for i, pair in enumerate([] if odd else pairs):
                for kind, held in zip(("keys", "values"), pair or (), strict=True):
                    rows = held if name in self._batched else held[0]
                    arrays[f"kv/{name}/{i:03d}/{kind}"] = rows.float().numpy()
        return arrays, lacks

    def says(self) -> dict[str, Any]:
        """What each cache says of itself beside what it holds."""
        kept = {name: cache for name, cache in self._caches.items() if cache is not None}
        return {name: caches.facts(cache) for name, cache in kept.items()}

    def _call(self, i: int, name: str, batch: tuple[Ids, ...], index_pos: int | None) -> Array:
        """One forward call; the last of the rows kept, on which a greedy step goes on."""
        cache, width = self._caches[name], len(batch[0])
        held, left = caches.length(cache), self._left.get(name) or (0,) * len(batch)
        kept = self._plan.kept_of(held, width)
        given = {_CACHE: cache, "use_cache": cache is not None}
        given["logits_to_keep"] = torch.tensor(kept, dtype=torch.long) - held
        if index_pos not in (None, held):
            if held:
                at = f"index_pos {index_pos} with {held} tokens cached"
                raise Inexpressible(f"{at}, as transformers takes the position from its cache")
            # Where nothing is cached a caller may give position_ids, and only them.
            given["position_ids"] = torch.arange(index_pos, index_pos + width)[None]
        if any(left):
            given |= _padded(left, held, width)
        with caches.masked(self._cache):
            rows: Tensor = self._model(torch.tensor(batch), **given).logits
        first = len(self._places)
        self._places += [(at - left[row], i, row) for row in range(len(batch)) for at in kept]
        self._logits[first : len(self._places)] = rows.flatten(0, 1).float().numpy()
        last: Array = self._logits[len(self._places) - 1]
        return last

    def _greedy(self, i: int, step: Greedy, chosen: list[int]) -> None:
        tokens, position = step.tokens, step.index_pos
        while True:
            chosen.append(int(self._call(i, step.cache, (tokens,), position).argmax()))
            if len(chosen) == step.n:
                return
            if position is not None:
                position += {"right": len(tokens), "zero": 0, "by_calls": 1}[step.advance]
            tokens = (chosen[-1],)

    def _fail(self, cache: Any, tokens: Ids) -> None:
        """A layer in the middle raises; then each layer is cropped by what it took."""
        before = [int(layer.get_seq_length()) for layer in cache.layers] if cache else []
        with contextlib.suppress(caches.BrokenOff), caches.broken_off(self._model):
            self._model(torch.tensor([tokens]), **{_CACHE: cache, "use_cache": cache is not None})
        if cache is not None:
            caches.crop_to(cache, before)

    def _fresh(self) -> Any:
        return caches.fresh(self._cache, self._model.config)


def _crop(cache: Any, length: int) -> None:
    held = caches.length(cache)
    if length > held:
        raise Refusal(f"crop: length is {length}, expected at most the {held} tokens cached")
    if cache is not None:
        caches.crop(cache, held - length)


def _trim(cache: Any, tokens: int) -> None:
    """Has the cache itself forget so many tokens, be it more than it holds."""
    if cache is not None:
        caches.crop(cache, tokens)


def _padded(left: tuple[int, ...], held: int, width: int) -> dict[str, Tensor]:
    """What hides the padding of rows (B, S), and where their own tokens of a call stand (B, L)."""
    before = torch.tensor(left)[:, None]
    columns = torch.arange(held + width)
    places = (columns[held:] - before).clamp(min=0)
    return {"attention_mask": (columns >= before).long(), "position_ids": places}


def _partial(pairs: Sequence[tuple[Tensor, Tensor] | None], length: int) -> str:
    """Why the layers lack keys and values of one shape for every token, or "" as for any Llama."""
    first: tuple[int, ...] | None = None
    for i, pair in enumerate(pairs):
        if pair is None:
            return f"layer {i} of transformers' cache has no keys"
        for kind, array in zip(("keys", "values"), pair, strict=True):
            if array.shape[2] != length:
                return f"layer {i} of transformers' cache keeps {array.shape[2]} of {length} tokens"
            first = first or tuple(array.shape)
            if tuple(array.shape) != first:
                has, others = list(array.shape[1:]), list(first[1:])
                return f"{kind} of layer {i} have shape {has}, expected {others} as its neighbours'"
    return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
