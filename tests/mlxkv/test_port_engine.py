"""Plans -> traces: which rows, at which positions, of which steps; what became of each step; what
the caches hold.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import models
import numpy as np
import numpy.typing as npt
import pytest

from mlxkv.engines import port
from mlxkv.engines.job import Job
from mlxkv.engines.job import read as read_job
from mlxkv.engines.port import PortRunner
from mlxkv.engines.process import Process
from mlxkv.port import joint, step
from mlxkv.port.cache import Cache
from mlxkv.port.llama import Llama
from mlxkv.port.weights import load
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Clone, Crop, Greedy, New, Plan, Reset, judged_plans
from oracle.formats.trace import SHARED, Meta, Outcome, Trace, read
from oracle.model.checkpoint import resolve

ModelOf = Callable[..., Llama]
FolderOf = Callable[[str], Path]
TOKENS = models.ids(9)


def rows(model: Llama, *calls: list[int]) -> npt.NDArray[Any]:
    cache = Cache(model.config, dtype=model.dtype)
    return np.concatenate(
        [np.array(model([ids], cache=cache, all_positions=True)[0]) for ids in calls]
    )


def followed(model: Llama, *steps: Any, rows: Any = "all", guarded: bool = True) -> Trace:
    return port.run(model, Plan("p", steps, rows), guarded=guarded)


def held(trace: Trace) -> dict[str, tuple[int, ...]]:
    return {
        n.removeprefix("kv/"): a.shape
        for n, a in trace.arrays.items()
        if n.startswith("kv/") and "/000/" in n
    }


# Rows, positions, steps.


def test_the_judged_plans_give_a_row_for_every_position_asked_for(model_of: ModelOf) -> None:
    model = model_of()
    traces = {name: port.run(model, plan) for name, plan in judged_plans(TOKENS, prompt=5).items()}

    for name, steps in {
        "full": [1] * 9,
        "step": [1] * 5 + [2, 3, 4, 5],
        "chunked": [1] * 3 + [2] * 2 + [3, 4, 5, 6],
    }.items():
        assert traces[name].positions.tolist() == list(range(9))
        assert traces[name].arrays["steps"].tolist() == steps
        assert held(traces[name]) == {"a/000/keys": (2, 9, 8), "a/000/values": (2, 9, 8)}
    assert traces["prefixes"].positions.tolist() == [4, 5, 6, 7, 8]
    assert traces["prefixes"].arrays["steps"].tolist() == [1, 3, 5, 7, 9]
    assert held(traces["prefixes"]) == {}
    for trace in traces.values():
        assert [trace.arrays[n].dtype for n in ("logits", "positions", "steps")] == [
            np.float32,
            np.int32,
            np.int32,
        ]
        assert trace.meta.outcomes == [Outcome()] * len(trace.meta.plan.steps)

    assert np.array_equal(traces["full"].logits, rows(model, TOKENS))
    assert np.array_equal(
        traces["step"].logits, rows(model, TOKENS[:5], *([t] for t in TOKENS[5:]))
    )
    assert np.array_equal(
        traces["chunked"].logits, rows(model, TOKENS[:3], TOKENS[3:5], *([t] for t in TOKENS[5:]))
    )
    for row, end in zip(traces["prefixes"].logits, range(5, 10), strict=True):
        np.testing.assert_allclose(row, rows(model, TOKENS[:end])[-1], atol=1e-5)


def test_a_plan_that_keeps_last_rows_has_one_per_call(model_of: ModelOf) -> None:
    model = model_of("gqa", "float64")

    last = followed(
        model, New("a"), Call("a", (1, 2, 3)), Call("a", (4,)), Call("a", (5, 6)), rows="last"
    )
    every = followed(model, New("a"), Call("a", (1, 2, 3)), Call("a", (4,)), Call("a", (5, 6)))

    assert (last.positions.tolist(), last.arrays["steps"].tolist()) == ([2, 3, 5], [1, 2, 3])
    assert (every.positions.tolist(), every.arrays["steps"].tolist()) == (
        [0, 1, 2, 3, 4, 5],
        [1, 1, 1, 2, 3, 3],
    )
    np.testing.assert_allclose(last.logits, every.logits[[2, 3, 5]], atol=1e-12)
    assert last.logits.dtype == every.logits.dtype == np.float64


@pytest.mark.parametrize("layout", models.LAYOUTS)
def test_a_plan_that_names_positions_has_their_rows_and_every_key(
    layout: str, model_of: ModelOf
) -> None:
    model, plan = model_of(layout, "float64"), judged_plans(TOKENS, prompt=5)["step"]

    some = port.run(model, replace(plan, rows=(0, 3, 4, 6)))
    every = port.run(model, plan)

    # The calls at positions 5, 7 and 8 leave no row.
    assert (some.positions.tolist(), some.arrays["steps"].tolist()) == ([0, 3, 4, 6], [1, 1, 1, 3])
    np.testing.assert_allclose(some.logits, every.logits[[0, 3, 4, 6]], atol=1e-12)
    assert some.meta.outcomes == every.meta.outcomes
    for i in range(len(model.layers)):
        for found, expected in zip(some.kv("a", i) or (), every.kv("a", i) or (), strict=True):
            assert np.array_equal(found, expected)
            assert found.shape[1] == 9


def test_rows_of_a_call_that_comes_elsewhere_are_those_at_the_positions_named(
    model_of: ModelOf,
) -> None:
    # The first call is refused, so that the next one's tokens stand at 0 and 1.
    steps = New("a"), Call("a", (99, 1)), Call("a", (3, 1, 4))
    trace = followed(model_of(), *steps, rows=(1, 2))

    assert (trace.positions.tolist(), trace.arrays["steps"].tolist()) == ([1, 2], [2, 2])
    np.testing.assert_allclose(trace.logits, rows(model_of(), [3, 1, 4])[1:], atol=1e-5)


# Batches.

BATCH = (models.ids(7, seed=1), models.ids(7, seed=2), models.ids(7, seed=3))


def in_batches(*sizes: int, cache: str = "a") -> list[Call]:
    """Calls of these sizes over the three sequences of BATCH."""
    ends = np.cumsum(sizes)
    cuts = [(int(end) - size, int(end)) for size, end in zip(sizes, ends, strict=True)]
    return [Call(cache, tuple(tuple(ids[a:b]) for ids in BATCH), a) for a, b in cuts]


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("layout", models.LAYOUTS)
def test_each_row_of_a_batch_is_what_it_is_alone(
    layout: str, guarded: bool, model_of: ModelOf
) -> None:
    model, sizes = model_of(layout, "float64"), (3, 1, 3)

    trace = followed(model, New("a"), *in_batches(*sizes), guarded=guarded)

    assert trace.meta.outcomes == [Outcome()] * 4
    assert trace.arrays["batch"].tolist() == [
        *([0] * 3 + [1] * 3 + [2] * 3),
        *(0, 1, 2),
        *([0] * 3 + [1] * 3 + [2] * 3),
    ]
    assert trace.arrays["batch"].dtype == np.int32
    for b, ids in enumerate(BATCH):
        mine = trace.batch == b
        assert trace.positions[mine].tolist() == list(range(7))
        alone = followed(model, New("a"), Call("a", tuple(ids)), guarded=guarded)
        np.testing.assert_allclose(trace.logits[mine], alone.logits, atol=1e-12)
        for i in range(len(model.layers)):
            for found, expected in zip(trace.kv("a", i) or (), alone.kv("a", i) or (), strict=True):
                assert found.shape == (3, *expected.shape)
                np.testing.assert_allclose(found[b], expected, atol=1e-12)


def test_a_batch_is_cloned_cropped_reset_and_kept_beside_single_sequences(
    model_of: ModelOf,
) -> None:
    model = model_of("mqa", "float64")
    first, second = in_batches(4, 3)
    steps = (
        *(New("a"), first, Clone("a", "b"), Crop("b", 2), New("c"), Call("c", (1, 2))),
        *(Call("b", tuple((id,) for id in (5, 6, 7)), 2), second, Clone("c", "d"), Reset("a")),
        *(Call("a", (8, 9)), New("e"), Call("e", ((8, 9),))),
    )

    trace = followed(model, *steps)

    assert [outcome.error for outcome in trace.meta.outcomes] == [None] * len(steps)
    assert held(trace) == {
        f"{name}/000/{part}": shape
        for name, shape in {
            "a": (1, 2, 12),
            "b": (3, 1, 3, 12),
            "c": (1, 2, 12),
            "d": (1, 2, 12),
            "e": (1, 1, 2, 12),  # a batch of one row is a batch
        }.items()
        for part in ("keys", "values")
    }
    of_b = trace.arrays["steps"] == 6
    for b, (ids, last) in enumerate(zip(BATCH, (5, 6, 7), strict=True)):
        expected = rows(model, [*ids[:2], last])[-1]
        np.testing.assert_allclose(trace.logits[of_b][b], expected, atol=1e-12)


def test_of_a_batch_only_the_rows_named_are_kept(model_of: ModelOf) -> None:
    model = model_of()
    plan = Plan("p", (New("a"), *in_batches(3, 1, 3)), (2, 5))
    some, every = port.run(model, plan), port.run(model, replace(plan, rows="all"))

    assert some.positions.tolist() == [2, 2, 2, 5, 5, 5]
    assert some.batch.tolist() == [0, 1, 2, 0, 1, 2]
    for row, position, b in zip(some.logits, some.positions, some.batch, strict=True):
        (expected,) = every.logits[(every.positions == position) & (every.batch == b)]
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_a_batch_of_another_size_than_is_held_is_refused_in_either_mode(model_of: ModelOf) -> None:
    model = model_of()
    for guarded in (True, False):
        cache = Cache(model.config, guarded=guarded)
        model([[1, 2], [3, 4]], cache=cache)
        for tokens in ([[5]], [[5], [6], [7]]):
            with pytest.raises(ValueError, match=r"batch|broadcast|reshape"):
                mx.eval(model(tokens, cache=cache))


def test_a_plan_without_calls_gives_an_empty_trace(model_of: ModelOf) -> None:
    trace = followed(model_of(), New("a"), Reset("a"))

    assert {n: (a.shape, str(a.dtype)) for n, a in trace.arrays.items()} == {
        "logits": ((0, 40), "float32"),
        "positions": ((0,), "int32"),
        "steps": ((0,), "int32"),
    }


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_kept_keys_and_values_are_the_caches_in_a_dtype_that_numpy_has(
    dtype: str, model_of: ModelOf
) -> None:
    model = model_of("mqa", dtype)
    trace = followed(model, New("a"), Call("a", (1, 2, 3)))
    cache = Cache(model.config, dtype=dtype)
    model([[1, 2, 3]], cache=cache)

    for i, layer in enumerate(cache.layers):
        pair = trace.kv("a", i)
        assert pair is not None
        for found, expected in zip(pair, (layer.keys, layer.values), strict=True):
            assert expected is not None
            assert (str(found.dtype), found.shape) == (
                "float64" if dtype == "float64" else "float32",
                (1, 3, 12),
            )
            assert found.tolist() == expected[0].tolist()
    assert trace.kv("a", 3) is None


# Greedy.


@pytest.mark.parametrize("index_pos", [0, None])
def test_greedy_feeds_what_it_chose_but_the_last(index_pos: int | None, model_of: ModelOf) -> None:
    model = model_of()

    trace = followed(model, New("a"), Greedy("a", (3, 1, 4), index_pos, 4))

    (chosen,) = [o.tokens for o in trace.meta.outcomes if o.tokens]
    expected = rows(model, [3, 1, 4], *([t] for t in chosen[:-1]))
    assert np.array_equal(trace.logits, expected)
    assert chosen == expected[2:].argmax(1).tolist()
    assert held(trace)["a/000/keys"] == (2, 6, 8)


def test_greedy_ties_take_the_lowest_id(model_of: ModelOf, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of()
    monkeypatch.setattr(Llama, "__call__", lambda *_, **__: mx.array([[[0.0, 2.0, 1.0, 2.0]]]))

    assert followed(model, New("a"), Greedy("a", (3,), 0, 2)).meta.outcomes == [
        Outcome(),
        Outcome(tokens=[1, 1]),
    ]


@pytest.mark.parametrize(
    ("advance", "positions"),
    [("right", [0, 3, 4, 5]), ("zero", [0, 0, 0, 0]), ("by_calls", [0, 1, 2, 3])],
)
def test_greedy_advances_the_position_as_the_plan_says(
    advance: Any, positions: list[int], model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, real = [], Cache.admit

    def admit(self: Cache, batch: int, length: int, index_pos: int | None, *rest: Any) -> int:
        asked.append(index_pos)
        return real(self, batch, length, index_pos, *rest)

    monkeypatch.setattr(Cache, "admit", admit)
    followed(model_of(), New("a"), Greedy("a", (3, 1, 4), 0, 4, advance), guarded=False)

    assert asked == positions


# Errors.


def test_a_step_that_is_refused_keeps_its_text_and_the_next_one_follows(model_of: ModelOf) -> None:
    model = model_of()

    trace = followed(
        model,
        New("a"),
        Call("a", (1, 2)),
        Call("a", (3,), 0),
        Crop("a", 9),
        Call("a", (99,)),
        Call("a", (3,), 2),
    )

    errors = [o.error for o in trace.meta.outcomes]
    assert [e and e.split(";")[0] for e in errors] == [
        None,
        None,
        "cache: index_pos is 0, expected 2 (the cache holds 2 tokens)",
        "cache: crop to 9, expected a whole number from 0 to the 2 tokens held",
        "tokens: id 99 at place 0 is outside the vocabulary of 40",
        None,
    ]
    assert trace.arrays["steps"].tolist() == [1, 1, 5]
    assert trace.positions.tolist() == [0, 1, 2]
    assert np.array_equal(trace.logits, rows(model, [1, 2], [3]))


def test_guarded_greedy_from_position_0_stops_at_its_second_call(model_of: ModelOf) -> None:
    trace = followed(model_of(), New("a"), Greedy("a", (3, 1), 0, 5, "zero"), Call("a", (4,), 2))

    (_, outcome, after) = trace.meta.outcomes
    assert outcome.tokens is None
    assert outcome.error is not None
    assert outcome.error.startswith("cache: index_pos is 0, expected 2 (the cache holds 2 tokens)")
    assert after == Outcome()
    assert trace.positions.tolist() == [0, 1, 2]


def test_an_error_of_another_kind_is_not_an_outcome(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Llama, "__call__", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        followed(model_of(), New("a"), Call("a", (1,)))


# Caches by name.


def test_clone_crop_and_reset_act_on_the_caches_they_name(model_of: ModelOf) -> None:
    model = model_of("gqa", "float64")
    steps = (
        New("a"),
        Call("a", (1, 2, 3)),
        Clone("a", "b"),
        Call("b", (4, 5)),
        Crop("b", 4),
        Call("b", (6,)),
        Call("a", (7,)),
    )

    trace = followed(
        model, *steps, Clone("b", "c"), Reset("b"), Call("b", (8,)), New("a"), Call("a", (9,))
    )

    assert held(trace) == {
        f"{n}/000/{part}": (2, size, 8)
        for n, size in (("a", 1), ("b", 1), ("c", 5))
        for part in ("keys", "values")
    }
    assert trace.positions.tolist() == [0, 1, 2, 3, 4, 4, 3, 0, 0]
    ends = {4: [1, 2, 3, 4, 5], 5: [1, 2, 3, 4, 6], 6: [1, 2, 3, 7], 7: [8], 8: [9]}
    for row, history in ends.items():
        np.testing.assert_allclose(trace.logits[row], rows(model, history)[-1], atol=1e-12)


# Metadata, and the process.


def test_a_trace_in_memory_says_who_made_it(model_of: ModelOf) -> None:
    plan = Plan("p", (New("a"), Call("a", (1,))))

    bare = port.run(model_of("gqa", "float16"), plan)
    told = port.run(model_of(), plan, meta=Meta(plan, "x", "1", "float32", fingerprint="f"))

    assert (bare.meta.engine, bare.meta.dtype, bare.meta.weights_dtype, bare.meta.fingerprint) == (
        "mlxkv",
        "float16",
        "float16",
        None,
    )
    said = {"length": 1, "size": 1, "nbytes": 384, "allocated": 98304, "rows": 1}
    assert told.meta == Meta(
        plan,
        "x",
        "1",
        "float32",
        fingerprint="f",
        outcomes=[Outcome(), Outcome()],
        environment={"caches": {"a": said}},
    )


def test_the_float64_operations_are_true() -> None:
    found = port.probe()

    assert found.keys() == {"matmul", "sqrt", "rsqrt", "tanh", "sum", "divide"}
    assert {name: error for name, error in found.items() if not error <= 1e-14} == {}


def test_a_job_survives_its_file(tmp_path: Path) -> None:
    job = Job(
        "somewhere",
        tuple(judged_plans(TOKENS, prompt=5).values()),
        tmp_path,
        "float64",
        "float16",
        "cpu",
        guarded=False,
    )

    assert read_job(job.save()) == job


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": 8}, "dtype is 8, expected str"),
        ({"threads": "two"}, "threads is 'two', expected int | null"),
        ({"plans": [{"name": "p", "steps": [{"do": "jump"}]}]}, "is 'jump', expected one of"),
        ({"speed": 1}, "unknown key 'speed'"),
    ],
)
def test_a_job_of_another_kind_is_refused_by_name(
    changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    job = Job(
        "somewhere", (judged_plans(TOKENS, prompt=5)["full"],), tmp_path, "float32", "float32"
    )
    path = job.save()
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    with pytest.raises(Refusal) as caught:
        read_job(path)

    assert str(caught.value).startswith(f"{path}: ")
    assert says in str(caught.value)


def test_a_process_that_the_system_ends_is_a_refusal_and_no_result() -> None:
    for end, says in (
        ("os.abort()", "was ended by signal 6"),
        ("sys.exit(3)", "ended with exit code 3"),
    ):
        process = Process(["mlxkv.engines.port"])
        process.command = [sys.executable, "-c", f"import os, sys; {end}"]
        with (
            process,
            pytest.raises(
                Refusal, match=rf"^mlxkv\.engines\.port: its process {says}, expected a result"
            ),
        ):
            process.wait()


def start(job: Job) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mlxkv.engines.port", str(job.save())],
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_process_writes_one_trace_per_plan(
    dtype: str, folder_of: FolderOf, model_of: ModelOf, tmp_path: Path
) -> None:
    folder, plans = folder_of("llama3"), tuple(judged_plans(TOKENS, prompt=5).values())
    job = Job(str(folder), plans, tmp_path / "out", dtype, "float32", "cpu")

    finished = start(job)

    assert (finished.returncode, finished.stdout, finished.stderr) == (0, "", "")
    traces = [f"{name}.safetensors" for name in ("chunked", "full", "mixed", "prefixes", "step")]
    found = sorted(path.name for path in job.out.iterdir())
    assert found == sorted(["forward.txt", "job.json", *traces])
    checkpoint = resolve(str(folder))
    for plan in plans:
        found, expected = read(job.trace(plan)), port.run(model_of("llama3", dtype), plan)
        assert found.arrays.keys() == expected.arrays.keys()
        assert all(np.array_equal(found.arrays[n], expected.arrays[n]) for n in expected.arrays)
        meta = found.meta
        assert (meta.plan, meta.engine, meta.dtype, meta.weights_dtype, meta.device) == (
            plan,
            "mlxkv",
            dtype,
            "float32",
            "cpu",
        )
        assert (meta.fingerprint, meta.config_digest) == (
            checkpoint.fingerprint,
            checkpoint.config_digest,
        )
        assert {"mlx", "blas", "cpu", "MLX_ENABLE_TF32"} <= meta.environment.keys()
        assert set(meta.probes) == (set(port.probe()) if dtype == "float64" else set())


def test_the_process_computes_on_weights_rounded_as_asked(
    folder_of: FolderOf, tmp_path: Path
) -> None:
    plan = Plan("p", (New("a"), Call("a", (1, 2, 3))))
    job = Job(str(folder_of("gqa")), (plan,), tmp_path, "float64", "float16", "cpu", guarded=False)

    assert start(job).returncode == 0

    found = read(job.trace(plan))
    assert np.array_equal(
        found.logits, port.run(load(folder_of("gqa"), "float64", rounded_to="float16"), plan).logits
    )
    assert (found.meta.engine, found.meta.weights_dtype) == ("mlxkv (unguarded)", "float16")


def test_a_plan_that_is_repeated_leaves_a_second_trace(folder_of: FolderOf, tmp_path: Path) -> None:
    plans = judged_plans(TOKENS, prompt=5)
    asked = tuple(plans.values())
    job = Job(str(folder_of("gqa")), asked, tmp_path, "float32", "float32", "cpu", repeat=("step",))

    assert start(job).returncode == 0

    once, again = read(job.trace(plans["step"])), read(job.repeated(plans["step"]))
    assert (once.meta.repeat, again.meta.repeat) == (0, 1)
    assert replace(again.meta, repeat=0) == once.meta
    assert again.arrays.keys() == once.arrays.keys()
    assert all(np.array_equal(array, once.arrays[name]) for name, array in again.arrays.items())
    assert [p.name for p in tmp_path.glob("*-repeated*")] == ["step-repeated.safetensors"]


@pytest.mark.parametrize("what", ["folder", "config", "tensor"])
def test_the_process_refuses_in_one_line(what: str, tmp_path: Path) -> None:
    config = models.config("gqa", **({"hidden_act": "gelu"} if what == "config" else {}))
    weights = models.weights(config)
    if what == "tensor":
        del weights["model.norm.weight"]
    folder = (
        tmp_path / "absent" if what == "folder" else models.save(tmp_path / "m", config, weights)
    )

    finished = start(
        Job(str(folder), (Plan("p", (New("a"),)),), tmp_path / "out", "float32", "float32", "cpu")
    )

    expected = {
        "folder": f"error: '{folder}': no such folder or file, expected one, or a Hub id "
        f"(org/name); check the spelling",
        "config": f"error: {folder}/config.json: hidden_act: expected 'silu', got 'gelu'",
        "tensor": f"error: {folder}: tensor model.norm.weight is missing (1 in all); the weights "
        f"do not fit config.json",
    }
    assert (finished.returncode, finished.stdout, finished.stderr) == (2, "", expected[what] + "\n")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["job.json"]


def test_unguarded_is_the_runners_caches_too(model_of: ModelOf) -> None:
    plan = Plan("p", (New("a"), Call("a", (1, 2), 0), Call("a", (3,), 0)))

    guarded, free = (
        PortRunner(model_of(), plan).run(),
        PortRunner(model_of(), replace(plan), guarded=False).run(),
    )

    assert [o.error is None for o in guarded.outcomes] == [True, True, False]
    assert [o.error is None for o in free.outcomes] == [True, True, True]


@pytest.mark.parametrize("layout", ["mha", "gqa", "mqa"])
def test_a_plan_may_begin_with_the_first_call_of_a_longer_one(
    model_of: ModelOf, layout: str
) -> None:
    model, ids = model_of(layout, dtype="float64"), tuple(models.ids(24))
    plans = {
        "full": Plan("full", (New("a"), Call("a", ids, 0)), (0, 9, 18, 23)),
        "chunked": Plan(
            "chunked",
            (New("a"), *(Call("a", ids[i:j], i) for i, j in ((0, 16), (16, 17), (17, 24)))),
            (0, 9, 18, 23),
        ),
        "other": Plan("other", (New("a"), Call("a", ids[1:9], 0)), (0, 7)),
        "more": Plan("more", (New("a"), Call("a", ids[:9], 0)), (0, 8)),
    }
    begun = port.Begun()
    shared = {name: port.run(model, plan, begun=begun) for name, plan in plans.items()}
    for name, plan in plans.items():
        alone = port.run(model, plan)
        assert shared[name].arrays.keys() == alone.arrays.keys()
        for array, mine in shared[name].arrays.items():
            np.testing.assert_allclose(mine, alone.arrays[array], rtol=0, atol=1e-13)
    # Other tokens, and a row that the longer call did not keep, are computed.
    said = {name: trace.meta.environment.get(SHARED) for name, trace in shared.items()}
    assert said == {"full": None, "chunked": "full", "other": None, "more": None}


def test_a_trace_says_which_way_the_port_took(folder_of: Callable[[str], Path]) -> None:
    """Another way adds up in another order, so that two reports may differ by it."""
    whole = "compiled" if step.compiles() else "not compiled (no C++ compiler)"
    turned = "input-major" if joint.input_major(mx.float32) else "output-major"
    expected = {
        ("float32", ()): (whole, turned),
        ("bfloat16", ()): (whole, "output-major"),
        ("float64", ()): ("not compiled", "output-major"),
        ("float32", ("hidden",)): ("not compiled", turned),
    }
    for (dtype, taps), ways in expected.items():
        job: Any = SimpleNamespace(dtype=dtype, taps=taps)
        assert tuple(port._ways(job, whole=True).values()) == ways
        assert port._ways(job, whole=False)["decode"] == "not compiled"
