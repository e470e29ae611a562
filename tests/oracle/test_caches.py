"""transformers' other caches follow plans: what each gives, refuses, and says of itself."""

import importlib.util
import json

import models
import numpy as np
import pytest
import torch

from oracle import folder as folders
from oracle.formats import trace
from oracle.formats.cache_name import CacheName, complete
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Clone, Crop, Fail, New, Pad, Plan, Recall, Reload, Reset
from oracle.model.checkpoint import resolve
from oracle.pool import caches, reference

N = 16
TOKENS = tuple(models.tokens(N))
EXACT = ("DynamicCache", "StaticCache:size=64", "DynamicSlidingCache:size=64")
"""Those that lose nothing over N tokens."""
NOISE = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.make(tmp_path_factory.mktemp("models") / "gqa", "gqa", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def model(folder):
    reference.set_up(1)
    return reference.Reference(resolve(str(folder)))


def run(model, cache, *steps):
    return model.run(Plan("test", (New("a"), *steps)), cache=caches.named(cache))


def calls(*sizes, first=0, cache="a"):
    starts = [first + sum(sizes[:i]) for i in range(len(sizes))]
    return [Call(cache, TOKENS[s : s + n], s) for s, n in zip(starts, sizes, strict=True)]


def rows(made):
    assert [o.error for o in made.meta.outcomes if o.error] == []
    return made.logits


@pytest.fixture(scope="module")
def whole(model):
    return rows(model.run(Plan("test", (New("a", False), *calls(N)))))


@pytest.mark.parametrize("cache", [*EXACT, "StaticSlidingCache:size=64"])
@pytest.mark.parametrize("sizes", [[N], [5, 1, 1, 9], [1] * N])
def test_caches_of_enough_room_give_what_no_cache_does(model, whole, cache, sizes):
    made = run(model, cache, *calls(*sizes))
    assert np.abs(rows(made) - whole).max() < NOISE
    assert made.kv("a", 2)[0].shape == (2, N, 10)
    said = made.meta.environment["caches"]["a"]
    assert (said["length"], said["rows"], said["nbytes"]) == (N, N, None)
    assert made.meta.environment["cache"] == str(caches.named(cache))


@pytest.mark.parametrize("cache", EXACT)
def test_crop_clone_and_fail_leave_what_a_straight_run_gives(model, cache):
    straight = rows(run(model, cache, *calls(9, 2)))[-2:]
    for between in (
        [*calls(3, first=9), Crop("a", 9)],
        [Crop("a", 9)],
        [Fail("a", (1, 2, 3))],
        [Clone("a", "b"), Call("b", (1, 2), 9)],
    ):
        made = run(model, cache, *calls(9), *between, *calls(2, first=9))
        assert np.abs(rows(made)[-2:] - straight).max() < NOISE, between
    emptied = rows(run(model, cache, *calls(9), Crop("a", 0), *calls(9, 2)))
    assert np.abs(emptied[-2:] - straight).max() < NOISE
    reset = rows(run(model, cache, *calls(9), Reset("a"), *calls(9, 2)))
    assert np.array_equal(reset[-2:], straight)


@pytest.mark.parametrize("cache", EXACT[:2])
def test_rows_of_different_lengths_give_what_each_gives_alone(model, cache):
    batch = Call("a", ((0, 0, *TOKENS[:3]), TOKENS[5:10]))
    after = Call("a", ((TOKENS[3],), (TOKENS[10],)))
    made = run(model, cache, Pad("a", (2, 0)), batch, after)
    alone = [rows(run(model, "DynamicCache", Call("a", ids))) for ids in (TOKENS[:4], TOKENS[5:11])]
    given = rows(made)
    assert made.positions.tolist() == [-2, -1, 0, 1, 2, *range(5), 3, 5]
    assert np.abs(given[2:5] - alone[0][:3]).max() < NOISE
    assert np.abs(given[5:10] - alone[1][:5]).max() < NOISE
    assert np.abs(given[10:] - np.stack([alone[0][3], alone[1][5]])).max() < NOISE


def test_what_transformers_has_no_call_for_cannot_be_expressed(model):
    made = run(model, "DynamicCache", *calls(4), Reload("a"), Recall("a", "b", 2))
    assert [o.kind for o in made.meta.outcomes[2:]] == ["cannot be expressed"] * 2


def test_a_window_keeps_fewer_rows_than_its_length_says(model):
    made = run(model, "DynamicSlidingCache:size=4", *calls(N))
    said = made.meta.environment["caches"]["a"]
    assert (said["length"], said["rows"]) == (N, 3)
    assert made.meta.no_cache == "layer 0 of transformers' cache keeps 3 of 16 tokens"
    assert made.kv("a", 0) is None
    late = run(model, "DynamicSlidingCache:size=4", *calls(N), Crop("a", 8))
    assert "does not track past states" in late.meta.outcomes[2].error


def test_a_quantised_cache_is_near_and_shows_what_it_holds(model, whole):
    made = run(model, "QuantizedCache", *calls(9, 3, 1, 3))
    assert made.meta.environment["cache"] == "QuantizedCache:backend=fp8"
    assert 1e-4 < np.abs(rows(made) - whole).max() < 1
    full = run(model, "DynamicCache", *calls(9, 3, 1, 3))
    near = np.abs(made.kv("a", 0)[1] - full.kv("a", 0)[1]).max()
    assert 1e-4 < near < 0.1 * np.abs(full.kv("a", 0)[1]).max()
    cut = run(model, "QuantizedCache", *calls(9), Crop("a", 5))
    assert cut.meta.outcomes[2].error == "cannot be expressed: its is_croppable is False"


def test_a_static_cache_that_is_full_refuses_and_counts_the_tokens_all_the_same(model):
    """transformers 5.24: the counter of its first layer moves before the rows are written."""
    made = run(model, "StaticCache:size=8", *calls(6), *calls(3, first=6), *calls(2, first=6))
    assert "index" in made.meta.outcomes[2].error
    assert made.meta.outcomes[3].error.startswith(
        "cannot be expressed: index_pos 6 with 9 tokens cached"
    )


def test_the_length_of_a_static_cache_is_its_counter_itself(model):
    """transformers 5.24: who keeps what `get_seq_length` gave sees it grow."""
    cache = caches.fresh(caches.named("StaticCache:size=8"), model._model.config)
    model._model(torch.tensor([[1, 2, 3]]), cache=cache)
    kept, copied = cache.get_seq_length(), caches.length(cache)
    model._model(torch.tensor([[4]]), cache=cache)
    assert (int(kept), copied) == (4, 3)


@pytest.mark.parametrize(
    ("cache", "says"),
    [
        ("KVCache", "cache: 'KVCache', expected one of DynamicCache, StaticCache, "),
        ("DynamicCache:size=4", "cache DynamicCache: option 'size', expected none"),
        ("StaticCache:size=x", "cache StaticCache: size is 'x', expected a whole number"),
        ("StaticCache:size=0", "cache StaticCache: size is 0, expected 1 or more"),
        ("DynamicSlidingCache", "cache DynamicSlidingCache: no size, expected size=NUMBER"),
        ("QuantizedCache:backend=int8", "backend is 'int8', expected one of fp8, quanto, hqq"),
        ("QuantizedCache:nbits=4", "option 'nbits', expected backend"),
        ("StaticCache:size=4,size=5", "expected options as key=value, each once"),
    ],
)
def test_a_name_that_is_none_is_refused(cache, says):
    with pytest.raises(Refusal) as error:
        caches.named(cache)
    assert says in str(error.value)


@pytest.mark.parametrize(("backend", "module"), [("quanto", "optimum"), ("hqq", "hqq")])
def test_a_backend_that_is_not_installed_is_refused_with_its_remedy(backend, module, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name.startswith(module) else real(name)
    )
    with pytest.raises(Refusal, match=rf"backend {backend} needs .*; pip install .*, or take back"):
        caches.named(f"QuantizedCache:backend={backend}")


def test_a_name_is_written_as_it_is_read():
    known = {"A": {"n": 3, "backend": "hqq", "nbits": 4}}
    assert complete("A", known) == CacheName("A", {"n": 3, "backend": "hqq", "nbits": 4})
    assert complete(str(complete("A:nbits=2", known)), known).options["nbits"] == 2


def test_follow_takes_a_cache_and_a_dither(folder, tmp_path):
    plan = tmp_path / "p.json"
    plan.write_text(json.dumps(Plan("p", (New("a"), *calls(N))).to_json()))
    found = []
    for i, dither in enumerate((0, 1, 1)):
        (path,) = folders.follow(
            str(folder),
            plan_files=[plan],
            out=tmp_path / str(i),
            threads=1,
            caches=("StaticCache:size=20",),
            dither=dither,
        )
        found.append(trace.read(path))
    assert found[0].meta.environment["cache"] == "StaticCache:size=20"
    plain, first, again = (made.logits for made in found)
    assert np.array_equal(first, again)
    assert 0 < np.abs(first - plain).max() < 1e-4
    with pytest.raises(Refusal, match=r"^cache: 'Nothing', expected one of DynamicCache"):
        folders.follow("nowhere", plan_files=[plan], out=tmp_path / "x", caches=["Nothing"])
