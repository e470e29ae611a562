import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from folders import CONFIG, INDEX, SHARDS, aged, arrays, folder_of, refusal, refused
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from oracle.formats.errors import Refusal
from oracle.model import fingerprint
from oracle.model.checkpoint import require_llama, resolve


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_carried_as_it_is(tmp_path: Path) -> None:
    found = resolve(str(folder_of(tmp_path / "tiny")))
    assert (found.folder, found.source, found.name) == (
        tmp_path / "tiny",
        str(tmp_path / "tiny"),
        "tiny",
    )
    assert (found.note, found.revision, found.config) == ("", None, CONFIG)
    assert (found.vocab_size, found.max_positions) == (11, 32)
    assert {n: (t.file.name, t.dtype, t.shape) for n, t in found.tensors.items()} == {
        "lm_head.weight": ("model.safetensors", "F32", (11, 4)),
        "model.embed_tokens.weight": ("model.safetensors", "F32", (11, 4)),
        "model.norm.weight": ("model.safetensors", "F32", (4,)),
    }


def test_a_tensors_place_in_its_file_holds_its_bytes(tmp_path: Path) -> None:
    for name, tensor in resolve(str(folder_of(tmp_path / "tiny", SHARDS))).tensors.items():
        assert tensor.file.read_bytes()[tensor.start : tensor.stop] == arrays()[name].tobytes()


def test_the_fingerprint_is_the_written_down_formula(tmp_path: Path) -> None:
    import hashlib

    rows = [
        [n, "F32", list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()]
        for n, a in sorted(arrays().items())
    ]
    expected = hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()
    assert resolve(str(folder_of(tmp_path / "tiny"))).fingerprint == expected


def test_shards_and_other_file_names_do_not_change_the_fingerprint(tmp_path: Path) -> None:
    whole = resolve(str(folder_of(tmp_path / "whole")))
    shards = resolve(str(folder_of(tmp_path / "shards", SHARDS)))
    (folder_of(tmp_path / "named") / "model.safetensors").rename(
        tmp_path / "named/weights.safetensors"
    )
    named = resolve(str(tmp_path / "named"))
    assert whole.fingerprint == shards.fingerprint == named.fingerprint
    assert {t.file.name for t in named.tensors.values()} == {"weights.safetensors"}


def renamed(a: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {("model.norm.bias" if n == "model.norm.weight" else n): v for n, v in a.items()}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(renamed, id="a name"),
        pytest.param(
            lambda a: a | {"model.norm.weight": a["model.norm.weight"].view(np.int32)}, id="a dtype"
        ),
        pytest.param(
            lambda a: a | {"model.norm.weight": a["model.norm.weight"].reshape(2, 2)}, id="a shape"
        ),
        pytest.param(
            lambda a: {n: v for n, v in a.items() if n != "lm_head.weight"}, id="a tensor less"
        ),
    ],
)
def test_another_name_dtype_or_shape_is_another_fingerprint(
    tmp_path: Path, change: Callable[..., dict[str, np.ndarray]]
) -> None:
    before = resolve(str(folder_of(tmp_path / "before"))).fingerprint
    save_file(change(arrays()), folder_of(tmp_path / "after") / "model.safetensors")
    assert resolve(str(tmp_path / "after")).fingerprint != before


def test_one_bit_in_place_is_another_fingerprint_where_the_clock_is_too_coarse_to_tell(
    tmp_path: Path,
) -> None:
    file = folder_of(tmp_path / "tiny") / "model.safetensors"
    aged(file.parent, seconds=-60)
    stamp = file.stat().st_mtime_ns
    before = resolve(str(tmp_path / "tiny")).fingerprint
    whole = file.read_bytes()
    with file.open("r+b") as out:
        out.write(whole[:-1] + bytes([whole[-1] ^ 1]))
    os.utime(file, ns=(stamp, stamp))
    assert resolve(str(tmp_path / "tiny")).fingerprint != before


def test_a_hash_is_made_once_while_the_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = aged(folder_of(tmp_path / "tiny", SHARDS))
    first = resolve(str(folder)).fingerprint
    asked = []
    hashed = fingerprint._hashed
    monkeypatch.setattr(
        fingerprint,
        "_hashed",
        lambda path, *rest: asked.append(path.name) or hashed(path, *rest),
    )
    assert resolve(str(folder)).fingerprint == first
    assert asked == []
    os.utime(folder / "b.safetensors")
    assert resolve(str(folder)).fingerprint == first
    assert asked == ["b.safetensors"]


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", "null", '{"hashes": 3}', "cut", "renamed", "not hex"]
)
def test_a_damaged_record_of_hashes_is_made_again(tmp_path: Path, cache: Path, damage: str) -> None:
    folder = aged(folder_of(tmp_path / "tiny"))
    first = resolve(str(folder)).fingerprint
    (record,) = (cache / "fingerprints").iterdir()
    good = record.read_text()
    edits = {
        "cut": good[:-9],
        "renamed": good.replace("lm_head", "lm_hat"),
        "not hex": good.replace('"lm_head.weight": "', '"lm_head.weight": "x'),
    }
    record.write_text(edits.get(damage, damage))
    assert resolve(str(folder)).fingerprint == first
    assert record.read_text() == good
    assert os.listdir(cache / "fingerprints") == [record.name]


def test_strays_are_not_looked_at_because_the_index_rules(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny", SHARDS)
    before = resolve(str(folder)).fingerprint
    (folder / "consolidated.safetensors").write_bytes(b"")
    (folder / "model.safetensors").write_bytes(b"not weights")
    assert resolve(str(folder)).fingerprint == before


def test_a_byte_order_mark_before_the_config_is_passed_over(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny")
    before = resolve(str(folder)).config_digest
    (folder / "config.json").write_text("\ufeff" + json.dumps(CONFIG, indent=8), encoding="utf-8")
    assert resolve(str(folder)).config_digest == before


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        pytest.param(
            lambda file: file.write_bytes(file.read_bytes()[:-1]),
            "of 607 bytes (its tensors end at byte 608)",
            id="one byte short",
        ),
        pytest.param(
            lambda file: file.write_bytes(file.read_bytes() + b"0"),
            "of 609 bytes (its tensors end at byte 608)",
            id="one byte over",
        ),
        pytest.param(
            lambda file: file.write_bytes(file.read_bytes()[:100]),
            "a header of",
            id="cut in its header",
        ),
        pytest.param(
            lambda file: file.write_bytes(b""),
            "not a whole safetensors file of 0 bytes (no header)",
            id="empty",
        ),
        pytest.param(lambda file: file.write_bytes(LFS), "a Git LFS pointer", id="LFS pointer"),
        pytest.param(
            lambda file: file.write_bytes(b"<!doctype html><title>404</title>"),
            "not a whole safetensors",
            id="a web page",
        ),
        pytest.param(
            lambda file: file.write_bytes((4).to_bytes(8, "little") + b"[1] "),
            "not a whole safetensors",
            id="a list as header",
        ),
        pytest.param(lambda file: save_file({}, file), "hold no tensors", id="no tensors"),
    ],
)
def test_a_damaged_file_is_refused_by_its_name(
    tmp_path: Path, damage: Callable[[Path], None], says: str
) -> None:
    folder = folder_of(tmp_path / "tiny")
    damage(folder / "model.safetensors")
    message = refused(folder)
    assert message.startswith(str(folder))
    assert says in message
    folder = folder_of(tmp_path / "shards", SHARDS)
    damage(folder / "b.safetensors")
    assert (
        "lacks model.embed" if says == "hold no tensors" else str(folder / "b.safetensors")
    ) in refused(folder)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        pytest.param({"shape": [5, 4]}, "for F32 [5, 4]", id="shape"),
        pytest.param({"dtype": "F16"}, "for F16 [4]", id="dtype"),
        pytest.param({"dtype": "F4"}, "is 'F4', expected one of", id="unknown dtype"),
        pytest.param({"shape": [-1, -4]}, "shape[0] is -1, expected int >= 0", id="negative"),
        pytest.param({"shape": [4.0]}, "shape[0] is 4.0, expected int", id="not whole"),
        pytest.param(
            {"data_offsets": [8, 24]}, "has bytes 8 to 24, expected them from", id="overlap"
        ),
        pytest.param({"data_offsets": None}, "not a whole safetensors file", id="no offsets"),
    ],
)
def test_a_header_that_does_not_add_up_is_refused(
    tmp_path: Path, edit: dict[str, object], says: str
) -> None:
    file = folder_of(tmp_path / "tiny") / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    entries = json.loads(whole[8 : 8 + length])
    entries["model.norm.weight"] |= edit
    text = json.dumps(entries).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    assert says in refused(file.parent)


HEAD, NORM, TABLE = "lm_head.weight", "model.norm.weight", "model.embed_tokens.weight"
A, B, C = "a.safetensors", "b.safetensors", "c.safetensors"


@pytest.mark.parametrize(
    ("where", "says"),
    [
        pytest.param(
            {HEAD: A, NORM: C, TABLE: B}, "c.safetensors: no such file", id="absent shard"
        ),
        pytest.param(
            {HEAD: A, TABLE: B},
            "a.safetensors: holds model.norm.weight, expected it nowhere",
            id="one not named",
        ),
        pytest.param(
            {HEAD: A, NORM: B, TABLE: B},
            "a.safetensors: holds model.norm.weight, expected it in b.safetensors",
            id="elsewhere",
        ),
        pytest.param(
            {HEAD: A, NORM: A, TABLE: B, "x": A}, "a.safetensors: lacks x", id="one not there"
        ),
        pytest.param(
            {HEAD: "../a.safetensors"},
            "expected the name of a safetensors file beside it",
            id="outside the folder",
        ),
        pytest.param(
            {HEAD: "a.bin"}, "expected the name of a safetensors file beside it", id="pickle"
        ),
    ],
)
def test_an_index_must_add_up_with_its_shards(
    tmp_path: Path, where: dict[str, str], says: str
) -> None:
    folder = folder_of(tmp_path / "tiny", SHARDS)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    save_file(
        arrays(), folder / "model.safetensors"
    )  # a whole file beside a wrong index does not save it
    assert says in refused(folder)


def test_a_tensor_in_two_shards_is_refused_by_both_names(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny", SHARDS)
    save_file(
        {n: arrays()[n] for n in ("model.embed_tokens.weight", "lm_head.weight")},
        folder / "b.safetensors",
    )
    assert f"{folder / 'b.safetensors'}: lm_head.weight is in a.safetensors too" in refused(folder)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not JSON"),
        ("[]", "a JSON list, expected an object"),
        ("", "not JSON"),
        ("[" * 99999, "not JSON"),
        ("{'a': 1}", "not JSON"),
    ],
)
def test_a_config_or_index_that_is_no_json_object_is_refused(
    tmp_path: Path, text: str, says: str
) -> None:
    folder = folder_of(tmp_path / "tiny", SHARDS)
    (folder / INDEX).write_text(text)
    assert f"{folder / INDEX}: {says}" in refused(folder)
    (folder / "config.json").write_text(text)
    assert f"{folder / 'config.json'}: {says}" in refused(folder)


def test_an_index_without_a_map_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny", SHARDS)
    (folder / INDEX).write_text('{"weight_map": {}}')
    assert f"{folder / INDEX}: no weight_map" in refused(folder)


def test_a_folder_without_config_or_weights_is_refused_with_the_remedy(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    assert f"{folder}: no model.safetensors, expected the weights beside config.json" in refused(
        folder
    )
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    assert (
        f"{folder}: no safetensors, and pytorch_model.bin is never opened (pickle files run code)"
        in refused(folder)
    )
    for name in ("x.safetensors", "y.safetensors"):
        save_file(arrays(), folder / name)
    assert f"{folder}: 2 safetensors files and no {INDEX}" in refused(folder)
    (folder / "config.json").unlink()
    assert f"{folder}: no config.json" in refused(folder)
    (folder / "m.Q8_0.gguf").touch()
    assert f"name the file {folder / 'm.Q8_0.gguf'} itself" in refused(folder)


def test_what_is_neither_folder_nor_gguf_nor_hub_id_is_refused(tmp_path: Path) -> None:
    assert (
        refused(tmp_path / "nowhere")
        == f"'{tmp_path}/nowhere': no such folder or file, expected one, or a Hub id (org/name); "
        f"check the spelling"
    )
    assert "no such folder or file" in refused(tmp_path / "nowhere.gguf")
    for model in ("", "gpt2", "https://huggingface.co/org/name", "x" * 5000, "~nobody", "nul\0"):
        assert "no such folder or file" in refused(model)
    file = folder_of(tmp_path / "tiny") / "model.safetensors"
    assert f"{file}: a file, expected a folder" in refused(file)


def test_only_a_hub_id_has_revisions(tmp_path: Path) -> None:
    for model in ("default", folder_of(tmp_path / "tiny"), "gpt2"):
        assert "has no revisions" in refused(model, revision="main")


@pytest.mark.parametrize(
    "config", [{"model_type": "qwen2"}, {"model_type": None}, {}, {"model_type": "Llama"}]
)
def test_a_model_that_is_not_llama_is_carried_and_refused_when_asked(
    tmp_path: Path, config: dict[str, object]
) -> None:
    found = resolve(str(folder_of(tmp_path / "tiny", config=config)))
    with pytest.raises(
        Refusal, match=rf"config.json: model_type is {config.get('model_type')!r}, expected 'llama'"
    ):
        require_llama(found)
    require_llama(resolve(str(folder_of(tmp_path / "llama"))))


@pytest.mark.parametrize("value", [None, 0, -1, "8", 8.0, True])
def test_sizes_that_are_not_whole_numbers_are_refused_by_key(tmp_path: Path, value: object) -> None:
    found = resolve(str(folder_of(tmp_path / "tiny", config=CONFIG | {"vocab_size": value})))
    with pytest.raises(
        Refusal, match=rf"config.json: vocab_size is {value!r}, expected a whole number from 1"
    ):
        _ = found.vocab_size


def test_a_cache_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path / "tiny")
    monkeypatch.setenv("MLXKV_CACHE", str(folder / "config.json/below"))
    for model in (folder, "default"):
        assert (
            "cannot be written (Not a directory); name another cache folder in MLXKV_CACHE"
            in refused(model)
        )


def test_progress_goes_up_to_its_total(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    resolve(str(folder_of(tmp_path / "tiny")), progress=lambda *told: seen.append(told))
    assert [done for _, done, _ in seen] == [176, 352, 368]
    assert {(what, total) for what, _, total in seen} == {("hashing model.safetensors", 368)}


def test_importing_costs_no_library() -> None:
    code = (
        "import sys, oracle.model.checkpoint, "
        "oracle.model.tokenizer\nprint(sorted({m.split('.')[0] for m in sys.modules} & "
        "set(sys.argv[1:])))"
    )
    heavy = [
        "numpy",
        "gguf",
        "huggingface_hub",
        "tokenizers",
        "torch",
        "mlx",
        "transformers",
        "safetensors",
        "platformdirs",
    ]
    done = subprocess.run(
        [sys.executable, "-c", code, *heavy], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    ("config", "generation", "ids"),
    [
        ({}, None, []),
        ({"eos_token_id": None}, {}, []),
        ({"eos_token_id": 3}, None, [3]),
        ({"eos_token_id": 3}, {"eos_token_id": [195, 7]}, [3, 7, 195]),
        ({"eos_token_id": [3, 4]}, {"eos_token_id": 0, "top_p": 0.9}, [0, 3, 4]),
    ],
)
def test_a_text_ends_by_both_files(
    tmp_path: Path, config: dict[str, object], generation: object, ids: list[int]
) -> None:
    folder = folder_of(tmp_path / "m", config=CONFIG | {"vocab_size": 256} | config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    assert resolve(str(folder)).eos_ids == frozenset(ids)


@pytest.mark.parametrize("odd", ["195", [[195]], 195.0, True, [3, None], {"a": 1}])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_odd_end_of_text_is_refused_by_its_file(tmp_path: Path, odd: object, name: str) -> None:
    folder = folder_of(tmp_path / "m", config=CONFIG)
    path = folder / name
    path.write_text(json.dumps((CONFIG if name == "config.json" else {}) | {"eos_token_id": odd}))
    found = resolve(str(folder))
    expected = "expected a token id or a list of them; correct it"
    assert refusal(lambda: found.eos_ids) == f"{path}: eos_token_id is {odd!r}, {expected}"


@pytest.mark.parametrize("beyond", [-1, 256])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_an_end_of_text_outside_the_vocabulary_is_refused_by_its_file(
    tmp_path: Path, beyond: int, name: str
) -> None:
    sized = CONFIG | {"vocab_size": 256}
    folder = folder_of(tmp_path / "m", config=sized)
    path = folder / name
    given = {"eos_token_id": [255, beyond]}
    path.write_text(json.dumps((sized if name == "config.json" else {}) | given))
    found = resolve(str(folder))
    expected = "expected 0 to 255, the vocabulary's ids; correct it"
    assert refusal(lambda: found.eos_ids) == f"{path}: eos_token_id is {beyond}, {expected}"


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16", "float64"])
@pytest.mark.parametrize("odd", ["NaN", "infinity", "-infinity", None])
def test_weights_that_are_not_finite_are_refused_by_tensor_and_file_and_that_is_kept(
    tmp_path: Path, cache: Path, dtype: str, odd: str | None
) -> None:
    folder = folder_of(tmp_path / "m")
    # More than is read at once, and the odd one alone at the end, or at the start.
    large = torch.linspace(-3, 2, 600_000, dtype=torch.float64)
    if odd:
        large[-1 if odd == "NaN" else 0] = float(odd.replace("infinity", "inf"))
    stored = {n: torch.tensor(a) for n, a in arrays().items()}
    stored |= {"model.norm.weight": large.to(getattr(torch, dtype))}
    stored |= {"ids": torch.full((3,), -1, dtype=torch.int32)}  # as a float it would be NaN
    save_torch(stored, folder / "model.safetensors")
    aged(folder)
    for _ in range(2):
        if odd is None:
            found = resolve(str(folder)).largest
            assert (found["model.norm.weight"], found["ids"]) == (3.0, 0.0)
            assert found["lm_head.weight"] == float(np.abs(arrays()["lm_head.weight"]).max())
        else:
            what = f"model.norm.weight holds {odd.strip('-')}, expected finite weights"
            remedy = "download or save it again"
            assert refused(folder) == f"{folder}/model.safetensors: {what}; {remedy}"
        assert len(os.listdir(cache / "fingerprints")) == 1


@pytest.mark.parametrize("meta", [{"total_size": 5}, [], "pt", {"format": None}])
def test_metadata_that_safetensors_does_not_read_is_refused(tmp_path: Path, meta: object) -> None:
    path = folder_of(tmp_path / "m") / "model.safetensors"
    whole = path.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    text = json.dumps({"__metadata__": meta} | json.loads(whole[8 : 8 + length])).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + whole[8 + length :])
    line = refused(tmp_path / "m")
    assert line.startswith(f"{path}: not a whole safetensors file of ")
    assert "(__metadata__ is " in line
