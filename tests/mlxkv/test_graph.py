"""What a GPU would run of a graph: hand-made graphs whose count is known, then both engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import mlx.core as mx
import pytest
from mlx import nn

from mlxkv.commands.bench import count, graph, models
from mlxkv.commands.bench.graph import Counted
from mlxkv.commands.bench.grid import Block
from mlxkv.commands.bench.kernels import VIEWS, Node
from mlxkv.commands.bench.result import Steps


@pytest.fixture
def x() -> mx.array:
    """(1, 4), computed."""
    made = mx.arange(4, dtype=mx.float32)[None]
    mx.eval(made)
    return made


@pytest.fixture
def w() -> mx.array:
    """(4, 4), computed."""
    made = mx.eye(4)
    mx.eval(made)
    return made


@pytest.fixture
def gpu() -> Iterator[None]:
    with graph.as_on_a_gpu():
        yield


def test_a_product_and_a_sum_are_two_kernels_and_views_are_none(x: mx.array, w: mx.array) -> None:
    found = graph.count((x @ w.T + x).reshape(2, 2).swapaxes(0, 1))
    kinds = {"Transpose": 2, "Matmul": 1, "Add": 1, "Reshape": 1}
    assert found == Counted(primitives=5, kernels=2, kinds=kinds)


def test_what_is_computed_already_is_not_counted(x: mx.array) -> None:
    once = mx.exp(x)
    mx.eval(once)
    assert graph.count(mx.abs(once)) == Counted(1, 1, {"Abs": 1})
    assert graph.count(once) == Counted(0, 0, {})


def test_an_array_that_two_take_is_counted_once(x: mx.array) -> None:
    shared = mx.exp(x)
    assert graph.count(mx.abs(shared), mx.sin(shared) + shared).primitives == 4


def test_each_part_that_is_joined_is_copied(x: mx.array) -> None:
    parts = [mx.exp(x), mx.abs(x), x]
    assert graph.nodes(mx.concatenate(parts))[-1] == Node("Concatenate", 3)
    assert graph.count(mx.concatenate(parts)).kernels == 2 + 3


def test_rows_are_written_by_one_kernel_or_by_two_where_a_kernel_computes_their_place(
    x: mx.array, w: mx.array
) -> None:
    still = mx.slice_update(w, x, mx.array([1]), axes=[0])
    assert graph.count(still) == Counted(1, 2, {"DynamicSliceUpdate": 1})
    w[1:2] = mx.exp(x)
    assert graph.count(w).kinds["SliceUpdate"] == 1
    assert graph.count(w).kernels == 1 + 1


def test_a_split_has_several_outputs_and_is_one_view(x: mx.array) -> None:
    a, b = mx.split(mx.exp(x), 2, axis=1)
    assert graph.count(a + b) == Counted(3, 2, {"Exp": 1, "Split": 1, "Add": 1})


def test_what_is_compiled_is_counted_as_it_is_fused_and_at_every_call(x: mx.array) -> None:
    @mx.compile
    def fused(x: mx.array) -> mx.array:
        return mx.exp(x) * x + x

    once, twice = graph.count(fused(x)), graph.count(fused(fused(x)))
    assert (once.primitives, once.kernels) == (1, 1)
    assert (twice.primitives, twice.kernels) == (2, 2)  # of one primitive, which both calls share
    (name,) = once.kinds
    assert name.startswith("Compiled")


def test_a_compiled_step_is_counted_by_what_it_contains(x: mx.array, w: mx.array) -> None:
    @mx.compile
    def step(x: mx.array) -> mx.array:
        for _ in range(3):
            x = (mx.exp(x) * x) @ w.T
        return x

    found = graph.count(step(x))
    assert (found.kinds["Matmul"], found.kernels) == (3, 6)


WEIGHT = mx.array([1.0, 2.0, 3.0, 4.0])
FAST: dict[str, Callable[[mx.array, mx.array], mx.array]] = {
    "RMSNorm": lambda x, w: mx.fast.rms_norm(x, WEIGHT, 1e-5),
    "LayerNorm": lambda x, w: mx.fast.layer_norm(x, WEIGHT, None, 1e-5),
    "RoPE": lambda x, w: mx.fast.rope(
        x[None, None], 4, traditional=False, base=1e4, scale=1.0, offset=3
    ),
    "ScaledDotProductAttention": lambda x, w: mx.fast.scaled_dot_product_attention(
        x[None, None], w[None, None], w[None, None], scale=0.5
    ),
}


@pytest.mark.parametrize("kind", FAST)
def test_each_fast_operation_is_one_primitive_of_the_same_shape_and_dtype(
    kind: str, x: mx.array, w: mx.array
) -> None:
    real = FAST[kind](x, w)
    assert graph.count(real).primitives > 3
    with graph.as_on_a_gpu():
        stand_in = FAST[kind](x, w)
        found = graph.count(stand_in)
    assert found.kinds[kind] == 1
    assert {*found.kinds} - VIEWS == {kind}
    assert found.kernels == 1
    assert (stand_in.shape, stand_in.dtype) == (real.shape, real.dtype)
    assert graph.count(FAST[kind](x, w)).primitives == graph.count(real).primitives


@pytest.mark.usefixtures("gpu")
def test_what_a_fast_operation_takes_is_counted_behind_it(x: mx.array, w: mx.array) -> None:
    q = x[None, None]
    mask = mx.array([[True, False, True, True]])
    found = graph.count(
        mx.fast.scaled_dot_product_attention(
            mx.sin(q),
            mx.cos(w)[None, None],
            mx.exp(w)[None, None],
            scale=0.5,
            mask=mx.logical_not(mask),
        )
    )
    assert found.kernels == 5
    step = mx.array(2)
    turned = mx.fast.rope(
        q, 4, traditional=False, base=None, scale=1.0, offset=step + 1, freqs=mx.exp(WEIGHT[:2])
    )
    assert {"RoPE", "Add", "Exp"} <= {*graph.count(turned).kinds}
    assert graph.nodes(nn.RMSNorm(4)(x))[-1] == Node("RMSNorm", 2)


@pytest.mark.usefixtures("gpu")
def test_a_fast_operation_is_not_fused_with_its_neighbours(x: mx.array, w: mx.array) -> None:
    @mx.compile
    def step(x: mx.array) -> mx.array:
        return mx.exp(mx.fast.rms_norm(mx.exp(x) * x, WEIGHT, 1e-5)) * x

    kinds = graph.count(step(x)).kinds
    assert kinds["RMSNorm"] == 1
    assert sum(n for name, n in kinds.items() if name.startswith("Compiled")) == 2


def test_who_asks_for_the_device_is_told_that_it_is_a_gpu(x: mx.array) -> None:
    """What the port does for a CPU's kernels alone is not counted."""
    with graph.as_on_a_gpu():
        assert mx.default_device() == mx.Device(mx.gpu)
        with mx.stream(mx.default_device()):
            assert mx.abs(x).tolist() == x.tolist()
    assert mx.default_device() == mx.Device(mx.cpu)
    assert mx.stream.__module__ == "mlx.core"


@pytest.mark.usefixtures("gpu")
def test_a_dependency_that_stands_for_nothing_is_a_view(x: mx.array, w: mx.array) -> None:
    assert graph.count(mx.depends([mx.exp(x)], [w])[0]) == Counted(2, 1, {"Exp": 1, "Depends": 1})


LAYERS = models.LAYERS
MLX_LM = {
    "Matmul": 7 * LAYERS + 1,
    "RMSNorm": 2 * LAYERS + 1,
    "RoPE": 2 * LAYERS,
    "ScaledDotProductAttention": LAYERS,
    "SliceUpdate": 2 * LAYERS,
    "Add": 2 * LAYERS,
    "Gather": 1,
    "ArgReduce": 1,
}
"""What mlx-lm's Llama is made of, by its source; and one fused SwiGLU in each layer."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Steps:
    """Both engines' steps on the model that is bound by overhead."""
    made = models.overhead(tmp_path_factory.mktemp("overhead"))
    return count.counted(Block(models.OVERHEAD, made, "float32", ()), "cpu")


def test_mlx_lm_runs_the_kernels_that_its_source_has(steps: Steps) -> None:
    found = steps.other
    run = {name: n for name, n in found.kinds.items() if name not in VIEWS}
    fused = [run.pop(name) for name in list(run) if name.startswith("Compiled")]
    assert (run, fused) == (MLX_LM, [LAYERS])
    assert found.kernels == sum(MLX_LM.values()) + LAYERS
    assert found.primitives == sum(found.kinds.values())


def test_nothing_is_left_of_what_a_cpu_makes_of_fast_operations(steps: Steps) -> None:
    kinds = steps.port.kinds
    assert not {"Rsqrt", "Softmax", "Cos", "Sin", "Exp", "Square"} & {*kinds}
    assert (kinds["RMSNorm"], kinds["ScaledDotProductAttention"]) == (2 * LAYERS + 1, LAYERS)


@pytest.mark.xfail(
    strict=True,
    raises=AssertionError,
    reason="the port rotates by eight small kernels a layer, and builds its graph in Python",
)
def test_the_port_runs_no_more_kernels_than_mlx_lm_and_is_built_in_less_time(steps: Steps) -> None:
    assert steps.port.kernels <= steps.other.kernels
    assert steps.ratio <= 0.7
