"""What the oracle holds in memory: float64 weights a layer at a time, converted ones mapped; and
many questions on one model.
"""

import json
import subprocess
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import command
import models
import neighbours
import numpy as np
import pytest
import torch
from folders import refusal
from test_packed import config_for, packed_tensors
from test_packed import make as make_packed

from oracle import answer, folder
from oracle.formats import rows, run_folder, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import judged_plans
from oracle.model.checkpoint import resolve
from oracle.pool import converted, reference, widened
from oracle.question import ask
from oracle.truth import llama, unpack
from oracle.truth.config import config_of
from oracle.truth.weights import Weights

TOKENS = models.tokens(12)
PLAN = judged_plans(TOKENS, prompt=5)["step"]
LAYERS, LAYER = 12, 8 * (4 * 256**2 + 3 * 256 * 1024)
"""Of `deep`: its layers, and the bytes of one in float64, 8.4 MB."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    place = tmp_path_factory.mktemp("models")
    reference.set_up(1)
    biased = {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True}
    models.make(place / "tied", "gqa", max_position_embeddings=2048)
    models.make(place / "biased", "mqa", **biased)
    make_packed(place / "packed", packed_tensors(config_for()))
    for name in ("qwen2", "gemma2"):
        neighbours.make(place / name, name)
    config = models.config_of("mha", hidden_size=256, intermediate_size=1024)
    config["num_hidden_layers"] = LAYERS
    tensors = models.tensors_of(config)
    models.write(place / "deep", config, {name: t.bfloat16() for name, t in tensors.items()})
    return place


@contextmanager
def anonymous():
    """By how many bytes this process's anonymous memory grew at most; a list, filled at the end."""

    def now():
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    grown, seen, done = [], [now()], threading.Event()

    def watch():
        while not done.is_set():
            seen.append(now())
            time.sleep(0.001)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield grown
    finally:
        done.set()
        watcher.join()
        grown.append(max(seen) - seen[0])


def in_own_process(measure, made):
    """What a function of this module gives for `deep`, in a process that has freed nothing before:
    memory that one has freed it takes again, and does not grow by.
    """
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    here = Path(__file__).parent
    code = (
        "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); import test_size as t; "
        f"print(json.dumps(t.{measure.__name__}(sys.argv[2])))"
    )
    paths = json.dumps([str(here), str(here.parent), str(here.parents[1])])
    line = command.torch_python("-c", code, paths, str(made / "deep"))
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", ["tied", "biased", "packed", "qwen2", "gemma2"])
def test_float64_layer_by_layer_is_bitwise_that_of_all_at_once(made, name, monkeypatch):
    model = reference.Reference(resolve(str(made / name)))
    kinds, own = {"exact": True, "rough": False}, model.kinds[-1]
    before = model.run(PLAN, attention=own)
    tensors = [*model._model.parameters(), *model._model.buffers()]
    found = {
        kind: model.double(TOKENS, exact=exact, attention=own) for kind, exact in kinds.items()
    }
    assert len(widened.decoder_layers(model._model)) in (2, 3)
    monkeypatch.setattr(widened, "decoder_layers", lambda _: [])
    for kind, exact in kinds.items():
        assert np.array_equal(found[kind], model.double(TOKENS, exact=exact, attention=own)), kind
    after = [*model._model.parameters(), *model._model.buffers()]
    assert all(a is b for a, b in zip(tensors, after, strict=True))
    again = model.run(PLAN, attention=own)
    assert all(np.array_equal(before.arrays[n], again.arrays[n]) for n in before.arrays)


def test_a_model_is_as_it_was_after_a_float64_call_that_broke_off(made, monkeypatch):
    model = reference.Reference(resolve(str(made / "tied")))
    before = model.run(PLAN)
    monkeypatch.setattr(model._model.model.layers[1].mlp, "forward", lambda x: x / None)
    with pytest.raises(TypeError):
        model.double(TOKENS)
    monkeypatch.undo()
    assert {p.dtype for p in model._model.parameters()} == {torch.float32}
    assert np.array_equal(model.run(PLAN).logits, before.logits)


def by_double(folder):
    """The growth layer by layer, and with all at once."""
    reference.set_up(1)
    model = reference.Reference(resolve(folder))
    with anonymous() as one:
        model.double(TOKENS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(widened, "decoder_layers", lambda _: [])
        with anonymous() as whole:
            model.double(TOKENS)
    return one[0], whole[0]


def test_only_one_layer_is_float64_at_a_time(made):
    model, seen = reference.Reference(resolve(str(made / "deep"))), []
    layers = model._model.model.layers

    def count(*_):
        wide = [layer.mlp.up_proj.weight.dtype == torch.float64 for layer in layers]
        seen.append([i for i, is_wide in enumerate(wide) if is_wide])

    handles = [layer.mlp.register_forward_hook(count) for layer in layers]
    model.double(TOKENS)
    assert seen == [[i] for i in range(LAYERS)]
    for handle in handles:
        handle.remove()
    one, whole = in_own_process(by_double, made)
    assert one < 5 * LAYER < (LAYERS - 2) * LAYER < whole


def by_truth(folder):
    """The growth with weights written over, and with those of every layer kept."""
    reference.set_up(1)
    checkpoint = resolve(folder)
    weights, config = Weights(checkpoint, dtype="float32"), config_of(checkpoint)
    ways = {"full": [12], "step": [5, *[1] * 7]}
    with anonymous() as one:
        found = llama.follow(weights, config, TOKENS, segments=ways)
    kept = []
    right = Weights.layer

    def keeping(*given, **_):
        kept.append(right(*given))
        return kept[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Weights, "layer", keeping)
        with anonymous() as whole:
            again = llama.follow(weights, config, TOKENS, segments=ways)
    assert all(torch.equal(found[name], again[name]) for name in ways)
    return one[0], whole[0]


def test_the_truth_holds_one_layer_of_weights(made):
    one, whole = in_own_process(by_truth, made)
    assert one < 5 * LAYER < (LAYERS - 2) * LAYER < whole


def test_long_sequences_in_pieces_are_the_same_truth(made, monkeypatch):
    checkpoint = resolve(str(made / "tied"))
    weights, config = Weights(checkpoint, dtype="float32"), config_of(checkpoint)
    ways = {"full": [12], "chunked": [5, 4, 1, 2]}
    tap = frozenset({"hidden"})
    whole = llama.follow(weights, config, TOKENS, segments=ways, taps=tap)
    for name, value in {"_SHORT": 2, "_WIDE": 4 * config.mlp, "_LONG_BLOCK": 200}.items():
        monkeypatch.setattr(llama, name, value)
    pieces = llama.follow(weights, config, TOKENS, segments=ways, taps=tap)
    for name in ways:
        assert float((whole[name] - pieces[name]).abs().max()) < 1e-13
    head = weights.head(config)
    outs = [np.zeros((12, config.vocab_size)) for _ in range(2)]
    most = [llama.write_logits(whole, [head], outs[0])[0]]
    most.append(llama.write_logits(whole, head.split(7), outs[1])[0])
    assert np.abs(outs[0] - outs[1]).max() < 1e-14
    assert abs(most[0] - most[1]) < 1e-14


@pytest.mark.parametrize(("name", "dtype"), [("deep", "float32"), ("packed", "bfloat16")])
def test_converted_weights_are_made_once_and_mapped(made, name, dtype, monkeypatch):
    checkpoint = resolve(str(made / name))
    expected = reference.Reference(checkpoint, dtype=dtype).run(PLAN)
    monkeypatch.setattr(converted, "LEAST", 0)
    path = converted.path_of(checkpoint, dtype)
    path.unlink(missing_ok=True)
    reference.Reference(checkpoint, dtype=dtype)
    stamp = path.stat()
    with anonymous() as grown:
        again = reference.Reference(checkpoint, dtype=dtype)
    assert path.stat() == stamp
    assert np.array_equal(again.run(PLAN).logits, expected.logits)
    if name == "deep":
        assert grown[0] < LAYERS * LAYER / 2 / 2  # half of the weights, which are half as wide


def test_a_converted_file_that_is_damaged_is_made_again(made, monkeypatch):
    monkeypatch.setattr(converted, "LEAST", 0)
    checkpoint = resolve(str(made / "packed"))
    path = converted.path_of(checkpoint, "float32")
    converted.tensors(checkpoint, "float32")
    whole = path.read_bytes()
    for damaged in (whole[:-4], whole[:-4] + b"\0\0\0\1", b""):
        path.write_bytes(damaged)
        converted.tensors(checkpoint, "float32")
        assert path.read_bytes() == whole
    monkeypatch.setattr(unpack, "__file__", __file__)  # other code may unpack otherwise
    assert converted.path_of(checkpoint, "float32") != path


def test_without_room_on_the_disk_weights_are_converted_in_memory_or_refused(made, monkeypatch):
    monkeypatch.setattr(converted, "LEAST", 0)
    checkpoint = resolve(str(made / "packed"))
    path = converted.path_of(checkpoint, "float16")
    path.unlink(missing_ok=True)
    monkeypatch.setattr(converted, "_ROOM", 2**60)
    found = converted.tensors(checkpoint, "float16")
    assert not path.exists()
    assert set(found) == set(checkpoint.weights)
    monkeypatch.setattr(converted, "_memory", lambda: 1000)
    said = refusal(converted.tensors, checkpoint, "float16")
    assert "GB are free, expected" in said
    assert "for the weights in float16; free some" in said


def test_many_questions_on_one_model_are_each_what_one_alone_is(made, tmp_path, monkeypatch):
    first = ask(str(made / "tied"), tokens=TOKENS[:6], steps=3, threads=1)
    second = ask(str(made / "tied"), tokens=TOKENS[3:9], steps=0, threads=1)
    right, loaded = answer._run, []
    monkeypatch.setattr(
        answer, "loaded", lambda *given, load=answer.loaded: loaded.append(1) or load(*given)
    )

    def refuse(question, *rest):
        if question.steps == 2:
            raise Refusal("its logits are odd")
        return right(question, *rest)

    monkeypatch.setattr(answer, "_run", refuse)
    bad = ask(str(made / "tied"), tokens=TOKENS[:6], steps=2, threads=1)
    asked = {"a": first, "bad": bad, "probe": first.probed(), "b": second}
    notes, there = [], []

    def answered():
        for out in folder.many({tmp_path / n: q for n, q in asked.items()}, note=notes.append):
            there.append(sorted(path.name for path in tmp_path.iterdir()))
            assert run_folder.read_manifest(out).tokens

    assert "its logits are odd (1 of 4 questions were refused)" in refusal(answered)
    assert there == [["a"], ["a", "probe"], ["a", "b", "probe"]]
    assert notes == ["warning: no answer on 7 tokens: its logits are odd"]
    assert loaded == [1]
    folder.run(str(made / "tied"), out=tmp_path / "alone", tokens=TOKENS[3:9], steps=0, threads=1)
    for name, other in {"b": "alone", "probe": "alone/probe"}.items():
        pair = [run_folder.read_manifest(tmp_path / n) for n in (name, other)]
        assert pair[0].files == pair[1].files


def test_questions_about_several_models_are_refused(made, tmp_path):
    asked = {
        tmp_path / name: ask(str(made / name), tokens=TOKENS, steps=0)
        for name in ("tied", "biased")
    }
    said = refusal(list, folder.many(asked))
    assert said.startswith("questions: 2 kinds of model, dtype and threads, expected one")


def test_a_long_sequence_has_a_sample_of_rows_and_two_ways(made, tmp_path):
    n = rows.WHOLE + 40
    tokens = [token % models.VOCAB for token in range(n)]
    question = ask(str(made / "tied"), tokens=tokens, steps=3, threads=1)
    plans = question.plans([1, 2, 3])
    chunks = [call.fed for call in plans["chunked"].calls()]
    assert question.segments(plans) == {"full": [n + 2], "chunked": chunks}
    manifest = folder.run(
        str(made / "tied"), out=tmp_path / "run", tokens=tokens, steps=3, threads=1, probe=False
    )
    assert not any(name.startswith("eager") for name in manifest.pool)
    step = trace.read(tmp_path / "run" / "reference-step.safetensors")
    assert len(step.logits) == len(plans["full"].rows) < n / 3
    assert folder.check(tmp_path / "run") == manifest
