"""The folder of a text: what stored caches lose, beside a plain forward written here in numpy."""

import json
import shutil
import sys

import command
import models
import numpy as np
import pytest
import torch

from oracle import text as texts
from oracle.formats import text
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import resolve
from oracle.truth import llama, losses
from oracle.truth import weights as truth_weights
from oracle.truth.config import checked
from oracle.truth.weights import Weights

N = 75
TOKENS = models.tokens(N)
LAYOUTS = ("mha", "gqa", "mqa")
WIDE = {"head_dim": 64, "rope_scaling": None, "max_position_embeddings": 256}
SPECS = (
    "float16",
    "bfloat16",
    "affine:bits=8,group_size=64",
    "affine:bits=2,group_size=32",
    "affine:keys=0,values=3,group_size=32",
    "affine:keys=4,values=0,group_size=64",
    "window:size=16",
    "window:size=16,keep=3",
    "window:size=1",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of a model by its layout."""
    root = tmp_path_factory.mktemp("models")
    made = {name: models.make(root / name, name, **WIDE) for name in LAYOUTS}
    made["untied"] = models.make(
        root / "untied", "gqa", **WIDE, tie_word_embeddings=False, attention_bias=True
    )
    return made


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    path = tmp_path_factory.mktemp("ids") / "ids.json"
    path.write_text(json.dumps(TOKENS))
    return path


@pytest.fixture(scope="module")
def whole(model, ids, tmp_path_factory):
    """The folder of each model with all SPECs, made once."""
    root, made = tmp_path_factory.mktemp("texts"), {}

    def of(name):
        if name not in made:
            texts.make(str(model[name]), ids=ids, out=root / name, specs=SPECS, threads=1)
            made[name] = root / name
        return made[name]

    return of


@pytest.fixture
def folder(whole, tmp_path):
    """A folder of one's own to damage or to add to."""
    return shutil.copytree(whole("gqa"), tmp_path / "text")


def oracle(*arguments):
    done = command.oracle("text", *arguments)
    return done.returncode, done.stdout, done.stderr


# The plain forward: numpy, one head after another, the mask written out.


def bf16(x):
    """The last 45 of 52 bits go, to the nearest, ties to even; straight from float64."""
    bits = np.ascontiguousarray(x).view(np.int64)
    return (bits + (bits >> 45 & 1) + 2**44 - 1 >> 45 << 45).view(np.float64)


def grouped(x, bits, size):
    """One group after another, one number after another; what `mx.quantize` documents."""
    rows = x.reshape(-1, size).copy()
    for row in rows:
        low, high = row.min(), row.max()
        edge, sign = (low, 1.0) if abs(low) > abs(high) else (high, -1.0)
        scale = sign * max((high - low) / (2**bits - 1), 1e-7)
        if round(edge / scale):
            scale, bias = np.float64(np.float32(edge / round(edge / scale))), np.float32(edge)
        else:
            bias = 0.0
        for i, number in enumerate(row):
            q = min(max(round((number - np.float64(bias)) / scale), 0), 2**bits - 1)
            row[i] = q * scale + np.float64(bias)
    return rows.reshape(x.shape)


PLAIN = {
    "truth": (lambda x: x, lambda x: x),
    "float16": (lambda x: x.astype(np.float16).astype(np.float64),) * 2,
    "bfloat16": (bf16,) * 2,
    "affine:bits=8,group_size=64": (lambda x: grouped(x, 8, 64),) * 2,
    "affine:bits=2,group_size=32": (lambda x: grouped(x, 2, 32),) * 2,
    "affine:keys=0,values=3,group_size=32": (lambda x: x, lambda x: grouped(x, 3, 32)),
    "affine:keys=4,values=0,group_size=64": (lambda x: grouped(x, 4, 64), lambda x: x),
}
WINDOWS = {"window:size=16": (16, 0), "window:size=16,keep=3": (16, 3), "window:size=1": (1, 0)}


def mask(spec):
    """Which keys a token sees, (n, n)."""
    size, keep = WINDOWS.get(spec, (N, 0))
    seen = np.zeros((N, N), bool)
    for own in range(N):
        for key in range(own + 1):
            seen[own, key] = key < keep or own - key < size - keep
    return seen


def plain(folder, spec):
    """(N, V) float64 logits: each layer's attention reads what the cache of `spec` keeps."""
    c = json.loads((folder / "config.json").read_text())
    w = Weights(resolve(str(folder)), dtype="float32")
    of = lambda name: w(name).numpy()  # noqa: E731
    H, K, D = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
    angles = np.arange(N)[:, None] * c["rope_theta"] ** (-np.arange(0, D, 2) / D)
    keep_keys, keep_values = PLAIN.get(spec, PLAIN["truth"])
    x, seen = of("model.embed_tokens.weight")[TOKENS], mask(spec)

    def norm(x, name):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * of(name)

    def turned(x):
        a, b = x[:, : D // 2], x[:, D // 2 :]
        cos, sin = np.cos(angles), np.sin(angles)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    for i in range(c["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        h = norm(x, layer + "input_layernorm.weight")
        biased = c["attention_bias"]
        q, k, v, _ = (
            h @ of(f"{layer}self_attn.{p}_proj.weight").T
            + (of(f"{layer}self_attn.{p}_proj.bias") if biased else 0.0)
            if p != "o"
            else None
            for p in "qkvo"
        )
        heads = []
        for head in range(H):
            at = head // (H // K)
            key, value = (t[:, at * D : (at + 1) * D] for t in (k, v))
            key, value = keep_keys(turned(key)), keep_values(value)
            scores = turned(q[:, head * D : (head + 1) * D]) @ key.T / np.sqrt(D)
            shares = np.exp(np.where(seen, scores - scores.max(-1, keepdims=True), -np.inf))
            heads.append(shares / shares.sum(-1, keepdims=True) @ value)
        x = x + np.concatenate(heads, -1) @ of(f"{layer}self_attn.o_proj.weight").T
        if biased:
            x = x + of(f"{layer}self_attn.o_proj.bias")
        h = norm(x, layer + "post_attention_layernorm.weight")
        gate, up = (h @ of(f"{layer}mlp.{p}_proj.weight").T for p in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ of(f"{layer}mlp.down_proj.weight").T
    head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
    return norm(x, "model.norm.weight") @ of(head).T


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("layout", [*LAYOUTS, "untied"])
def test_a_stored_cache_loses_what_a_plain_forward_says(whole, model, layout, spec):
    found = text.read(whole(layout)).stored[spec]
    true, other = (log_softmax(plain(model[layout], s)) for s in ("truth", spec))
    kl = (np.exp(true) * (true - other)).sum(-1)
    assert (found.kl >= 0).all()
    assert found.kl.mean() > 1e-9  # it loses something on these models
    np.testing.assert_allclose(found.kl, kl, rtol=1e-7, atol=1e-13)
    right = np.arange(N - 1), TOKENS[1:]
    np.testing.assert_allclose(found.p_right, np.exp(other[right]), rtol=1e-10)
    np.testing.assert_allclose(found.p_right_truth, np.exp(true[right]), rtol=1e-10)
    assert found.top1_same.dtype == bool
    assert (found.top1_same == (true.argmax(-1) == other.argmax(-1))).all()


@pytest.mark.parametrize("layout", [*LAYOUTS, "untied"])
def test_the_truth_is_the_oracles_and_both_its_ways_agree(whole, model, layout):
    found = text.read(whole(layout))
    checkpoint = resolve(str(model[layout]))
    config, weights = checked(checkpoint), Weights(checkpoint, dtype="float32")
    cache = []
    hidden = llama.follow(
        weights,
        config,
        TOKENS,
        segments={"steps": [N - 9] + [1] * 9},
        sink=lambda _, seen: cache.append([seen["keys"].numpy(), seen["values"].numpy()]),
    )["steps"]
    logits = (hidden @ weights.head(config).T).numpy()
    np.testing.assert_allclose(found.hidden, hidden, atol=1e-12)
    np.testing.assert_allclose(found.logits, logits, rtol=6e-8, atol=1e-9)  # float32
    np.testing.assert_allclose(found.lse, np.log(np.exp(logits).sum(-1)), rtol=1e-13)
    for i, name in enumerate(("keys", "values")):
        expected = np.stack([layer[i] for layer in cache])
        np.testing.assert_allclose(getattr(found, name), expected, rtol=6e-8, atol=1e-9)
        assert getattr(found, name).shape == (3, config.n_kv_heads, N, config.head_dim)
    proofs = found.manifest.proofs
    assert 0 < proofs["truth_agreement"] <= 1e-12
    assert (proofs["truth_agreement_limit"], proofs["chunk"]) == (1e-10, 38)
    assert proofs["truth_max"] == pytest.approx(np.abs(logits).max(), rel=1e-12)


def test_a_window_as_long_as_the_text_loses_exactly_nothing(model, ids, tmp_path):
    specs = [f"window:size={N}", "window:size=100", "window:size=100,keep=4"]
    texts.make(str(model["gqa"]), ids=ids, out=tmp_path / "o", specs=specs[:2], threads=1)
    texts.make(str(model["gqa"]), ids=ids, out=tmp_path / "o", specs=specs, threads=1)
    for lost in text.read(tmp_path / "o").stored.values():
        assert (lost.kl == 0).all()
        assert (lost.p_right == lost.p_right_truth).all()
        assert lost.top1_same.all()


def test_one_shorter_than_the_text_shows_at_its_last_token_alone(model, ids, tmp_path):
    texts.make(
        str(model["gqa"]), ids=ids, out=tmp_path / "o", specs=[f"window:size={N - 1}"], threads=1
    )
    (lost,) = text.read(tmp_path / "o").stored.values()
    assert (lost.kl[:-1] == 0).all()
    assert lost.kl[-1] > 0


def test_a_truth_whose_ways_differ_is_refused_and_leaves_nothing(model, ids, tmp_path, monkeypatch):
    right = llama.Layer._rotate
    later = lambda self, x, start: right(self, x, start) * (1 + 1e-8 * (start > 0))  # noqa: E731
    monkeypatch.setattr(llama.Layer, "_rotate", later)
    with pytest.raises(
        Refusal, match=r"whole and in chunks it differs by .*, expected at most 1e-1"
    ):
        texts.make(str(model["mha"]), ids=ids, out=tmp_path / "o", threads=1)
    assert list(tmp_path.iterdir()) == []


def test_all_ways_read_each_layers_weights_once_and_logits_come_in_blocks(
    model, ids, tmp_path, monkeypatch
):
    read, rows = [], []
    layer, logits_of = Weights.layer, llama.logits_of
    monkeypatch.setattr(
        Weights, "layer", lambda self, c, i, **into: (read.append(i), layer(self, c, i, **into))[1]
    )
    monkeypatch.setattr(
        llama,
        "logits_of",
        lambda hidden, *given, **at: (rows.append(len(hidden)), logits_of(hidden, *given, **at))[1],
    )
    specs = ["float16", "window:size=5", "affine:bits=3"]
    large, small = tmp_path / "large", tmp_path / "small"
    texts.make(str(model["mqa"]), ids=ids, out=large, specs=specs, threads=1)
    assert read == [0, 1, 2]
    assert rows == [N] * 5
    rows.clear()
    monkeypatch.setattr(losses, "_BLOCK", 7 * models.VOCAB + 3)
    texts.make(str(model["mqa"]), ids=ids, out=small, specs=specs, threads=1)
    assert rows == [7] * 5 * (N // 7) + [N % 7] * 5
    one, other = text.read(large), text.read(small)
    np.testing.assert_allclose(one.logits, other.logits, rtol=1e-6)
    for name, lost in one.stored.items():
        np.testing.assert_allclose(lost.kl, other.stored[name].kl, rtol=1e-7, atol=1e-14)
        np.testing.assert_allclose(lost.p_right, other.stored[name].p_right, rtol=1e-12)
        assert (lost.top1_same == other.stored[name].top1_same).all()


def test_a_loss_is_never_below_nothing_and_a_nan_stays_one():
    logits = torch.randn(500, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    true = torch.log_softmax(logits, dim=-1)
    other = torch.log_softmax(logits * (1 + 1e-15), dim=-1)
    assert ((true.exp() * (true - other)).sum(-1) < 0).any()  # as rounding has it
    other[7, 3] = torch.nan
    kl = losses._rows(true, other, torch.zeros(500, dtype=torch.long))["kl"]
    assert torch.isnan(kl).nonzero().tolist() == [[7]]
    assert (kl[torch.arange(500) != 7] >= 0).all()


def test_more_specs_are_added_and_what_is_there_stays(model, ids, tmp_path):
    out, at_once = tmp_path / "out", tmp_path / "at-once"
    given = [model["gqa"], "--ids", ids, "--threads", 1]
    code, stdout, stderr = oracle(*given, "--out", out, "--stored", "float16")
    assert (code, stdout) == (0, f"{out}\n")
    assert stderr.splitlines()[0].startswith("oracle: the truth of 75 tokens and 1 stored cache, ")
    assert stderr.splitlines()[1].startswith("whole and in chunks agree to ")
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in out.iterdir()}
    wanted = ["--stored", "window:size=9", "--stored", "float16", "--stored", "affine:bits=4"]
    code, _, stderr = oracle(*given, "--out", out, *wanted)
    assert code == 0
    assert "75 tokens, whose truth is kept, and 2 stored caches, " in stderr
    for name in ("truth.safetensors", "stored-0.safetensors"):
        path = out / name
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == before[name]
    manifest = text.read_manifest(out)
    assert manifest.stored == {
        "float16": "stored-0.safetensors",
        "window:size=9": "stored-1.safetensors",
        "affine:bits=4,group_size=64": "stored-2.safetensors",
    }
    assert sorted(p.name for p in out.iterdir()) == sorted(["text.json", *manifest.files])
    stamp = (out / "text.json").stat().st_ino
    code, stdout, stderr = oracle(*given, "--out", out, *wanted)
    assert (code, stdout, len(stderr.splitlines())) == (0, f"{out}\n", 1)  # no estimate
    assert (out / "text.json").stat().st_ino == stamp
    assert oracle(*given, "--out", at_once, "--stored", "float16", *wanted)[0] == 0
    one, other = text.read(out), text.read(at_once)
    for name, lost in other.stored.items():
        assert (one.stored[name].kl == lost.kl).all()
        assert (one.stored[name].p_right == lost.p_right).all()
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_files_are_copied_where_a_file_system_has_no_links(model, ids, folder, monkeypatch):
    def unlinked(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr("os.link", unlinked)
    texts.make(str(model["gqa"]), ids=ids, out=folder, specs=["window:size=9"], threads=1)
    assert sorted(text.read(folder).stored) == sorted([*SPECS, "window:size=9"])


def test_force_makes_a_whole_or_a_damaged_folder_anew(model, ids, folder):
    given = [model["gqa"], "--ids", ids, "--threads", 1, "--out", folder, "--stored", "float16"]
    (folder / "stored-1.safetensors").write_bytes(b"")
    assert oracle(*given)[0] == 2
    assert oracle(*given, "--force")[0] == 0
    assert list(text.read(folder).stored) == ["float16"]
    assert sorted(p.name for p in folder.iterdir()) == [
        "stored-0.safetensors",
        "text.json",
        "truth.safetensors",
    ]


def test_what_fails_half_way_leaves_the_folder_as_it_was(model, ids, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(text.tensors, "write", full)
    with pytest.raises(OSError, match="No space"):
        texts.make(str(model["gqa"]), ids=ids, out=folder, specs=["window:size=9"], threads=1)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [p.name for p in folder.parent.iterdir() if p.name.startswith(".")] == []


def test_keys_that_a_dtype_cannot_hold_are_refused(ids, tmp_path):
    config = models.config_of("mha", **WIDE)
    tensors = models.tensors_of(config)
    tensors["model.layers.1.self_attn.k_proj.weight"] *= 1e5
    model = models.write(tmp_path / "m", config, tensors)
    given = [model, "--ids", ids, "--threads", 1, "--out", tmp_path / "o"]
    assert oracle(*given, "--stored", "bfloat16")[0] == 0
    code, _, stderr = oracle(*given, "--stored", "float16")
    assert code == 2
    assert stderr.splitlines()[-1] == (
        "error: --stored float16: keys or values become infinite, expected a dtype that holds "
        "them; leave it out"
    )
    assert list(text.read(tmp_path / "o").stored) == ["bfloat16"]


@pytest.mark.parametrize(
    ("written", "says"),
    [
        ("[1, 2", "not JSON"),
        ('{"ids": [1, 2]}', "expected one list of token ids"),
        ("[]", "tokens: none, expected one id or more"),
        ("[5]", "tokens: 1 of them, expected at least 2"),
        ("[5, 61]", "tokens: id 61 at place 1, expected 0 to 60"),
        ("[5, -1]", "tokens: id -1 at place 1"),
        ("[5, true]", "tokens: id True at place 1"),
        ("[5, 6.0]", "tokens: id 6.0 at place 1"),
        ("[5, [6]]", "tokens: id [6] at place 1"),
        (json.dumps([5] * 257), "tokens: 257 of them, expected at most 256"),
        (None, "cannot be read"),
    ],
)
def test_ids_that_are_none_of_the_models_are_refused_by_the_files_name(
    model, tmp_path, written, says
):
    path = tmp_path / "ids.json"
    if written is not None:
        path.write_text(written)
    code, stdout, stderr = oracle(model["gqa"], "--ids", path, "--out", tmp_path / "o")
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"error: {path}: ")
    assert says in stderr
    assert len(stderr.splitlines()) == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stored", "affine:bits=9"], "--stored 'affine:bits=9': bits is '9', expected one of"),
        (
            ["--stored", "affine:group_size=128"],
            "group_size is 128, expected a divisor of head_dim",
        ),
        (["--stored", "window:size=0"], "expected a size from 1"),
        (["--threads", "100000"], "threads: 100000, expected 1 to"),
    ],
)
def test_what_cannot_be_asked_is_one_line(model, ids, tmp_path, options, says):
    given = [model["gqa"], "--ids", ids, "--out", tmp_path / "o", *options]
    code, stdout, stderr = oracle(*given)
    assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)
    assert says in stderr
    assert list(tmp_path.iterdir()) == []


def test_an_architecture_without_a_truth_is_refused_in_one_line(ids, tmp_path):
    model = models.make(tmp_path / "m", "mha", model_type="qwen2", architectures=None)
    code, _, stderr = oracle(model, "--ids", ids, "--out", tmp_path / "o")
    assert (code, len(stderr.splitlines())) == (2, 1)
    assert "model_type is 'qwen2', expected 'llama'; judge mlx-lm on it with " in stderr


def test_torch_that_is_missing_is_named(model, ids, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    code, _, stderr = oracle(model["gqa"], "--ids", ids, "--out", tmp_path / "o")
    assert code == 2
    assert stderr.startswith("error: torch is not installed; pip install")


def test_a_folder_of_something_else_is_refused(model, ids, folder, tmp_path):
    other = tmp_path / "other.json"
    other.write_text(json.dumps(TOKENS[:-1]))
    asked = ["--out", folder, "--stored", "float16"]
    for given, says in (
        (
            [model["gqa"], "--ids", other],
            "text.json: made of other tokens; name another folder, or",
        ),
        ([model["mqa"], "--ids", ids], "text.json: made of weights "),
    ):
        code, _, stderr = oracle(*given, *asked)
        assert (code, len(stderr.splitlines())) == (2, 1)
        assert says in stderr
    (folder / "notes.txt").touch()
    for force in ([], ["--force"]):
        code, _, stderr = oracle(model["gqa"], "--ids", ids, *asked, *force)
        assert code == 2
        assert "holds notes.txt, expected a new folder or one that the oracle made" in stderr
    assert (folder / "notes.txt").exists()


def test_a_folder_of_other_sources_is_not_added_to(model, ids, folder, monkeypatch):
    monkeypatch.setattr(text.run_folder, "sources", dict)
    with pytest.raises(Refusal, match=r"made of inputs .* or make it anew with --force"):
        texts.make(str(model["gqa"]), ids=ids, out=folder, specs=["float16"], threads=1)


@pytest.mark.parametrize("name", ["gqa", "untied"])
def test_a_large_head_is_widened_a_block_at_a_time(model, ids, whole, tmp_path, monkeypatch, name):
    sizes = []
    right = truth_weights.Weights.__call__

    def told(self, of, **more):
        made = right(self, of, **more)
        if of == truth_weights.head_name(config) and len(made) != N:  # the rows of the tokens
            sizes.append(made.numel())
        return made

    config = checked(resolve(str(model[name])))
    most = config.hidden * 7
    assert most < config.vocab_size * config.hidden
    for module in (truth_weights, losses):
        monkeypatch.setattr(module, "HEAD_BLOCK", most)
    monkeypatch.setattr(truth_weights.Weights, "__call__", told)
    specs = SPECS[:1]
    texts.make(str(model[name]), ids=ids, out=tmp_path / "text", specs=specs, threads=1)
    assert sizes
    assert max(sizes) <= most
    blocks, once = (text.read(folder) for folder in (tmp_path / "text", whole(name)))
    np.testing.assert_allclose(blocks.logits, once.logits, atol=1e-6)
    for key in ("kl", "p_right", "p_right_truth"):
        found, expected = (getattr(of.stored[specs[0]], key) for of in (blocks, once))
        np.testing.assert_allclose(found, expected, atol=1e-12)
