"""Faults planted in the port alone, each found at its plan, position, layer, tap and head.

A right port is left in peace.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import numpy as np
import pytest
from command import Done, mlxkv, torch_python

from mlxkv.commands.locate import place as locate
from mlxkv.commands.locate import rows
from mlxkv.commands.locate import run as locating
from mlxkv.commands.locate.found import Located
from mlxkv.commands.locate.layers import WALK
from mlxkv.engines import job, port
from mlxkv.engines import machine as runtime
from mlxkv.engines import recorder as taps
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.verdict import judge
from mlxkv.port import llama, ops
from mlxkv.port.cache import Cache
from mlxkv.port.llama import Block, Llama
from mlxkv.port.weights import load
from oracle.formats import plan as plans
from oracle.formats import run_folder, trace
from oracle.formats.trace import TAPS, Meta
from oracle.model.checkpoint import resolve

PROMPT = models.ids(6)
LENGTH = 12  # six tokens, and six of seven greedy ones
Patch = pytest.MonkeyPatch


def make(
    folder: Path, model: Path, *, taps: tuple[str, ...] = TAPS, env: dict[str, str] | None = None
) -> Path:
    tokens = ",".join(map(str, PROMPT))
    options = ["--tokens", tokens, "--steps", "7", "--threads", "1", "--taps", ",".join(taps)]
    command = torch_python("-m", "oracle", "run", str(model), *options, "--out", str(folder))
    subprocess.run(command, check=True, capture_output=True, env=os.environ | (env or {}))
    return folder


@pytest.fixture(scope="module")
def tapped(folder_of: Callable[[str], Path], room: Path) -> Callable[[str], Path]:
    """The oracle's folder with every tap, by layout."""

    def folder(layout: str) -> Path:
        made = room / f"tapped-{layout}"
        return made if made.exists() else make(made, folder_of(layout))

    return folder


@pytest.fixture(scope="module")
def bare(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The oracle's folder as it is made without --taps."""
    return make(tmp_path_factory.mktemp("bare") / "gqa", folder_of("gqa"), taps=("hidden",))


def look(folder: Path, model: Llama, *, case: Case | None = None) -> Located:
    """What `mlxkv locate` does, in this process and in float64 alone."""
    case = read_case(folder) if case is None else case
    judged = run_folder.read_plans(folder, case.manifest)
    meta = Meta(
        judged["full"],
        "mlxkv",
        "0",
        "float64",
        fingerprint=case.manifest.fingerprint,
        probes={"tanh": 0.0},
    )
    verdict = judge(
        case, {}, algebra={name: port.run(model, plan, meta=meta) for name, plan in judged.items()}
    )
    plan = judged[locate.failing_plan(verdict) or "step"]
    propagated, _ = taps.run(model, plan, meta)
    isolated, _ = taps.run(model, plan, meta, truth=case.truth)
    return locate.locate(case, verdict, propagated=propagated, isolated=isolated)


# A right port.


@pytest.mark.parametrize("layout", ["gqa", "mqa"])
def test_on_a_right_port_nothing_stands_out_at_any_tap(
    layout: str, tapped: Callable[[str], Path], model_of: Callable[..., Llama]
) -> None:
    found = look(tapped(layout), model_of(layout, "float64"))
    assert (found.outcome, found.exit_code, found.position, found.layer, found.tap, found.hint) == (
        "nothing",
        0,
        None,
        None,
        None,
        None,
    )
    assert [row.tap for row in found.rows] == [*WALK, "logits"]
    assert [row.tap for row in found.rows if row.wrong or not row.propagated < 1e-13] == []
    assert found.strip is not None
    assert np.shape(found.strip.values) == (3, LENGTH)
    assert all(
        value is not None and value < 1e-13 for layer in found.strip.values for value in layer
    )


def test_scores_of_a_prompt_that_goes_through_in_blocks_are_put_together(
    tapped: Callable[[str], Path], model_of: Callable[..., Llama], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(llama, "QUERIES", 3)
    model, case = model_of("gqa", "float64"), read_case(tapped("gqa"))
    plan = run_folder.read_plans(tapped("gqa"), case.manifest)["full"]
    made, _ = taps.run(model, plan, Meta(plan, "mlxkv", "0", "float64"))
    for layer in range(3):
        name = f"tap/{layer:03d}/scores"
        np.testing.assert_allclose(made.arrays[name], case.truth.arrays[name], rtol=0, atol=1e-12)


def test_recording_changes_no_number(model_of: Callable[..., Llama]) -> None:
    model, plan = model_of("gqa", "float64"), plans.judged_plans(PROMPT, prompt=6)["full"]
    before = port.run(model, plan)
    made, _ = taps.run(model, plan, before.meta)
    assert np.array_equal(made.logits, before.logits)
    assert set(before.arrays) < set(made.arrays)
    assert all(np.array_equal(made.arrays[name], before.arrays[name]) for name in before.arrays)
    assert np.array_equal(port.run(model, plan).logits, before.logits)


# Faults.


@dataclass(frozen=True)
class Fault:
    """What is done to a model that only the port sees, and what must be found."""

    plant: Callable[[Llama, Patch], None]
    plan: str
    position: int
    layers: tuple[int, ...]
    tap: str
    heads: tuple[int, ...] = ()
    hint: str = ""
    head: int | None = None


EVERY = (0, 1, 2)


def weight(
    path: str, index: tuple[int, ...] | int, change: float = 0.1
) -> Callable[[Llama, Patch], None]:
    """One number of one layer's tensor."""

    def plant(model: Llama, _: Patch) -> None:
        layer, *names = path.split(".")
        owner = model.layers[int(layer)]
        for name in names:
            owner = getattr(owner, name)
        array = np.array(owner.weight)
        array[index] += change
        owner.weight = mx.array(array, mx.float64)

    return plant


def eps(layer: int, norm: str) -> Callable[[Llama, Patch], None]:
    return lambda model, _: setattr(getattr(model.layers[layer], norm), "eps", 1.1e-5)


def scale(model: Llama, _: Patch) -> None:
    model.layers[2].self_attn.scale *= 1.001


def silu(_: Llama, patch: Patch) -> None:
    patch.setattr(ops, "silu", lambda x: x * (0.5 * (1.0 + mx.tanh(0.5 * 1.702 * x))))


def swapped(model: Llama, _: Patch) -> None:
    for projection in (model.layers[1].self_attn.k_proj, model.layers[1].self_attn.v_proj):
        array = np.array(projection.weight)
        projection.weight = mx.array(np.concatenate([array[8:], array[:8]]), mx.float64)


def interleaved_heads(kinds: str) -> Callable[[Llama, Patch], None]:
    """Query head h reads KV head h % K instead of h // G, of keys and values or of values alone."""

    def plant(_: Llama, patch: Patch) -> None:
        real = ops.attention

        def attention(queries: mx.array, keys: mx.array, values: mx.array, **rest: Any) -> mx.array:
            wrong = (
                mx.concatenate([keys, keys], axis=1)
                if "keys" in kinds
                else mx.repeat(keys, 2, axis=1)
            )
            return real(queries, wrong, mx.concatenate([values, values], axis=1), **rest)

        patch.setattr(ops, "attention", attention)

    return plant


def residual(first: bool) -> Callable[[Llama, Patch], None]:
    """Layer 1 without its first, or its second, residual."""

    def plant(model: Llama, patch: Patch) -> None:
        broken, real = model.layers[1], Block.__call__

        def call(self: Block, x: mx.array, cache: Cache, start: int, tap: Any) -> mx.array:
            if self is not broken:
                return real(self, x, cache, start, tap)
            attended = self.self_attn(self.input_layernorm(x), cache, start, tap)
            x = attended if first else x + attended
            out = self.mlp(self.post_attention_layernorm(x), tap)
            return x + out if first else out

        patch.setattr(Block, "__call__", call)

    return plant


def mask(change: Callable[[int, int, Any], Any]) -> Callable[[Llama, Patch], None]:
    def plant(_: Llama, patch: Patch) -> None:
        real = Cache.mask

        def masked(self: Cache, length: int, start: int) -> mx.array | None:
            right = real(self, length, start)
            return None if right is None else mx.array(change(length, start, np.array(right)))

        patch.setattr(Cache, "mask", masked)

    return plant


def window(length: int, start: int) -> Any:
    back = np.arange(start, start + length)[:, None] - np.arange(start + length)[None, :]
    return (back >= 5).astype(np.uint8)


def without_offset(length: int, start: int, right: Any) -> Any:
    return (
        (np.arange(start + length)[None, :] > np.arange(length)[:, None]).astype(np.uint8)
        if start
        else right
    )


def turned(wrong: Callable[[int, int], bool]) -> Callable[[Llama, Patch], None]:
    """RoPE one position late in the calls of that start and length."""

    def plant(_: Llama, patch: Patch) -> None:
        real = Cache.rotation
        patch.setattr(
            Cache,
            "rotation",
            lambda self, start, length: real(self, start + wrong(start, length), length),
        )

    return plant


def written(
    layer: int, change: Callable[[Cache, Any, Any], None]
) -> Callable[[Llama, Patch], None]:
    """What one layer of a cache stores of its rows, [K, L, D] each; `change` works in place."""

    def plant(_: Llama, patch: Patch) -> None:
        real = Cache.extend

        def extend(self: Cache, at: int, keys: mx.array, values: mx.array) -> Any:
            if at == layer and self.use_kv_cache and self.layers[at].length:
                rows = np.array(keys), np.array(values)
                change(self, rows[0][0], rows[1][0])
                keys, values = (mx.array(a, mx.float64) for a in rows)
            return real(self, at, keys, values)

        patch.setattr(Cache, "extend", extend)

    return plant


def stale(cache: Cache, keys: Any, _: Any) -> None:
    if cache.layers[1].length == 8:
        keys[0, 0] = np.array(cache.layers[1].keys)[0, 0, 7]


def halved(cache: Cache, _: Any, values: Any) -> None:
    if cache.layers[2].length >= 9:
        values[1] = values[1].astype(np.float16)


def uncached(_: Llama, patch: Patch) -> None:
    real = Cache.extend

    def extend(self: Cache, layer: int, keys: mx.array, values: mx.array) -> Any:
        keys, values = real(self, layer, keys, values)
        return keys, values if self.use_kv_cache or layer != 2 else values * 1.5

    patch.setattr(Cache, "extend", extend)


def emptied(cache: Cache, keys: Any, _: Any) -> None:
    if cache.layers[0].length == 10:
        keys[1] = 0.0


def embedding(model: Llama, _: Patch) -> None:
    array = np.array(model.embed_tokens.weight)
    array[PROMPT[3]] += 0.01
    model.embed_tokens.weight = mx.array(array, mx.float64)


def final_eps(model: Llama, _: Patch) -> None:
    model.norm.eps = 1.1e-5


def normed(inverse: Callable[[mx.array], mx.array]) -> Callable[[Llama, Patch], None]:
    """`inverse` gives what every norm multiplies a row by, from its mean square."""

    def plant(_: Llama, patch: Patch) -> None:
        def rms_norm(x: mx.array, weight: mx.array, eps: float) -> mx.array:
            return x * inverse(mx.mean(x * x, axis=-1, keepdims=True)) * weight

        patch.setattr(ops, "rms_norm", rms_norm)

    return plant


def right_eps() -> mx.array:
    return mx.array(1e-5, mx.float64)


def over_one_less(mean: mx.array) -> mx.array:
    return mx.rsqrt(mean * (32 / 31) + right_eps())


def rough(mean: mx.array) -> mx.array:
    bent = mx.tanh(1e3 * mean - mx.floor(1e3 * mean))
    return mx.rsqrt(mean + right_eps()) * (1 + 5e-6 * bent)


def capped(_: Llama, patch: Patch) -> None:
    def cap(queries: mx.array, keys: mx.array, values: mx.array, **rest: Any) -> mx.array:
        B, H, L, D = queries.shape
        grouped = queries.reshape(B, keys.shape[1], -1, L, D) * rest["scale"]
        scores = 5.0 * mx.tanh(grouped @ keys[:, :, None].swapaxes(-1, -2) / 5.0)
        if rest["hidden"] is not None:
            scores = mx.where(rest["hidden"], -mx.inf, scores)
        if rest["tap"] is not None:
            rest["tap"]("scores", scores)
        return (ops._softmax(scores) @ values[:, :, None]).reshape(B, H, L, D)

    patch.setattr(ops, "attention", cap)


def other_rotation(
    change: Callable[[mx.array, mx.array, mx.array], mx.array],
) -> Callable[[Llama, Patch], None]:
    def plant(_: Llama, patch: Patch) -> None:
        patch.setattr(llama, "rotate", change)

    return plant


def swapped_pair(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Of the four query heads alone: in keys too, it would only be another layout."""
    a, b = mx.split(x, 2, axis=-1)
    turned = [a * cos - b * sin, b * cos + a * sin]
    queries = mx.concatenate([half[:, :4] for half in turned[::-1]], axis=-1)
    return mx.concatenate([queries, mx.concatenate(turned, axis=-1)[:, 4:]], axis=1)


def longer(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    a, b = mx.split(x * mx.array(1.25, mx.float64), 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def lost(_: Llama, patch: Patch) -> None:
    """What decoding wrote at position 7 is never read."""
    real = Cache.extend

    def extend(self: Cache, layer: int, keys: mx.array, values: mx.array) -> Any:
        held = real(self, layer, keys, values)
        if keys.shape[2] > 1 or held[0].shape[2] <= 8:
            return held
        return tuple(mx.concatenate([a[:, :, :7], a[:, :, 8:]], axis=2) for a in held)

    patch.setattr(Cache, "extend", extend)


def split_wrong(_: Llama, patch: Patch) -> None:
    def heads(self: Any, x: mx.array, n: int) -> mx.array:
        B, L, _ = x.shape
        return x.reshape(B, L, self.head_dim, n).transpose(0, 3, 1, 2)

    patch.setattr(llama.Attention, "_heads", heads)


def in_float32(_: Llama, patch: Patch) -> None:
    real = ops.silu
    patch.setattr(ops, "silu", lambda x: real(x).astype(mx.float32).astype(mx.float64))


def norm_weight(model: Llama, _: Patch) -> None:
    array = np.array(model.layers[0].post_attention_layernorm.weight)
    array[7] *= 1.001
    model.layers[0].post_attention_layernorm.weight = mx.array(array, mx.float64)


LARGER = (
    "RMSNorm: eps (each row is the truth's times a factor of its own, that of an eps larger by "
    "1e-06)"
)
SPEED = (
    "each pair turns at another speed: theta, scaling, the sign of the angles or the order of the "
    "pairs"
)
STEP_CACHE = "the cache: row {row} of its {kind} in layer {layer}, head {head}, is "
FAULTS = {
    "eps in the input norm of layer 1": Fault(
        eps(1, "input_layernorm"),
        "full",
        0,
        (1,),
        "input_norm",
        hint=LARGER,
    ),
    "eps in the post norm of layer 2": Fault(
        eps(2, "post_attention_layernorm"),
        "full",
        0,
        (2,),
        "post_norm",
        hint=LARGER,
    ),
    "one weight of a norm": Fault(
        norm_weight,
        "full",
        0,
        (0,),
        "post_norm",
        hint="RMSNorm: the norm's weight (channel 7 of 32)",
    ),
    "one weight of q": Fault(
        weight("0.self_attn.q_proj", (17, 3)),
        "full",
        1,
        (0,),
        "q",
        (2,),
        "q_proj.weight: the single weight [17, 3]",
        2,
    ),
    "one weight of k": Fault(
        weight("2.self_attn.k_proj", (9, 31)),
        "full",
        0,
        (2,),
        "k",
        (1,),
        "k_proj.weight: the single weight [9, 31]",
        1,
    ),
    "one weight of v": Fault(
        weight("1.self_attn.v_proj", (3, 0)),
        "full",
        0,
        (1,),
        "v",
        (0,),
        "v_proj.weight: the single weight [3, 0]",
        0,
    ),
    "one weight of o": Fault(
        weight("1.self_attn.o_proj", (5, 6)),
        "full",
        0,
        (1,),
        "o_proj",
        (),
        "o_proj.weight: the single weight [5, 6]",
    ),
    "one weight of gate": Fault(
        weight("0.mlp.gate_proj", (47, 1)),
        "full",
        0,
        (0,),
        "gate",
        (),
        "gate_proj.weight: the single weight [47, 1]",
    ),
    "one weight of up": Fault(
        weight("1.mlp.up_proj", (5, 7)),
        "full",
        0,
        (1,),
        "up",
        (),
        "up_proj.weight: the single weight [5, 7]",
    ),
    "one weight of down": Fault(
        weight("2.mlp.down_proj", (31, 2)),
        "full",
        0,
        (2,),
        "down",
        (),
        "down_proj.weight: the single weight [31, 2]",
    ),
    "one row of o": Fault(
        weight("1.self_attn.o_proj", 5),
        "full",
        0,
        (1,),
        "o_proj",
        (),
        "o_proj: its weight, bias or precision (output 5 of 32)",
    ),
    "KV heads swapped in layer 1": Fault(
        swapped,
        "full",
        0,
        (1,),
        "k",
        (0, 1),
        "k_proj: the order of its heads (head 0 is the truth's head 1, "
        "head 1 is the truth's head 0)",
    ),
    "KV heads interleaved": Fault(
        interleaved_heads("keys and values"),
        "full",
        0,
        EVERY,
        "scores",
        (1, 2),
        "GQA's head order: query head 1 reads head 1, expected 0",
        1,
    ),
    "values interleaved": Fault(
        interleaved_heads("values"),
        *("full", 0, EVERY, "attention", (1, 2)),
        "GQA's head order among the values: query head 1 reads head 1, expected 0; "
        "query head 2 reads head 0, expected 1",
        1,
    ),
    "attention's scale times 1.001 in layer 2": Fault(
        scale,
        "full",
        1,
        (2,),
        "scores",
        (*EVERY, 3),
        "the attention's scale: every score is 1.001 times the truth's",
    ),
    "the mask lets one future token in": Fault(
        mask(lambda length, start, right: np.roll(right, 1, axis=1) * right),
        *("full", 0, EVERY, "scores", (0, 1, 2, 3)),
        "the mask: position 0 sees the key of position 1, and none sees more than 1 ahead",
    ),
    "the mask hides the token itself from position 1 on": Fault(
        mask(
            lambda length, start, right: (
                right
                | np.eye(length, start + length, start, dtype=np.uint8)
                * (np.arange(length) > 0)[:, None]
            )
        ),
        *("full", 1, EVERY, "scores", (0, 1, 2, 3)),
        "the mask: 11 tokens do not see themselves (position 1 does not see the key of position 1)",
    ),
    "a chunk's mask without its offset": Fault(
        mask(without_offset),
        "mixed",
        2,
        EVERY,
        "scores",
        (0, 1, 2, 3),
        "the mask: the offset of the call that starts at position 2 is missing",
    ),
    "a chunk turned one position late": Fault(
        turned(lambda start, length: start > 0 and length > 1),
        *("mixed", 2, EVERY, "q_rope", (0, 1, 2, 3)),
        "RoPE: positions: position 2 is turned as position 3 is (index_pos)",
    ),
    "single tokens turned one position late": Fault(
        turned(lambda start, length: length == 1),
        "mixed",
        5,
        EVERY,
        "q_rope",
        (0, 1, 2, 3),
        "RoPE: positions: position 5 is turned as position 6 is (index_pos)",
    ),
    "silu with 1.702": Fault(silu, "full", 0, EVERY, "activation", hint="the activation: silu"),
    "no first residual in layer 1": Fault(
        residual(True), "full", 0, (1,), "post_norm", hint="the residual before the norm"
    ),
    "no second residual in layer 1": Fault(
        residual(False), "full", 0, (1,), "hidden", hint="the residual: what leaves the layer"
    ),
    "one stale key row": Fault(
        written(1, stale),
        "step",
        8,
        (1,),
        "keys",
        (0,),
        "the cache: row 8 of its keys in layer 1, head 0, is the truth's row 7: stale",
        0,
    ),
    "values of one head in float16 from row 9 on": Fault(
        written(2, halved),
        "step",
        9,
        (2,),
        "values",
        (1,),
        "the cache: row 9 of its values in layer 2, head 1, is rounded to float16",
        1,
    ),
    "an empty key row": Fault(
        written(0, emptied),
        "step",
        10,
        (0,),
        "keys",
        (1,),
        "the cache: row 10 of its keys in layer 0, head 1, is empty",
        1,
    ),
    "values of layer 2 wrong where there is no cache": Fault(
        uncached,
        "prefixes",
        0,  # the taps have positions of which a growing prefix gives no logits
        (2,),
        "attention",
        (0, 1, 2, 3),
        "attention with right scores: every row is 1.5 times the truth's in heads 0, 1, 2 and 3",
    ),
    "one row of the embedding": Fault(
        embedding,
        "full",
        3,
        (0,),
        "embedding",
        hint="the embedding: its weights, its scale, or other token ids",
    ),
    "a mean over E - 1": Fault(
        normed(over_one_less),
        *("full", 0, EVERY, "input_norm"),
        hint="RMSNorm: every row is 0.984251 times the truth's: its mean, or one factor on its "
        "weight",
    ),
    "an rsqrt off by up to 5e-6": Fault(
        normed(rough),
        *("full", 0, EVERY, "input_norm"),
        hint="RMSNorm: each row is the truth's times a factor of its own: its mean, eps or rsqrt",
    ),
    "a window of 5": Fault(
        mask(lambda length, start, right: right | window(length, start)),
        *("full", 5, EVERY, "scores", (0, 1, 2, 3)),
        "the mask: a window of 5: a token sees itself and the 4 before it (position 5 does not see "
        "the key of position 0)",
    ),
    "capped scores": Fault(
        capped,
        *("full", 1, EVERY, "scores", (0, 1, 2, 3)),
        "scores of right queries and keys: each keeps its rank: a cap or another function",
    ),
    "the numbers of each pair swapped": Fault(
        other_rotation(swapped_pair),
        *("full", 1, EVERY, "q_rope", (0, 1, 2, 3)),
        "RoPE: its pairing: each row keeps its length, and its pairs do not",
    ),
    "a factor on the tables": Fault(
        other_rotation(longer),
        *("full", 0, EVERY, "q_rope", (0, 1, 2, 3)),
        "RoPE: every row is 1.25 times as long: a factor on its tables",
    ),
    "a row that is never read": Fault(
        lost,
        *("step", 8, EVERY, "scores", (0, 1, 2, 3)),
        "the cache: at position 8 the key of position 7 is not read: its row was lost",
    ),
    "heads split the wrong way": Fault(
        split_wrong,
        *("full", 0, EVERY, "q", (0, 1, 2, 3)),
        "q_proj: the same numbers in another order: how they are split into heads",
    ),
    "eps of the final norm": Fault(
        final_eps,
        "full",
        0,
        (),
        "logits",
        hint="behind the layers: each row is the truth's times a factor of its own: the final norm "
        "(its mean, eps or rsqrt)",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found_at_its_place(
    name: str, tapped: Callable[[str], Path], folder_of: Callable[[str], Path], monkeypatch: Patch
) -> None:
    fault, model = FAULTS[name], load(folder_of("gqa"), "float64")
    fault.plant(model, monkeypatch)
    found = look(tapped("gqa"), model)
    assert (found.outcome, found.exit_code) == ("located", 1)
    assert (found.plan, found.position, found.layers, found.tap) == (
        fault.plan,
        fault.position,
        fault.layers,
        fault.tap,
    )
    assert found.layer == (fault.layers[0] if fault.layers else None)
    assert (found.heads, found.head) == (fault.heads, fault.head)
    assert found.hint is not None
    assert fault.hint in found.hint


def test_another_theta_is_found_at_position_1_in_every_layer(
    tapped: Callable[[str], Path], tmp_path: Path
) -> None:
    found = look(
        tapped("gqa"),
        load(models.save(tmp_path / "m", models.config("gqa", rope_theta=10100.0)), "float64"),
    )
    assert (found.plan, found.position, found.layers, found.tap, found.heads) == (
        "full",
        1,
        EVERY,
        "q_rope",
        (0, 1, 2, 3),
    )
    assert found.hint == f"RoPE: {SPEED}"


def test_errors_that_are_not_numbers_are_located_and_are_null_in_json(
    tapped: Callable[[str], Path], folder_of: Callable[[str], Path], monkeypatch: Patch
) -> None:
    model = load(folder_of("gqa"), "float64")
    weight("1.mlp.up_proj", (5, 7), float("nan"))(model, monkeypatch)
    found = look(tapped("gqa"), model)
    assert (found.position, found.layer, found.tap, found.hint) == (
        0,
        1,
        "up",
        "mlp.up_proj: its weight, bias or precision (output 5 of 48)",
    )
    (row,) = [
        row
        for row in json.loads(json.dumps(found.to_json(), allow_nan=False))["rows"]
        if row["tap"] == "up"
    ]
    assert (row["isolated"], row["wrong"]) == (None, True)


# A port that computes the same in another way, and a run with taps that fails.


def rotated_apart(self: llama.Attention, x: mx.array, cache: Cache, start: int, tap: Any) -> Any:
    """Attention whose queries and keys are rotated in two calls."""
    B, L, _ = x.shape
    q, k, v = (
        self._heads(project(x), n)
        for project, n in (
            (self.q_proj, self.n_heads),
            (self.k_proj, self.n_kv_heads),
            (self.v_proj, self.n_kv_heads),
        )
    )
    turned = [llama.rotate(a, *cache.rotation(start, L)) for a in (q, k)]
    keys, values = cache.extend(self.layer, turned[1], v)
    hidden = llama.fitting(cache.mask(L, start), (B, self.n_heads, L, keys.shape[2]))
    options = {"hidden": hidden, "scale": self.scale, "tap": tap}
    mixed = llama.blockwise(turned[0], keys, values, **options).swapaxes(1, 2).reshape(B, L, -1)
    out = self.o_proj(mixed)
    if tap is not None:
        ops.show(tap, input_norm=x, q=q, k=k, v=v, q_rope=turned[0], k_rope=turned[1])
        ops.show(tap, attention=mixed, o_proj=out)
    return out


def test_a_port_that_rotates_queries_and_keys_in_two_calls_is_left_in_peace(
    tapped: Callable[[str], Path], model_of: Callable[..., Llama], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(llama.Attention, "__call__", rotated_apart)
    found = look(tapped("gqa"), model_of("gqa", "float64"))
    assert (found.outcome, found.hint, found.notes) == ("nothing", None, ())
    assert [row.tap for row in found.rows] == [*WALK, "logits"]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_step_that_fails_in_the_run_with_taps_is_said(
    wrong: bool, tapped: Callable[[str], Path], folder_of: Callable[[str], Path], monkeypatch: Patch
) -> None:
    model, real = load(folder_of("gqa"), "float64"), taps.Recorder.begin

    def begin(self: taps.Recorder, first: int) -> None:
        if first == (5 if wrong else 7):
            raise ValueError("no room")
        real(self, first)

    monkeypatch.setattr(taps.Recorder, "begin", begin)
    if wrong:
        # Right in one call, and so wrong first in mixed.
        turned(lambda start, length: length == 1)(model, monkeypatch)
    found = look(tapped("gqa"), model)
    said = (
        f"the run with taps failed in step 3 of plan {'mixed' if wrong else 'step'}, so nothing "
        "inside the layers was looked at: no room"
    )
    if wrong:
        assert (found.outcome, found.position, found.layer) == ("located", 5, None)
        assert found.notes == (said,)
    else:
        assert (found.outcome, found.exit_code, found.reasons) == ("cannot tell", 2, (said,))


# A folder that lacks taps.


def test_without_taps_a_folder_still_gives_layer_keys_and_values(
    bare: Path, folder_of: Callable[[str], Path], monkeypatch: Patch
) -> None:
    model = load(folder_of("gqa"), "float64")
    weight("2.self_attn.k_proj", (9, 31))(model, monkeypatch)
    found = look(bare, model)
    assert (found.layers, found.tap, found.head) == ((2,), "k_rope", 1)
    assert found.hint is not None
    # The taps would say k_proj.
    assert found.hint.startswith("made between v and k_rope: k, which would say more, was not")


def test_where_torch_is_missing_the_note_says_what_the_folder_lacks(
    bare: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(runtime, "has", lambda _: False)
    case = read_case(bare)
    same, (note,) = locating.with_taps(case)
    assert same is case
    assert note.startswith(
        "the oracle folder was made without the taps input_norm, q, k, v, q_rope, k_rope, scores, "
        "attention, "
    )
    assert "torch is not installed" in note


def test_the_taps_are_not_asked_of_another_model_than_the_folders(
    bare: Path, tmp_path: Path
) -> None:
    case = read_case(bare)
    other = models.save(tmp_path / "m", models.config("gqa", rms_norm_eps=1.1e-5))
    same, (note,) = locating.with_taps(
        replace(case, manifest=replace(case.manifest, source=str(other)))
    )
    assert same.truth is case.truth
    assert "its weights or config.json are not those" in note


def test_a_folder_without_a_tap_never_passes_for_one_with_it(
    folder_of: Callable[[str], Path],
) -> None:
    found = resolve(str(folder_of("gqa")))
    inputs = run_folder.Inputs(tokens=(1, 2), prompt_tokens=2, dtype="float32", threads=1)
    digests = [
        run_folder.inputs_digest(
            found.fingerprint, found.config_digest, replace(inputs, taps=names)
        )
        for names in (("hidden",), ("hidden", "q"), ("q", "hidden"), TAPS)
    ]
    assert len(set(digests)) == 3
    assert digests[1] == digests[2]


# The command.


def locate_command(*arguments: object, env: dict[str, str] | None = None) -> Done:
    return mlxkv("locate", *arguments, env=env)


def test_the_command_says_that_nothing_stands_out(
    bare: Path, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    done = locate_command(folder_of("gqa"), "--oracle", bare, "--out", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    last, report = done.stdout.splitlines()[-2:]
    assert last.startswith("nothing stands out: every tap within ")
    assert report == f"report: {tmp_path / 'locate.md'}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["locate.json", "locate.md", "locate.svg"]


def test_a_key_that_is_to_be_ignored_is_ignored_by_the_process_that_records(
    bare: Path, tmp_path: Path
) -> None:
    odd = models.save(tmp_path / "odd", models.config("gqa") | {"surprise": 1})
    given = (odd, "--oracle", bare, "--out", tmp_path / "out")
    done = locate_command(*given, "--ignore-key", "surprise")
    assert (done.returncode, done.stderr) == (0, "")
    assert "nothing stands out" in done.stdout


def test_the_command_asks_the_oracle_for_the_taps_and_names_the_place(
    bare: Path, folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    wrong = models.save(
        tmp_path / "wrong",
        models.config("gqa", rms_norm_eps=1.1e-5),
        models.weights(models.config("gqa")),
    )
    env = {"MLXKV_CACHE": str(tmp_path / "cache")}
    runs = [
        locate_command(wrong, "--oracle", bare, "--out", tmp_path / name, "--json", env=env)
        for name in ("a", "b")
    ]
    assert [run.returncode for run in runs] == [1, 1]
    first, second = (json.loads(run.stdout) for run in runs)
    assert first == second
    assert (first["format"], first["exit_code"], first["engine"], first["third"]) == (
        "mlxkv-locate/1",
        1,
        "mlxkv",
        None,
    )
    assert [first[key] for key in ("plan", "position", "layer", "layers", "tap", "heads")] == [
        "full",
        0,
        0,
        [0, 1, 2],
        "input_norm",
        [],
    ]
    assert first["hint"].startswith("RMSNorm: eps")
    # Kept for the second search, under a digest of its own.
    (kept,) = (tmp_path / "cache" / "oracle").iterdir()
    assert {f"tap/000/{tap}" for tap in TAPS} <= read_case(kept).truth.arrays.keys()
    assert "oracle: 12 tokens" in runs[0].stderr
    assert runs[1].stderr == ""
    for name in ("locate.svg", "locate.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert list((tmp_path / "cache" / "runs").iterdir()) == []


def test_a_third_engines_trace_is_looked_into_beside_the_port(
    bare: Path, folder_of: Callable[[str], Path], model_of: Callable[..., Llama], tmp_path: Path
) -> None:
    step = run_folder.read_plans(bare, read_case(bare).manifest)["step"]
    made = port.run(
        model_of("gqa"),
        step,
        meta=Meta(
            step, "third", "1", "float32", fingerprint=resolve(str(folder_of("gqa"))).fingerprint
        ),
    )
    values = made.arrays["kv/a/001/values"]
    values[0, 7] = values[0, 6]
    trace.write(tmp_path / "third.safetensors", made.meta, made.arrays)
    env = {"MLXKV_CACHE": str(tmp_path / "cache")}
    done = locate_command(
        folder_of("gqa"),
        "--oracle",
        bare,
        "--candidate",
        tmp_path / "third.safetensors",
        "--out",
        tmp_path,
        env=env,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "nothing stands out" in done.stdout
    assert (
        "note: the cause was not looked for: sigma is within its limit at the first 12 positions "
        "of plan step\n" in done.stdout
    )
    assert done.stdout.splitlines()[-2] == "located: position 7, layer 1, values, head 0"
    found = json.loads((tmp_path / "locate.json").read_text())
    assert (found["outcome"], found["third"]["engine"], found["third"]["outcome"]) == (
        "nothing",
        "third",
        "located",
    )
    assert "# Where third goes wrong" in (tmp_path / "locate.md").read_text()


def test_a_job_with_taps_survives_its_file(tmp_path: Path) -> None:
    asked = job.Job(
        "somewhere",
        tuple(plans.judged_plans(PROMPT, prompt=6).values()),
        tmp_path,
        "float64",
        "float32",
        taps=TAPS,
        truth="t",
    )
    assert job.read(asked.save()) == asked


def test_the_command_refuses_in_one_line(bare: Path, tmp_path: Path) -> None:
    other = models.save(
        tmp_path / "other", models.config("gqa"), models.weights(models.config("gqa"), seed=1)
    )
    done = locate_command(other, "--oracle", bare, "--out", tmp_path / "out")
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "made with weights" in done.stderr


def test_rounding_to_bfloat16_is_to_the_nearest_and_ties_to_even() -> None:
    values = np.array([1.0, 1.00390625, 1.01171875, -3.1415926, 0.0])
    expected = np.array(
        mx.array(values.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32), np.float64
    )
    assert rows.rounded(values, "bfloat16").tolist() == expected.tolist()
