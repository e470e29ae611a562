"""A person's own MLX model is judged as the port is; what goes wrong in their file is one line that
says where.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import models
import numpy as np
import own_llama
import pytest
from command import Done, mlxkv

from mlxkv.engines import own as custom
from mlxkv.judge.case import ORDER
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, Clone, Crop, Greedy, New, Plan, Reset, judged_plans

OWN = Path(own_llama.__file__)
SEQUENCE = models.SEQUENCE


def compare(*arguments: str | Path, **environment: str) -> Done:
    return mlxkv("compare", *arguments, env=environment)


def refused(done: Done, line: str) -> None:
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    last = [shown for shown in done.stderr.splitlines() if shown.startswith("error: ")]
    assert last == [f"error: {line}"], done.stderr
    assert "Traceback" not in done.stderr


def written(folder: Path, *changes: tuple[str, str], name: str = "mine.py") -> Path:
    """The person's file with some of its text replaced."""
    text = OWN.read_text()
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


# In processes of their own, as a person runs it.


def test_a_right_model_of_ones_own_agrees_and_is_named_everywhere(
    answer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = compare("--engine", f"{OWN}:load", "--oracle", answer, "--out", out)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        done.stdout.splitlines()[-1]
        == f"own_llama.py:load: agree (logits, cache)    report: {out / 'compare.md'}"
    )
    assert "  own_llama.py:load, mlx 0." in done.stdout.splitlines()[0]
    verdict = json.loads((out / "compare.json").read_text())
    assert (verdict["subject"]["engine"], verdict["plans"]) == (
        "own_llama.py:load",
        [*ORDER, "probe full", "probe chunked"],
    )
    assert [g["name"] for g in verdict["gates"] if not g["ran"]] == ["algebra (float64)"]
    assert sorted(verdict["environment"]) == ["oracle", "own_llama.py:load"]
    assert len(verdict["environment"]["own_llama.py:load"]["sha256 of own_llama.py"]) == 64
    assert (out / "compare.md").read_text().startswith("# own_llama.py:load against transformers: ")
    assert str(OWN) not in (out / "compare.json").read_text()


# float64 inside, float32 out. MLX's own norm, rotation, softmax and sigmoid are accurate in float32
# only.
EXACT = """
import sys

def norm64(x, weight, eps):
    return x * mx.rsqrt(mx.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def turned64(x, offset, theta):
    L, D = x.shape[2:]
    angles = np.arange(offset, offset + L)[:, None] * theta ** (-np.arange(0, D, 2) / D)
    cos, sin = (mx.array(f(angles), mx.float64) for f in (np.cos, np.sin))
    a, b = mx.split(x, 2, axis=-1)
    return mx.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention64(queries, keys, values):
    assert not {"torch", "mlx_lm"} & sys.modules.keys()  # nobody here needs them
    keys, values = (mx.repeat(a, queries.shape[1] // a.shape[1], axis=1) for a in (keys, values))
    scores = np.array(queries @ keys.swapaxes(2, 3)) * keys.shape[3] ** -0.5
    L, S = scores.shape[2:]
    scores = scores + np.triu(np.full((L, S), -np.inf), S - L + 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    return mx.array(shares / shares.sum(-1, keepdims=True), mx.float64) @ values
"""


def test_one_that_is_more_exact_than_the_pool_agrees_with_a_note(
    answer: Path, tmp_path: Path
) -> None:
    attention = (
        "mx.fast.scaled_dot_product_attention(\n            queries, keys, values, scale=D**-0.5, "
        'mask="causal" if L > 1 else None\n        )'
    )
    norm = 'mx.fast.rms_norm(x, self.weights[f"{name}.weight"], self.config["rms_norm_eps"])'
    rope = "mx.fast.rope(a, D, traditional=False, base=theta, scale=1.0, offset=cache.offset)"
    head = 'return self.linear("lm_head", self.norm("model.norm", x))'
    mine = written(
        tmp_path,
        ("from pathlib import Path\n", f"from pathlib import Path\nimport numpy as np\n{EXACT}"),
        (norm, norm.replace("mx.fast.rms_norm", "norm64")),
        (rope, "turned64(a, cache.offset, theta)"),
        (attention, "attention64(queries, keys, values)"),
        ("gate * mx.sigmoid(gate)", "gate * (0.5 + 0.5 * mx.tanh(0.5 * gate))"),
        (head, f"{head}.astype(mx.float32)"),
        ("getattr(mx, dtype)", "mx.float64"),
    )
    done = compare(
        "--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out", "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["reasons"] == []
    assert max(g["value"] for g in verdict["gates"] if g["name"] == "sigma") < 0.3
    notes = [note for note in verdict["notes"] if "nearer to the truth" in note]
    assert notes[0].startswith("plan full: sigma is 0.")


def test_a_wrong_one_differs_and_the_usual_suspect_is_named(answer: Path, tmp_path: Path) -> None:
    mine = written(tmp_path, ('self.config["rope_theta"]', "500000.0"))
    done = compare("--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out")
    assert done.returncode == 1, done.stdout + done.stderr
    words = "looks like rope_theta 500000 instead of 10000 (sigma "
    assert f"\nmine.py:load: differ (logits, cache): {words}" in done.stdout
    assert "; gates: sigma, " in done.stdout


def test_what_bfloat16_cannot_show_is_said_by_name_and_float32_shows_it(tmp_path: Path) -> None:
    # own_llama knows no RoPE scaling. One this mild is within bfloat16's noise at 12 tokens.
    scaling = models.LLAMA3 | {"factor": 1.05}
    config = models.config("llama3", tie_word_embeddings=False, rope_scaling=scaling)
    folder = models.save(tmp_path / "model", config)
    ids = ["--tokens", "3,7,11,2,19,5", "--steps", "7", "--engine", f"{OWN}:load"]
    env = {"MLXKV_CACHE": str(tmp_path / "cache")}
    first, second = (
        compare(folder, *ids, "--dtype", "bfloat16", "--quick", "--out", tmp_path / "out", **env)
        for _ in range(2)
    )
    assert first.returncode == 0, first.stdout + first.stderr
    said = re.search("note: at 12 tokens in bfloat16 this run cannot see: (.*)", first.stdout)
    assert said is not None
    assert "lost RoPE scaling" in said[1].split(", ")
    assert "no causal mask" not in said[1]
    assert f"- {said[0].removeprefix('note: ')}" in (tmp_path / "out" / "compare.md").read_text()
    assert len([*(tmp_path / "cache" / "suspects").glob("*/suspects.json")]) == 1
    assert said[0] in second.stdout
    # The probe is long enough to show it.
    longer = compare(folder, *ids, "--dtype", "bfloat16", "--out", tmp_path / "out", **env)
    assert longer.returncode == 1
    assert "; plans full, step, prefixes, chunked and mixed agree; " in longer.stdout
    exact = compare(folder, *ids, "--out", tmp_path / "out", **env)
    assert exact.returncode == 1
    assert "looks like lost RoPE scaling (sigma " in exact.stdout


def test_a_cache_that_does_not_show_its_rows_leaves_their_gates_out(
    answer: Path, tmp_path: Path
) -> None:
    mine = written(
        tmp_path,
        ("    @property\n    def state(self):\n        return self.keys, self.values\n", ""),
    )
    done = compare(
        "--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out", "--json"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["scopes"] == ["logits"]
    assert {g["reason"] for g in verdict["gates"] if g["name"].startswith(("keys", "values"))} == {
        "not run: no keys in trace"
    }
    ran = {g["plan"]: g["ran"] for g in verdict["gates"] if g["name"] == "cached against uncached"}
    assert ran == {"step": True, "probe chunked": True}
    assert "the probe's cache: no keys in trace" in verdict["not_exercised"]


def test_a_stale_cache_differs_though_its_keys_are_not_shown(answer: Path, tmp_path: Path) -> None:
    # The newest row is attended to but not kept after the first call.
    mine = written(
        tmp_path,
        (
            "        self.keys, self.values, self.offset = keys, values, keys.shape[2]\n",
            "        self.keep(keys, values)\n",
        ),
        ("    def trim", "    def keep(self, keys, values):\n        if self.keys is None:\n"
         "            self.keys, self.values = keys, values\n        self.offset += 1\n\n    def "
         "trim"),
        ("return self.keys, self.values\n\n", "raise AttributeError\n\n"),
    )  # fmt: skip
    done = compare(
        "--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out", "--json"
    )
    assert done.returncode == 1, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert [g["plan"] for g in verdict["gates"] if g["name"] == "sigma" and g["failed"]] == [
        "step",
        "chunked",
        "mixed",
        "probe chunked",
    ]


def test_nan_differs(answer: Path, tmp_path: Path) -> None:
    mine = written(
        tmp_path, ('return self.linear("lm_head"', 'return mx.nan * self.linear("lm_head"')
    )
    done = compare("--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out")
    assert done.returncode == 1, done.stdout + done.stderr
    what = "the logits of position 0 and of 23 more are NaN in every plan that has them"
    assert f"\nmine.py:load: differ (logits, cache): {what}" in done.stdout
    assert "; gates: finite, sigma" in done.stdout


FLICKERS = """
        if CHANCE.random() < 0.2:
            logits[0, -1, 0] = logits[0, -1, 0] * (1 + 2e-7)
        return logits
"""


@pytest.mark.parametrize("steady", [True, False])
def test_a_row_that_is_other_in_one_call_of_five_is_found(
    answer: Path, tmp_path: Path, steady: bool
) -> None:
    # A last bit of one logit, which no noise floor shows.
    says = "" if steady else "    OwnLlama.deterministic = False\n"
    mine = written(
        tmp_path,
        (HEAD, HEAD.replace("return", "logits =") + FLICKERS.rstrip()),
        ("    return OwnLlama(", f"{says}    return OwnLlama("),
        ("import json\n", "import json\nfrom random import Random\nCHANCE = Random(1)\n"),
    )
    done = compare("--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out")
    verdict = json.loads((tmp_path / "out" / "compare.json").read_text())
    (gate,) = [gate for gate in verdict["gates"] if gate["name"] == "repeat"]
    assert gate["failed"] == steady
    assert done.returncode == (1 if steady else 0), done.stdout + done.stderr
    said = verdict["environment"]["mine.py:load"].get("deterministic", True)
    assert said == steady
    if steady:
        assert "; gates: repeat\n" in done.stdout
        assert gate["value"] >= 1  # how many positions
    assert "repeats of 55 of 76 calls: " in " ".join(verdict["not_exercised"])


# In this process.

MODEL = "model(tokens, cache=cache)"
CALL = f"mine.py:load: {MODEL}"
HEAD = 'return self.linear("lm_head", self.norm("model.norm", x))'
CACHE = 'return [LayerCache() for _ in range(self.config["num_hidden_layers"])]'
MORE = "; run it by itself to see more"


def at(what: str, error: str, line: str) -> str:
    return f"mine.py:load: {what} failed with {error} (mine.py:{line}){MORE}"


SHAPE = "expected [1, 24, 40] of floats: batch, tokens, vocabulary"


def run(file: Path, folder: Path, plan: Plan) -> custom.OwnRunner:
    source = custom.find(f"{file}:load")
    return custom.OwnRunner(
        custom.load(source, str(folder), "float32"), plan, name=source.name, vocab=40
    ).run()


def test_a_call_that_takes_places_gives_their_rows_alone(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    call = "def __call__(self, tokens, cache):"
    head = 'self.linear("lm_head", self.norm("model.norm", x'
    chooses = (call, call.replace("cache", "cache, places"))
    mine = written(tmp_path / "some", chooses, (head, f"{head}[:, places]"))
    plan = replace(judged_plans(SEQUENCE, prompt=5)["mixed"], rows=(0, 4, 9, 20))
    rows = [run(file, folder_of("gqa"), plan).arrays()["logits"] for file in (OWN, mine)]
    assert rows[0].shape == (4, 40)
    np.testing.assert_allclose(rows[1], rows[0], atol=1e-5)
    every = written(tmp_path / "every", chooses)
    with pytest.raises(
        Refusal, match=r"gave \[1, \d, 40\] float32, expected \[1, 1, 40\] of floats"
    ):
        run(every, folder_of("gqa"), plan)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("import json\n", "import jsno\n", at("import", "ModuleNotFoundError: No module named "
                                                        "'jsno'", "3 in <module>")),
        ("def load(path, dtype):", "def load(path, dtype)", at("import", "SyntaxError: expected "
                                                                         "':'", "77")),
        ("def load(", "def laod(", "mine.py:load: no function load in DIR/mine.py, expected "
                                   "load(path, dtype)"),
        (
            "    config = json",
            "    raise SystemExit\n    config = json",
            at("load('FOLDER', 'float32')", "SystemExit", "78 in load"),
        ),
        ("def make_cache", "def new_cache", f"mine.py:load: a OwnLlama without make_cache(), "
                                            f"{custom.CONVENTION}"),
        ("def __call__", "def call", f"mine.py:load: a OwnLlama without model(tokens, "
                                     f"cache=cache), {custom.CONVENTION}"),
        (
            CACHE,
            "1 / 0",
            at("make_cache()", "ZeroDivisionError: division by zero", "37 in make_cache"),
        ),
        (CACHE, "return 3", "mine.py:load: make_cache() gave a int, expected a list with one "
                            "cache per layer"),
        (HEAD, "return mx.zeros(6).reshape(7)",
         at(
             MODEL,
             "ValueError: [reshape] Cannot reshape array of size 6 into shape (7).",
             "74 in __call__",
         )),
        (HEAD, "raise ValueError('a\\nb')", at(MODEL, "ValueError: a b", "74 in __call__")),
        (HEAD, f"{HEAD}[0]", f"{CALL} gave [24, 40] float32, {SHAPE}"),
        (HEAD, f"{HEAD}[:, -1:]", f"{CALL} gave [1, 1, 40] float32, {SHAPE}"),
        (HEAD, f"{HEAD}[..., :39]", f"{CALL} gave [1, 24, 39] float32, {SHAPE}"),
        (HEAD, f"{HEAD}.astype(mx.int32)", f"{CALL} gave [1, 24, 40] int32, {SHAPE}"),
        (HEAD, f"{HEAD}.tolist()", f"{CALL} gave a list, expected an mx.array [1, 24, 40]"),
        ("return self.keys, self.values\n\n", "return self.nothing\n\n", None),
        ("return self.keys, self.values\n\n", "LayerCache.n = getattr(LayerCache, 'n', 0) + 1\n"
         "        return (self.keys, self.values) if LayerCache.n % 2 else None\n\n", None),
        (
            "return self.keys, self.values\n\n",
            "raise OSError(self.offset)\n\n",
            at("a cache's state", "OSError: 24", "16 in state"),
        ),
    ],
)  # fmt: skip
def test_what_goes_wrong_in_the_file_is_one_line(
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    line: str | None,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    mine, folder, plan = (
        written(tmp_path, (old, new)),
        folder_of("gqa"),
        judged_plans(SEQUENCE, prompt=5)["full"],
    )
    if line is None:  # nothing is shown, which is no fault
        assert sorted(run(mine, folder, plan).arrays()) == ["logits", "positions", "steps"]
        return
    with pytest.raises(Refusal) as told:
        run(mine, folder, plan).arrays()
    assert str(told.value) == line.replace("FOLDER", str(folder)).replace("DIR", str(tmp_path))


def test_an_error_within_what_the_file_calls_is_shown_where_the_file_called_it(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    mine = written(
        tmp_path,
        ("import json\n", "import json\nfrom beside_mine import config_of\n"),
        ("json.loads(", "config_of("),
    )
    (tmp_path / "beside_mine.py").write_text(
        "import json\n\n\ndef config_of(text):\n    return json.loads(text[1:])\n"
    )
    with pytest.raises(
        Refusal,
        match=r"failed with json.decoder.JSONDecodeError: .* \(mine.py:79 in load\); run it by "
        r"itself",
    ):
        run(mine, folder_of("gqa"), judged_plans(SEQUENCE, prompt=5)["full"])


def test_what_the_convention_cannot_express_is_its_steps_error(
    folder_of: Callable[[str], Path],
) -> None:
    tokens = (3, 7, 11, 2, 19)
    plan = Plan(
        "misuse",
        (
            New("a"),
            Call("a", tokens, 0),
            Clone("a", "b"),
            Call("a", (4, 6), None),
            Call("b", (8,), 5),
            Call("a", (4,), 0),
            Crop("a", 9),
            Crop("a", 5),
            Call("a", (8,), 5),
            Reset("a"),
            Call("a", tokens, 0),
            New("n", use_kv_cache=False),
            Call("n", tokens, 0),
            Call("n", tokens, 0),
            New("g"),
            Greedy("g", tokens, 0, 3),
        ),
    )
    found = run(OWN, folder_of("gqa"), plan)
    errors = {
        i: outcome.error for i, outcome in enumerate(found.outcomes) if outcome.error is not None
    }
    assert errors == {
        5: "cannot be expressed: index_pos 0 with 7 tokens cached, as the cache has the position",
        6: "crop: length is 9, expected at most the 7 tokens cached",
    }
    arrays = found.arrays()
    rows = {step: arrays["logits"][arrays["steps"] == step] for step in range(16)}
    assert np.array_equal(rows[4], rows[8])  # the clone, and the cropped cache
    assert np.array_equal(rows[1], rows[10])
    assert np.array_equal(rows[12], rows[13])
    assert arrays["kv/b/000/keys"].shape == (2, 6, 8)
    assert sorted({name.split("/")[1] for name in arrays if name.startswith("kv/")}) == [
        "a",
        "b",
        "g",
    ]


BATCH = Plan(
    "batch",
    (New("a"), Call("a", ((3, 7, 11), (2, 19, 5)), 0), Call("a", ((1,), (8,)), 3)),
    rows=(0, 2, 3),
)


def test_a_batch_is_followed_and_each_row_is_what_it_is_alone(
    folder_of: Callable[[str], Path],
) -> None:
    arrays = run(OWN, folder_of("gqa"), BATCH).arrays()
    assert arrays["positions"].tolist() == [0, 2, 0, 2, 3, 3]
    assert arrays["batch"].tolist() == [0, 0, 1, 1, 0, 1]
    assert arrays["kv/a/000/keys"].shape == (2, 2, 4, 8)
    for b, ids in enumerate(((3, 7, 11, 1), (2, 19, 5, 8))):
        alone = run(OWN, folder_of("gqa"), Plan("one", (New("a"), Call("a", ids, 0)))).arrays()
        mine = arrays["batch"] == b
        np.testing.assert_allclose(arrays["logits"][mine], alone["logits"][[0, 2, 3]], atol=1e-5)
        keys = arrays["kv/a/001/keys"][b]
        np.testing.assert_allclose(keys, alone["kv/a/001/keys"], atol=1e-5)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (HEAD, f"{HEAD}[:1]", "gave [1, 3, 40] float32, expected [2, 3, 40] of floats"),
        ("B, L, _ = x.shape", "(B, L, _), (_,) = x.shape, x", "failed with ValueError: too many"),
    ],
)
def test_a_batch_that_a_model_does_not_take_cannot_be_expressed(
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    old: str,
    new: str,
    why: str,
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = run(written(tmp_path, (old, new)), folder_of("gqa"), BATCH)
    assert [outcome.kind for outcome in found.outcomes[:2]] == ["done", "cannot be expressed"]
    assert "cannot be expressed: a batch of 2, as model(tokens, cache=cache) " in str(
        found.outcomes[1].error
    )
    assert why in str(found.outcomes[1].error)


def test_a_cache_that_shows_another_batch_than_it_was_fed_shows_no_rows(
    folder_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    shown = "return self.keys, self.values\n\n"
    mine = written(tmp_path, (shown, "return self.keys[:1], self.values[:1]\n\n"))
    arrays = run(mine, folder_of("gqa"), BATCH).arrays()
    assert sorted(arrays) == ["batch", "logits", "positions", "steps"]


@pytest.mark.parametrize(
    "engine", ["mlx_lm", "mine.py", "mine.py:", "mine.txt:load", "mine.py:a b"]
)
def test_an_engine_that_names_no_function_in_a_file_is_refused(engine: str) -> None:
    with pytest.raises(
        Refusal, match=r"expected port or mlx-lm, or FILE\.py:FUNCTION for a model of your own"
    ):
        custom.find(engine)


def test_a_file_that_is_not_there_is_refused_before_the_oracle_is_asked(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    env = {"MLXKV_CACHE": str(tmp_path / "cache")}
    done = compare(
        folder_of("gqa"),
        "--tokens",
        "1,2",
        "--engine",
        "gone.py:load",
        "--out",
        tmp_path / "out",
        **env,
    )
    refused(
        done,
        "--engine: gone.py: no such file, expected the Python file that holds load; check the path",
    )
    assert not (tmp_path / "cache" / "oracle").exists()


def test_on_the_command_line_a_fault_of_the_file_is_one_line_and_exit_code_2(
    answer: Path, tmp_path: Path
) -> None:
    mine = written(tmp_path, (HEAD, "print('chatter')\n        return x.nothing"))
    done = compare("--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out")
    line = at(MODEL, "AttributeError: 'array' object has no attribute 'nothing'", "75 in __call__")
    refused(done, line.replace(MORE, "; run again with --debug to see more"))
    assert "chatter" not in done.stderr + done.stdout

    mine = written(tmp_path, (HEAD, "import os; os._exit(7)"))
    done = compare("--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out")
    ended = "its process ended with exit code 7, expected a result; there may be too little memory"
    why = "the file ends its own process; run again with --debug to see what it prints"
    refused(done, f"mine.py:load: {ended}, or {why}")

    mine = written(tmp_path, (HEAD, "print('chatter')\n        return x.nothing"))
    done = compare(
        "--engine", f"{mine}:load", "--oracle", answer, "--out", tmp_path / "out", "--debug"
    )
    assert done.returncode == 2
    assert done.stdout == ""
    before, _, after = done.stderr.partition("Traceback (most recent call last):")
    assert "chatter" in before
    assert f'File "{mine}", line 75, in __call__' in after
    last = done.stderr.splitlines()[-1]
    assert last == f"error: {line.replace(MORE, '; its traceback is above')}"
