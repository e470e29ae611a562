"""`mlxkv bench`: the figures are those of the turns that were taken."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import models
import numpy as np
import pytest
from command import mlxkv, refused
from mlx.utils import tree_flatten

from mlxkv.commands import reports
from mlxkv.commands.bench import bandwidth, busy, grid, page, picture, run, sequence, turns
from mlxkv.commands.bench import models as made
from mlxkv.commands.bench.ask import Request
from mlxkv.commands.bench.busy import Busy, Watch
from mlxkv.commands.bench.grid import Place
from mlxkv.commands.bench.result import Bench, Cell, Side, Step, Steps
from mlxkv.port.cache import Cache
from mlxkv.port.weights import load
from oracle.formats.errors import Refusal
from oracle.model.checkpoint import Checkpoint, resolve

MODEL = Path(__file__).parents[1] / "golden" / "tiny" / "gqa"


def test_speeds_are_tokens_over_seconds_and_ratios_the_ports_over_mlx_lms(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch in 4 bits, with everything written that can be."""
    decoded: list[Any] = []
    ask = turns.Worker.ask

    def asked_of(worker: turns.Worker, *question: Any) -> Any:
        answer = ask(worker, *question)
        decoded.extend([answer["ids"]] if question == ("decode", 2) else [])
        return answer

    monkeypatch.setattr(turns.Worker, "ask", asked_of)
    config = models.config("gqa", hidden_size=64, intermediate_size=128, head_dim=16)
    folder = models.save(tmp_path / "wide", config, models.weights(config))
    paths = {kind: tmp_path / "out" / f"b.{kind}" for kind in ("json", "md", "svg")}
    begun = time.perf_counter()
    done = mlxkv(
        *("bench", folder, "--prefill", "8,16", "--decode", "8", "--batch", "2"),
        *("--dtype", "4bit", "--steps", "2", "--rounds", "2", "--json"),
        *("--export-json", paths["json"], "--export-markdown", paths["md"]),
        *("--export-svg", paths["svg"]),
    )
    passed = time.perf_counter() - begun
    assert done.returncode == 0, done.stderr
    value = json.loads(done.stdout)
    assert value == json.loads(paths["json"].read_text())
    assert value["format"] == "mlxkv-bench/2"
    assert value["environment"]["device"] == "cpu"
    asked = [("prefill", 8, 16), ("decode", 8, 4), ("prefill", 16, 32)]
    assert [(c["what"], c["length"], c["port"]["tokens"]) for c in value["cells"]] == asked
    seconds = 0.0
    for cell in value["cells"]:
        assert (cell["dtype"], cell["batch"], len(cell["ratios"])) == ("4bit", 2, 2)
        pairs = zip(cell["port"]["seconds"], cell["other"]["seconds"], strict=True)
        assert cell["ratios"] == pytest.approx([other / port for port, other in pairs])
        for side in (cell["port"], cell["other"]):
            assert side["speed"] == pytest.approx(side["tokens"] / np.median(side["seconds"]))
            assert side["peak"] > 0
            seconds += sum(side["seconds"])
    # What was decoded was taken back, and both engines computed the same.
    assert len(decoded) == 6
    assert decoded == decoded[:1] * 6
    # All turns follow each other, within the time that the command took.
    assert 0 < seconds < passed
    (step,) = value["steps"]
    assert step["dtype"] == "4bit"
    # Of a layer of mlx-lm's seven, and of ours four: q, k and v in one, gate and up in another.
    layers, products = config["num_hidden_layers"], "QuantizedMatmul"
    found = step["other"]["kinds"][products], step["port"]["kinds"][products]
    assert found == (7 * layers + 1, 4 * layers + 1)
    assert "![" in paths["md"].read_text()
    assert paths["svg"].read_text().startswith("<?xml")


@pytest.fixture
def unrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run.count, "counted", lambda *_: pytest.fail("it runs"))


@pytest.mark.usefixtures("unrun")
def test_turns_longer_than_the_model_are_refused_before_anything_runs(tmp_path: Path) -> None:
    config = models.config("gqa", max_position_embeddings=64)
    folder = models.save(tmp_path / "short", config, models.weights(config))
    done = mlxkv("bench", folder, "--decode", "8,61", "--steps", "4")
    refused(done, "error: --decode 61: 61 tokens and 4 after them, expected at most 64 in all")
    refused(mlxkv("bench", folder, "--prefill", "65"), "--prefill 65: 65 tokens, expected at most")
    at_its_end = Request(model=str(folder), prefill=(64,), decode=(60,), steps=4)
    assert at_its_end.lists(resolve(str(folder))).prefill == (64,)


@pytest.mark.usefixtures("unrun")
def test_what_cannot_be_timed_is_refused_in_one_line(tmp_path: Path) -> None:
    refused(mlxkv("bench", MODEL, "--prefill", "0"), "error: --prefill: 0, expected whole numbers")
    refused(mlxkv("bench", MODEL, "--batch", "2,-1"), "error: --batch: -1, expected whole numbers")
    narrow = mlxkv("bench", MODEL, "--prefill", "4", "--dtype", "4bit")
    refused(narrow, "no matrix has a multiple of 64 columns", "leave --dtype 4bit out")
    config = made.overhead_config(1)
    packed = made.written.save(
        tmp_path / "packed",
        config,
        shapes := made.written.shapes_of(config),
        made.written.drawn(shapes),
        values="4-bit",
    )
    again = mlxkv("bench", packed, "--prefill", "4", "--dtype", "4bit")
    refused(again, "--dtype 4bit", "packed already")
    (tmp_path / "file").write_text("")
    there = mlxkv("bench", MODEL, "--prefill", "4", "--export-json", tmp_path / "file" / "x.json")
    refused(there, "cannot be written")
    onto = mlxkv("bench", MODEL, "--prefill", "4", "--export-markdown", tmp_path)
    refused(onto, "cannot be written (is a folder)")


@pytest.fixture(scope="module")
def tiny() -> Checkpoint:
    return resolve(str(MODEL))


def of(tiny: Checkpoint, most: int = 8192, **asked: Any) -> list[tuple[int, int, bool, bool]]:
    """Batch, length, and what is timed there, of a model of so many positions."""
    checkpoint = replace(tiny, config=tiny.config | {"max_position_embeddings": most})
    request = Request(**asked)
    found = grid.places(request, request.lists(checkpoint))
    return [(p.batch, p.length, p.prefill, p.decode) for p in found]


def test_without_options_few_cells_are_timed_and_with_full_all(tiny: Checkpoint) -> None:
    few = [(1, 128, True, True), (1, 1024, True, True), (1, 4096, False, True)]
    assert of(tiny) == few
    whole = [(1, 128, True, True), (1, 1024, True, True), (1, 4096, True, True)]
    batched = [(8, 128, True, True), (8, 1024, True, True)]
    assert of(tiny, full=True) == [*whole, (1, 8000, False, True), *batched]
    dtypes = Request(full=True).lists(tiny).dtypes
    assert dtypes == ("float32", "float16", "bfloat16", "4bit")
    assert Request(full=True, dtypes=("float16",)).lists(tiny).dtypes == ("float16",)
    packed: Any = {"model.norm.weight": None}
    assert "4bit" not in Request(full=True).lists(replace(tiny, packed=packed)).dtypes


def test_lengths_that_are_not_asked_for_are_those_that_the_model_has(tiny: Checkpoint) -> None:
    assert of(tiny, 1056) == [(1, 128, True, True), (1, 1024, True, True)]
    assert of(tiny, 1055) == [(1, 128, True, True), (1, 1024, True, False)]
    assert of(tiny, 64) == [(1, 16, False, True), (1, 32, True, False)]


def test_lengths_that_are_asked_for_are_all_that_is_timed(tiny: Checkpoint) -> None:
    assert of(tiny, prefill=(8, 8)) == [(1, 8, True, False)]
    assert of(tiny, decode=(2048,), batches=(8,)) == [(8, 2048, False, True)]
    asked = [Request(), Request(decode=(8,)), Request(decode=(8,), overhead=True)]
    assert [one.with_overhead for one in asked] == [True, False, True]


def test_short_turns_have_more_rounds() -> None:
    assert [grid.rounds(None, seconds) for seconds in (0.01, 2, 4, 600)] == [15, 6, 3, 3]
    assert grid.rounds(2, 0.01) == 2


def test_the_default_model_is_timed_within_ten_minutes(tiny: Checkpoint) -> None:
    """By the two speeds of `grid`, of which one run on a quiet machine is to be the proof."""
    large = replace(tiny, config=tiny.config | {"max_position_embeddings": 8192})
    places = grid.places(Request(), Request().lists(large))
    size = 134_515_008
    tensor = replace(next(iter(large.tensors.values())), shape=(size,))
    block = grid.Block("", replace(large, tensors={"weight": tensor}), "float32", places)
    assert block.checkpoint.parameters == size
    assert grid.seconds(block, Request()) < 400


def test_what_is_taken_back_is_decoded_again() -> None:
    model, port = load(MODEL), sequence.load("mlxkv", str(MODEL), "float32")
    rows = sequence.made_up(7, 2, port.vocab)
    assert rows[0] != rows[1]
    port.begin(10)
    first = port.prefill(rows).tolist()
    found = []
    for _ in range(2):
        tokens = [first]
        for _ in range(3):
            tokens.append(port.step(tokens[-1]).tolist())
        found.append(tokens)
        port.back(3)
    assert found[0] == found[1]
    whole = [row + [step[i] for step in found[0][:-1]] for i, row in enumerate(rows)]
    logits = model(whole, cache=Cache(model.config), all_positions=True)
    assert np.array(logits)[:, 6:].argmax(-1).T.tolist() == found[0]


class Slow:
    """A process that takes a second for each token of a prompt, and says so at once."""

    def ask(self, what: str, *given: int) -> dict[str, Any]:
        seconds = float(given[0] * given[1]) if what == "prefill" else 1.0
        return {"seconds": seconds, "peak": 1, "ids": [0]}


def test_a_length_of_ours_that_takes_too_long_is_left_out_and_named(tiny: Checkpoint) -> None:
    places = (Place(1, 64, True, True), Place(1, 128, True, True), Place(2, 8, False, True))
    block, pair = grid.Block("", tiny, "float16", places), cast(Any, (Slow(), Slow()))
    found = turns.Timed(block, pair, Request(rounds=1))
    assert [cell.name for cell in found.cells] == [
        "prefill 64",
        "decode after 64",
        "decode after 8",
    ]
    assert found.left_out == ["float16, batch 1: 128 tokens"]
    assert turns.Timed(block, pair, Request(rounds=1, prefill=(128,))).left_out == []


@pytest.mark.parametrize("layout", ["mha", "gqa", "mqa"])
def test_a_step_reads_every_weight_but_an_embedding_and_the_rows_held(
    layout: str, tmp_path: Path
) -> None:
    config = models.config(layout)
    folder = models.save(tmp_path, config, models.weights(config))
    model, checkpoint = load(folder, "float16"), resolve(str(folder))
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    if not config["tie_word_embeddings"]:
        weights -= model.embed_tokens.weight.nbytes
    rows = 2 * 3 * config["num_key_value_heads"] * config["head_dim"] * 2
    assert bandwidth.read_by_step(checkpoint, "float16", 1, 0) == weights
    assert bandwidth.read_by_step(checkpoint, "float16", 8, 10) == weights + 80 * rows


def test_packed_weights_are_read_as_they_are_stored(tmp_path: Path) -> None:
    config = made.overhead_config(1)
    shapes = made.written.shapes_of(config)
    plain = resolve(
        str(made.written.save(tmp_path / "plain", config, shapes, made.written.drawn(shapes)))
    )
    packed = made.packed(plain, tmp_path / "packed")
    model = load(packed.folder)
    weights = sum(array.nbytes for _, array in tree_flatten(model.parameters()))
    assert bandwidth.read_by_step(packed, "float32", 1, 0) == weights
    assert weights < bandwidth.read_by_step(plain, "float32", 1, 0) / 4


def test_a_copy_reads_and_writes() -> None:
    assert bandwidth.copied(size=2**22) > 1e8


STAT = "cpu  {user} 0 {system} {idle} 7 0 0 0 0 0\ncpu0 1 1 1 1\n"


def test_what_others_use_is_told_from_what_the_run_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stat, own = tmp_path / "stat", [10.0]

    def ticks(user: int, system: int, idle: int) -> None:
        stat.write_text(STAT.format(user=user, system=system, idle=idle))

    ticks(1000, 100, 5000)
    monkeypatch.setattr(busy, "_STAT", stat)
    monkeypatch.setattr(busy, "_own", lambda: own[0])
    monkeypatch.setattr(busy.os, "sysconf", lambda _: 100)
    clock = iter([50.0, 60.0])
    monkeypatch.setattr(busy.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(busy.time, "sleep", lambda _: ticks(1050, 125, 5025))
    watch = Watch()
    own[0] = 22.0  # of 10 seconds of two cores the run used 12, and all together 15
    ticks(2050, 625, 5525)
    found = watch.end()
    assert found == Busy(before=1.5, during=pytest.approx(0.3))
    first, second = found.words
    assert first.startswith("others used 1.5 of ")
    assert second.startswith("others used 0.3 of ")
    assert Busy(0.1, 0.1).words == ()
    monkeypatch.setattr(busy, "_STAT", tmp_path / "none")
    monkeypatch.setattr(busy.os, "getloadavg", lambda: (0.7, 0, 0))
    clock = iter([50.0, 60.0])
    assert Watch().end() == Busy(0.7, None)


def bench(**changes: Any) -> Bench:
    """A run of three cells."""
    port, other = Side(128, (0.5, 0.4, 0.4), 612_000_000), Side(128, (0.6, 0.4, 0.5), 640_000_000)
    after = Side(32, (2.0, 2.0, 2.0), 620_000_000), Side(32, (2.2, 2.4, 2.6), 5_000_000)
    fast = Side(32, (0.016, 0.016, 0.016), 5_000_000)
    cells = (
        Cell("", "float32", 1, "prefill", 128, port, other),
        Cell("", "float32", 1, "decode", 1024, *after, 538_000_000),
        Cell("30 layers of 64", "float32", 1, "decode", 128, fast, fast, 1_000_000),
    )
    left = Step(1131, 524, {"Matmul": 211, "Concatenate": 60, "Transpose": 331}, (0.002,) * 3)
    right = Step(1450, 514, {"Matmul": 211, "RoPE": 60, "Transpose": 331}, (0.004,) * 3)
    environment = {"mlx": "0.32.4", "device": "cpu", "blas": "BLIS (libblis.so.4)"}
    value: dict[str, Any] = {
        "model": "Tiny",
        "source": "tiny",
        "fingerprint": "f" * 64,
        "cells": cells,
        "left_out": (),
        "steps": (Steps("", "float32", left, right),),
        "copy": 20e9,
        "busy": Busy(0.0, 0.0),
        "environment": environment | {"device_name": "a CPU, 2 cores"},
    }
    return Bench(**value | changes)


def test_a_terminal_shows_it_in_80_columns() -> None:
    text = """\
Tiny  mlx 0.32.4 cpu (BLIS)  a CPU, 2 cores

float32, batch 1     port  mlx-lm  ratio         range  peak MB  of copy
prefill 128         320.0   256.0   1.20  1.00 to 1.25  612/640        -
decode after 1,024   16.0    13.3   1.20  1.10 to 1.30  620/5.0   43/36%

30 layers of 64    port  mlx-lm  ratio         range  peak MB  of copy
decode after 128  2,000   2,000   1.00  1.00 to 1.00  5.0/5.0   10/10%

a decode step, port/mlx-lm   primitives  kernels  ms to build  ratio
float32                     1,131/1,450  524/514    2.00/4.00   0.50

a copy moves 20.0 GB/s
"""
    assert page.console(bench()) == text
    large = Side(8 * 4096, (1.0, 1.0), 28_000_000_000)
    wide = Cell("", "bfloat16", 8, "decode", 4096, large, large, 5 * 10**6)
    loud = bench(cells=(wide,), busy=Busy(1.5, 0.5), model="A" * 40, left_out=("float16: 1 token",))
    lines = page.console(loud).splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[-5] == "left out, as a turn would take minutes: float16: 1 token"
    assert lines[-4].startswith("warning: others used 1.5 of")


def test_a_page_says_what_was_measured_and_what_its_words_mean() -> None:
    text = page.markdown(bench(), commands=["mlxkv bench"], svg="bench.svg")
    table = """\
| float32, batch 1   |  port | mlx-lm | ratio |        range | peak MB | of copy |
| ------------------ | ----: | -----: | ----: | -----------: | ------: | ------: |
| prefill 128        | 320.0 |  256.0 |  1.20 | 1.00 to 1.25 | 612/640 |       - |
| decode after 1,024 |  16.0 |   13.3 |  1.20 | 1.10 to 1.30 | 620/5.0 |  43/36% |
"""
    kinds = """\
| primitive     | port | mlx-lm | kernels each |
| ------------- | ---: | -----: | -----------: |
| `Matmul`      |  211 |    211 |            1 |
| `Concatenate` |   60 |      0 |    as inputs |
| `RoPE`        |    0 |     60 |            1 |
| `Transpose`   |  331 |    331 |            - |
"""
    assert table in text
    assert kinds in text
    assert "](bench.svg)" in text
    assert "**Warning**" not in text
    loud = page.markdown(bench(busy=Busy(1.5)), commands=["mlxkv bench"])
    assert "- **Warning**: others used 1.5 of" in loud
    assert "![" not in loud
    assert "eval_gpu" in loud


def test_pairs_that_spread_are_warned_of() -> None:
    assert bench().warnings == ()
    worse = Side(32, (1.0, 1.0, 2.0), 1), Side(32, (1.0, 2.0, 1.0), 1)
    cell = Cell("", "float32", 1, "decode", 128, *worse)
    (warning,) = bench(cells=(*bench().cells, cell)).warnings
    assert warning == (
        "1 of 4 cells spread by more than 25%, most of all float32, batch 1: decode after 128, "
        "0.50 to 2.00; run again on a quiet machine or with more --rounds"
    )


def test_a_picture_is_the_same_for_the_same_figures() -> None:
    drawn = picture.ratios(bench())
    assert drawn == picture.ratios(bench())
    for text in ("30 layers of 64", "decode after 1,024", "speed over mlx-lm"):
        assert text in drawn


def test_nothing_to_time_is_refused(tiny: Checkpoint) -> None:
    with pytest.raises(Refusal, match="nothing to time"):
        run.run(Request(model=str(MODEL), prefill=()))
    assert Place(1, 8, True, False) in grid.places(
        Request(prefill=(8,)), Request(prefill=(8,)).lists(tiny)
    )


def test_the_report_is_that_of_the_whole_grid_and_the_index_says_how_many_are_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []

    def measured(request: Request) -> Bench:
        asked.append(request)
        return bench(environment=bench().environment | {"os": "Linux", "arch": "x86_64"})

    monkeypatch.setattr(run, "run", measured)
    names = [path.relative_to(tmp_path) for path in reports.write(tmp_path, only=["bench"])]
    place = Path("Tiny/linux-x86_64-cpu")
    kinds = ("svg", "json", "md")
    assert names == [*(place / f"bench.{kind}" for kind in kinds), Path("README.md")]
    assert asked == [Request(full=True)]
    said = "as fast as mlx-lm or faster in 3 of 3 cells"
    row = f"| [bench]({place}/bench.md) | Tiny | linux-x86_64-cpu | {said} |"
    assert row in (tmp_path / "README.md").read_text()
    assert reports.check(tmp_path, only=["bench"]).lines == ()
