"""transformers follows batches and keeps the rows asked for; a trace says which row is which."""

from dataclasses import replace

import models
import numpy as np
import pytest
from folders import refusal

from oracle.formats import trace
from oracle.formats.plan import Call, Clone, Crop, New, Plan, Reset, in_calls, judged_plans
from oracle.model.checkpoint import resolve
from oracle.pool import reference

A, B = tuple(models.tokens(9)), tuple(models.tokens(9, seed=2))
NOISE = 1e-5


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    reference.set_up(1)
    folder = models.make(tmp_path_factory.mktemp("models") / "gqa", "gqa")
    return reference.Reference(resolve(str(folder)))


def run(model, *steps, rows="all"):
    made = model.run(Plan("p", (New("a"), *steps), rows))
    assert [outcome.error for outcome in made.meta.outcomes] == [None] * (1 + len(steps))
    return made


def both(start, stop):
    return Call("a", (A[start:stop], B[start:stop]), start)


def test_each_row_of_a_batch_is_what_it_is_alone(model):
    made = run(model, both(0, 4), both(4, 5), both(5, 9))
    for row, ids in enumerate((A, B)):
        alone = model.run(in_calls("p", ids, [4, 1, 4]))
        mine = made.batch == row
        assert made.positions[mine].tolist() == list(range(9))
        assert made.arrays["steps"][mine].tolist() == [1] * 4 + [2] + [3] * 4
        assert np.abs(made.logits[mine] - alone.logits).max() < NOISE
        for i in range(3):
            for kind, its in zip(made.kv("a", i), alone.kv("a", i), strict=True):
                assert kind.shape == (2, 2, 9, 10)
                assert np.abs(kind[row] - its).max() < NOISE
    # Row by row within each call.
    assert made.batch.tolist() == [0] * 4 + [1] * 4 + [0, 1] + [0] * 4 + [1] * 4
    assert np.abs(made.logits[:4] - made.logits[4:8]).max() > 0.1


def test_a_batch_is_cloned_cropped_and_reset_as_a_whole(model):
    other = Call("b", (A[5:7], A[5:7]))
    made = run(model, both(0, 5), Clone("a", "b"), Crop("a", 3), other, both(3, 5), Reset("a"))
    again = made.logits[made.arrays["steps"] == 5]
    first = made.logits[made.arrays["steps"] == 1]
    assert np.abs(again - first[[3, 4, 8, 9]]).max() < NOISE
    assert made.kv("b", 0)[0].shape == (2, 2, 7, 10)
    assert made.kv("a", 0) is None
    alone = model.run(in_calls("p", (*B[:5], *A[5:7]), [5, 2]))
    assert np.abs(made.kv("b", 2)[1][1] - alone.kv("a", 2)[1]).max() < NOISE


def test_a_cache_that_is_reset_may_hold_one_sequence_after_a_batch(model):
    made = run(model, both(0, 3), Reset("a"), Call("a", A[:3], 0), New("b"), Call("b", (A[:2],)))
    assert made.kv("a", 0)[0].shape == (2, 3, 10)
    assert made.kv("b", 0)[0].shape == (1, 2, 2, 10)
    assert made.batch.tolist() == [0] * 3 + [1] * 3 + [0] * 5


def test_the_rows_named_are_kept_and_are_those_of_all(model):
    sizes = [2, 3, 1, 3]
    every = model.run(in_calls("p", A, sizes))
    for rows in ((0, 1, 4, 8), (3,), tuple(range(9)), (6, 7)):
        some = model.run(in_calls("p", A, sizes, rows))
        assert some.positions.tolist() == list(rows)
        assert "batch" not in some.arrays
        assert np.abs(some.logits - every.logits[list(rows)]).max() < NOISE
        assert np.array_equal(some.kv("a", 2)[0], every.kv("a", 2)[0])
    steps = every.arrays["steps"][[0, 1, 4, 8]]
    assert np.array_equal(steps, model.run(in_calls("p", A, sizes, (0, 1, 4, 8))).arrays["steps"])
    made = run(model, both(0, 4), both(4, 9), rows=(3, 8))
    assert (made.positions.tolist(), made.batch.tolist()) == ([3, 3, 8, 8], [0, 1, 0, 1])


def test_mixed_calls_give_the_rows_of_one_call(model):
    plans = judged_plans(models.tokens(24), prompt=5)
    mixed, full = model.run(plans["mixed"]), model.run(plans["full"])
    assert mixed.positions.tolist() == list(range(24))
    assert np.abs(mixed.logits - full.logits).max() < NOISE
    assert mixed.logits.tobytes() != full.logits.tobytes()


def test_a_trace_of_a_batch_says_of_which_row_each_is(model, tmp_path):
    made = run(model, both(0, 2))
    path = tmp_path / "t.safetensors"
    trace.write(path, replace(made.meta, repeat=1), made.arrays)
    found = trace.read(path)
    assert found.batch.tolist() == [0, 0, 1, 1]
    assert found.meta.repeat == 1
    trace.write(path, made.meta, {k: v for k, v in made.arrays.items() if k != "batch"})
    assert f"{path}: no batch, expected it beside" in refusal(trace.read, path)
    trace.write(path, made.meta, made.arrays | {"batch": np.zeros(3, np.int32)})
    assert "batch has shape [3] int32, expected 1 axes and 4 rows" in refusal(trace.read, path)


def test_a_trace_without_batches_or_repeats_is_as_it_was(model, tmp_path):
    made = model.run(in_calls("p", A, [9]))
    assert not {"repeat", "no_cache"} & set(made.meta.to_json())
    trace.write(tmp_path / "t.safetensors", made.meta, made.arrays)
    found = trace.read(tmp_path / "t.safetensors")
    assert (found.meta.repeat, found.batch.tolist()) == (0, [0] * 9)
