"""The format of a text's folder: what is read, and what damage is refused by name."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from oracle.formats import tensors, text
from oracle.formats.errors import Refusal
from oracle.formats.run_folder import TRUTH
from oracle.formats.text import Lost, Manifest

N, V, E = 5, 7, 4
CACHE = 2, 3, 4
SPECS = {"float16": "stored-0.safetensors", "window:size=2": "stored-1.safetensors"}
FINGERPRINT, DIGEST = "a" * 64, "b" * 64


def truth(**changes):
    random = np.random.default_rng(0)
    shapes = text.shapes(N, vocab=V, cache=CACHE, hidden=E)
    arrays = {n: random.standard_normal(shape).astype(kind) for n, (kind, shape) in shapes.items()}
    return arrays | changes


def lost(**changes):
    random = np.random.default_rng(1)
    arrays = {"kl": random.random(N), "top1_same": np.array([1, 0, 1, 1, 0], np.uint8)}
    return arrays | {n: random.random(N - 1) for n in ("p_right", "p_right_truth")} | changes


def sealed(folder: Path, **changes):
    """Writes the manifest that says of the folder's files what they are."""
    files = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.glob("*.safetensors")
    }
    tokens = list(range(N))
    value = {
        "source": "m",
        "name": "m",
        "note": "",
        "revision": None,
        "fingerprint": FINGERPRINT,
        "config_digest": DIGEST,
        "ignored_keys": [],
        "tokens": tokens,
        "inputs": text.inputs(FINGERPRINT, DIGEST, tokens),
        "files": files,
        "stored": SPECS,
        "proofs": {text.PROOF: 1e-15},
    }
    text.write_manifest(folder, Manifest(**value | changes))
    return folder


@pytest.fixture
def folder(tmp_path):
    tensors.write(tmp_path / TRUTH, truth(), text.about("truth"))
    for name, file in SPECS.items():
        arrays = lost()
        arrays["top1_same"] = arrays["top1_same"].astype(bool)
        text.write_arrays(tmp_path / file, Lost(**arrays), of=name)
    return sealed(tmp_path)


def refused(folder, file):
    with pytest.raises(Refusal) as error:
        text.read(folder)
    line = str(error.value)
    assert line.startswith(f"{folder / file}: ")
    assert line.endswith(f"; make the folder anew with `mlxkv-oracle text --out {folder} --force`")
    assert "\n" not in line
    return line


def test_a_folder_is_read_as_it_was_written_and_mapped(folder):
    found = text.read(folder)
    for name, array in truth().items():
        assert (getattr(found, name) == array).all()
        assert isinstance(getattr(found, name), np.memmap)
        assert getattr(found, name).dtype == array.dtype
    assert list(found.stored) == list(SPECS)
    its, expected = found.stored["window:size=2"], lost()
    assert its.top1_same.dtype == bool
    assert its.top1_same.tolist() == [True, False, True, True, False]
    for name in ("kl", "p_right", "p_right_truth"):
        assert (getattr(its, name) == expected[name]).all()
    assert found.manifest.tokens == list(range(N))


def test_memory_given_back_is_read_again(folder):
    found = text.read(folder)
    first = np.array(found.logits)
    tensors.release(found.logits)
    assert (found.logits == first).all()
    tensors.release(np.zeros(3))  # not mapped: nothing to give back


@pytest.mark.parametrize("file", [TRUTH, *SPECS.values()])
@pytest.mark.parametrize("damage", ["absent", "short", "flipped", "empty"])
def test_a_file_that_is_not_what_it_was_is_refused_by_its_name(folder, file, damage):
    path = folder / file
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    if damage == "absent":
        path.unlink()
        with pytest.raises(Refusal, match="cannot be read"):
            text.read(folder)
        return
    path.write_bytes({"short": data[:-1], "flipped": data, "empty": b""}[damage])
    assert f"expected {listed(folder, file)} as in text.json" in refused(folder, file)


def listed(folder, file):
    return json.loads((folder / "text.json").read_text())["files"][file][:16]


BAD = np.nan, np.inf, -np.inf


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", sorted(truth()))
def test_a_number_that_is_not_finite_in_the_truth_is_refused(folder, name, bad):
    arrays = truth()
    arrays[name].reshape(-1)[-1] = bad
    tensors.write(folder / TRUTH, arrays, text.about("truth"))
    assert f"{name} holds others, expected finite numbers; " in refused(sealed(folder), TRUTH)


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *[(name, bad) for name in ("kl", "p_right", "p_right_truth") for bad in BAD],
        ("kl", -1e-9),
        ("p_right", 1.001),
        ("p_right_truth", -0.001),
        ("top1_same", 2),
    ],
)
def test_a_number_that_no_spec_can_lose_is_refused(folder, name, bad):
    arrays = lost()
    arrays[name][-1] = bad
    file = SPECS["float16"]
    tensors.write(folder / file, arrays, text.about("float16"))
    expected = "from 0 to inf" if name == "kl" else "from 0 to 1"
    assert f"{name} holds others, expected finite numbers {expected}" in refused(
        sealed(folder), file
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"logits": np.zeros((N - 1, V), np.float32)}, "logits has shape [4, 7] float32, expected"),
        ({"logits": np.zeros((N, V))}, "logits has shape [5, 7] float64, expected [5, v] float32"),
        ({"logits": np.zeros(N, np.float32)}, "logits has shape [5] float32, expected [5, v]"),
        ({"lse": np.zeros((N, 1))}, "lse has shape [5, 1] float64, expected [5] float64"),
        ({"values": np.zeros((2, 3, N, 8), np.float32)}, "values has shape [2, 3, 5, 8] float32"),
        ({"keys": np.zeros((2, 3, N + 1, 4), np.float32)}, "keys has shape [2, 3, 6, 4] float32"),
        ({"hidden": np.zeros((N - 1, E))}, "hidden has shape [4, 4] float64"),
        ({"more": np.zeros(2)}, "holds hidden, keys, logits, lse, more, values, expected hidden"),
    ],
)
def test_arrays_of_other_sizes_or_names_are_refused(folder, changes, says):
    tensors.write(folder / TRUTH, truth(**changes), text.about("truth"))
    assert says in refused(sealed(folder), TRUTH)


@pytest.mark.parametrize("name", sorted(lost()))
def test_an_array_of_a_spec_that_is_missing_or_shorter_is_refused(folder, name):
    arrays, file = lost(), SPECS["window:size=2"]
    short = arrays | {name: arrays[name][1:]}
    tensors.write(folder / file, short, text.about("window:size=2"))
    assert f"{name} has shape [{len(short[name])}] " in refused(sealed(folder), file)
    del arrays[name]
    tensors.write(folder / file, arrays, text.about("window:size=2"))
    assert f"holds {', '.join(sorted(arrays))}, expected " in refused(sealed(folder), file)


def test_a_file_of_another_spec_or_kind_is_refused(folder):
    one, other = (folder / file for file in SPECS.values())
    one.write_bytes(other.read_bytes())
    line = refused(sealed(folder), one.name)
    assert "its metadata is {'format': 'mlxkv-text/1', 'of': 'window:size=2'}" in line
    other.write_bytes((folder / TRUTH).read_bytes())
    one.unlink()
    stored = {"window:size=2": other.name}
    assert "'of': 'truth'" in refused(sealed(folder, stored=stored), other.name)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stored": {"float16": "../stored-0.safetensors"}}, "expected stored-<i>.safetensors"),
        ({"stored": {"float16": "stored-0.safetensors"}}, "files are stored-0.safetensors, stored"),
        ({"files": {}}, "files are , expected stored-0.safetensors, stored-1.safetensors, truth"),
        (
            {
                "stored": {
                    "float16": SPECS["float16"],
                    "window:keep=0,size=2": "stored-1.safetensors",
                }
            },
            "stored holds 'window:keep=0,size=2', expected 'window:size=2'",
        ),
        ({"proofs": {text.PROOF: 2e-10}}, "proof truth_agreement is 2e-10, expected at most 1e-10"),
        ({"proofs": {}}, "proof truth_agreement is None, expected at most 1e-10"),
        ({"tokens": [3]}, "1 tokens, expected at least 2"),
        ({"tokens": ["a"]}, "tokens[0] is 'a', expected int"),
    ],
)
def test_what_no_folder_says_of_itself_is_refused(folder, changes, says):
    assert says in refused(sealed(folder, **changes), "text.json")


def test_a_manifest_that_is_none_is_refused(folder):
    path = folder / "text.json"
    value = json.loads(path.read_text())
    for written, says in (
        ("{", "not JSON"),
        ("[]", "format is [], expected 'mlxkv-text/1'"),
        (json.dumps(value | {"format": "mlxkv-text/2"}), "format is 'mlxkv-text/2'"),
        (json.dumps(value | {"more": 1}), "unknown key 'more'"),
        (
            json.dumps({k: v for k, v in value.items() if k != "lost"} | {"inputs": 1}),
            "inputs is 1",
        ),
    ):
        path.write_text(written)
        assert says in refused(folder, "text.json")
    path.unlink()
    assert "cannot be read" in refused(folder, "text.json")


def test_a_folder_is_of_its_weights_config_tokens_and_sources(folder, monkeypatch):
    manifest, tokens = text.read_manifest(folder), list(range(N))
    given = {"weights": FINGERPRINT, "config": DIGEST, "tokens": tokens}
    text.require(manifest, folder, **given)
    for changes, says in (
        ({"tokens": [*tokens, 1]}, "made of other tokens"),
        ({"weights": "c" * 64}, "made of weights aaaaaaaaaaaaaaaa, expected cccccccccccccccc"),
        ({"config": "c" * 64}, "made of config bbbbbbbbbbbbbbbb, expected cccccccccccccccc"),
    ):
        with pytest.raises(Refusal, match=says):
            text.require(manifest, folder, **given | changes)
    monkeypatch.setattr(text.run_folder, "sources", lambda: {"truth/llama.py": "changed"})
    with pytest.raises(Refusal, match="made of inputs"):
        text.require(manifest, folder, **given)
