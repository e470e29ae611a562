"""The proof at size, on tiny models: what it makes, measures, locates and says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import models
import numpy as np
import pytest
from command import mlxkv, refused

from mlxkv.cli import CASES
from mlxkv.commands import reports
from mlxkv.commands.locate import place
from mlxkv.commands.scale import cases, faulty, longer, measured, memory, page, result, run, same
from mlxkv.commands.scale import sequence as sequences
from mlxkv.commands.scale.cases import Case
from mlxkv.commands.scale.faulty import Planted, Scaled, Slipped
from mlxkv.commands.scale.memory import Memory, Watch
from mlxkv.commands.scale.result import Fault, Model, Place, Ran, Result, Same, Worst
from mlxkv.commands.scale.sequence import Ids
from mlxkv.engines import port
from mlxkv.engines.own import OwnRunner
from mlxkv.judge.case import read_case
from mlxkv.judge.verdict import judge
from oracle.formats import disk, run_folder
from oracle.formats.errors import AlreadySaid, Refusal
from oracle.formats.trace import Meta, Trace
from oracle.model import tokenizer, written
from oracle.model.checkpoint import Checkpoint, resolve
from oracle.model.written import read

FolderOf = Callable[[str], Path]
MB = 1_000_000
SHORT = Ids((3, 7, 11, 2, 19))
LINUX_ONLY = pytest.mark.skipif(sys.platform != "linux", reason="/proc tells it")

# Memory, as it is seen from outside.

HOLDS = """
import mmap, subprocess, sys, time
held = bytearray({own} * 1000000)
held[::4096] = bytes(len(held[::4096])).replace(b"\\0", b"x")
file = open(sys.argv[1], "rb")
mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
assert sum(mapped[::4096]) >= 0
{more}
print("ready", flush=True)
sys.stdin.read()
"""
CHILD = "child = subprocess.Popen([sys.executable, '-c', {code!r}, sys.argv[1]], stdin=sys.stdin, "
CHILD += "stdout=subprocess.PIPE); child.stdout.readline()"


def peak(code: str, file: Path) -> Memory:
    """What is seen of a process that says when it is ready."""
    line = [sys.executable, "-c", code, str(file)]
    with (
        subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as popen,
        Watch(popen.pid, interval=0.01) as watch,
    ):
        assert popen.stdout is not None
        assert popen.stdout.readline() == b"ready\n"
        before = watch._samples
        while watch._samples < before + 2:
            pass
        popen.communicate()
    found = watch.memory
    assert found is not None
    return found


@LINUX_ONLY
def test_what_a_process_and_its_child_hold_is_seen_and_mapped_files_are_not_counted(
    tmp_path: Path,
) -> None:
    file = tmp_path / "mapped"
    file.write_bytes(bytes(200 * MB))
    alone = peak(HOLDS.format(own=60, more=""), file)
    assert 60 * MB < alone.together < 90 * MB
    child = CHILD.format(code=HOLDS.format(own=100, more=""))
    both = peak(HOLDS.format(own=60, more=child), file)
    assert 160 * MB < both.together < 210 * MB
    assert 100 * MB < max(both.each.values()) < 130 * MB


def test_where_nothing_is_known_of_memory_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "holding", lambda _: [])
    with Watch(1, interval=0.01) as watch:
        pass
    assert watch.memory is None


@LINUX_ONLY
def test_a_process_that_does_not_tell_its_children_is_not_measured_without_them() -> None:
    assert memory.holding(2**22 + 1) == []


def test_a_process_is_called_by_what_it_runs() -> None:
    lines = {
        ("python", "-P", "-m", "oracle", "run", "model", "--out", "x"): "oracle run",
        ("python", "-P", "-m", "mlxkv.engines.port", "/x/float64/job.json"): "port float64",
        ("python", "-P", "-m", "mlxkv.engines.own", "/x/run/job.json"): "own run",
        ("python", "-P", "-m", "mlxkv", "compare", "x"): "mlxkv compare",
        ("/usr/bin/uname", "-p"): "uname",
    }
    assert {line: memory.named(list(line)) for line in lines} == lines


def test_the_sizes_on_disk_are_those_of_a_folders_entries(tmp_path: Path) -> None:
    (tmp_path / "oracle" / "a").mkdir(parents=True)
    (tmp_path / "oracle" / "a" / "x").write_bytes(bytes(range(256)) * 4096)
    (tmp_path / "runs").mkdir()
    found = memory.on_disk(tmp_path)
    assert found["runs"] == 0
    assert MB < found["oracle"] < 1.2 * MB
    assert memory.on_disk(tmp_path / "missing") == {}


# The bars.


def ran(together: int | None = MB, seconds: float = 9.0, command: str = "mlxkv compare m") -> Ran:
    held = None if together is None else Memory(together, {"oracle run": together}, 7)
    return Ran(command, seconds, {"oracle": 5.0}, held, {"oracle": 2 * 10**9, "locks": 0})


def fault(found: Place | None) -> Fault:
    planted = Place(1, "v", head=2)
    return Fault("in layer 1 it is wrong", planted, found, "located", "v_proj", ran(2 * MB))


def make(**changes: Any) -> Result:
    given: dict[str, Any] = {
        "case": "wide2",
        "about": "Twice as wide.",
        "model": Model("m made 2 times as wide", "f" * 64, 1000, 4000, 2000),
        "dtype": "float32",
        "tokens": 9,
        "prompt_tokens": 5,
        "rows": "9 of 9",
        "outcome": "agree",
        "scopes": ["algebra", "logits", "cache"],
        "gates": [Worst("sigma", "step", 0.7, 8.0)],
        "reasons": ["a note"],
        "not_exercised": ["batches"],
        "cold": ran(),
        "warm": ran(MB // 2, 3.0),
        "same": Same("m", 9, 2e-15, 0.6),
        "fault": fault(Place(1, "v", head=2, position=0)),
        "seconds": {"cold": 120.0, "warm": 60.0},
        "environment": {"port": {"os": "Linux", "arch": "x86_64", "device": "cpu", "threads": 1}},
        "sources": "c" * 64,
        "machine": 24 * 10**9,
    }
    return Result(**(given | changes))


def not_met(one: Result) -> list[str]:
    return [bar.what for bar in one.bars if bar.met is not True]


def test_every_bar_is_met_or_named() -> None:
    assert not_met(make()) == []
    assert make().met
    over = 4000 + result.BESIDE + 1
    found = {
        "verdict": make(outcome="cannot tell"),
        "peak of all processes, cold": make(cold=ran(over)),
        "peak of all processes, warm": make(warm=ran(over)),
        "time, cold": make(cold=ran(seconds=120.5)),
        "time, warm": make(warm=ran(seconds=61)),
        "truth beside that of m": make(same=Same("m", 9, 2e-10, 0.6)),
        "sigma of the port beside that truth, 9 rows": make(same=Same("m", 9, 0.0, np.nan)),
        "planted fault": make(fault=fault(Place(1, "v", head=1))),
        "peak of all processes, locating it": make(
            fault=replace(fault(Place(1, "v", head=2)), ran=ran(24 * 10**9 + 1))
        ),
    }
    assert {name: not_met(one) for name, one in found.items()} == {name: [name] for name in found}
    assert not any(one.met for one in found.values())
    assert make(cold=ran(over - 1)).met


def test_what_was_not_measured_is_not_met() -> None:
    unknown = make(cold=ran(None), same=Same("m", 0, None, None), fault=fault(None))
    assert [bar.met for bar in unknown.bars] == [
        True,
        None,
        True,
        True,
        True,
        None,
        None,
        False,
        True,
    ]
    assert not unknown.met
    assert [bar.met for bar in make(warm=ran(None, 3.0)).bars].count(None) == 1
    assert not make(warm=ran(None, 3.0)).met


def test_a_case_that_is_not_run_again_has_no_bars_for_it() -> None:
    once = make(warm=None, seconds={"cold": 120.0})
    assert [bar.what for bar in make().bars if bar not in once.bars] == [
        "peak of all processes, warm",
        "time, warm",
    ]
    assert once.met
    row = next(line for line in page.markdown([once]).splitlines() if "[wide2]" in line)
    assert [cell.strip() for cell in row.split("|")][6:8] == ["9 s", "-"]


@pytest.mark.parametrize(
    "found", [None, Place(2, "v", 2), Place(1, "k", 2), Place(1, "v", None), Place(None, None)]
)
def test_a_fault_is_located_where_every_part_of_its_place_is_named(found: Place | None) -> None:
    assert not fault(found).located
    assert fault(Place(1, "v", 2, position=4)).located


def test_the_worst_of_each_gate_that_ran() -> None:
    gates = [
        {"name": "sigma", "plan": "full", "value": 0.5, "limit": 8.0, "ran": True},
        {"name": "sigma", "plan": "step", "value": None, "limit": 8.0, "ran": True},
        {"name": "sigma", "plan": "mixed", "value": 9.5, "limit": 8.0, "ran": True},
        {"name": "repeat", "plan": "full", "value": 0.0, "limit": 0.0, "ran": True},
        {"name": "repeat", "plan": "step", "value": 2.0, "limit": 0.0, "ran": True},
        {"name": "peak", "plan": "full", "value": None, "limit": 8.0, "ran": False},
    ]
    assert run.worst(gates) == [
        Worst("sigma", "step", None, 8.0),
        Worst("repeat", "step", 2.0, 0.0),
    ]


# What runs.


def test_a_case_that_would_fill_the_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = replace(cases.everything()["wide8"], make=lambda _: pytest.fail("it is made"))
    usage = SimpleNamespace(free=case.disk - 1)
    monkeypatch.setattr(run, "shutil", SimpleNamespace(disk_usage=lambda _: usage))
    with pytest.raises(Refusal, match=r"20\.00 GB free, expected 20\.00 GB for wide8; free some"):
        run.run(case, tmp_path, device="cpu")


def test_the_first_layers_of_a_model_go_on_for_longer(tmp_path: Path) -> None:
    config = models.config("gqa")
    source = models.save(tmp_path / "m", config)
    (source / "tokenizer.json").write_text("{}")
    made = resolve(str(longer.longer(str(source), tmp_path / "long", layers=2, positions=256)))
    scaling = made.config["rope_scaling"]
    assert (made.config["num_hidden_layers"], made.max_positions) == (2, 256)
    assert (scaling["rope_type"], scaling["factor"]) == ("llama3", 4.0)
    assert scaling["original_max_position_embeddings"] == 64
    tensors = models.weights(config)
    assert set(made.tensors) == {name for name in tensors if ".layers.2." not in name}
    for name, tensor in made.tensors.items():
        assert np.array_equal(read(tensor), tensors[name])
    assert (made.folder / "tokenizer.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("layout", "layers", "words"),
    [("gqa", 4, "layers: 4"), ("gqa", 0, "layers: 0"), ("llama3", 2, "scaled already")],
)
def test_what_cannot_be_made_longer_is_refused(
    layout: str, layers: int, words: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        longer.longer(str(folder_of(layout)), tmp_path, layers=layers, positions=128)


def test_random_weights_of_a_known_shape_are_stored_in_bfloat16(tmp_path: Path) -> None:
    config = cases.LLAMA_1B | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 50}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    case = cases.one(config | {"head_dim": 16}, sequence=SHORT, **rest())
    made = resolve(str(case.make(tmp_path / "one")))
    assert {tensor.dtype for tensor in made.tensors.values()} == {"BF16"}
    assert set(made.tensors) == set(models.shapes(made.config))
    assert case.dtype == "float32"


def test_the_shape_of_the_1b_has_its_parameters() -> None:
    shapes = written.shapes_of(cases.LLAMA_1B)
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 1_235_814_400


@pytest.mark.parametrize("length", [1, 700, 8172])
def test_a_text_has_exactly_so_many_tokens(length: int, default_checkpoint: Checkpoint) -> None:
    words = tokenizer.load(default_checkpoint.folder)
    assert words is not None
    assert len(words.encode(sequences.exactly(words, length))) == length


class Characters:
    """A token a character, one less for a text of fifty that begins with `odd`."""

    def __init__(self, odd: str) -> None:
        self.odd = odd

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text][len(text) == 50 and text.startswith(self.odd) :]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def test_where_a_cut_text_makes_other_tokens_another_place_is_tried() -> None:
    odd: Any = Characters("Keep")
    text = disk.read_text(sequences.TEXT)
    assert sequences.exactly(odd, 50) == text[1:51]
    odd.odd = ""
    with pytest.raises(Refusal, match="no text of exactly 50 tokens was found"):
        sequences.exactly(odd, 50)


def test_a_text_goes_by_a_file_and_leaves_room_for_what_is_decoded(
    default_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    folder = default_checkpoint.folder
    option, path = sequences.Text(100).options(folder, tmp_path, steps=20)
    words = tokenizer.load(folder)
    assert words is not None
    assert option == "--prompt-file"
    assert len(words.encode(Path(path).read_text(encoding="utf-8"))) + 19 == 100


def rest(planted: Planted | None = None) -> dict[str, Any]:
    planted = Scaled(1, 1, 1.01) if planted is None else planted
    return {"about": "Tiny.", "fault": planted, "disk": 1, "estimate": 1}


# Faults.


def traces(model: Any, folder: Path) -> dict[str, Trace]:
    case, found = read_case(folder), {}
    vocab = case.truth.logits.shape[1]
    for name, plan in run_folder.read_plans(folder, case.manifest).items():
        meta = Meta(plan, "own", "1", "float32", fingerprint=case.manifest.fingerprint)
        found[name] = Trace(
            meta, OwnRunner(model, plan, name="f.py:load", vocab=vocab).run().arrays()
        )
    return found


@pytest.mark.parametrize("layout", ["mha", "gqa", "mqa", "llama3"])
@pytest.mark.parametrize("kind", ["right", "scaled", "slipped"])
def test_the_port_with_a_fault_is_wrong_where_it_was_planted(
    kind: str, layout: str, folder_of: FolderOf, oracle_of: FolderOf, tmp_path: Path
) -> None:
    planted = {"right": Scaled(1, 0, 1.0), "scaled": Scaled(1, 0, 1.01), "slipped": Slipped(1, 9)}
    disk.write_text(tmp_path / "f.py", faulty.text(planted[kind]))
    space: dict[str, Any] = {}
    exec((tmp_path / "f.py").read_text(), space)
    model = space["load"](str(folder_of(layout)), "float32")
    case = read_case(oracle_of(layout))
    runs = traces(model, oracle_of(layout))
    verdict = judge(case, runs)
    assert hasattr(model, "taps") == (kind != "slipped")
    if kind == "right":
        assert verdict.outcome == "agree"
        return
    found = place.locate(case, verdict, arithmetic=runs)
    assert (found.outcome, found.layer) == ("located", 1)
    if kind == "slipped":
        assert (found.tap, found.position) == ("keys", 9)
    else:
        assert (found.tap, found.head) == ("values", 0)


# The logits beside those of the small model.


def test_logits_are_compared_where_both_sequences_are_equal(
    answer: Path, model_of: Callable[..., Any]
) -> None:
    case = read_case(answer)
    plan = run_folder.read_plans(answer, case.manifest)["step"]
    ours = port.run(model_of("gqa"), plan)
    found = same.compared(case, case, ours, of="m")
    assert (found.rows, found.truth) == (24, 0.0)
    assert found.sigma is not None
    assert 0.3 < found.sigma < 2
    tokens = [*case.manifest.tokens[:20], 0, 0, 0, 0]
    other = replace(case, manifest=replace(case.manifest, tokens=tokens))
    assert same.compared(case, other, ours, of="m").rows == 20
    off = {name: np.array(array) for name, array in ours.arrays.items()}
    off["logits"][3] += np.linspace(-1, 1, off["logits"].shape[1], dtype=np.float32)
    wrong = same.compared(case, case, replace(ours, arrays=off), of="m")
    assert wrong.sigma is not None
    assert wrong.sigma > 1e3
    none = replace(case, manifest=replace(case.manifest, tokens=[0, *case.manifest.tokens[1:]]))
    if case.manifest.tokens[0] != 0:
        assert same.compared(case, none, ours, of="m") == Same("m", 0, None, None)


# All of it.


@pytest.fixture
def _warm(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mlxkv` as a process of its own, whose oracle is there at once."""
    script = str(Path(__file__).with_name("warm_mlxkv.py"))
    warm = SimpleNamespace(command=lambda _, *words: [sys.executable, script, *words])
    monkeypatch.setattr(measured, "child", warm)


def tiny(name: str, model: str) -> Case:
    """A case of each kind on a tiny model."""
    of_all = {"steps": 5, "model": model} | rest(Scaled(1, 2, 1.01))
    wide = {"sequence": SHORT, "of": "tiny", "quick": True} | of_all
    forty = {"sequence": Ids(tuple(models.ids(36))), **of_all, "fault": Slipped(1, 20)}
    if name == "one":
        config = models.config("llama3", num_hidden_layers=2)
        of_one = rest(Scaled(1, 1, 1.01)) | {"seconds": {"cold": 600.0, "warm": 600.0}}
        return cases.one(config, sequence=SHORT, steps=5, quick=True, **of_one)
    return {
        "wide4": lambda: cases.wide("wide4", 2, **wide),
        "wide8": lambda: cases.wide(
            "wide8", 2, values="bfloat16", **wide | {"fault": Scaled(1, 2, 2.0)}
        ),
        "whole": lambda: cases.whole(**forty),
        "long": lambda: cases.long(layers=2, positions=128, again=False, **forty),
    }[name]()


@pytest.mark.usefixtures("_warm")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("wide4"),
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("wide8", "whole", "long", "one")
        ),
    ],
)
def test_a_tiny_case_of_each_kind_meets_every_bar(
    name: str, folder_of: FolderOf, tmp_path: Path
) -> None:
    case = tiny(name, str(folder_of("gqa")))
    done = run.run(case, tmp_path, device="cpu")
    assert not_met(done) == []
    kinds = ["verdict", *done.runs, *(done.runs if name == "one" else ())]
    assert [*done.runs] == (["cold"] if name == "long" else ["cold", "warm"])
    kinds += ["truth", "sigma"] if name.startswith("wide") else []
    assert len(done.bars) == len([*kinds, "fault", "locating"])
    assert done.cold.took["oracle"] > 0
    assert done.warm is None or "oracle" not in done.warm.took
    assert done.cold.disk["oracle"] > 0
    assert set(done.cold.took) == {"oracle", "port", "port float64"}
    assert done.fault is not None
    assert done.fault.ran.command.endswith("--engine=faulty.py:load")
    list(run.publish(tmp_path / "out", done))
    assert run.found(tmp_path / "out") == [done]


@pytest.mark.usefixtures("_warm")
def test_a_command_that_refuses_ends_the_case(tmp_path: Path) -> None:
    with pytest.raises(AlreadySaid):
        measured.measured(["compare", str(tmp_path / "missing")], cache=tmp_path / "cache")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit(3)", "exit code 3 and printed no JSON"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9 and printed no JSON"),
        ("print('{')", "exit code 0 and printed no JSON"),
        ("print('[]')", "printed list, expected an object"),
    ],
)
def test_a_command_that_prints_no_report_is_no_result(
    code: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = SimpleNamespace(command=lambda *_: [sys.executable, "-c", code])
    monkeypatch.setattr(measured, "child", line)
    with pytest.raises(Refusal, match=words):
        measured.measured(["compare"], cache=tmp_path)


def test_no_path_stands_in_a_command_that_is_shown() -> None:
    words = [
        "compare",
        "/home/me/model",
        "--prompt-file",
        "/home/me/p.txt",
        "--engine=/h/f.py:load",
    ]
    shown = "mlxkv compare model --prompt-file p.txt --engine=f.py:load"
    assert measured.shown(words) == shown


# The report.


def shrink(patch: pytest.MonkeyPatch, done: dict[str, Result]) -> None:
    known = {name: tiny(name, "m") for name in cases.everything()}
    patch.setattr(cases, "everything", lambda: known)
    patch.setattr(run, "run", lambda case, room, device: done[case.name])


def test_each_case_is_kept_when_it_is_done_and_the_page_has_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = {name: make(case=name) for name in cases.everything()}
    shrink(monkeypatch, done)
    only = {"only": ["scale"], "device": "cpu"}
    made = list(reports.write(tmp_path, **only, at=reports.Scale(cases=("wide8", "one"))))
    names = ["scale/wide8.json", "scale/scale.md", "scale/one.json", "scale/scale.md", "README.md"]
    assert [str(path.relative_to(tmp_path)) for path in made] == names
    assert [one.case for one in run.found(tmp_path / "scale")] == ["one", "wide8"]
    monkeypatch.setitem(done, "one", make(case="one", outcome="differ"))
    list(reports.write(tmp_path, **only, at=reports.Scale(cases=("one",))))
    text = (tmp_path / "scale" / "scale.md").read_text()
    assert ("## wide8" in text, "## one" in text, "differ" in text) == (True, True, True)
    rows = (tmp_path / "README.md").read_text().splitlines()[-2:]
    assert rows == [
        "| [scale, one](scale/scale.md#one) | m made 2 times as wide | linux-x86_64-cpu | "
        "differ, 8 of 9 bars met |",
        "| [scale, wide8](scale/scale.md#wide8) | m made 2 times as wide | linux-x86_64-cpu | "
        "agree, 9 of 9 bars met |",
    ]


def test_the_check_of_a_case_lets_times_and_peaks_move_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = {"one": make(case="one")}
    shrink(monkeypatch, done)
    at = reports.Scale(cases=("one",))
    list(reports.write(tmp_path, only=["scale"], at=at))
    done["one"] = make(case="one", cold=ran(2 * MB, 11.0))
    assert reports.check(tmp_path, only=["scale"], at=at).lines == ()
    done["one"] = make(case="one", cold=ran(4 * 10**9))
    lines = reports.check(tmp_path, only=["scale"], at=at).lines
    moved = "True committed, False now"
    assert [line.lower() for line in lines] == [
        f"scale/one.json{where}: {moved.lower()}" for where in (".bars[1].met", ".met")
    ]
    done["one"] = make(case="one", gates=[Worst("sigma", "step", 2.7, 8.0)])
    (line,) = reports.check(tmp_path, only=["scale"], at=at).lines
    assert ".gates[0].value" in line


def test_a_case_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "one.json"
    value = json.loads(json.dumps(dict(result.to_json(make(case="one")))))
    path.write_text(json.dumps(value | {"extra": 1}))
    with pytest.raises(
        Refusal, match=r"unknown key .extra.; make the case again with `mlxkv reports"
    ):
        result.read(path)
    path.write_text("[]")
    with pytest.raises(Refusal, match="format is"):
        result.read(path)


def test_a_file_that_cannot_be_read_is_refused_before_hours_of_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shrink(monkeypatch, {"one": make(case="one")})
    (tmp_path / "one.json").write_text("[]")
    which: dict[str, Any] = {"device": "cpu", "room": None, "keep": False}
    assert list(run.write(tmp_path, ["one"], **which))  # it is made anew
    (tmp_path / "long.json").write_text("[]")
    monkeypatch.setattr(run, "run", lambda *_, **__: pytest.fail("it runs"))
    with pytest.raises(Refusal, match="format is"):
        list(run.write(tmp_path, ["one"], **which))


def test_scale_is_made_only_when_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(reports, "PARTS", {})
        patch.setattr(reports.scale, "write", lambda *_, **__: pytest.fail("it is made"))
        assert list(reports.write(tmp_path)) == [tmp_path / "README.md"]
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"reports: without bench, .* 1 hour: `mlxkv reports --only bench`\n"
        r"reports: without scale, .* hours: `mlxkv reports --only scale`\n",
        said,
    )
    assert tuple(CASES.choices) == tuple(cases.everything())
    for name in ("--case=one", "--room=x", "--keep"):
        refused(mlxkv("reports", name), "expected --only scale beside", name.split("=")[0])
    refused(mlxkv("reports", "--only=scale", "--keep"), "--keep: no --room, expected the folder")


def test_a_room_is_removed_unless_it_is_to_be_kept(tmp_path: Path) -> None:
    case = tiny("wide4", "m")
    with run._room(case, tmp_path, keep=True) as made:
        for name in ("model", "cache", "theirs"):
            (made / name).mkdir()
        (made / "prompt.txt").write_text("x")
    assert sorted(p.name for p in made.iterdir()) == ["cache", "model", "prompt.txt", "theirs"]
    with suppress(KeyboardInterrupt), run._room(case, tmp_path, keep=False) as made:
        assert sorted(path.name for path in made.iterdir()) == ["model", "theirs"]
        raise KeyboardInterrupt
    assert [path.name for path in made.iterdir()] == ["theirs"]
    (made / "theirs").rmdir()
    with run._room(case, tmp_path, keep=False) as made:
        pass
    assert not made.exists()


def test_a_model_that_was_kept_is_used_again_if_it_was_made_so(
    tmp_path: Path, folder_of: FolderOf
) -> None:
    case, begun = tiny("wide4", str(folder_of("gqa"))), []

    def make(out: Path) -> Path:
        begun.append(out)
        return case.make(out)

    counted = replace(case, make=make)
    first = run._model(counted, tmp_path)
    assert run._model(counted, tmp_path) == first
    assert len(begun) == 1
    run._model(replace(counted, made="otherwise"), tmp_path)
    assert len(begun) == 2
    found = run._model(tiny("whole", str(folder_of("gqa"))), tmp_path / "none")
    assert found.folder == folder_of("gqa")


def test_the_page_says_all_that_was_measured() -> None:
    over = make(cold=ran(4 * 10**9, 31.0), same=Same("m", 9, None, 0.6), fault=fault(None))
    assert page.markdown([over]).partition("## Words")[0] == PAGE


PAGE = """\
# At size

Large models and long sequences, each compared in a cache folder of its own by `mlxkv reports --only scale`, which measured all that stands here.

| case            | parameters | dtype   | tokens | verdict | cold | warm |    peak | bars met |
| --------------- | ---------: | ------- | -----: | ------- | ---: | ---: | ------: | -------- |
| [wide2](#wide2) |      1,000 | float32 |      9 | agree   | 31 s |  3 s | 4.00 GB | 6 of 9   |

## wide2

Twice as wide.

- model: m made 2 times as wide; 1,000 parameters, 0.00 GB on disk, 0.00 GB in float32; weights `ffffffffffffffff`
- sequence: 9 tokens, the first 5 as the prompt; 9 of 9 rows of logits judged
- a note

| bar                                         |     measured |    limit | met                   |
| ------------------------------------------- | -----------: | -------: | --------------------- |
| verdict                                     |        agree |    agree | yes                   |
| peak of all processes, cold                 |      4.00 GB |  3.00 GB | no                    |
| peak of all processes, warm                 |      0.00 GB |  3.00 GB | yes                   |
| time, cold                                  |         31 s |    120 s | yes                   |
| time, warm                                  |          3 s |     60 s | yes                   |
| truth beside that of m                      | not compared |  1.0e-10 | could not be measured |
| sigma of the port beside that truth, 9 rows |         0.60 |     8.00 | yes                   |
| planted fault                               |  not located |  located | no                    |
| peak of all processes, locating it          |      0.00 GB | 24.00 GB | yes                   |

Each gate on the plan that did worst:

| gate  | plan | value | limit |
| ----- | ---- | ----: | ----: |
| sigma | step |  0.70 |  8.00 |

Times: cold 31.0 s (oracle 5.0); warm 3.0 s (oracle 5.0); locate 9.0 s (oracle 5.0).

| peak                   |    cold |    warm |  locate |
| ---------------------- | ------: | ------: | ------: |
| all processes together | 4.00 GB | 0.00 GB | 0.00 GB |
| oracle run             | 4.00 GB |       - |       - |

Most on disk at one time: cold oracle 2.00 GB; warm oracle 2.00 GB.

Planted: in layer 1 it is wrong; expected layer 1, tap v, head 2. `mlxkv locate`: located, nothing.

Its hint: `v_proj`

Not exercised:

- batches

Code `cccccccccccccccc`, run on:

|         | port   |
| ------- | ------ |
| arch    | x86_64 |
| device  | cpu    |
| os      | Linux  |
| threads | 1      |

```sh
mlxkv reports --only scale --case wide2
mlxkv compare m
mlxkv compare m
```

"""
