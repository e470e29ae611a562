"""Caches that are saved and loaded (point 11): nothing changes on the way, and nothing else is ever
taken for one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import models
import numpy as np
import pytest
from caches import LAYOUTS, ModelOf, fresh, held, refused, run, same
from safetensors.numpy import load_file

from mlxkv.port import cache_file, rope
from mlxkv.port.cache import BLOCK, Cache, CacheError, Layer
from mlxkv.port.llama import Llama
from mlxkv.port.weights import load
from oracle.formats.errors import Refusal
from oracle.formats.tensors import writer

FolderOf = Callable[[str], Path]
DTYPES = ("float32", "float16", "bfloat16", "float64")


def saved(cache: Cache, path: Path) -> Path:
    cache.save(path)
    return path


def bits(cache: Cache) -> list[bytes]:
    return [
        np.array(a.view(mx.uint8)).tobytes()
        for layer in cache.layers
        for a in (layer.keys, layer.values)
        if a is not None
    ]


def filled(model: Llama, *calls: list[int], **options: Any) -> Cache:
    cache = fresh(model, **options)
    run_all(model, cache, *calls)
    return cache


def run_all(model: Llama, cache: Cache, *calls: list[int]) -> list[bytes]:
    return [np.array(model([ids], cache=cache, all_positions=True)).tobytes() for ids in calls]


def refusal(path: Path, model: Llama) -> str:
    """The line that refuses a file, without the file's name in front."""
    with pytest.raises(CacheError) as caught:
        Cache.load(path, model)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def parts(path: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    """The metadata, the tensors' table and the rows' bytes of a file, by safetensors' own rules."""
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    return json.loads(header.pop("__metadata__")["mlxkv"]), header, content[end:]


def forge(path: Path, rows: bytes | None = None, **changes: Any) -> Path:
    """The file with other rows or metadata, and a digest that fits them; ... drops a field."""
    meta, tensors, old = parts(path)
    rows = old if rows is None else rows
    meta = {k: v for k, v in (meta | changes).items() if v is not ... and k != "sha256"}
    digest = cache_file._digest(meta)
    digest.update(rows)
    inner = json.dumps(
        {"sha256": digest.hexdigest(), **meta}, sort_keys=True, separators=(",", ":")
    )
    text = json.dumps({"__metadata__": {"mlxkv": inner}, **tensors}, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + rows)
    return path


# There and back.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_11_a_cache_that_was_away_goes_on_bit_for_bit(
    layout: str, dtype: str, model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of(layout, dtype)
    cache = filled(model, models.ids(7), [1], [2, 3])

    loaded = Cache.load(saved(cache, tmp_path / "cache.safetensors"), model)

    assert (len(loaded), loaded.nbytes, repr(loaded)) == (10, cache.nbytes, repr(cache))
    assert bits(loaded) == bits(cache)
    assert (
        saved(loaded, tmp_path / "again.safetensors").read_bytes()
        == (tmp_path / "cache.safetensors").read_bytes()
    )
    calls = [[4], [5, 6, 7], [8]]
    assert run_all(model, loaded, *calls) == run_all(model, cache, *calls)
    assert bits(loaded) == bits(cache)


def test_11_rows_beyond_a_block_go_on_bit_for_bit(tmp_path: Path) -> None:
    model = load(
        models.save(tmp_path / "long", models.config("gqa", max_position_embeddings=2 * BLOCK))
    )
    cache = filled(model, models.ids(BLOCK + 3))

    loaded = Cache.load(saved(cache, tmp_path / "cache.safetensors"), model)

    assert [b.shape for b in loaded.layers[0].buffers or ()] == [
        b.shape for b in cache.layers[0].buffers or ()
    ]
    assert run_all(model, loaded, [1], [2, 3]) == run_all(model, cache, [1], [2, 3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_11_an_empty_cache_is_empty_afterwards(
    dtype: str, model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of("gqa", dtype)
    used = filled(model, [1, 2, 3])
    used.reset()

    files = [
        saved(cache, tmp_path / f"{i}.safetensors") for i, cache in enumerate((fresh(model), used))
    ]

    assert files[0].read_bytes() == files[1].read_bytes()
    loaded = Cache.load(files[1], model)
    assert (len(loaded), loaded.layers) == (0, (Layer(), Layer(), Layer()))
    assert run_all(model, loaded, [1, 2], [3]) == run_all(model, fresh(model), [1, 2], [3])


def test_11_batches_clones_and_crops_come_back_as_they_were(
    model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of()
    batch = fresh(model)
    model([models.ids(6, seed=s) for s in range(3)], cache=batch)
    clone = batch.clone()
    model([[1], [2], [3]], cache=clone)
    cropped = clone.clone()
    cropped.crop(4)

    for cache in (batch, clone, cropped):
        loaded = Cache.load(saved(cache, tmp_path / "cache.safetensors"), model)
        assert same(held(loaded), held(cache))
        assert loaded.layers[0].batch == 3
        found, expected = (
            np.array(model([[7], [8], [9]], cache=c)) for c in (loaded, cache.clone())
        )
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("guarded", [True, False])
@pytest.mark.parametrize("use_kv_cache", [True, False])
def test_11_settings_come_back(
    guarded: bool, use_kv_cache: bool, model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of()
    cache = filled(model, [1, 2, 3], guarded=guarded, use_kv_cache=use_kv_cache)

    loaded = Cache.load(saved(cache, tmp_path / "cache.safetensors"), model)

    assert (loaded.guarded, loaded.use_kv_cache, loaded.config, loaded.dtype) == (
        guarded,
        use_kv_cache,
        model.config,
        mx.float32,
    )
    assert len(loaded) == (3 if use_kv_cache else 0)


def test_11_a_cache_made_for_a_length_comes_back_with_it(model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of()
    cache = filled(model, [1, 2, 3], max_length=5)
    loaded = Cache.load(saved(cache, tmp_path / "cache.safetensors"), model)
    assert (loaded.max_length, len(loaded.cos)) == (5, 5)
    run(model, loaded, [4, 5])
    assert "is beyond the 5 rows" in refused(lambda: run(model, loaded, [6]), loaded)


def test_11_loading_leaves_the_file_and_saving_leaves_the_cache(
    model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of()
    cache = filled(model, [1, 2, 3])
    layers, before = cache.layers, held(cache)

    path = saved(cache, tmp_path / "new folder" / "cache.safetensors")
    content = path.read_bytes()
    run(model, Cache.load(str(path), model), [4])

    assert cache.layers is layers
    assert same(held(cache), before)
    assert path.read_bytes() == content
    assert [p.name for p in path.parent.iterdir()] == ["cache.safetensors"]


def test_11_the_file_is_plain_safetensors_and_says_what_it_holds(
    model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of()
    cache = filled(model, [1, 2, 3])
    path = saved(cache, tmp_path / "cache.safetensors")

    arrays = load_file(path)
    assert sorted(arrays) == [f"{i:03d}/{part}" for i in range(3) for part in ("keys", "values")]
    assert same([arrays[name] for name in sorted(arrays)], held(cache))
    meta = parts(path)[0]
    tables = meta.pop("rope_tables"), meta.pop("sha256")
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in tables)
    assert meta == {
        "format": "mlxkv-cache/1",
        "length": 3,
        "batch": 1,
        "dtype": "float32",
        "use_kv_cache": True,
        "guarded": True,
        "max_length": 64,
        "fingerprint": model.fingerprint,
        "config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 40,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5,
            "rope": {
                "theta": 10000.0,
                "rope_type": "default",
                "factor": 1.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 1.0,
                "original_max_position_embeddings": 0,
                "attention_factor": None,
                "mscale": None,
                "mscale_all_dim": None,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": True,
                "short_factor": [],
                "long_factor": [],
            },
            "tie_word_embeddings": False,
            "attention_bias": False,
            "mlp_bias": False,
        },
    }


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_11_half_precision_is_stored_as_itself(
    dtype: str, model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of("gqa", dtype)
    cache = filled(model, [1, 2, 3])

    arrays = mx.load(str(saved(cache, tmp_path / "cache.safetensors")))

    assert isinstance(arrays, dict)
    for i, layer in enumerate(cache.layers):
        assert layer.keys is not None
        assert arrays[f"{i:03d}/keys"].dtype == cache.dtype
        assert mx.array_equal(arrays[f"{i:03d}/keys"], layer.keys)


# Another's file.


ANOTHER = "load the model that filled it, or fill a new cache"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rope_theta": 10001.0},
            f"config.rope.theta is 10000.0, expected 10001.0 as the model's; {ANOTHER}",
        ),
        (
            {"rope_scaling": models.LLAMA3},
            f"config.rope.rope_type is 'default', expected 'llama3' as the model's; {ANOTHER}",
        ),
        (
            {"rms_norm_eps": 1.1e-5},
            f"config.rms_norm_eps is 1e-05, expected 1.1e-05 as the model's; {ANOTHER}",
        ),
        (
            {"max_position_embeddings": 65},
            f"config.max_position_embeddings is 64, expected 65 as the model's; {ANOTHER}",
        ),
    ],
    ids=["theta", "llama3", "eps", "positions"],
)
def test_11_the_same_weights_under_another_config_are_refused(
    changes: dict[str, Any], message: str, model_of: ModelOf, tmp_path: Path
) -> None:
    path = saved(filled(model_of(), [1, 2, 3]), tmp_path / "cache.safetensors")
    other = load(
        models.save(
            tmp_path / "other",
            models.config("gqa", **changes),
            models.weights(models.config("gqa")),
        )
    )

    assert other.fingerprint == model_of().fingerprint
    assert refusal(path, other) == message


def test_11_one_number_of_llama3s_scaling_is_enough(model_of: ModelOf, tmp_path: Path) -> None:
    path = saved(filled(model_of("llama3"), [1, 2, 3]), tmp_path / "cache.safetensors")
    scaling = models.LLAMA3 | {"high_freq_factor": 4.5}
    other = load(
        models.save(
            tmp_path / "other",
            models.config("llama3", rope_scaling=scaling),
            models.weights(models.config("llama3")),
        )
    )

    assert (
        refusal(path, other)
        == f"config.rope.high_freq_factor is 4.0, expected 4.5 as the model's; {ANOTHER}"
    )


def test_11_other_weights_under_the_same_config_are_refused(
    model_of: ModelOf, tmp_path: Path
) -> None:
    path = saved(filled(model_of(), [1, 2, 3]), tmp_path / "cache.safetensors")
    config = models.config("gqa")
    other = load(models.save(tmp_path / "other", config, models.weights(config, seed=1)))

    mine, theirs = model_of().fingerprint, other.fingerprint
    assert mine is not None
    assert theirs is not None
    assert (
        refusal(path, other)
        == f"fingerprint is {mine[:12]}, expected {theirs[:12]} as the model's; {ANOTHER}"
    )


def test_11_one_changed_weight_is_another_model(model_of: ModelOf, tmp_path: Path) -> None:
    path = saved(filled(model_of(), [1, 2, 3]), tmp_path / "cache.safetensors")
    config, weights = models.config("gqa"), models.weights(models.config("gqa"))
    weights["model.layers.2.mlp.down_proj.weight"][3, 5] += 1e-3

    assert refusal(path, load(models.save(tmp_path / "other", config, weights))).startswith(
        "fingerprint is "
    )


def test_11_another_dtype_is_refused_with_both(model_of: ModelOf, tmp_path: Path) -> None:
    path = saved(filled(model_of("gqa", "float16"), [1, 2, 3]), tmp_path / "cache.safetensors")

    message = (
        "dtype is 'float16', expected 'bfloat16' as the model's; load the model with the file's "
        "dtype, or fill a new cache"
    )
    assert refusal(path, model_of("gqa", "bfloat16")) == message


def test_11_rounded_weights_are_other_weights(
    folder_of: FolderOf, model_of: ModelOf, tmp_path: Path
) -> None:
    rounded, plain = (
        load(folder_of("gqa"), "float64", rounded_to="float16"),
        model_of("gqa", "float64"),
    )
    path = saved(filled(rounded, [1, 2, 3]), tmp_path / "cache.safetensors")

    assert plain.fingerprint is not None
    name = plain.fingerprint[:12]
    assert (
        refusal(path, plain)
        == f"fingerprint is {name} in float16, expected {name} as the model's; {ANOTHER}"
    )
    assert len(Cache.load(path, rounded)) == 3


def test_11_angles_that_another_code_made_are_refused(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, plain = model_of(), rope.tables(model_of().config)
    cache = fresh(model)
    cache.cos = mx.array(np.nextafter(plain[0], 2))
    run(model, cache, [1, 2, 3])

    message = refusal(saved(cache, tmp_path / "cache.safetensors"), model)

    remedy = "the same config makes other angles here: fill a new cache"
    assert re.fullmatch(
        rf"rope_tables is [0-9a-f]{{12}}, expected [0-9a-f]{{12}} as the model's; {remedy}", message
    )


def test_11_an_empty_cache_of_other_weights_is_taken_and_of_another_config_refused(
    model_of: ModelOf, tmp_path: Path
) -> None:
    config = models.config("gqa")
    other = load(models.save(tmp_path / "other", config, models.weights(config, seed=1)))
    path = saved(fresh(other), tmp_path / "cache.safetensors")

    assert run_all(model_of(), Cache.load(path, model_of()), [1, 2]) == run_all(
        model_of(), fresh(model_of()), [1, 2]
    )
    assert refusal(path, model_of("mha")).startswith(
        "config.num_key_value_heads is 2, expected 4 as the model's; "
    )


# A damaged or foreign file.


def test_11_any_changed_byte_is_refused(model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of("mqa", "float16")
    path = saved(filled(model, [1, 2]), tmp_path / "cache.safetensors")
    content, random = path.read_bytes(), np.random.default_rng(0)

    for i in range(len(content)):
        changed = bytearray(content)
        changed[i] ^= int(random.integers(1, 256))
        path.write_bytes(changed)
        refusal(path, model)
    path.write_bytes(content)
    assert len(Cache.load(path, model)) == 2


def test_11_a_cut_or_lengthened_file_is_refused(model_of: ModelOf, tmp_path: Path) -> None:
    model = model_of("mqa", "float16")
    path = saved(filled(model, [1, 2]), tmp_path / "cache.safetensors")
    content = path.read_bytes()
    size = len(content)

    for n in (0, 7, 8, 9, 100, size // 2, size - 289, size - 288, size - 1):
        path.write_bytes(content[:n])
        refusal(path, model)
    path.write_bytes(content[:-1])
    assert (
        refusal(path, model)
        == f"has {size - 1} bytes, expected {size} for 2 tokens; save or copy it again"
    )
    path.write_bytes(content + b"\0")
    assert (
        refusal(path, model)
        == f"has {size + 1} bytes, expected {size} for 2 tokens; save or copy it again"
    )


def test_11_an_edited_row_is_refused_as_such(model_of: ModelOf, tmp_path: Path) -> None:
    path = saved(filled(model_of(), [1, 2]), tmp_path / "cache.safetensors")
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)

    pattern = (
        r"sha256 is [0-9a-f]{12}, expected [0-9a-f]{12} as it says; it was changed: save or copy "
        r"it again"
    )
    assert re.fullmatch(pattern, refusal(path, model_of()))


def test_11_what_is_no_cache_file_is_refused(
    model_of: ModelOf, folder_of: FolderOf, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.safetensors"
    with writer(trace, {"logits": (np.float32, (1, 40))}) as out:
        out.finish({"format": "mlxkv-trace/1"})
    text, empty = tmp_path / "text", tmp_path / "empty"
    text.write_text("a text that is no cache")
    empty.write_bytes(b"")
    short = tmp_path / "short"
    short.write_bytes(b"\x40")

    theirs, archive = tmp_path / "prompt.safetensors", tmp_path / "model.pt"
    rows = {"0.0": mx.zeros((1, 2, 3, 8)), "0.1": mx.zeros((1, 2, 3, 8))}
    # As mlx-lm's save_prompt_cache writes it.
    mx.save_safetensors(str(theirs), rows, {"1.0": "KVCache", "2.0": "", "0.model": "a/b"})
    arrays = tmp_path / "arrays.safetensors"
    mx.save_safetensors(str(arrays), rows)
    archive.write_bytes(b"PK\3\4" + bytes(range(40)))

    for path, kind in {
        trace: "of another kind, mlxkv-trace/1",
        theirs: "mlx-lm's prompt cache (KVCache)",
        folder_of("gqa") / "model.safetensors": "a model's weights",
        arrays: "a safetensors file of 2 other tensors",
        folder_of("gqa") / "config.json": "a JSON file",
        archive: "a zip, as PyTorch writes",
        text: "no safetensors",
    }.items():
        assert (
            refusal(path, model_of())
            == f"not an mlxkv cache but {kind}, expected mlxkv-cache/1; give a file that "
            f"Cache.save wrote"
        )
    assert re.fullmatch(
        r"not a whole mlxkv-cache/1 file \(.*\); save or copy it again", refusal(short, model_of())
    )
    says = "is empty, expected mlxkv-cache/1; save or copy it again"
    assert refusal(empty, model_of()) == says
    assert (
        refusal(tmp_path / "none", model_of())
        == "cannot be read (No such file or directory); check the path"
    )
    assert refusal(tmp_path, model_of()) == "cannot be read (Is a directory); check the path"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"format": "mlxkv-cache/2"},
            "format is 'mlxkv-cache/2', expected 'mlxkv-cache/1' as the model's; it was written "
            "by another version: ",
        ),
        ({"fingerprint": None}, "fingerprint is None, expected "),
        ({"fingerprint": ...}, "fingerprint is missing, expected "),
        ({"config": []}, "config.hidden_size is missing, expected 32 as the model's; "),
        ({"guarded": ...}, "guarded is missing, expected the fields of mlxkv-cache/1; "),
        ({"guarded": 1}, "guarded is 1, expected bool; "),
        ({"length": True}, "length is True, expected int; "),
        ({"length": 4.0}, "length is 4.0, expected int; "),
        (
            {"length": 65},
            "length is 65 and batch 1, expected 0 to 64 tokens and a batch where there are any; ",
        ),
        (
            {"length": -1},
            "length is -1 and batch 1, expected 0 to 64 tokens and a batch where there are any; ",
        ),
        (
            {"length": 0},
            "length is 0 and batch 1, expected 0 to 64 tokens and a batch where there are any; ",
        ),
        (
            {"batch": 0},
            "length is 4 and batch 0, expected 0 to 64 tokens and a batch where there are any; ",
        ),
        ({"length": 3}, "has "),
        (
            {"length": 2, "batch": 2},
            "its table of rows is another than length 2 and batch 2 make, expected that one; "
            "save or copy it again",
        ),
        ({"window": 5}, "window is not known, expected the fields of mlxkv-cache/1; "),
    ],
    ids=str,
)
def test_11_a_field_that_no_save_wrote_is_refused_though_the_digest_fits(
    changes: dict[str, Any], message: str, model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of()
    path = saved(filled(model, [1, 2, 3, 4]), tmp_path / "cache.safetensors")
    assert len(Cache.load(forge(path), model)) == 4

    assert refusal(forge(path, **changes), model).startswith(message)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_11_rows_that_are_not_finite_are_refused_on_both_ways(
    bad: float, dtype: str, model_of: ModelOf, tmp_path: Path
) -> None:
    model = model_of("gqa", dtype)
    cache = filled(model, [1, 2, 3])
    path = saved(cache, tmp_path / "cache.safetensors")
    content = path.read_bytes()
    with mx.stream(mx.cpu):
        last = cache.layers[2]
        assert last.keys is not None
        assert last.values is not None
        values = mx.array(last.values)
        values[0, 1, 2, 5] = bad
        cache.restore((*cache.layers[:2], Layer((last.keys, values), 3)))

    with pytest.raises(CacheError) as caught:
        cache.save(path)

    assert (
        str(caught.value)
        == "cache: layer 2 values of 3 tokens holds nan or inf, expected finite rows; fill a new "
        "cache"
    )
    assert path.read_bytes() == content
    message = f"layer 2 holds nan or inf, expected finite {dtype} rows; fill a new cache"
    assert refusal(forge(path, rows=b"".join(bits(cache))), model) == message


# Saves that fail.


def test_11_a_failed_save_leaves_the_earlier_file_whole(
    model_of: ModelOf, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = model_of()
    cache = filled(model, [1, 2, 3])
    path = saved(cache, tmp_path / "cache.safetensors")
    content = path.read_bytes()
    run(model, cache, [4])
    real, calls = cache_file._bytes_of, [0]

    def full(array: mx.array) -> bytes:
        calls[0] += 1
        if calls[0] == 6:
            raise OSError(28, "No space left on device")
        return real(array)

    with monkeypatch.context() as patched:
        patched.setattr(cache_file, "_bytes_of", full)
        with pytest.raises(Refusal) as caught:
            cache.save(path)

    assert (
        str(caught.value)
        == f"{path}: cannot be written (No space left on device); choose another folder or free "
        f"some space"
    )
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]
    assert len(Cache.load(saved(cache, path), model)) == 4


def test_11_rows_of_unknown_weights_are_not_saved(model_of: ModelOf, tmp_path: Path) -> None:
    config = models.config("gqa")
    other = load(models.save(tmp_path / "other", config, models.weights(config, seed=1)))
    mixed = filled(model_of(), [1, 2], guarded=False)
    run_all(other, mixed, [3])
    run_all(model_of(), mixed, [4])
    by_hand = Llama(model_of().config)
    unnamed = filled(by_hand, [1, 2])

    for cache in (mixed, unnamed):
        with pytest.raises(CacheError) as caught:
            cache.save(tmp_path / "cache.safetensors")
        expected = (
            "cache: the weights of its rows are not known, expected those of one model; fill it "
            "with a model from mlxkv.load"
        )
        assert str(caught.value) == expected
    mixed.reset()
    run_all(other, mixed, [1, 2])
    assert len(Cache.load(saved(mixed, tmp_path / "cache.safetensors"), other)) == 2


def test_11_what_a_failed_unguarded_call_leaves_is_not_saved(
    model_of: ModelOf, tmp_path: Path
) -> None:
    model, cache = model_of(), filled(model_of(), [1, 2, 3], guarded=False)
    with pytest.raises(CacheError, match="cannot broadcast"):
        model([[4, 5]], cache=cache, index_pos=2)

    with pytest.raises(CacheError) as caught:
        cache.save(tmp_path / "cache.safetensors")

    assert (
        str(caught.value) == "cache: its layers hold 3 to 5 tokens, expected one length; reset it"
    )
    assert list(tmp_path.iterdir()) == []
