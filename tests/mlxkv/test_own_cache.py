"""A person's own cache inside mlx-lm's Llama: what is right runs, and what is not is one line."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import command
import models
import numpy as np
import pytest

from mlxkv.engines import kinds, process
from mlxkv.engines.job import Job
from mlxkv.engines.mlx_lm import MlxLmRunner, caches_for
from oracle.formats import trace
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.formats.plan import Call, Clone, Crop, Fail, New, Plan, Recall, Reload, Step

TOKENS = tuple(models.SEQUENCE)
OWN = """
import mlx.core as mx

class Own:
    def __init__(self):
        self.offset, self.rows = 0, None

    def update_and_fetch(self, keys, values):
        new = (keys, values)
        if self.rows is not None:
            new = tuple(mx.concatenate([a[:, :, : self.offset], b], axis=2)
                        for a, b in zip(self.rows, new))
        self.rows, self.offset = new, self.offset + keys.shape[2]
        return self.rows

    @property
    def state(self):
        return (*(self.rows or (None, None)), self.offset)

    @state.setter
    def state(self, found):
        *rows, self.offset = found
        self.rows = tuple(rows)

    @classmethod
    def from_state(cls, state):
        made = cls()
        made.state = state
        return made

    def is_trimmable(self):
        return True

    def trim(self, n):
        self.offset -= n
        return n

    @property
    def nbytes(self):
        return sum(a.nbytes for a in self.rows or ())
"""
MAKE = "\ndef make(config):\n    return [Own() for _ in range(config.num_hidden_layers)]\n"


@pytest.fixture(scope="module")
def model(mlx_lm_of: Callable[[Path], Any], folder_of: Callable[[str], Path]) -> Any:
    return mlx_lm_of(folder_of("gqa"))


@pytest.fixture
def kind(tmp_path: Path) -> Callable[..., kinds.Kind]:
    def written(source: str, function: str = "make") -> kinds.Kind:
        (tmp_path / "mine.py").write_text(source)
        return kinds.parse(f"{tmp_path / 'mine.py'}:{function}")

    return written


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of one name in one process; a real process executes each once."""
    from mlxkv.engines import own_cache

    own_cache._function.cache_clear()
    monkeypatch.setattr(sys, "path", list(sys.path))


def run(model: Any, kind: kinds.Kind, *steps: Step) -> MlxLmRunner:
    return MlxLmRunner(model, Plan("p", (New("a"), *steps)), kind=kind).run()


STEPS = (
    Call("a", TOKENS[:10], 0),
    Clone("a", "b"),
    Call("a", TOKENS[10:14]),
    Crop("a", 10),
    Fail("a", (1, 2)),
    Reload("a"),
    Recall("a", "c", 8),
    Call("a", TOKENS[10:12], 10),
    Call("b", TOKENS[10:12], 10),
    Call("c", TOKENS[8:12], 8),
)


def test_a_cache_of_ones_own_does_all_that_mlx_lms_own_does(
    model: Any, kind: Callable[..., kinds.Kind]
) -> None:
    ours, theirs = run(model, kind(OWN + MAKE), *STEPS), run(model, kinds.parse("KVCache"), *STEPS)
    assert [o.error for o in ours.outcomes] == [None] * 11
    found, expected = ours.arrays(), theirs.arrays()
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5, err_msg=name)
    said = ours.says()["caches"]["a"]
    assert (said["length"], said["size"], said["rows"]) == (12, None, 12)
    assert said["nbytes"] == said["allocated"] == 12 * 2 * 2 * 8 * 4 * 3


def test_a_cache_without_the_rest_of_the_protocol_is_fed_and_no_more(
    model: Any, kind: Callable[..., kinds.Kind]
) -> None:
    least = OWN.partition("    @property")[0] + MAKE
    found = run(model, kind(least), *STEPS[:4], Fail("a", (1, 2)), Reload("a"), Recall("a", "c", 8))
    errors = [outcome.error for outcome in found.outcomes]
    assert errors[:4] == [None] * 4
    assert errors[4] == errors[5] == "cannot be expressed: mine.py:make has no is_trimmable()"
    assert errors[6] == (
        "cannot be expressed: class Own has no state and from_state to be saved and read by"
    )
    assert errors[7] is not None
    assert (
        errors[7] == "cannot be expressed: class Own has no nbytes, which LRUPromptCache asks for"
    )
    # It shows no rows, so there is nothing of it but logits.
    assert not any(name.startswith("kv/") for name in found.arrays())
    said = found.says()["caches"]["a"]
    assert (said["nbytes"], said["rows"]) == (None, None)


@pytest.mark.parametrize(
    ("name", "file"), [("not_there:make", "not_there.py:make"), ("a.b:make", "a/b.py:make")]
)
def test_a_module_that_python_does_not_find_may_be_a_file(model: Any, name: str, file: str) -> None:
    with pytest.raises(Refusal) as error:
        caches_for(model, kinds.parse(name))
    package = name.partition(":")[0].partition(".")[0]
    what = f"Python finds no module {package}, expected one that is installed"
    assert str(error.value) == f"{name}: {what}; name its file: {file}"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("def make(", "mine.py:make: import failed with SyntaxError"),
        ("import not_there", "No module named 'not_there' (mine.py:1 in <module>)"),
        ("raise SystemExit(0)", "mine.py:make: import failed with SystemExit: 0 (mine.py:1"),
        ("x = 1", "no function make in "),
        (OWN + "make = 3", "no function make in "),
        ("def make(): pass", "make(config) failed with TypeError: make() takes 0 positional"),
        (
            "def make(config):\n    1 / 0",
            "failed with ZeroDivisionError: division by zero (mine.py:2",
        ),
        (
            "def make(config):\n    return None",
            "make(config) gave a NoneType, expected a list of 3",
        ),
        (OWN + MAKE.replace("layers)", "layers - 1)"), "gave 2 caches, expected a list of 3, one"),
        (OWN + "def make(config):\n    return [Own()] * 3", "gave one cache for several layers"),
        (
            OWN.replace("update_and", "update_or") + MAKE,
            "of class Own, has no update_and_fetch, expected",
        ),
        (
            OWN.replace("self.offset", "self.n") + MAKE,
            "layer 0's cache, of class Own, has no offset",
        ),
        (
            OWN.replace("self.offset, self", "self.n, self").replace(
                "    def is_t", "    @property\n    def offset(self):\n        1 / 0\n    def is_t"
            )
            + MAKE,
            "offset of layer 0's cache failed with ZeroDivisionError",
        ),
    ],
)
def test_what_is_no_cache_for_each_layer_is_one_line(
    model: Any, kind: Callable[..., kinds.Kind], source: str, says: str
) -> None:
    with pytest.raises(Refusal, match=re.escape(says)) as error:
        caches_for(model, kind(source))
    assert len(str(error.value).splitlines()) == 1
    assert error.value.where == "mine.py:make"


def test_a_clone_is_the_caches_own_copy_where_it_has_one(
    model: Any, kind: Callable[..., kinds.Kind]
) -> None:
    shared = OWN + "\n    def copy(self):\n        return self\n" + MAKE
    found = run(model, kind(shared), Call("a", TOKENS[:5]), Clone("a", "b"), Call("b", (1,)))
    assert found.says()["caches"]["a"]["length"] == 6  # the copy is none, and that is seen


def test_rows_that_only_some_layers_show_are_not_judged(
    model: Any, kind: Callable[..., kinds.Kind]
) -> None:
    some = MAKE.replace("return [", "Own.n = 0\n    made = [").rstrip() + (
        "\n    made[1].__class__ = type('Mute', (Own,), {'state': None})\n    return made\n"
    )
    found = run(model, kind(OWN + some), Call("a", TOKENS[:5]))
    assert found.outcomes[1].error is None
    assert not any(name.startswith("kv/") for name in found.arrays())


@pytest.mark.parametrize("raises", ["raise OSError('gone')", "raise SystemExit(3)", "1 / 0"])
def test_what_raises_in_a_call_is_that_steps_error(
    model: Any, kind: Callable[..., kinds.Kind], raises: str
) -> None:
    fails = OWN.replace(
        "        new = (k", f"        if self.offset == 5: {raises}\n        new = (k"
    )
    found = run(model, kind(fails + MAKE), Call("a", TOKENS[:5]), Call("a", (1,)), Call("a", (1,)))
    errors = [outcome.error for outcome in found.outcomes]
    assert errors[:2] == [None, None]
    assert errors[2] is not None
    assert errors[2].startswith("mine.py:make: a call of mlx-lm's Llama failed with ")
    assert "(mine.py:9 in update_and_fetch)" in errors[2]
    assert errors[3] is not None


def test_an_offset_that_counts_wrongly_does_not_move_the_rows_of_a_trace(
    model: Any, kind: Callable[..., kinds.Kind]
) -> None:
    late = OWN.replace("self.offset + keys.shape[2]", "self.offset + keys.shape[2] - 1")
    found = run(model, kind(late + MAKE), Call("a", TOKENS[:5], 0), Call("a", TOKENS[5:7], 5))
    assert np.concatenate(found.positions).tolist() == [*range(7)]
    assert found.says()["caches"]["a"]["length"] == 5


def job(folder: Path, out: Path, cache: str, *steps: Step) -> Job:
    plan = Plan("p", (New("a"), *steps))
    return Job(str(folder), (plan,), out, "float32", "float32", "cpu", caches={"p": cache})


def test_a_module_is_imported_by_its_name(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "mine.py").write_text(OWN + MAKE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(__file__).parents[2]}")
    asked = job(folder_of("gqa"), tmp_path, "package.mine:make", Call("a", TOKENS, 0))
    with asked.begin(process.MLX_LM) as running:
        asked.end(running)
    found = trace.read(asked.trace(asked.plans[0]))
    assert found.meta.environment["cache"] == "package.mine:make"
    assert found.logits.shape == (24, 40)


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "import os\nos._exit(3)",
            "mine.py: its process ended with exit code 3, expected a result",
        ),
        (
            "import os\ndef make(config):\n    os._exit(0)",
            "mine.py: its process ended with exit code 0 before it was done, expected a result; "
            "the file ends its own process",
        ),
        (OWN, "error: mine.py:make: no function make in "),
    ],
)
def test_a_file_that_ends_its_process_or_has_no_make_is_one_line(
    folder_of: Callable[[str], Path],
    kind: Callable[..., kinds.Kind],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    source: str,
    says: str,
) -> None:
    asked = job(folder_of("gqa"), tmp_path, kind(source).text, Call("a", TOKENS, 0))
    with asked.begin(process.MLX_LM) as running, pytest.raises((Refusal, AlreadySaid)) as error:
        asked.end(running)
    assert says in f"{error.value}\n{capfd.readouterr().err}"
    assert not asked.trace(asked.plans[0]).exists()


# Judged by compare and locate.


def judged(
    name: str, folder: Path, oracle: Path, out: Path, cache: object, *more: str
) -> command.Done:
    given = [folder, "--oracle", oracle, "--cache", cache, "--out", out, *more]
    return command.mlxkv(name, *given)


def test_a_right_cache_of_ones_own_agrees_and_its_rows_are_judged(
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Path],
    kind: Callable[..., kinds.Kind],
    tmp_path: Path,
) -> None:
    own = kind(OWN + MAKE).text
    done = judged("compare", folder_of("gqa"), oracle_of("gqa"), tmp_path / "out", own, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert (verdict["subject"]["engine"], verdict["scopes"]) == (
        "mlx-lm with mine.py:make",
        ["logits", "cache"],
    )
    said = verdict["environment"]["mlx-lm with mine.py:make"]
    assert said["cache"] == "mine.py:make"
    assert len(said["sha256 of mine.py"]) == 64
    assert "caches" not in said
    assert {"mlx-lm with mine.py:make", "oracle"} <= set(verdict["took"])


def test_a_cache_that_shows_nothing_is_judged_by_logits_and_one_that_raises_not_at_all(
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Path],
    kind: Callable[..., kinds.Kind],
    tmp_path: Path,
) -> None:
    given = folder_of("gqa"), oracle_of("gqa"), tmp_path / "out"
    least = OWN.partition("    @property")[0] + MAKE
    done = judged("compare", *given, kind(least).text)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mlx-lm with mine.py:make: agree (logits)" in done.stdout
    fails = OWN.replace("        new = (k", "        if self.offset == 7: 1 / 0\n        new = (k")
    done = judged("compare", *given, kind(fails + MAKE).text)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "failed with ZeroDivisionError: division by zero (mine.py:9 in upd" in done.stdout


@pytest.mark.parametrize("name", ["compare", "locate"])
def test_a_lossy_cache_is_judged_as_any_other_and_said_to_be_lossy(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    given = folder_of("gqa"), oracle_of("gqa"), tmp_path
    done = judged(name, *given, "StoredKVCache:dtype=bfloat16")
    assert done.returncode == 1, done.stdout + done.stderr
    note = "note: lossy by design (quantised): `mlxkv cost` says what it costs"
    assert note in done.stdout
    assert "mlx-lm with StoredKVCache:dtype=bfloat16" in done.stdout
    assert "a scale, an eps" not in done.stdout
    assert ("lossy by design: " in done.stdout) == (name == "locate")


def test_where_a_lossy_cache_that_shows_no_rows_is_off_nothing_is_guessed(
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Path],
    kind: Callable[..., kinds.Kind],
    tmp_path: Path,
) -> None:
    least = OWN.partition("    @property")[0].replace(
        "        new = (k",
        "        keys = keys.astype(mx.bfloat16).astype(mx.float32)\n        new = (k",
    )
    own = kind(least + MAKE).text
    given = folder_of("gqa"), oracle_of("gqa"), tmp_path
    done = judged("locate", *given, own, "--lossy", "quantised")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the first wrong position points to" not in done.stdout
    assert "RoPE or the mask" not in done.stdout
    assert "lossy by design: which rows are off can be seen where `.state` shows" in done.stdout
    done = judged("locate", *given, own)
    assert "the first wrong position points to RoPE or the mask" in done.stdout


def test_a_state_whose_order_nobody_knows_is_not_compared(
    folder_of: Callable[[str], Path], oracle_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """A list of blocks of 16 rows, for 24 tokens and more."""
    own = f"{Path(__file__).parent / 'own_formats.py'}:paged"
    done = judged("compare", folder_of("gqa"), oracle_of("gqa"), tmp_path, own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "own_formats.py:paged: agree (logits)" in done.stdout
    assert "cannot tell" not in done.stdout


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            ["KVCache", "--engine", "port"],
            "--cache: a cache runs inside mlx-lm's Llama, expected --",
        ),
        (["KVCache", "--engine", "mine.py:load"], "expected --engine mlx-lm, got mine.py:load"),
        (
            ["port"],
            "--cache: the port's own cache runs in the port, which is judged without --cache",
        ),
        (["StaticCache"], "with `mlxkv pitfalls --cache StaticCache`"),
        (["Nothing"], "--cache: 'Nothing', expected FILE.py:make, module:function, or one of KVC"),
        (["nothing.py:make"], "--cache: nothing.py: no such file, expected the Python file"),
        (["KVCache", "--lossy", "window"], "--lossy window, expected it for a cache of your own"),
        (["QuantizedKVCache:bits=8"], "group_size is 64, expected none, which divides head_dim 8"),
    ],
)
def test_a_cache_that_cannot_be_judged_is_refused_before_anything_runs(
    folder_of: Callable[[str], Path],
    oracle_of: Callable[[str], Path],
    tmp_path: Path,
    given: list[str],
    says: str,
) -> None:
    done = judged("compare", folder_of("gqa"), oracle_of("gqa"), tmp_path / "out", *given)
    command.refused(done, says)
    assert not (tmp_path / "out").exists()


def test_lossy_without_a_cache_is_refused(folder_of: Callable[[str], Path]) -> None:
    done = command.mlxkv("compare", folder_of("gqa"), "--lossy", "window")
    command.refused(done, "--lossy window: expected it beside --cache")
