"""The cases at size, each a function of its parameters, so that tests can make a tiny one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlxkv.commands.scale.faulty import Planted, Scaled, Slipped
from mlxkv.commands.scale.longer import longer
from mlxkv.commands.scale.sequence import Ids, Text
from mlxkv.commands.scale.widen import widen
from oracle.model import written
from oracle.model.checkpoint import resolve

Make = Callable[[Path], Path]
"""Makes a model in a folder that is not there yet, and gives its folder; one that is somewhere
already is given as it is."""

FRANCE = Ids((504, 3575, 282, 4649, 314))
"""The capital of France is"""

LLAMA_1B: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""The shape of Llama 3.2 1B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A comparison at size.

    `narrow` makes the model, called `of`, whose logits are the same. `again` asks for the warm run.
    `seconds` are those that a run may take, `cold` or `warm`. `disk` are the bytes that all of it
    needs, `estimate` the seconds that the whole case takes on two cores.
    """

    name: str
    about: str
    made: str
    make: Make
    sequence: Ids | Text
    fault: Planted
    disk: int
    estimate: int
    narrow: Make | None = None
    of: str = ""
    dtype: str = "float32"
    steps: int = 20
    quick: bool = False
    again: bool = True
    seconds: Mapping[str, float] = field(default_factory=dict)


def _found(model: str | None) -> Make:
    return lambda _: resolve(model).folder


def wide(
    name: str,
    times: int,
    *,
    fault: Planted,
    model: str | None = None,
    values: str = "float32",
    sequence: Ids = FRANCE,
    of: str = "SmolLM2-135M-Instruct",
    **more: Any,
) -> Case:
    """A model `times` as wide as a small one, of the same logits, run in its values' dtype."""
    narrow = _found(model)
    if values != "float32":
        narrow, of = _widened(model, 1, values), f"{of} rounded to {values}"
    return Case(
        name=name,
        made=f"{of} made {times} times as wide, values {values}",
        make=_widened(model, times, values),
        narrow=narrow,
        of=of,
        dtype=values,
        sequence=sequence,
        fault=fault,
        **more,
    )


def _widened(model: str | None, times: int, values: str) -> Make:
    return lambda out: widen(model, out, times=times, values=values)


def whole(sequence: Ids | Text, *, model: str | None = None, **more: Any) -> Case:
    """A model as it is, over its whole context but the last position."""
    return Case(
        name="whole",
        made="as it is",
        make=_found(model),
        sequence=sequence,
        **more,
    )


def long(
    sequence: Ids | Text, *, layers: int, positions: int, model: str | None = None, **more: Any
) -> Case:
    """A model's first layers with room for more positions."""
    return Case(
        name="long",
        made=f"the first {layers} layers, {positions:,} positions by RoPE of type llama3",
        make=lambda out: longer(model, out, layers=layers, positions=positions),
        sequence=sequence,
        **more,
    )


def one(config: Mapping[str, Any] = LLAMA_1B, *, sequence: Ids = FRANCE, **more: Any) -> Case:
    """Random weights of a known shape, stored in bfloat16 and run in float32."""

    def make(out: Path) -> Path:
        shapes = written.shapes_of(config)
        return written.save(out, config, shapes, written.drawn(shapes, 1), values="bfloat16")

    made = "random weights, values bfloat16, run in float32"
    return Case(name="one", made=made, make=make, sequence=sequence, **more)


def everything() -> dict[str, Case]:
    """The cases of the report, by name. `disk` and `estimate` are for two cores and 24 GB."""
    return {case.name: case for case in (*_of_many_weights(), *_of_many_tokens(), _of_llama())}


def _of_many_weights() -> tuple[Case, ...]:
    four = wide(
        "wide4",
        4,
        about="1.8 billion parameters in float32; the default run, with its probe.",
        fault=Scaled(layer=17, head=5, by=1.001),
        disk=16_000_000_000,
        estimate=1800,
    )
    eight = wide(
        "wide8",
        8,
        values="bfloat16",
        about="7.0 billion parameters in bfloat16, file and run; `--quick --steps 5`.",
        fault=Scaled(layer=17, head=5, by=2.0),
        steps=5,
        quick=True,
        disk=20_000_000_000,
        estimate=4800,
    )
    return four, eight


def _of_many_tokens() -> tuple[Case, ...]:
    text = "The text is the built-in one of `mlxkv cost`, again and again."
    limits: dict[str, Any] = {"disk": 20_000_000_000, "estimate": 5400}
    of_default = whole(
        Text(8191),
        about="The default model over its whole context but the last position; the default run. "
        + text,
        fault=Slipped(layer=17, position=5000),
        **limits,
    )
    of_two_layers = long(
        Text(32768),
        layers=2,
        positions=32768,
        about="Two layers over 32,768 tokens, RoPE of type llama3 with an original length of "
        f"8,192; the default run. {text}",
        fault=Slipped(layer=1, position=20000),
        again=False,  # nearly all of the time is the port's, which is run anew each time
        **limits,
    )
    return of_default, of_two_layers


def _of_llama() -> Case:
    return one(
        about="The shape of Llama 3.2 1B; `--quick`.",
        fault=Scaled(layer=9, head=3, by=1.001),
        quick=True,
        seconds={"cold": 120.0, "warm": 60.0},
        disk=12_000_000_000,
        estimate=900,
    )
