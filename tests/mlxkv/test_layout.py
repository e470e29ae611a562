"""A cache that is laid out in another way than the truth's is judged in its layout: agrees if it is
right, differs if one row is wrong. A wrong cache in the usual layout is never excused.

The layouts are written down here once more, from the truth to what is stored.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import models
import numpy as np
import own_llama
import pytest
from command import mlxkv
from synthetic import (
    LAYERS,
    NOISE,
    Array,
    N,
    changed,
    make_algebra,
    make_candidates,
    make_case,
    make_probe,
    noisy,
)

from mlxkv.engines import own
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.layout import as_truth, find
from mlxkv.judge.result import Gate, Verdict
from mlxkv.judge.verdict import judge
from oracle.formats.plan import judged_plans
from oracle.formats.trace import Meta, Trace

HEADS = {"mha": (4, 8), "gqa": (2, 12), "mqa": (1, 16)}
"""By name K and D; where D is 12 it is not hidden / heads of any usual model."""
DTYPES = ("float32", "bfloat16")
PLAIN = "instead of [heads, positions, channels]"
Stored = Callable[[Array], Array]


def angles(dim: int, n: int = N) -> Array:
    return np.arange(n)[:, None] * 10000.0 ** (-np.arange(0, dim, 2) / dim)


def before_rope(keys: Array) -> Array:
    """Keys turned back: one complex number for the pair (i, i + D / 2)."""
    half = keys.shape[-1] // 2
    z = (keys[..., :half] + 1j * keys[..., half:]) * np.exp(-1j * angles(keys.shape[-1]))
    return np.concatenate([z.real, z.imag], axis=-1)


def metas(keys: Array) -> Array:
    """Channel i next to channel i + D / 2."""
    half = keys.shape[-1] // 2
    order = [c for i in range(half) for c in (i, i + half)]
    return keys[..., order]


def halves(keys: Array) -> Array:
    """As `metas`, of a truth whose neighbours make a pair."""
    return np.concatenate([keys[..., 0::2], keys[..., 1::2]], axis=-1)


LAYOUTS: dict[str, tuple[str, Stored, str]] = {
    "Meta's order": ("keys", metas, "in Meta's order (neighbours make a pair)"),
    "halves": ("keys", halves, "in Hugging Face's order (halves make a pair)"),
    "before RoPE": ("keys", before_rope, "before RoPE"),
    "newest keys first": ("keys", lambda a: a[:, ::-1], "newest first"),
    "newest values first": ("values", lambda a: a[:, ::-1], "newest first"),
    "values times 2": ("values", lambda a: a * 2, "times 2"),
    "keys scaled": ("keys", lambda a: a * -0.125, "times -0.125"),
    "rows before heads": ("values", lambda a: a.swapaxes(0, 1), "as [positions, "),
    "keys transposed": ("keys", lambda a: a.swapaxes(1, 2), "as ["),
    "channels first": ("values", lambda a: a.transpose(2, 0, 1), "as ["),
    "heads side by side": (
        "values",
        lambda a: a.swapaxes(0, 1).reshape(N, -1),
        "as [positions, heads x ",
    ),
    "a batch of one": ("keys", lambda a: a[None], "as [1, "),
    "Meta's order, scaled": ("keys", lambda a: metas(a) * 0.5, "and times 0.5"),
    "before RoPE in Meta's order": ("keys", lambda a: metas(before_rope(a)), "and before RoPE"),
    "before RoPE, newest first": (
        "keys",
        lambda a: before_rope(a)[:, ::-1],
        "newest first and before RoPE",
    ),
    "transposed, times 2": ("values", lambda a: 2 * a.swapaxes(1, 2), " and times 2"),
}
OF_HEADS: dict[str, tuple[str, Stored, str]] = {
    "heads reversed": ("keys", lambda a: a[::-1], "with heads in the order "),
    "heads turned on": ("values", lambda a: np.roll(a, 1, axis=0), "with heads in the order "),
    "heads reversed, times 2": ("values", lambda a: 2 * a[::-1], " and times 2"),
}


def a_case(heads: str, dtype: str) -> Case:
    kv, dim = HEADS[heads]
    case = make_case(dtype=dtype, kv=(kv, dim))
    tables = {"rope/cos": np.cos(angles(dim)), "rope/sin": np.sin(angles(dim))}
    return replace(case, truth=replace(case.truth, arrays=dict(case.truth.arrays) | tables))


CASES = {(heads, dtype): a_case(heads, dtype) for heads in HEADS for dtype in DTYPES}


def stored(case: Case, **layouts: Stored) -> dict[str, Trace]:
    """A correct engine's runs, whose step plan keeps keys or values in these layouts."""
    runs = make_candidates(case)
    for kind, layout in layouts.items():
        for layer in range(LAYERS):
            name = f"kv/a/{layer:03d}/{kind}"
            runs["step"] = changed(runs["step"], name, layout)
    return runs


def stale(layout: Stored, *, head: int = 0, position: int = 9) -> Stored:
    """One row of one head is that of the position before, in the layout."""

    def change(array: Array) -> Array:
        array = array.copy()
        array[head, position] = array[head, position - 1]
        return layout(array)

    return change


def gates(verdict: Verdict, kind: str) -> list[tuple[bool, bool, str | None]]:
    """Of the plan whose cache is laid out in another way, on the sequence itself."""
    of = [g for g in verdict.gates if g.plan == "step" and g.name.startswith(kind)]
    return [(g.ran, g.failed, g.reason) for g in of]


def said(verdict: Verdict) -> list[str]:
    return [note for note in verdict.notes if " are kept " in note]


EVERY = [
    (heads, dtype, name)
    for heads in HEADS
    for dtype in DTYPES
    for name in (*LAYOUTS, *(OF_HEADS if heads != "mqa" else ()))
    # Of one head both are the same array in the same order.
    if (heads, name) != ("mqa", "heads side by side")
]


@pytest.mark.parametrize(("heads", "dtype", "name"), EVERY)
def test_every_layout_is_named_and_judged_and_a_changed_row_in_it_is_seen(
    heads: str, dtype: str, name: str
) -> None:
    case = CASES[heads, dtype]
    kind, layout, words = (LAYOUTS | OF_HEADS)[name]
    right = judge(case, stored(case, **{kind: layout}))
    assert (right.outcome, right.reasons, right.scopes) == ("agree", (), ("logits", "cache"))
    (note,) = said(right)
    assert note.startswith(f"{kind} are kept ")
    assert words in note
    # Keys before RoPE are stale before RoPE.
    wrong = (
        (lambda a: layout(before_rope_again(stale(before_rope)(a))))
        if "before RoPE" in name
        else stale(layout)
    )
    verdict = judge(case, stored(case, **{kind: wrong}))
    assert (verdict.outcome, said(verdict)) == ("differ", [note]), name
    assert {g.name for g in verdict.gates if g.failed} <= {f"{kind} worst row", f"{kind} 95%"}
    (worst,) = [g for g in verdict.gates if (g.plan, g.name) == ("step", f"{kind} worst row")]
    assert (worst.position, worst.layer is not None) == (9, True)


def test_a_layout_of_both_sequences_is_said_once_and_one_of_the_probe_is_said_to_be_its() -> None:
    case, probe = make_case(), make_probe()
    usual = probe.candidates["chunked"]

    def notes(main: Stored, other: Stored) -> list[str]:
        chunked = usual
        for layer in range(LAYERS):
            chunked = changed(chunked, f"kv/a/{layer:03d}/keys", other)
        given = replace(probe, candidates=dict(probe.candidates) | {"chunked": chunked})
        verdict = judge(case, stored(case, keys=main), probe=given)
        assert (verdict.outcome, verdict.scopes) == ("agree", ("logits", "cache"))
        return said(verdict)

    def transposed(keys: Array) -> Array:
        return 3 * keys.swapaxes(1, 2)

    what = f"keys are kept as [heads, channels, positions] {PLAIN} and times 3"
    note = f"{what}; compared after undoing that"
    assert notes(transposed, transposed) == [note]
    assert notes(lambda keys: keys, transposed) == [f"probe: {note}"]


def before_rope_again(keys: Array) -> Array:
    half = keys.shape[-1] // 2
    z = (keys[..., :half] + 1j * keys[..., half:]) * np.exp(1j * angles(keys.shape[-1]))
    return np.concatenate([z.real, z.imag], axis=-1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
def test_the_usual_layout_needs_no_word(heads: str, dtype: str) -> None:
    case = CASES[heads, dtype]
    step = make_candidates(case)["step"]
    assert said(judge(case, make_candidates(case))) == []
    for kind in ("keys", "values"):
        found = find(step, case.truth, kind)  # type: ignore[arg-type]
        assert found is not None
        assert found.changes == 0


def test_keys_that_rope_turned_little_are_before_rope_all_the_same() -> None:
    """On three tokens keys before RoPE lie near those after it, and further than noise."""
    theta, n, dim = 500_000.0, 3, 128
    angle = np.arange(n)[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    case = make_case(n=n, prompt=2, kv=(2, dim))
    tables = {"rope/cos": np.cos(angle), "rope/sin": np.sin(angle)}
    case = replace(case, truth=replace(case.truth, arrays=dict(case.truth.arrays) | tables))

    def back(keys: Array) -> Array:
        z = (keys[..., : dim // 2] + 1j * keys[..., dim // 2 :]) * np.exp(-1j * angle)
        return np.concatenate([z.real, z.imag], axis=-1)

    verdict = judge(case, stored(case, keys=back))
    assert (verdict.outcome, said(verdict)) == (
        "agree",
        ["keys are kept before RoPE; compared after undoing that"],
    )


def in_half(array: Array) -> Array:
    return array.astype(np.float16).astype(np.float32)


def one_head(array: Array) -> Array:
    """The last head is twice what it should be."""
    array = array.copy()
    array[-1] *= 2
    return array


def head_copied(array: Array) -> Array:
    array = array.copy()
    array[-1] = array[0]
    return array


def many_rows(array: Array) -> Array:
    """Ten of 24 rows are those before."""
    array = array.copy()
    array[:, 14:] = array[:, 13:-1].copy()
    return array


WRONG: dict[str, tuple[str, Stored]] = {
    "float16": ("float32", in_half),
    "one row": ("bfloat16", stale(lambda a: a)),
    "one head twice too large": ("float32", one_head),
    "one head twice too large, bfloat16": ("bfloat16", one_head),
    "a head of another": ("float32", head_copied),
    "many rows": ("float32", many_rows),
    "a little too large": ("float32", lambda a: a * 1.001),
    "too large": ("bfloat16", lambda a: a * 1.2),
}


@pytest.mark.parametrize("heads", ["mha", "gqa"])
@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_cache_in_the_usual_layout_is_not_excused(
    wrong: str, kind: str, heads: str
) -> None:
    dtype, change = WRONG[wrong]
    case = CASES[heads, dtype]
    verdict = judge(case, stored(case, **{kind: change}))
    assert (verdict.outcome, said(verdict)) == ("differ", [])
    assert any(failed for _, failed, _ in gates(verdict, kind))


@pytest.mark.parametrize("wrong", ["float16", "one head twice too large", "a head of another"])
def test_a_wrong_cache_in_another_layout_is_not_excused(wrong: str) -> None:
    _, change = WRONG[wrong]
    case = CASES["gqa", "float32"]
    verdict = judge(case, stored(case, keys=lambda a: metas(change(a))))
    assert verdict.outcome == "differ"
    assert said(verdict)


def test_one_layer_in_another_layout_is_a_wrong_layer() -> None:
    case = CASES["gqa", "float32"]
    runs = make_candidates(case)
    runs["step"] = changed(runs["step"], "kv/a/001/keys", metas)
    verdict = judge(case, runs)
    assert verdict.outcome == "differ"
    assert {g.layer for g in verdict.gates if g.failed} == {1}


UNKNOWN: dict[str, Stored] = {
    "channels mixed": lambda a: a @ np.linalg.qr(np.random.default_rng(3).normal(size=(12, 12)))[0],
    "rows in an odd order": lambda a: a[:, np.random.default_rng(4).permutation(N)],
    "zeros": np.zeros_like,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_known_layout_fits_is_not_judged_and_said_so(name: str, dtype: str) -> None:
    case = CASES["gqa", dtype]
    verdict = judge(case, stored(case, keys=UNKNOWN[name]))
    assert (verdict.outcome, verdict.scopes, verdict.reasons) == ("agree", ("logits",), ())
    assert (
        gates(verdict, "keys")
        == [(False, False, "not compared: keys laid out in another way, or wrong: not judged")] * 3
    )
    assert all(ran and not failed for ran, failed, _ in gates(verdict, "values"))


def without(*plans: str) -> Callable[[Mapping[str, Trace]], dict[str, Trace]]:
    return lambda runs: {name: run for name, run in runs.items() if name not in plans}


def worse(runs: Mapping[str, Trace]) -> dict[str, Trace]:
    """One row of logits is another's."""

    def change(logits: Array) -> Array:
        logits[12] = logits[11]
        return logits

    return dict(runs) | {"chunked": changed(runs["chunked"], "logits", change)}


UNSOUND: dict[str, Callable[[Mapping[str, Trace]], dict[str, Trace]]] = {
    "nothing uncached": without("full", "prefixes"),
    "wrong logits": worse,
}


@pytest.mark.parametrize("unsound", UNSOUND)
@pytest.mark.parametrize("layout", ["Meta's order", "keys transposed", "zeros"])
def test_without_sound_logits_nothing_is_excused(unsound: str, layout: str) -> None:
    case = CASES["gqa", "float32"]
    change = UNKNOWN[layout] if layout in UNKNOWN else LAYOUTS[layout][1]
    verdict = judge(case, UNSOUND[unsound](stored(case, keys=change)))
    transposed = layout == "keys transposed" and unsound == "nothing uncached"
    assert verdict.outcome == ("cannot tell" if transposed else "differ")
    assert said(verdict) == []


@pytest.mark.parametrize("right", [True, False])
def test_the_probe_is_judged_in_its_layout_too_and_named_once(right: bool) -> None:
    case, probe = CASES["gqa", "float32"], make_probe()
    runs = dict(probe.candidates)
    for layer in range(LAYERS):
        name = f"kv/a/{layer:03d}/keys"
        change = metas if right else stale(metas, position=260)
        runs["chunked"] = changed(runs["chunked"], name, change)
    probed = replace(probe, candidates=runs, algebra={})
    verdict = judge(case, stored(case, keys=metas), probe=probed)
    assert (verdict.outcome, len(said(verdict))) == ("agree" if right else "differ", 1)
    wrong = {(g.plan, g.position) for g in verdict.gates if g.failed and "worst" in g.name}
    assert wrong == (set() if right else {("probe chunked", 260)})


@pytest.mark.parametrize("layer", range(LAYERS))
def test_one_layer_of_another_shape_is_not_another_layout(layer: int) -> None:
    case = CASES["gqa", "float32"]
    runs, name = make_candidates(case), f"kv/a/{layer:03d}/keys"
    runs["step"] = changed(runs["step"], name, lambda a: a.swapaxes(0, 1))
    verdict = judge(case, runs)
    assert verdict.outcome == "cannot tell"
    assert f"{name} has shape [24, 2, 12], expected [2, 24, 12]" in verdict.reasons[0]


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_trace_can_be_laid_out_as_the_truth_whole(name: str) -> None:
    case = CASES["gqa", "float32"]
    kind, layout, _ = LAYOUTS[name]
    usual, other = make_candidates(case)["step"], stored(case, **{kind: layout})["step"]
    found = as_truth(other, case.truth)
    for key in usual.arrays:
        np.testing.assert_allclose(found.arrays[key], usual.arrays[key], rtol=1e-5, atol=1e-5)
    assert as_truth(usual, case.truth).arrays == usual.arrays


def test_a_row_too_few_is_not_another_layout() -> None:
    case = CASES["gqa", "float32"]
    verdict = judge(case, stored(case, keys=lambda a: a[:, 1:]))
    assert verdict.outcome == "cannot tell"
    assert "has shape [2, 23, 12], expected [2, 24, 12]" in verdict.reasons[0]


def test_nan_in_another_layout_differs() -> None:
    def broken(array: Array) -> Array:
        array[0, 3, 1] = np.nan
        return metas(array)

    verdict = judge(CASES["gqa", "float32"], stored(CASES["gqa", "float32"], keys=broken))
    assert (verdict.outcome, len(said(verdict))) == ("differ", 1)


OTHERS: dict[str, Stored] = {"usual": np.array, "transposed": lambda a: a.swapaxes(0, 1)}


def algebra_cache(verdict: Verdict) -> list[Gate]:
    """What the float64 run's keys and values of the plan *step* came to."""
    return [g for g in verdict.gates if (g.name, g.plan) == ("algebra, cache", "step")]


@pytest.mark.parametrize("of", OTHERS)
@pytest.mark.parametrize("rows", [N, N - 4])
def test_a_cache_of_no_numbers_is_no_other_layout(rows: int, of: str) -> None:
    """No layout fits it, which is excused of numbers alone."""

    def broken(array: Array) -> Array:
        array[:, :rows] = np.nan
        return OTHERS[of](array)

    case = CASES["gqa", "float32"]
    verdict = judge(case, stored(case, keys=broken))
    assert verdict.outcome == "differ"
    assert any(failed for _, failed, _ in gates(verdict, "keys"))
    assert verdict.found.startswith("the keys of ")
    assert verdict.found.endswith(" are NaN in the cache of plan step")
    exact = make_algebra(case)
    for layer in range(LAYERS):
        exact["step"] = changed(exact["step"], f"kv/a/{layer:03d}/keys", broken)
    (gate,) = algebra_cache(judge(case, {}, algebra=exact))
    assert (gate.ran, gate.failed) == (True, True)


def test_a_number_that_is_none_is_named_by_its_place_in_the_truths_layout() -> None:
    def broken(array: Array) -> Array:
        array[1, 20, 3] = np.nan
        return array.swapaxes(0, 1)

    case = CASES["gqa", "float32"]
    verdict = judge(case, stored(case, values=broken))
    what = "the values of position 20, layer 0, head 1 are NaN in the cache of plan step"
    assert (verdict.outcome, verdict.found) == ("differ", what)


def test_a_shape_that_no_order_of_axes_gives_is_not_judged() -> None:
    case = CASES["gqa", "float32"]
    verdict = judge(case, stored(case, keys=lambda a: a.reshape(3, N, -1)))
    assert (verdict.outcome, verdict.scopes) == ("agree", ("logits",))
    reason = "not compared: keys laid out in another way, or wrong: not judged"
    assert gates(verdict, "keys") == [(False, False, reason)] * 3


def test_a_folder_without_the_angles_cannot_know_keys_before_rope() -> None:
    case = CASES["gqa", "float32"]
    arrays = {k: a for k, a in case.truth.arrays.items() if not k.startswith("rope/")}
    verdict = judge(
        replace(case, truth=replace(case.truth, arrays=arrays)), stored(case, keys=before_rope)
    )
    assert (verdict.outcome, verdict.scopes) == ("agree", ("logits",))


@pytest.mark.parametrize("right", [True, False])
def test_the_float64_run_is_judged_in_its_layout_too(right: bool) -> None:
    case = CASES["gqa", "float32"]
    exact = make_algebra(case)
    layout = metas if right else stale(metas)
    runs = stored(case, keys=metas)
    for layer in range(LAYERS):
        exact["step"] = changed(exact["step"], f"kv/a/{layer:03d}/keys", layout)
    verdict = judge(case, runs, algebra=exact)
    assert verdict.outcome == ("agree" if right else "differ")
    (gate,) = algebra_cache(verdict)
    assert (gate.ran, gate.failed) == (True, not right)


def test_noise_of_the_size_of_the_floor_does_not_hide_a_layout() -> None:
    """In bfloat16 a correct engine's keys are off by some percent of a row."""
    case = CASES["mqa", "bfloat16"]
    rng = np.random.default_rng(7)
    runs = make_candidates(case)
    for layer in range(LAYERS):
        name = f"kv/a/{layer:03d}/keys"
        keys = noisy(case.truth.arrays[name], rng, NOISE["bfloat16"] / 4)
        runs["step"] = changed(runs["step"], name, lambda _, keys=keys: before_rope(keys))
    assert len(said(judge(case, runs))) == 1


# A real tiny model: one's own Llama, whose cache is another one.

METAS = """

def metas(x):
    B, H, L, D = x.shape
    return x.reshape(B, H, L, 2, D // 2).swapaxes(-1, -2).reshape(B, H, L, D)
"""
ROPE = "mx.fast.rope(a, D, traditional=False, base=theta, scale=1.0, offset=cache.offset)"
TURN = (
    "        queries, keys = (\n"
    f"            {ROPE}\n            for a in (queries, keys)\n        )\n"
    "        keys, values = cache.update(keys, values)\n"
)
LATE = (
    f"        queries = {ROPE.replace('(a', '(queries')}\n"
    "        keys, values = cache.update(keys, values)\n"
    f"        keys = {ROPE.replace('(a', '(keys').replace('cache.offset', '0')}\n"
)
STATE = "return self.keys, self.values\n\n"
ENGINES: dict[str, tuple[tuple[str, str], list[str]]] = {
    "Meta's order": (
        ("fast.rope(a, D, traditional=False", "fast.rope(metas(a), D, traditional=True"),
        ["keys are kept in Meta's order (neighbours make a pair); compared after undoing that"],
    ),
    "before RoPE": (
        (TURN, LATE),
        ["keys are kept before RoPE; compared after undoing that"],
    ),
    "newest first": (
        (STATE, "return self.keys[:, :, ::-1], self.values[:, :, ::-1]\n\n"),
        [
            f"{kind} are kept newest first; compared after undoing that"
            for kind in ("keys", "values")
        ],
    ),
    "values times 2": (
        (STATE, "return self.keys, 2 * self.values\n\n"),
        ["values are kept times 2; compared after undoing that"],
    ),
    "transposed": (
        (STATE, "return self.keys.swapaxes(2, 3), self.values.swapaxes(1, 2)\n\n"),
        [
            f"keys are kept as [heads, channels, positions] {PLAIN}; compared after undoing that",
            f"values are kept as [positions, heads, channels] {PLAIN}; compared after undoing that",
        ],
    ),
}


def engine(folder: Path, *changes: tuple[str, str]) -> Path:
    text = Path(own_llama.__file__).read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.py").write_text(text + METAS)
    return folder / "mine.py"


def verdict_on(file: Path, folder: Path, answer: Path) -> Verdict:
    """The verdict on the file's model, which runs in this process."""
    case, source = read_case(answer), own.find(f"{file}:load")
    model = own.load(source, str(folder), "float32")
    runs = {}
    for name, plan in judged_plans(models.SEQUENCE, prompt=models.PROMPT).items():
        arrays = own.OwnRunner(model, plan, name="mine", vocab=40, heads=(2, 8)).run().arrays()
        runs[name] = Trace(Meta(plan, "mine", "", "float32"), arrays)
    return judge(case, runs)


@pytest.fixture
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.mark.usefixtures("_own_path")
@pytest.mark.parametrize("name", ENGINES)
def test_an_engine_of_ones_own_in_every_layout(
    name: str, folder_of: Callable[[str], Path], answer: Path, tmp_path: Path
) -> None:
    change, notes = ENGINES[name]
    verdict = verdict_on(engine(tmp_path, change), folder_of("gqa"), answer)
    assert (verdict.outcome, verdict.scopes, said(verdict)) == ("agree", ("logits", "cache"), notes)


@pytest.mark.parametrize(("tokens", "capacity"), [(24, 24), (5, 5), (5, 32), (2, 32), (8, 8)])
def test_the_tokens_in_use_are_cut_in_every_layout_of_the_state(tokens: int, capacity: int) -> None:
    """K is 2 and D is 8; the buffer may be larger than what is used, or than D."""
    usual = mx.random.normal((1, 2, capacity, 8))
    for axes in ((0, 1, 2, 3), (0, 2, 1, 3), (0, 1, 3, 2), (0, 2, 3, 1)):
        shown = usual.transpose(axes)
        layer = SimpleNamespace(state=(shown, shown), offset=tokens)
        pair = own._rows(layer, 1, (2, 8))
        assert pair is not None
        wanted = usual[:, :, :tokens].transpose(axes)
        # Eight tokens of eight channels each can be either; then nothing is lost.
        assert pair[0].shape == wanted.shape
        assert mx.array_equal(pair[0], wanted)


def test_heads_are_read_from_a_config() -> None:
    assert own.heads_of(models.config("mqa")) == (1, 12)
    assert own.heads_of({"num_attention_heads": 4, "hidden_size": 32}) == (4, 8)
    assert own.heads_of({"hidden_size": 32}) == own.heads_of({}) == ()


# The newest row is attended to, but what is kept of position 12 is the row before it.
KEEP = "        self.keys, self.values, self.offset = keys, values, keys.shape[2]\n"
STALE = KEEP + (
    "        if keys.shape[2] == 13:\n"
    "            self.keys = mx.concatenate([keys[:, :, :12], keys[:, :, 11:12]], axis=2)\n"
)


@pytest.mark.parametrize("right", [True, False])
def test_a_layout_is_named_by_compare(answer: Path, tmp_path: Path, right: bool) -> None:
    change, (note,) = ENGINES["Meta's order"]
    mine = engine(tmp_path, change, *(() if right else ((KEEP, STALE),)))
    done = mlxkv("compare", "--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "o")
    assert done.returncode == (0 if right else 1), done.stdout + done.stderr
    if right:
        assert f"note: {note}" in done.stdout.splitlines()
