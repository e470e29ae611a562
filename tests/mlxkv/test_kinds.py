"""Every kind of cache that runs inside mlx-lm's Llama: whole and chunked calls, and each step that
a plan can ask of it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import models
import numpy as np
import numpy.typing as npt
import pytest

from mlxkv.engines import kinds, port, process, prompt_cache, runner
from mlxkv.engines.job import Job
from mlxkv.engines.mlx_lm import MlxLmRunner, caches_for
from oracle.formats import child, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Clone, Crop, Fail, New, Pad, Plan, Recall, Reload, Reset, Step

TOKENS = tuple(models.SEQUENCE)
N = len(TOKENS)
EXACT = ("KVCache", "ConcatenateKVCache", "ChunkedKVCache", "BatchKVCache")
"""Those that lose nothing, in calls one after another."""
LOSSY = {
    "RotatingKVCache:size=64": 1e-5,  # as long as the model's context: nothing is lost
    "BatchRotatingKVCache:size=64": 1e-5,
    "StoredKVCache:dtype=float16": 0.02,
    "StoredKVCache:dtype=bfloat16": 0.2,
    "QuantizedKVCache:bits=8,group_size=32": 0.3,
    "SplitKVCache:keys=8,values=8,group_size=32": 0.3,
    "SplitKVCache:keys=0,values=8,group_size=32": 0.3,
    "SwitchedKVCache:bits=8,group_size=32,start=8": 0.3,
}
"""By kind, about how far its logits may be from the whole cache's: their largest is 4."""


@pytest.fixture(scope="module")
def model(mlx_lm_of: Callable[[Path], Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Llama whose heads are long enough for groups of 32."""
    config = models.config("gqa", head_dim=32)
    return mlx_lm_of(models.save(tmp_path_factory.mktemp("model"), config))


def run(model: Any, kind: str, *steps: Step) -> MlxLmRunner:
    return MlxLmRunner(model, Plan("p", (New("a"), *steps)), kind=kinds.parse(kind)).run()


def rows(found: MlxLmRunner) -> npt.NDArray[Any]:
    """All logits of a run of which no step failed."""
    assert [o.error for o in found.outcomes if o.error] == []
    return np.concatenate(found.rows)


def calls(*sizes: int, cache: str = "a", first: int = 0) -> list[Call]:
    made, at = [], first
    for size in sizes:
        made.append(Call(cache, TOKENS[at : at + size], at))
        at += size
    return made


@pytest.fixture(scope="module")
def whole(model: Any) -> npt.NDArray[Any]:
    """(N, V): what mlx-lm gives without a cache."""
    return rows(MlxLmRunner(model, Plan("p", (New("a", False), *calls(N)))).run())


@pytest.mark.parametrize("kind", [*EXACT, *LOSSY])
def test_whole_and_chunked_calls_give_about_what_a_whole_cache_does(
    model: Any, whole: npt.NDArray[Any], kind: str
) -> None:
    near = LOSSY.get(kind, 1e-5)
    for sizes in ([N], [5, 1, 1, 9, 8], [1] * N):
        found = rows(run(model, kind, *calls(*sizes)))
        assert np.abs(found - whole).max() < near, sizes
        # That which switches between calls loses nothing in the first.
        if near > 1e-4 and not (kind.startswith("Switched") and len(sizes) == 1):
            assert np.abs(found - whole).max() > near / 1000, sizes


@pytest.mark.parametrize("kind", [k for k in (*EXACT, *LOSSY) if k != "ConcatenateKVCache"])
def test_clone_crop_and_reload_leave_what_a_straight_run_gives(model: Any, kind: str) -> None:
    straight = rows(run(model, kind, *calls(10, 2, 1)))[-3:]
    other = Call("b", (TOKENS[0],), 10)
    cloned = run(model, kind, *calls(10), Clone("a", "b"), other, *calls(2, 1, first=10))
    assert np.array_equal(rows(cloned)[-3:], straight)
    more = calls(4, first=10)
    cropped = run(model, kind, *calls(10), *more, Crop("a", 10), *calls(2, 1, first=10))
    if kind.startswith("SwitchedKVCache"):
        # What was quantised in the call that was trimmed stays so.
        assert np.abs(rows(cropped)[-3:] - straight).max() < LOSSY[kind]
    else:
        assert np.abs(rows(cropped)[-3:] - straight).max() < 1e-5
    reset = run(model, kind, *calls(3), Reset("a"), *calls(10, 2, 1))
    assert np.array_equal(rows(reset)[-3:], straight)
    reloaded = run(model, kind, *calls(10), Reload("a"), *calls(2, 1, first=10))
    if kind.startswith("BatchRotating"):
        # mlx-lm 0.32.2: from_state leaves `_lengths` out, which the next call reads.
        assert "has no attribute '_lengths'" in str(reloaded.outcomes[-2].error)
    else:
        assert np.array_equal(rows(reloaded)[-3:], straight)


def test_a_concatenating_cache_that_was_trimmed_shows_more_rows_than_it_says(model: Any) -> None:
    found = run(model, "ConcatenateKVCache", *calls(10), Crop("a", 6)).says()["caches"]["a"]
    assert (found["length"], found["rows"]) == (6, 10)


@pytest.mark.parametrize("kind", [*EXACT, *LOSSY])
def test_what_a_cache_says_of_itself(model: Any, kind: str) -> None:
    found = run(model, kind, *calls(10, 1)).says()["caches"]["a"]
    assert (found["length"], found["rows"]) == (11, 11)
    assert found["nbytes"] is not None
    # BatchKVCache has its rows' offsets and padding besides.
    assert 0 <= found["allocated"] - found["nbytes"] < 100
    assert found["size"] in (11, None)  # mlx-lm: 0 where a class has no size of its own
    assert run(model, kind).says()["caches"]["a"]["allocated"] == 0


def test_a_store_gives_a_cache_of_the_tokens_shared(model: Any) -> None:
    straight = rows(run(model, "KVCache", *calls(6), Call("a", (1, 2), 6)))[-2:]
    for kind in ("KVCache", "RotatingKVCache:size=64", "StoredKVCache", "BatchKVCache"):
        found = run(model, kind, *calls(10), Recall("a", "b", 6), Call("b", (1, 2), 6))
        assert np.abs(rows(found)[-2:] - straight).max() < 0.02, kind
        # The other stays as it is.
        found = run(model, kind, *calls(10), Recall("a", "b", 6), *calls(1, first=10))
        assert found.held("a") == 11
    full = run(model, "RotatingKVCache:size=8", *calls(10), Recall("a", "b", 6))
    expected = "cannot be expressed: LRUPromptCache gives nothing for 6 shared tokens"
    assert full.outcomes[-1].error == expected


@pytest.mark.parametrize("kind", [k for k in (*EXACT, *LOSSY) if k != "ConcatenateKVCache"])
def test_after_a_call_that_broke_off_a_trimmed_cache_goes_on(model: Any, kind: str) -> None:
    straight = rows(run(model, kind, *calls(10, 2)))[-2:]
    found = run(model, kind, *calls(10), Fail("a", (1, 2, 3)), *calls(2, first=10))
    near = LOSSY[kind] if kind.startswith("Switched") else 1e-5
    assert np.abs(rows(found)[-2:] - straight).max() < near


def test_a_cache_that_cannot_be_trimmed_is_lost_by_a_call_that_broke_off(model: Any) -> None:
    found = run(model, "RotatingKVCache:size=8", *calls(10), Fail("a", (1, 2, 3)))
    assert "trim_prompt_cache trimmed 0 of 3 tokens" in str(found.outcomes[-1].error)


@pytest.mark.parametrize("kind", ["BatchKVCache", "BatchRotatingKVCache:size=64"])
def test_rows_of_different_lengths_give_what_each_gives_alone(model: Any, kind: str) -> None:
    pad = Pad("a", (2, 0))
    batch = Call("a", ((0, 0, *TOKENS[:3]), TOKENS[5:10]))
    after = Call("a", ((TOKENS[3],), (TOKENS[10],)))
    found = run(model, kind, pad, batch, after)
    given = rows(found)
    alone = [rows(run(model, "KVCache", Call("a", ids, 0))) for ids in (TOKENS[:4], TOKENS[5:11])]
    assert np.abs(given[2:5] - alone[0][:3]).max() < 1e-5
    assert np.abs(given[5:10] - alone[1][:5]).max() < 1e-5
    assert np.abs(given[10:] - np.stack([alone[0][3], alone[1][5]])).max() < 1e-5
    assert found.positions[0].tolist() == [-2, -1, 0, 1, 2, 0, 1, 2, 3, 4]


def test_another_cache_takes_no_padded_rows(model: Any) -> None:
    found = run(model, "KVCache", Pad("a", (2, 0)))
    assert found.outcomes[1].error == "cannot be expressed: a KVCache takes no padded rows"


def test_a_switch_happens_between_calls_as_mlx_lm_has_it(model: Any) -> None:
    from mlx_lm.generate import maybe_quantize_kv_cache
    from mlx_lm.models.cache import KVCache

    sizes, start = [5, 1, 3, 4], 6  # it is reached exactly
    found = rows(run(model, f"SwitchedKVCache:bits=4,group_size=32,start={start}", *calls(*sizes)))
    import mlx.core as mx

    cache, expected = [KVCache() for _ in model.layers], []
    for call in calls(*sizes):
        expected.append(np.array(model(mx.array(call.batch), cache=cache)[0]))
        maybe_quantize_kv_cache(cache, start, 32, 4)
    assert np.array_equal(found, np.concatenate(expected))


def test_split_bits_are_those_of_mlx_lms_own_quantised_cache(model: Any) -> None:
    ours = run(model, "SplitKVCache:keys=8,values=4,group_size=32", *calls(7, 1))
    eight, four = (
        run(model, f"QuantizedKVCache:bits={bits},group_size=32", *calls(7, 1)) for bits in (8, 4)
    )
    layer = {name: list(found.kept()) for name, found in (("o", ours), ("8", eight), ("4", four))}
    # Of the first layer, whose input is the same on all.
    assert np.array_equal(np.array(layer["o"][0][2]), np.array(layer["8"][0][2]))
    assert np.array_equal(np.array(layer["o"][0][3]), np.array(layer["4"][0][3]))


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("QuantizedKVCache:bits=7", "cache QuantizedKVCache: bits is 7, expected one of 1, 2, 3, "),
        ("SplitKVCache:keys=9", "cache SplitKVCache: keys is 9, expected one of 0, 1, 2, "),
        ("SwitchedKVCache:bits=0,group_size=32", "bits is 0, expected one of 1, 2, "),
        ("QuantizedKVCache:bits=8", "group_size is 64, expected 32, which divides head_dim 32"),
        ("SplitKVCache:group_size=16", "group_size is 16, expected 32, which divides head_dim 32"),
        ("StoredKVCache:dtype=float8", "dtype is 'float8', expected one of float16, bfloat16"),
        ("RotatingKVCache:size=4,keep=4", "size is 4, expected 5 or more"),
        ("ChunkedKVCache:size=0", "size is 0, expected 1 or more"),
        ("port", "port:mode=guarded is no cache for mlx-lm's Llama"),
        ("DynamicCache", "DynamicCache is no cache for mlx-lm's Llama"),
    ],
)
def test_what_does_not_fit_is_refused(model: Any, kind: str, says: str) -> None:
    with pytest.raises(Refusal, match=re.escape(says)):
        caches_for(model, kinds.parse(kind))


def test_a_name_is_read_back_from_what_it_is_written_as() -> None:
    for name in kinds.BUILT_IN:
        kind = kinds.parse(
            f"{name}:size=9" if None in kinds.BUILT_IN[name].options.values() else name
        )
        assert kinds.parse(kind.text) == kind
        assert kinds.parse(kind.text).name == kind.name


def test_a_files_kind_is_read_back_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    kind = kinds.parse("mine.py:make", lossy="window")
    monkeypatch.chdir("/")
    assert kinds.parse(kind.text, lossy="window") == kind


# What mlx-lm 0.32.2 gets wrong, so that a later one that gets it right is noticed.


def filled(name: str, tokens: int = 4, dim: int = 64, **options: Any) -> Any:
    import mlx.core as mx
    from mlx_lm.models import cache

    made, rows = getattr(cache, name)(**options), mx.ones((1, 2, tokens, dim))
    made.update_and_fetch(rows, rows)
    return made


def test_quantised_groups_of_5_and_6_bits_do_not_fit_heads_of_128(model: Any) -> None:
    assert filled("QuantizedKVCache", dim=64, bits=6).offset == 4
    for bits in (5, 6):
        with pytest.raises(ValueError, match="cannot be broadcast"):
            filled("QuantizedKVCache", dim=128, bits=bits)


def test_a_trim_of_all_layers_after_a_broken_call_takes_tokens_from_those_behind(
    model: Any,
) -> None:
    from mlx_lm.models.cache import trim_prompt_cache

    found = MlxLmRunner(model, Plan("p", (New("a"), *calls(10)))).run()
    cache = found.caches["a"]
    with suppress(runner.BrokenOff), prompt_cache.broken_off(model):
        found._logits(((1, 2, 3),), cache)
    assert [layer.offset for layer in cache] == [13, 10, 10]
    trim_prompt_cache(cache, cache[0].offset - 10)
    assert [layer.offset for layer in cache] == [10, 7, 7]


def test_sinks_are_hidden_from_several_tokens_at_once(model: Any, whole: Any) -> None:
    """A mask of max_size columns leaves no room for the first `keep`."""
    kept, plain = (
        rows(run(model, f"RotatingKVCache:size=8,keep={keep}", *calls(N))) for keep in (2, 0)
    )
    assert np.array_equal(kept, plain)
    single, plain = (
        rows(run(model, f"RotatingKVCache:size=8,keep={keep}", *calls(*[1] * N))) for keep in (2, 0)
    )
    assert np.abs(single - plain)[8:].max() > 0.1


def test_a_class_that_mlx_lm_does_not_know_is_read_as_none_or_as_another(tmp_path: Path) -> None:
    from mlx_lm.models import cache

    class Mine(cache.KVCache):
        """Another KVCache."""

    file = str(tmp_path / "a.safetensors")
    made = filled("KVCache")
    made.__class__ = Mine
    cache.save_prompt_cache(file, [made])
    with pytest.raises(KeyError, match="Mine"):
        cache.load_prompt_cache(file)
    (found,) = prompt_cache.reloaded([made])
    assert (type(found), found.offset) == (Mine, 4)
    Mine.__name__ = "KVCache"
    cache.save_prompt_cache(file, [made])
    assert type(cache.load_prompt_cache(file)[0]) is cache.KVCache
    assert type(prompt_cache.reloaded([made])[0]) is Mine
    assert vars(cache)["KVCache"] is not Mine


# The port, on the same steps.


def port_run(model_of: Callable[..., Any], *steps: Step, guarded: bool = True) -> port.PortRunner:
    return port.PortRunner(model_of(), Plan("p", (New("a"), *steps)), guarded=guarded).run()


def test_the_port_goes_on_after_a_reload_and_after_a_call_that_broke_off(
    model_of: Callable[..., Any],
) -> None:
    straight = np.concatenate(port_run(model_of, *calls(10, 2)).rows)
    found = port_run(model_of, *calls(10), Reload("a"), Fail("a", (1, 2, 3)), *calls(2, first=10))
    assert [outcome.error for outcome in found.outcomes] == [None] * 5
    assert np.array_equal(np.concatenate(found.rows), straight)
    said = found.says()["caches"]["a"]
    assert (said["length"], said["rows"], said["allocated"]) == (12, 12, 256 * 2 * 2 * 8 * 4 * 3)
    assert said["nbytes"] == said["allocated"] * 12 // 256


def test_in_candles_mode_a_call_that_broke_off_leaves_rows_in_the_layers_before(
    model_of: Callable[..., Any],
) -> None:
    found = port_run(model_of, *calls(10), Fail("a", (1, 2, 3)), *calls(2, first=10), guarded=False)
    assert "cannot broadcast" in str(found.outcomes[3].error)
    found = port_run(model_of, *calls(10), Fail("a", (1, 2, 3)), guarded=False)
    said = found.says()["caches"]["a"]
    assert (said["length"], said["rows"]) == (13, 10)


def test_the_port_has_no_store_and_takes_no_padded_rows(model_of: Callable[..., Any]) -> None:
    found = port_run(model_of, *calls(4), Recall("a", "b", 2), New("c"), Pad("c", (1,)))
    kinds_of = [outcome.kind for outcome in found.outcomes]
    assert kinds_of[2] == kinds_of[4] == "cannot be expressed"


@pytest.mark.parametrize("module", [process.PORT, process.MLX_LM])
def test_dither_moves_a_run_as_rounding_does_and_the_same_each_time(
    folder_of: Callable[[str], Path], tmp_path: Path, module: str
) -> None:
    plan = Plan("p", (New("a"), *calls(N)))
    found = []
    for i, dither in enumerate((0, 1, 1, 2)):
        out = tmp_path / str(i)
        out.mkdir()
        job = Job(str(folder_of("gqa")), (plan,), out, *["float32"] * 2, "cpu", dither=dither)
        with job.begin(module) as running:
            job.end(running)
        found.append(trace.read(job.trace(plan)).logits)
    plain, first, again, second = found
    assert np.array_equal(first, again)
    for one, other in ((plain, first), (first, second)):
        assert 0 < np.abs(one - other).max() < 1e-4


def test_the_warm_process_of_the_tests_computes_what_a_cold_one_does(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, found = Plan("p", (New("a"), *calls(N))), []
    for name in ("warm", "cold"):
        (tmp_path / name).mkdir()
        job = Job(str(folder_of("gqa")), (plan,), tmp_path / name, *["float32"] * 2, "cpu")
        with job.begin(process.MLX_LM) as running:
            assert ("warm.py" in running.command[2]) == (name == "warm" and sys.platform == "linux")
            job.end(running)
        found.append(trace.read(job.trace(plan)))
        monkeypatch.setattr(process, "child", child)
    warm, cold = found
    assert warm.meta == cold.meta
    assert {k: v.tobytes() for k, v in warm.arrays.items()} == {
        k: v.tobytes() for k, v in cold.arrays.items()
    }


def test_packed_weights_are_not_dithered() -> None:
    import mlx.core as mx
    from mlx import nn

    packed = nn.QuantizedEmbedding(8, 32, group_size=32)
    with pytest.raises(Refusal, match=r"^dither: the embedding is packed, expected floats$"):
        runner.dither(packed, 1)
    before = mx.array(packed.weight)
    runner.dither(packed, 0)
    assert mx.array_equal(packed.weight, before)
