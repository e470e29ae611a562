"""`mlxkv cost`: figures, known answers, and planted mistakes, which move it away from them."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import models
import numpy as np
import pytest
from command import mlxkv, refused

from mlxkv.commands.cost import ask, metrics, page, picture, probe, run, scoring, variants
from mlxkv.commands.cost.held import Bytes, Held
from mlxkv.commands.cost.metrics import Known, Value
from mlxkv.commands.cost.probe import Probe
from mlxkv.commands.cost.result import Cost, Measured
from mlxkv.commands.cost.rows import Array, Rows
from mlxkv.engines import machine, oracle, process
from mlxkv.engines.kinds import Lossy
from mlxkv.report.text import pretty
from oracle.formats import stored, strict_json, text
from oracle.model.checkpoint import Checkpoint, resolve

N, LENGTH, VOCAB = 400, 300, 300
TOKENS = tuple(np.random.default_rng(5).integers(0, VOCAB, N).tolist())
HEADS = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
OWN = Path(__file__).with_name("mistaken_caches.py")  # which imports mlx_lm, and so torch
SPECS = (
    "float16",
    "bfloat16",
    "affine:bits=8,group_size=64",
    "affine:bits=4,group_size=64",
    "affine:keys=8,values=4,group_size=64",
    "affine:keys=4,values=8,group_size=64",
    "window:size=64",
    "window:size=64,keep=4",
    "window:size=1000",
)

RIGHT = [
    ("StoredKVCache:dtype=float16", "float16"),
    ("StoredKVCache:dtype=bfloat16", "bfloat16"),
    ("QuantizedKVCache:bits=8", "affine:bits=8,group_size=64"),
    ("QuantizedKVCache:bits=4", "affine:bits=4,group_size=64"),
    ("SplitKVCache", "affine:keys=8,values=4,group_size=64"),
    ("SplitKVCache:keys=4,values=8", "affine:keys=4,values=8,group_size=64"),
    ("RotatingKVCache:size=64", "window:size=64"),
    ("RotatingKVCache:size=1000", "window:size=1000"),
    (f"{OWN}:quantised", "affine:bits=8,group_size=64"),
    (f"{OWN}:window", "window:size=64"),
    (f"{OWN}:sinks", "window:size=64,keep=4"),
]
WRONG = [
    (f"{OWN}:stale_scale", "affine:bits=8,group_size=64"),
    (f"{OWN}:keys_bits_for_values", "affine:keys=8,values=4,group_size=64"),
    ("SplitKVCache:keys=4,values=8", "affine:keys=8,values=4,group_size=64"),
    (f"{OWN}:window_one_short", "window:size=64"),
    (f"{OWN}:sinks_overwritten", "window:size=64,keep=4"),
]
SINKS = "RotatingKVCache:size=64,keep=4"
FULL = ("ConcatenateKVCache", "BatchKVCache", "ChunkedKVCache", f"{OWN}:full")
CACHES = dict.fromkeys(["KVCache", SINKS, *FULL, *(cache for cache, _ in RIGHT + WRONG)])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny model whose heads are as wide as a group."""
    folder = tmp_path_factory.mktemp("cost") / "model"
    config = models.config("gqa", **HEADS, vocab_size=VOCAB, max_position_embeddings=1500)
    return resolve(str(models.save(folder, config)))


@pytest.fixture(scope="module")
def truth(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLXKV_CACHE", str(tmp_path_factory.mktemp("cache")))
        kept = oracle.text_folder(checkpoint, TOKENS, SPECS, fresh=False)
        with kept as folder:
            yield folder


Read = Callable[[str], tuple[scoring.Facts, Rows]]


@pytest.fixture(scope="module")
def read(checkpoint: Checkpoint, truth: Path, tmp_path_factory: pytest.TempPathFactory) -> Read:
    """What a cache reads on the text, by the name that --cache takes; all in one process."""
    room, numbers = tmp_path_factory.mktemp("rows"), {name: str(i) for i, name in enumerate(CACHES)}
    named = {number: variants.Variant(name, name) for name, number in numbers.items()}
    job = scoring.Job(str(checkpoint.folder), str(truth), str(room), named, LENGTH, 64)
    with run._begun(job, room / "job.json"):
        pass

    def rows(name: str) -> tuple[scoring.Facts, Rows]:
        facts = run._facts(scoring.facts_file(room, numbers[name]))
        assert facts.failed == ""
        with np.load(scoring.rows_file(room, numbers[name])) as arrays:
            return facts, Rows(**arrays)

    return rows


@pytest.fixture(scope="module")
def known(truth: Path, read: Read) -> Callable[[str, str], Known]:
    """How a cache stands to what a SPEC says."""

    def compared(name: str, spec: str) -> Known:
        answer = np.asarray(text.read(truth).stored[stored.parse(spec).name].kl)
        return metrics.known(spec, answer, read(name)[1], read("KVCache")[1])

    return compared


# Known answers, and planted mistakes.


@pytest.mark.parametrize(
    ("cache", "spec"),
    RIGHT,
)
def test_a_cache_costs_what_the_oracle_computes_for_one_that_keeps_just_that(
    cache: str, spec: str, known: Callable[[str, str], Known]
) -> None:
    found = known(cache, spec)
    assert found.met, found
    assert spec == "window:size=1000" or abs(found.ratio - 1) < 0.1


@pytest.mark.parametrize(
    ("cache", "spec"),
    WRONG,
)
def test_a_planted_mistake_moves_the_cost_away_from_its_known_answer(
    cache: str, spec: str, known: Callable[[str, str], Known]
) -> None:
    found = known(cache, spec)
    print(found)
    assert not found.met
    assert found.errors > 3


@pytest.mark.parametrize("cache", FULL)
def test_a_full_cache_loses_nothing_that_noise_does_not_explain(cache: str, read: Read) -> None:
    found = metrics.nothing_lost(read(cache)[1], read("KVCache")[1])
    assert found.met, found
    assert math.isnan(found.ratio)


@pytest.mark.parametrize("cache", ["StoredKVCache:dtype=float16", f"{OWN}:stale_scale", SINKS])
def test_a_cache_that_loses_something_is_beyond_the_noise(cache: str, read: Read) -> None:
    found = metrics.nothing_lost(read(cache)[1], read("KVCache")[1])
    assert not found.met
    assert found.ratio > 1000


def test_what_is_lost_at_one_position_only_is_seen() -> None:
    noise = rows_of([1e-11] * 1000)
    assert metrics.nothing_lost(rows_of([2e-11] * 1000), noise).met
    assert not metrics.nothing_lost(rows_of([1e-11] * 999 + [2e-10]), noise).met
    assert not metrics.nothing_lost(rows_of([4e-11] * 1000), noise).met


@pytest.mark.parametrize(
    ("cache", "lossy", "everything"),
    [
        *((name, "", True) for name in ("KVCache", *FULL)),
        (FULL[-1], "quantised", False),
        ("StoredKVCache", "", False),
        ("SplitKVCache:keys=0,values=0", "", True),
        ("SplitKVCache:keys=0,values=8", "", False),
        ("RotatingKVCache:size=64", "", False),
        ("SwitchedKVCache", "", False),
    ],
)
def test_what_is_not_declared_lossy_must_keep_everything(
    cache: str, lossy: Lossy, everything: bool
) -> None:
    one = variants.Variant("x", cache, lossy)
    assert one.keeps_everything is everything
    assert not replace(one, dtype="float16").keeps_everything
    assert not replace(one, bits=8).keeps_everything


def test_the_sinks_that_mlx_lms_mask_hides_in_a_chunk_are_seen(
    known: Callable[[str, str], Known],
) -> None:
    found = known(SINKS, "window:size=64,keep=4")
    assert not found.met
    assert found.apart > 1000 * found.most_apart


def test_a_window_longer_than_the_text_costs_nothing_that_could_be_seen(
    known: Callable[[str, str], Known],
) -> None:
    found = known("RotatingKVCache:size=1000", "window:size=1000")
    assert math.isnan(found.ratio)
    assert found.mean_kld == 0.0


@pytest.mark.parametrize(
    ("cache", "least", "most"),
    [
        ("KVCache", 0, 1e-5),
        ("RotatingKVCache:size=64", 0, 1e-5),
        (SINKS, 0, 1e-5),
        ("StoredKVCache:dtype=float16", 1e-4, 4e-4),
        ("QuantizedKVCache:bits=8", 1e-3, 1e-2),
        ("SplitKVCache:keys=4,values=8", 5e-2, 2e-1),
    ],
)
def test_the_first_layers_keys_show_what_the_cache_itself_rounds(
    cache: str, least: float, most: float, read: Read
) -> None:
    """Nothing before them was lost. Of a window the rows that it holds are at their positions."""
    held = read(cache)[0].held
    assert held is not None
    assert held.keys is not None
    assert least <= held.keys[0][0] <= most


def test_bytes_are_those_of_all_layers_at_the_texts_end_and_far_on(read: Read) -> None:
    row = 3 * 2 * 64 * 4  # three layers, keys and values, 64 numbers of float32
    facts = read("KVCache")[0]
    assert facts.far == Bytes(8192, 8192 * row, 8192 * row)
    assert facts.held is not None
    assert facts.held.bytes == Bytes(N, 512 * row, 512 * row)  # in steps of 256 rows
    assert read("StoredKVCache:dtype=float16")[0].far == Bytes(8192, 4096 * row, 4096 * row)
    eight = 8192 * row * (64 + 8) // 256  # a byte a number; a scale and a bias for 64
    assert read("QuantizedKVCache:bits=8")[0].far == Bytes(8192, eight, eight)
    assert read(f"{OWN}:quantised")[0].far == Bytes(8192, eight, eight)


# Rows and figures.


def naive(t: Array, x: Array) -> Array:
    """KL by the definition, from log-softmaxes in longdouble."""
    a, b = (np.asarray(z, np.longdouble) for z in (t, x))
    a, b = (z - z.max(1, keepdims=True) for z in (a, b))
    a, b = (z - np.log(np.exp(z).sum(1, keepdims=True)) for z in (a, b))
    return np.asarray((np.exp(a) * (a - b)).sum(1), np.float64)


def test_rows_are_what_the_definitions_say() -> None:
    random = np.random.default_rng(0)
    t, x = random.normal(0, 3, (2, 7, 50))
    tokens = random.integers(0, 50, 7)
    rows = Rows.of(7)
    rows.put(0, x[:4].astype(np.float32), t[:4], tokens)
    rows.put(4, x[4:].astype(np.float32), t[4:], tokens)
    x = x.astype(np.float32).astype(np.float64)
    assert np.allclose(rows.kl, naive(t, x), rtol=1e-10)
    p = [np.exp(z) / np.exp(z).sum(1, keepdims=True) for z in (t, x)]
    for of, name in zip(p, ("p_truth", "p"), strict=True):
        assert np.allclose(getattr(rows, name)[:-1], of[np.arange(6), tokens[1:]])
        assert np.isnan(getattr(rows, name)[-1])
    assert np.allclose(rows.nll[:-1], -np.log(rows.p[:-1]))
    assert rows.same.tolist() == (t.argmax(1) == x.argmax(1)).tolist()
    five = [len({*a.argsort()[-5:]} & {*b.argsort()[-5:]}) / 5 for a, b in zip(t, x, strict=True)]
    assert rows.five.tolist() == five
    two = np.sort(t, 1)[:, -2:]
    assert np.allclose(rows.margin, two[:, 1] - two[:, 0])
    e = x - t
    assert np.allclose(rows.peak, np.abs(e - e.mean(1, keepdims=True)).max(1))


def test_a_tiny_difference_is_not_lost_in_rounding() -> None:
    t = np.random.default_rng(1).normal(0, 3, (1, 200))
    e = 1e-9 * np.random.default_rng(2).normal(0, 1, (1, 200))
    rows = Rows.of(1)
    rows.put(0, t + e, t, np.array([0]))
    p = np.exp(t) / np.exp(t).sum()
    variance = (p * e**2).sum() - (p * e).sum() ** 2
    assert rows.kl[0] == pytest.approx(variance / 2, rel=1e-6)


def test_a_row_that_is_not_finite_is_not_a_number_and_spoils_no_other() -> None:
    t = np.random.default_rng(1).normal(0, 3, (3, 20))
    for odd in (np.nan, np.inf, -np.inf):
        x, rows = t.copy(), Rows.of(3)
        x[1, 4] = odd
        rows.put(0, x, t, np.array([1, 2, 3]))
        assert rows.finite.tolist() == [True, False, True]
        assert np.isnan([rows.p[1], rows.nll[1], rows.same[1], rows.five[1], rows.peak[1]]).all()


def rows_of(kl: list[float], **more: list[float]) -> Rows:
    """Rows of which only what is given differs from the truth's."""
    n = len(kl)
    p = np.array([0.5] * (n - 1) + [np.nan])
    given: dict[str, Any] = dict.fromkeys(("p", "p_truth"), p)
    given |= dict.fromkeys(("nll", "nll_truth"), -np.log(p))
    given |= {"same": np.ones(n), "five": np.ones(n), "peak": np.full(n, 1e-6)}
    given |= {"margin": np.ones(n), "kl": np.array(kl)}
    given |= {name: np.array(values) for name, values in more.items()}
    return Rows(**given)


def test_figures_are_means_with_paired_errors() -> None:
    p = [0.25, 0.5, 0.5, math.nan]
    found = metrics.figures(
        rows_of([1.0, 2.0, 3.0, 6.0], p=p, nll=(-np.log(p)).tolist(), same=[0, 1, 0, 1]),
        rows_of([0.0] * 4, margin=[0.0] * 4),
    )
    assert found.mean_kld == Value(3.0, pytest.approx(math.sqrt(14 / 3) / 2))
    assert (found.median_kld, found.maximum_kld) == (2.5, 6.0)
    assert found.mean_dp.mean == pytest.approx(-0.25 / 3)
    assert found.rms_dp.mean == pytest.approx(0.25 / math.sqrt(3))
    assert found.same_top_p.mean == 0.5
    assert found.decisive_flips == 2
    assert found.ppl_base == Value(pytest.approx(2.0), pytest.approx(0.0))
    assert found.ppl_ratio.mean == pytest.approx(2 ** (1 / 3))
    # Paired: that of the ratio's logarithm, whose values are log 2, 0, 0.
    assert found.ppl_ratio.error == pytest.approx(2 ** (1 / 3) * math.log(2) / 3)


def test_a_flip_is_decisive_only_where_float32_could_not_have_made_it() -> None:
    flipped = rows_of([1.0] * 3, same=[0.0] * 3, margin=[1.0, 16.1, 15.9])
    noise = rows_of([0.0] * 3, peak=[1.0] * 3)
    assert metrics.figures(flipped, noise).decisive_flips == 1


def test_bins_cover_every_position_once() -> None:
    for n in (1, 63, 64, 65, 1280, 9000):
        found = metrics.bins(rows_of([1.0] * n))
        covered = [at for one in found for at in range(one.first, one.last + 1)]
        assert covered == list(range(n))


# The retrieval probe.


TEXT = np.random.default_rng(1).integers(0, 4000, 1280).tolist()


@pytest.mark.parametrize("windows", [(), (256, 1024), (100,), (60, 70, 80), (4000,)])
def test_the_probe_asks_for_what_stood_at_its_distance_before_and_nowhere_nearer(
    windows: tuple[int, ...],
) -> None:
    made = probe.probe(windows, TEXT, vocab=49152, limit=8192)
    assert made is not None
    for window in windows:
        assert any(window < far for far in made.distances)
    for at, far in zip(made.asked, made.distances, strict=True):
        assert made.tokens[at] == made.tokens[at - far]
        assert made.tokens[at] not in made.tokens[at - far + 1 : at]


def test_a_probe_that_has_no_room_is_left_out() -> None:
    assert probe.probe((), TOKENS, vocab=40, limit=64) is None
    short = probe.probe((), TOKENS, vocab=40, limit=600)
    assert short is not None
    assert len(short.tokens) <= 600


def test_rates_are_by_distance() -> None:
    made = Probe((0,) * 4, (0, 1, 2, 3), (9, 9, 5, 5))
    assert made.rates((1, 0, 1, 1)) == {5: 1.0, 9: 0.5}


@pytest.mark.parametrize("length", range(1, 13))
def test_the_probes_answers_are_the_same_in_chunks_of_any_size(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model foretells token 3 i + 1 after token i, which the cache, a list, has counted."""
    import mlx.core as mx

    def model(tokens: Any, cache: list[Any]) -> Any:
        start, L = len(cache), tokens.shape[1]
        cache.extend([None] * L)
        return mx.arange(20)[None, None] == (3 * mx.arange(start, start + L)[None, :, None] + 1)

    monkeypatch.setattr(scoring.mlx_lm, "caches_for", lambda model, kind: [])
    monkeypatch.setattr(scoring.prompt_cache, "arrays_of", lambda caches: [])
    probe_tokens = (0, 1, 4, 7, 10, 5, 16, 19)
    for first in range(1, len(probe_tokens)):
        asked = tuple(range(first, len(probe_tokens)))
        job = scoring.Job("", "", "", {}, 1, length, probe_tokens, asked)
        fed = scoring._Fed(model, job, variants.PLAIN.kind, lambda n: None)
        assert scoring._hits(fed) == tuple(int(at != 5) for at in asked), first


# Variants and requests.


def test_the_default_variants_are_those_that_are_announced() -> None:
    names = [one.name for one in variants.default()]
    assert names == [
        *("float32", "float16", "bfloat16", "8 bits", "6 bits", "4 bits", "3 bits", "2 bits"),
        *("keys 8, values 4 bits", "keys 4, values 8 bits"),
        *("window 256", "window 256, keep 4", "window 1024", "window 1024, keep 4"),
        *("weights 8 bits", "weights 4 bits"),
    ]
    known = {one.name: one.known for one in variants.default() if one.known}
    assert known == {
        "float16": "float16",
        "8 bits": "affine:bits=8,group_size=64",
        "window 256": "window:size=256",
        "window 256, keep 4": "window:size=256,keep=4",
    }


def test_with_all_variants_every_cache_that_has_a_known_answer_has_it() -> None:
    for one in variants.everything():
        whole = one.dtype != "float32" or one.bits or one.cache == "KVCache"
        assert bool(one.known) != bool(whole), one
        if one.known:
            stored.parse(one.known)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--cache", "port"], ["--cache", "port", "mlxkv pitfalls"]),
        (["--cache", "DynamicCache"], ["--cache", "DynamicCache"]),
        (["--cache", "KVCach"], ["KVCach", "expected"]),
        (["--lossy", "window"], ["--lossy", "leave it out"]),
        (["--cache", "StoredKVCache", "--known", "float16"], ["--known", "leave them out"]),
        (["--cache", f"{OWN}:window", "--known", "window"], ["window", "size"]),
        (["--tokens", "1,2,400"], ["400", "299"]),
        (["--tokens", "1,2,3", "--length", "3", "--decode", "1"], ["3 tokens", "4"]),
        (["--tokens", "1"], ["two or more"]),
        (["--tokens", "1,2", "--text", "x"], ["--text and --tokens"]),
        ([], ["tokenizer.json", "--tokens"]),
    ],
)
def test_what_cannot_be_measured_is_refused_before_the_oracle_works(
    given: list[str], words: list[str], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    refused(mlxkv("cost", checkpoint.folder, *given, "--out", tmp_path), *words)


# Pages.


def measured(name: str, kl: float, size: int, cache: str = "KVCache", **more: Any) -> Measured:
    """A variant whose rows all read `kl`, give or take; `size` bytes a token."""
    spread = 1 + 0.3 * np.random.default_rng(0).normal(0, 1, 40)
    rows, noise = rows_of((kl * spread).tolist()), rows_of([1e-11] * 40)
    held = Held(Bytes(40, None, 40 * size), why="layer 0 shows no keys and values")
    far = Bytes(8192, 8192 * size, 8192 * size)
    facts = scoring.Facts("", 1.0, 1.0, (), held, far)
    variant = more.pop("variant", variants.Variant(name, cache))
    given = {"known": None, "rates": {128: 1.0}} | more
    return Measured.of(variant, facts, rows, noise, 30, **given)


def cost(**more: Any) -> Cost:
    away = Known("window:size=256,keep=4", 0.05, 8.0, 22.0, 7.0, 1e-4, False)
    some = (
        measured("", 1e-11, 46080, variant=variants.PLAIN),
        measured("float16", 4e-7, 23040, "StoredKVCache"),
        measured("8 bits", 3e-4, 12960, "QuantizedKVCache"),
        measured("6 bits", 6e-3, 10080, "QuantizedKVCache"),
        measured("4 bits", 0.13, 7200, "QuantizedKVCache"),
        measured("2 bits", 3.8, 4320, "QuantizedKVCache"),
        measured("keys 8, values 4 bits", 0.02, 10080, "SplitKVCache"),
        measured("keys 4, values 8 bits", 0.1, 10080, "SplitKVCache"),
        measured("window 256", 0.5, 9216, "RotatingKVCache:size=256", rates={128: 0.0}),
        measured("window 256, keep 4", 0.4, 9216, "RotatingKVCache:size=256,keep=4", known=away),
        measured("w", 0.01, 46080, variant=variants.Variant("weights 8 bits", bits=8)),
        Measured(variants.Variant("weights 4 bits", bits=4), "rows of 48, expected 64"),
    )
    given = {"model": "M", "source": "m", "fingerprint": "f", "title": "the built-in text"}
    given |= {"tokens": (1,) * 40, "length": 30, "chunk": 8, "measured": some, "distances": (128,)}
    given |= {"beside": ("8 bits",)}
    return Cost(**given | {"environment": {"mlx-lm": {"mlx": "1", "device": "cpu"}}} | more)


def test_the_terminals_table_has_every_variant_and_fits_into_100_columns() -> None:
    lines = page.console(cost(), report="r/cost.md").splitlines()
    assert max(map(len, lines)) <= 100
    for one in cost().measured:
        assert any(line.startswith(f"{one.variant.name}  ") for line in lines)
    assert any(line.startswith("weights 4 bits") and "rows of 48" in line for line in lines)
    assert lines[-1] == "report: r/cost.md"


def test_the_page_says_what_missed_its_known_answer_and_what_was_not_seen() -> None:
    text = page.markdown(cost(), commands=["mlxkv cost"], svg="cost.svg")
    away = "mean KL is 8 of what noise hides (its known answer is none), expected within 10 %"
    assert f"window 256, keep 4: {away} (22.0 standard errors): not the format's cost" in text
    assert "not the format's cost but a fault (known of mlx-lm: calls of several tokens do" in text
    assert "- not seen: float16: layer 0 shows no keys and values" in text
    assert "- not measured: weights 4 bits: rows of 48, expected 64" in text
    assert "forgotten by window 256 (at 128)" in text


def test_forgotten_is_said_only_at_distances_at_which_the_full_cache_remembers() -> None:
    far = (128, 320, 1088)
    full, lost = dict(zip(far, (0.95, 0.84, 0.95), strict=True)), dict.fromkeys(far, 0.0)
    some = tuple(replace(one, rates=full) for one in cost().shown)

    def said(*measured: Measured) -> str:
        of = cost(measured=measured, distances=far)
        assert "320 back (*)" in page.markdown(of, commands=[], svg=None)
        assert (of.tells, of.to_json()["tells"]) == ((128, 1088), [128, 1088])
        return " ".join(page.console(of, report="r").split())

    assert "cannot tell at 320 back; forgotten by none" in said(*some)
    assert "forgotten by none" in said(*some[:-1], replace(some[-1], rates=full | {320: 0.0}))
    text = said(*some[:-1], replace(some[-1], rates=lost))
    assert "forgotten by weights 8 bits (at 128, 1,088)" in text


def test_a_model_that_finds_nothing_far_back_cannot_tell() -> None:
    some = list(cost().measured)
    some[0] = replace(some[0], rates={128: 0.89})
    text = page.console(cost(measured=tuple(some)), report="r")
    assert "this model cannot tell at 128 back" in text
    assert "forgotten" not in text


def test_what_was_missed_leads_the_sentence() -> None:
    def said(kl: float, **more: Any) -> str:
        met = {"spec": "float16", "mean_kld": 1e-3, "ratio": 1.0, "errors": 1.5, "apart": 0.1}
        found = Known(**met | {"most_apart": 0.3, "met": False} | more)
        return page.known(measured("x", kl, 100, known=found))

    mean = float(measured("x", 1e-3, 100).all.mean_kld.mean)
    ratio = said(1.281e-3, ratio=1.281, mean_kld=mean)
    assert ratio.startswith("mean KL is 1.28 of its known answer, expected within 10 % (1.5 stand")
    apart = said(1e-3, ratio=1.01, apart=9.0)
    assert apart.startswith("differs from its known answer by 9 of it at a position on average")
    one = said(1e-3, spec=metrics.NOTHING, ratio=1.2, apart=40.0)
    assert one.startswith("keeps every row, and loses ")
    assert "nats at one position, 40 times the largest noise" in one
    assert "nats on average, 1e+08 times the noise" in said(1e-3, spec=metrics.NOTHING, ratio=1e8)


def test_names_differ_where_the_caches_do_and_leave_out_what_is_usual(tmp_path: Path) -> None:
    given = ("QuantizedKVCache:bits=4", "QuantizedKVCache:bits=8", "SplitKVCache:keys=4,values=8")
    names = [one.name for one in variants.chosen(given, "", "")]
    assert names[1:] == ["QuantizedKVCache:bits=4", "QuantizedKVCache", given[2]]
    files = [tmp_path / folder / "one.py" for folder in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text("")
    own = variants.chosen([f"{file}:make" for file in (*files, files[0])], "", "")
    assert [one.name for one in own[1:]] == ["one.py:make", "one.py:make (2)"]


@pytest.mark.parametrize("length", [3, 22, 23, 60, 300])
@pytest.mark.parametrize("kl", [0.0, 1e-300, 1e-9, 700.0])
def test_the_terminals_table_fits_whatever_it_shows(length: int, kl: float) -> None:
    away = Known("float16", 1e-30, 1e25, 1e9, 7.0, 1e-4, False)
    names = [f"{letter * length}" for letter in "ab"]
    some = [measured(name, kl, 10**9, known=away) for name in names]
    made = cost(measured=(cost().noise, *some), distances=())
    lines = page.console(made, report="r").splitlines()
    assert max(map(len, lines)) <= 100
    for name in names:
        assert any(line.startswith(name[:97]) for line in lines)


def test_the_error_of_a_single_position_is_a_dash() -> None:
    assert page._pair(Value(1.5, math.nan), 4) == ["1.5000", "-"]
    assert page._pair(Value(math.nan, math.nan), 4) == ["-", "-"]
    assert page._pair(Value(2.0, 1e300), 4) == ["2.0000", "1.00e+300"]
    rows, noise = rows_of([1e-3, 2e-3]), rows_of([1e-11] * 2)
    some = [replace(one, parts={"all": metrics.figures(rows, noise)}) for one in cost().shown]
    text = page.console(cost(measured=tuple(some)), report="r")
    text += page.markdown(cost(measured=tuple(some)), commands=[], svg=None)
    assert not re.search(r"\bnan\b", text)


def test_bytes_per_token_are_those_far_on_and_the_page_has_both() -> None:
    held = Held(Bytes(40, None, 40 * 777_000), why="no keys")
    some = [replace(one, held=held) for one in cost().shown]
    made = cost(measured=tuple(some))
    assert "46,080" in page.console(made, report="r")
    assert "777,000" not in page.console(made, report="r")
    text = page.markdown(made, commands=[], svg=None)
    assert "B/token at the text's end" in text
    assert "777,000" in text
    assert "after 8,192 tokens" in picture.kl_against_bytes(made)


def test_the_words_say_that_a_perplexity_below_the_truths_is_not_better() -> None:
    assert "below 1 is not better" in page.markdown(cost(), commands=[], svg=None)


def test_the_exit_code_is_1_where_a_known_answer_is_missed_and_2_where_nothing_was_told() -> None:
    some = cost().measured
    assert [one.variant.name for one in cost().away] == ["window 256, keep 4"]
    assert cost().exit_code == 0  # a fault of mlx-lm that is known is no news
    missed = replace(some[3], known=cost().away[0].known)
    assert cost(measured=(*some[:3], missed)).exit_code == 1
    assert cost(measured=some[:3]).exit_code == 0
    assert cost(measured=some[:1]).exit_code == 0
    assert cost(measured=(some[0], some[-1])).exit_code == 2


def test_the_json_is_strict_and_has_null_for_what_was_not_seen() -> None:
    value = strict_json.decode(pretty(cost().to_json()))
    assert value["format"] == "mlxkv-cost/1"
    eight = value["measured"][2]
    assert (eight["name"], eight["bytes_per_token"]) == ("8 bits", 12960)
    assert eight["held"]["keys"] is None
    assert value["measured"][-1]["failed"] == "rows of 48, expected 64"


def test_the_pareto_line_has_what_nothing_smaller_beats() -> None:
    names = [one.variant.name for one in picture.pareto(cost().shown)]
    assert names == ["float32", "float16", "8 bits", "6 bits", "4 bits", "2 bits"]


def test_the_picture_names_every_variant_and_is_the_same_each_time() -> None:
    svg = picture.kl_against_bytes(cost())
    ElementTree.fromstring(svg)
    for one in cost().shown:
        assert one.variant.name in svg
    assert svg == picture.kl_against_bytes(cost())


@pytest.mark.filterwarnings("error")
def test_variants_of_one_size_are_drawn_too() -> None:
    some = (cost().noise, measured("own", 1e-3, 46080))
    assert "own" in picture.kl_against_bytes(cost(measured=some))


def test_a_cache_that_depends_on_its_calls_is_drawn_among_those_of_fewer_bits() -> None:
    own = variants.Variant("own", "mine:make", lossy="depends")
    some = (cost().noise, measured("own", 1e-3, 20000, variant=own))
    assert "fewer bits" in picture.kl_against_bytes(cost(measured=some))


# All of it.


@pytest.fixture
def asked(checkpoint: Checkpoint, tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    def run(*given: object) -> tuple[Any, Any]:
        ids = ",".join(map(str, TOKENS[:100]))
        line = ["cost", checkpoint.folder, "--tokens", ids, "--decode", 10, "--out", tmp_path]
        done = mlxkv(*line, *given, env={"MLXKV_CACHE": str(tmp_path / "cache")})
        found = tmp_path / "cost.json"
        return done, json.loads(found.read_text()) if found.exists() else None

    return run


def test_caches_of_ones_own_are_measured_and_one_that_fails_is_a_line(
    asked: Callable[..., tuple[Any, Any]],
) -> None:
    given = ["--cache", f"{OWN}:window", "--cache", f"{OWN}:broken", "--lossy", "window"]
    done, value = asked(*given, "--known", "window:size=64")
    assert done.returncode == 0, done.stderr
    names = [one["name"] for one in value["measured"]]
    assert names == ["float32", "mistaken_caches.py:window", "mistaken_caches.py:broken"]
    assert value["measured"][1]["known"]["met"] is True
    assert "no such table" in value["measured"][2]["failed"]
    assert "no such table" in done.stdout


def test_a_cache_that_is_away_from_its_known_answer_gives_exit_code_1(
    asked: Callable[..., tuple[Any, Any]],
) -> None:
    done, value = asked("--cache", f"{OWN}:window_one_short", "--known", "window:size=64")
    assert done.returncode == 1
    words = " ".join(done.stdout.split())
    assert re.search(r"window_one_short: [^(]+ its known answer [^(]+\([0-9.]+ standard", words)
    assert value["measured"][1]["known"]["errors"] > 3


def test_a_cache_that_is_not_declared_lossy_and_loses_something_gives_exit_code_1(
    asked: Callable[..., tuple[Any, Any]],
) -> None:
    wrong, given = f"{OWN}:keys_for_values", [f"--cache={name}" for name in FULL]
    done, value = asked(*given, "--cache", wrong)
    assert done.returncode == 1, done.stderr
    met = {one["name"]: one["known"] and one["known"]["met"] for one in value["measured"]}
    assert [name for name, one in met.items() if one is False] == [
        "mistaken_caches.py:keys_for_values"
    ]
    assert met["BatchKVCache"] is True
    words = " ".join(done.stdout.split())
    assert "keys_for_values: not declared lossy, and loses" in words
    assert "a fault, or declare it with --lossy" in words
    done, value = asked("--cache", wrong, "--lossy", "quantised")
    assert done.returncode == 0
    assert value["measured"][1]["known"] is None


def test_a_group_that_no_head_fills_is_a_line_and_nothing_else_measured_is_exit_code_2(
    asked: Callable[..., tuple[Any, Any]],
) -> None:
    done, value = asked("--cache", "QuantizedKVCache:group_size=128")
    assert done.returncode == 2
    assert "128" in value["measured"][1]["failed"]


def test_the_truth_is_kept_and_only_what_is_missing_is_added(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path))
    tokens = TOKENS[:50]

    def asked(spec: str) -> tuple[text.Text, int, int]:
        with oracle.text_folder(checkpoint, tokens, [spec], fresh=False) as folder:
            of = (folder / "truth.safetensors").stat()
            return text.read(folder), of.st_ino, of.st_mtime_ns

    first, second = asked("float16"), asked("bfloat16")
    assert first[1:] == second[1:]
    assert set(second[0].stored) == {"float16", "bfloat16"}
    (kept,) = (tmp_path / "texts").iterdir()
    (kept / "truth.safetensors").write_bytes(b"")
    assert asked("float16")[0].logits.shape == (50, VOCAB)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_text_that_is_read_stays_while_another_run_makes_it_anew_or_adds_to_it(
    fresh: bool, checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path))
    tokens, start, read = TOKENS[:50], oracle.process.start, list[int]()
    with oracle.text_folder(checkpoint, tokens, ["float16"], fresh=fresh) as mine:

        def meanwhile(command: Any) -> Any:
            read.append(len(text.read(mine).logits))
            return start(command)

        stamp = (mine / "truth.safetensors").stat().st_ino
        monkeypatch.setattr(oracle.process, "start", meanwhile)
        with oracle.text_folder(checkpoint, tokens, ["bfloat16"], fresh=fresh) as other:
            assert set(text.read(mine).stored) == {"float16"}
            assert "bfloat16" in text.read(other).stored
            assert ((other / "truth.safetensors").stat().st_ino == stamp) is not fresh
        (kept,) = (path for path in (tmp_path / "texts").iterdir() if path != mine)
        shutil.rmtree(kept)
        assert text.read(mine).logits.shape == (50, VOCAB)
        assert read == [50]
    assert not mine.exists()


def test_the_built_in_text_is_long_enough_for_the_default_run(
    default_checkpoint: Checkpoint,
) -> None:
    found = ask.passage(ask.Request(), default_checkpoint)
    assert (found.length, len(found.tokens)) == (1024, 1280)


def test_the_default_run_is_announced_with_less_than_12_minutes(
    default_checkpoint: Checkpoint,
) -> None:
    fed, asked = ask.passage(ask.Request(), default_checkpoint), variants.default()
    specs = [one.known for one in asked if one.known]
    probed = run._probe(asked, default_checkpoint, fed)
    slow = run._beside(ask.Request(device="cpu"), default_checkpoint, asked)
    given = (default_checkpoint, fed, asked, specs, probed)
    assert slow
    assert 300 < run._seconds(*given, slow) < run._seconds(*given, ()) < 720


def test_quantised_caches_run_beside_the_others_where_a_cpu_has_the_memory(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = (
        *variants.default(),
        variants.Variant("8 bits, weights too", "QuantizedKVCache:bits=8", bits=8),
    )
    slow = ("8 bits", "6 bits", "4 bits", "3 bits", "2 bits")
    slow += ("keys 8, values 4 bits", "keys 4, values 8 bits")

    def beside() -> tuple[str, ...]:
        return run._beside(ask.Request(device="cpu"), checkpoint, asked)

    assert beside() == slow
    with monkeypatch.context() as patch:
        patch.setattr(machine, "uses_gpu", lambda device: True)
        assert beside() == ()
    weights = 4 * checkpoint.parameters
    for memory, found in ((4 * weights, slow), (4 * weights - 1, ())):
        monkeypatch.setattr(machine, "memory_bytes", lambda memory=memory: memory)
        assert beside() == found


def test_a_process_beside_the_others_that_dies_costs_its_own_variants_alone(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = process.Process.__enter__

    def enter(self: process.Process) -> process.Process:
        running = begun(self)
        if self.kept and self.popen:
            self.popen.kill()
        return running

    caches = ("QuantizedKVCache:bits=4,group_size=32", "StoredKVCache")
    sizes = {"length": 8, "chunk": 4}
    request = ask.Request(
        model=checkpoint.source, caches=caches, tokens=TOKENS[:12], device="cpu", **sizes
    )
    whole = run.run(request)
    assert [one.failed for one in whole.measured] == ["", "", ""]
    assert whole.beside == ("QuantizedKVCache:bits=4,group_size=32",)
    monkeypatch.setattr(process.Process, "__enter__", enter)
    plain, quantised, stored = run.run(request).measured
    assert "ended by signal 9" in quantised.failed
    assert (plain.failed, stored.failed) == ("", "")
