"""Valid files, damaged at random: only a Refusal of one line may come out of any reader, whatever
was done to the bytes.

MLXKV_FUZZ multiplies the number of cases.
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import INDEX, SHARDS, arrays, folder_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oracle import folder
from oracle.formats import disk, plan, run_folder, strict_json, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Greedy, New, Plan
from oracle.model import safetensors as safetensors_file
from oracle.model.gguf import read as read_gguf
from oracle.truth.config import read_config

CASES = 250 * int(os.environ.get("MLXKV_FUZZ", "1"))
fuzz = settings(
    max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([-1, 2**31, 2**63, 2**70, 10**400, -0.0, math.nan, math.inf, 1e308])
    | st.floats()
    | st.sampled_from(
        [
            "",
            "\0",
            "..",
            "../x",
            "/etc/passwd",
            "x" * 300,
            "\ud800",
            "F32",
            "F64",
            "a",
            "right",
            "call",
        ]
    )
    | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


def quietly(read: Callable[[], object]) -> None:
    """Reads; a Refusal of one line is as good as a value."""
    try:
        read()
        said = ""
    except Refusal as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 2000
    said.encode()


def damaged(data: st.DataObject, valid: bytes) -> bytes:
    """Bytes flipped, cut, doubled or put in."""
    raw = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, max(0, min(len(raw), 4000) - 1)))
        match data.draw(st.integers(0, 3)):
            case 0:
                del raw[at:]
            case 1:
                raw[at : at + 1] = bytes([data.draw(st.integers(0, 255))])
            case 2:
                raw[at:at] = data.draw(st.binary(max_size=9))
            case _:
                raw[at:at] = raw[at : at + data.draw(st.integers(1, 40))]
    return bytes(raw)


def edited(data: st.DataObject, value: Any) -> Any:
    """One entry somewhere within a JSON value replaced, removed or added."""
    value = json.loads(json.dumps(value))
    inside = value
    while isinstance(inside, dict | list) and inside:
        key = data.draw(
            st.sampled_from(sorted(inside) if isinstance(inside, dict) else range(len(inside)))
        )
        if not isinstance(inside[key], dict | list) or not inside[key] or data.draw(st.booleans()):
            how = data.draw(st.integers(0, 9))
            if how == 0:
                del inside[key]
            elif how == 1 and isinstance(inside, dict):
                inside[data.draw(st.text(max_size=6))] = data.draw(JSON)
            else:
                inside[key] = data.draw(JSON)
            break
        inside = inside[key]
    return value


def text_of(data: st.DataObject, value: Any) -> bytes:
    """An edited value as JSON, sometimes with a key named twice or nested deep."""
    text = json.dumps(value)
    how = data.draw(st.integers(0, 19))
    if how == 0:
        text = text.replace("{", '{"name": 1, ', 1).replace("}", ', "name": 2}', 1)
    elif how == 1:
        text = text.replace("[]", "[" * 5000 + "]" * 5000, 1)
    elif how == 2:
        text = text.replace("1", "1" * 5000, 1)
    return text.encode()


def packed(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(8, "little") + header + body


@functools.cache
def room() -> Path:
    """A folder for the one file that a case writes; in memory where the system has such a place."""
    kept = tempfile.TemporaryDirectory(prefix="mlxkv-fuzz-")
    room.kept = kept  # type: ignore[attr-defined]
    return Path(kept.name)


@functools.cache
def a_trace() -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """A valid trace's header, metadata and data."""
    judged = Plan("greedy", (New("a"), Greedy("a", (1, 2), 0, 3)))
    meta = trace.Meta(
        judged,
        "other",
        "1",
        "float32",
        outcomes=[trace.Outcome(), trace.Outcome([1, 2, 3])],
        environment={"os": "Linux"},
    )
    kv = {f"kv/a/000/{kind}": np.ones((2, 3, 4), np.float32) for kind in ("keys", "values")}
    rows = {
        "logits": np.ones((3, 7), np.float32),
        "positions": np.arange(3, dtype=np.int32),
        "steps": np.ones(3, np.int32),
    }
    trace.write(room() / "valid.safetensors", meta, rows | kv)
    raw = (room() / "valid.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    return header, json.loads(header["__metadata__"]["mlxkv"]), raw[8 + size :]


def used(path: Path) -> None:
    """What a judge does first with a trace."""
    found = trace.read(path)
    found.label.encode()
    json.dumps(found.meta.to_json(), allow_nan=False).encode()
    assert len(found.logits) == len(found.positions)
    found.kv("a", 0)
    for array in found.arrays.values():
        np.isfinite(array).all()


@fuzz
@given(st.data())
def test_a_trace_with_damaged_bytes(data: st.DataObject) -> None:
    header, _, body = a_trace()
    path = room() / "t.safetensors"
    path.write_bytes(damaged(data, packed(json.dumps(header).encode(), body)))
    quietly(lambda: used(path))


@fuzz
@given(st.data())
def test_a_trace_with_an_edited_header_or_metadata(data: st.DataObject) -> None:
    header, meta, body = a_trace()
    if data.draw(st.booleans()):
        header = edited(data, header)
    else:
        header = header | {"__metadata__": {"mlxkv": text_of(data, edited(data, meta)).decode()}}
    path = room() / "t.safetensors"
    path.write_bytes(packed(text_of(data, header), body))
    quietly(lambda: used(path))


PLAN = {
    "format": plan.FORMAT,
    "name": "p",
    "rows": "all",
    "steps": [
        {"do": "new", "cache": "a", "use_kv_cache": True},
        {"do": "call", "cache": "a", "tokens": [1, 2], "index_pos": 0},
        {
            "do": "greedy",
            "cache": "a",
            "tokens": [3],
            "index_pos": None,
            "n": 2,
            "advance": "right",
        },
        {"do": "clone", "from": "a", "to": "b"},
        {"do": "crop", "cache": "b", "length": 1},
        {"do": "reset", "cache": "b"},
    ],
}


@fuzz
@given(st.data())
def test_a_plan(data: st.DataObject) -> None:
    path = room() / "p.json"
    valid = json.dumps(PLAN).encode()
    path.write_bytes(
        damaged(data, valid) if data.draw(st.booleans()) else text_of(data, edited(data, PLAN))
    )

    def read() -> None:
        found = plan.read(path)
        assert Path(found.name).name == found.name
        assert plan.from_json(found.to_json()) == found
        assert found.longest >= 0
        found.digest.encode()

    quietly(read)


@functools.cache
def a_manifest() -> tuple[Path, dict[str, Any]]:
    """A run folder's manifest over files that are there; nothing of it was computed."""
    place = room() / "run"
    (place / "plans").mkdir(parents=True)
    judged = plan.judged_plans([1, 2, 3], prompt=2)
    for name, each in judged.items():
        disk.write_text(place / "plans" / f"{name}.json", json.dumps(each.to_json()))
    (place / "truth.safetensors").write_bytes(b"x")
    manifest = run_folder.Manifest(
        source="default",
        name="tiny",
        note="",
        revision=None,
        fingerprint="f" * 64,
        config_digest="c" * 64,
        dtype="float32",
        prompt="a b",
        prompt_tokens=2,
        tokens=[1, 2, 3],
        texts=["a", "b", "c"],
        plans={name: each.digest for name, each in judged.items()},
        files={
            p.relative_to(place).as_posix(): disk.sha256(p) for p in place.rglob("*") if p.is_file()
        },
        proofs={
            "truth_agreement": 1e-14,
            "transformers_double": 1e-8,
        },
        generated=[3],
        pool=["sdpa-step"],
        pool_distinct=1,
        left_out={},
        ignored_keys=[],
        packed="",
        environment={"os": "Linux", "threads": 2},
        inputs="e" * 64,
    )
    run_folder.write_manifest(place, manifest)
    return place, json.loads((place / "manifest.json").read_bytes())


@fuzz
@given(st.data())
def test_a_manifest(data: st.DataObject) -> None:
    place, valid = a_manifest()
    text = (
        damaged(data, json.dumps(valid).encode())
        if data.draw(st.integers(0, 3)) == 0
        else text_of(data, edited(data, valid))
    )
    (place / "manifest.json").write_bytes(text)

    def read() -> None:
        found = run_folder.read_manifest(place)
        json.dumps(asdict(found), allow_nan=False).encode()
        assert all((place / name).resolve().is_relative_to(place.resolve()) for name in found.files)
        folder.show(place).encode()

    quietly(read)
    quietly(lambda: folder.check(place))


@functools.cache
def a_model() -> tuple[Path, bytes, bytes, bytes]:
    """A folder in two shards, with the bytes of its index, its config and one shard."""
    place = folder_of(room() / "model", SHARDS)
    return (
        place,
        (place / INDEX).read_bytes(),
        (place / "config.json").read_bytes(),
        (place / "a.safetensors").read_bytes(),
    )


@fuzz
@given(st.data())
def test_a_models_safetensors_and_index(data: st.DataObject) -> None:
    place, index, _, shard = a_model()
    size = int.from_bytes(shard[:8], "little")
    match data.draw(st.integers(0, 3)):
        case 0:
            index = text_of(data, edited(data, json.loads(index)))
        case 1:
            index = damaged(data, index)
        case 2:
            shard = damaged(data, shard)
        case _:
            shard = packed(
                text_of(data, edited(data, json.loads(shard[8 : 8 + size]))), shard[8 + size :]
            )
    (place / INDEX).write_bytes(index)
    (place / "a.safetensors").write_bytes(shard)

    def read() -> None:
        found = safetensors_file.tensors(place)
        assert {t.file.name for t in found.values()} <= set(SHARDS)
        assert all(0 < t.start <= t.stop <= t.file.stat().st_size for t in found.values())

    quietly(read)


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 32,
    },
    "tie_word_embeddings": False,
    "eos_token_id": [1, 2],
}


@fuzz
@given(st.data())
def test_a_config_as_text(data: st.DataObject) -> None:
    path = room() / "config.json"
    path.write_bytes(damaged(data, json.dumps(CONFIG).encode()))
    quietly(lambda: read_config(safetensors_file.read_object(path), where=str(path)))


@fuzz
@given(st.data())
def test_a_gguf(data: st.DataObject) -> None:
    from gguf import GGUFWriter

    path = room() / "valid.gguf"
    if not path.exists():
        writer = GGUFWriter(str(path), "llama")
        writer.add_block_count(1)
        writer.add_token_list(["a", "b"])
        writer.add_tensor("token_embd.weight", arrays()["lm_head.weight"])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    other = room() / "t.gguf"
    other.write_bytes(damaged(data, path.read_bytes()))
    from oracle.model import gguf_llama

    made = room() / "gguf"
    made.mkdir(exist_ok=True)
    quietly(lambda: read_gguf(other))
    quietly(lambda: gguf_llama.convert(other, made, progress=lambda *_: None))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"a": 1, "a": 2}', "key 'a' is there twice"),
        (b'{"a": "\\ud800"}', "surrogates not allowed"),
        (b"[" * 40 + b"]" * 40, "nested more than 32 deep"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deep"),
        (b"\xff{}", "decode"),
        (b"1" * 5000, "digits"),
        (b'{"a": [9223372036854775808]}', "does not fit into 64 bits"),
        (b"[NaN]", "NaN is not finite"),
        (b"[-Infinity]", "-Infinity is not finite"),
        (b"[1e999]", "1e999 is not finite"),
    ],
)
def test_json_that_is_none_for_us(text: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        strict_json.decode(text)


@pytest.mark.parametrize(
    ("value", "kind", "good"),
    [
        (1, int, True),
        (True, int, False),
        (1, float, True),
        (-0.0, float, True),
        ("a", str | None, True),
        (None, str | None, True),
        ([1, "a"], list[int], False),
        ({"a": {"b": [1, None, 0.5]}}, Any, True),
        ({"a": 1.5}, dict[str, float], True),
        ({"a": "1"}, dict[str, float], False),
    ],
)
def test_kinds_are_the_annotations(value: Any, kind: Any, good: bool) -> None:
    assert strict_json.fits(value, kind) is good
