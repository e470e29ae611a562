"""A model shared by several ranks, which mlx.launch starts on this machine.

Each launch costs seconds, so one process of a kind sees many things; `on_ranks` is what it does.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import models
import packed_models
import pytest
from command import mlxkv, refused

from mlxkv.engines import launch, ranks
from mlxkv.engines.job import Job
from mlxkv.engines.process import Process
from mlxkv.port.part import Part, require_splits
from oracle.formats.errors import Refusal
from oracle.formats.plan import Call, New, Plan
from oracle.model.checkpoint import resolve

HOST = {"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}
NINE = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 72}


@pytest.fixture(autouse=True)
def _found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks find `on_ranks`."""
    tests = Path(__file__).parent
    path = [str(tests), str(tests.parent), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))


def job(out: Path, asked: dict[str, Any], folder: Path, **more: Any) -> Job:
    plans = [Plan("full", [New("c0"), Call("c0", models.ids(4))])]
    out.mkdir(exist_ok=True)
    made = Job.on(resolve(str(folder)), plans, out, dtype="float32", device="cpu", **more)
    return Job(**{f: getattr(made, f) for f in made.__slots__} | {"custom": json.dumps(asked)})


def launched(out: Path, size: int, asked: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    """What each of so many ranks saw."""
    of = job(out, asked | {"shared": str(out)}, folder, ranks=size)
    ranks.launch(of, str(of.save()), "on_ranks")
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(size)]


def running(out: Path) -> list[str]:
    """The processes that work in a folder."""
    # Whole lines: ps cuts them to COLUMNS.
    command = ["ps", "-eww", "-o", "args"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if str(out) in line]


def agree(seen: list[dict[str, Any]], size: int) -> None:
    """Every rank's model computes what the whole one does, and its cache lives as any."""
    for rank, one in enumerate(seen):
        for name, facts in one.items():
            exact = name.endswith("float64")
            assert max(facts["off"]) < (1e-13 if exact else 2e-5), (rank, name, facts["off"])
            assert facts["bytes"][1] * size == facts["bytes"][0]
            assert facts["held"] == [6, 8]
            assert facts["loaded"][1] is True
            assert facts["same parts"] is True
            assert facts["another rank's"] == (
                f"part is that of rank {(rank + 1) % size} of {size}, expected rank {rank} of "
                f"{size}; give each rank the file that it saved, or fill a new cache"
            )
            assert facts["refused"] == [
                f"cache: made for a whole model, expected rank {rank} of {size} as the model is; "
                "make it with Cache(model.config, part=model.part)",
                f"cache: made for rank {rank} of {size}, expected a whole model as the model is; "
                "make it with Cache(model.config, part=model.part)",
                f"shard: is rank {rank} of {size} already, expected a whole model",
            ]


def test_three_ranks_share_nine_heads_and_three_kv_heads(tmp_path: Path) -> None:
    plain = models.save(tmp_path / "plain", models.config("gqa", **NINE))
    wide = models.save(
        tmp_path / "wide",
        models.config("mha", **NINE | {"num_key_value_heads": 9, "intermediate_size": 96}),
    )
    packed = models.save(
        tmp_path / "whole",
        models.config("gqa", **NINE | {"hidden_size": 96, "head_dim": 32, "intermediate_size": 96}),
    )
    packed = packed_models.quantised(packed, tmp_path / "packed")
    of = [(plain, "float32"), (plain, "float64"), (wide, "float32"), (packed, "float32")]
    asked = {"of": [(str(folder), dtype) for folder, dtype in [*of, (packed, "float64")]]}

    seen = launched(tmp_path / "out", 3, asked, plain)

    agree(seen, 3)
    assert [one["plain float32"]["repr"] for one in seen] == [
        f"Cache(9 of 64 tokens, 1728 bytes, 3 layers x 1 KV heads x 8, KV head {rank} of 3, "
        f"rank {rank} of 3, float32)"
        for rank in range(3)
    ]
    assert "KV heads 3 to 5 of 9, rank 1 of 3" in seen[1]["wide float32"]["repr"]
    assert running(tmp_path) == []


def test_four_ranks_hold_a_quarter_of_what_is_split(tmp_path: Path) -> None:
    """With biases too. No rank ever holds more than its part and a tensor or two."""
    biased = models.config("mha", attention_bias=True, mlp_bias=True, num_hidden_layers=2)
    folder = models.save(tmp_path / "biased", biased)
    large = models.config("mha", hidden_size=128, head_dim=32, intermediate_size=1024)
    asked = {"large": str(models.save(tmp_path / "large", large)), "of": [(str(folder), "float32")]}

    seen = launched(tmp_path / "out", 4, asked, folder)

    for one in seen:
        size = one.pop("large")
        assert size["part"] < size["all"] / 3
        assert size["held"] <= size["part"] + 2**16
        assert size["peak"] <= size["part"] + 2 * size["largest"] + 2**16
    agree(seen, 4)


@pytest.mark.parametrize("engine", ["port", "mlx-lm"])
def test_compare_judges_an_engine_on_ranks(engine: str, tmp_path: Path, answer: Path) -> None:
    """mlx-lm on a cache of one's own, whose rows are shown only where it has the rank's heads."""
    (tmp_path / "hosts.json").write_text(json.dumps({"backend": "ring", "hosts": [HOST, HOST]}))
    how = ["--ranks", 2] if engine == "port" else ["--hostfile", tmp_path / "hosts.json"]
    words = ["--oracle", answer, "--quick", "--json", "--engine", engine]
    if engine == "mlx-lm":
        words += ["--cache", f"{Path(__file__).with_name('own_caches.py')}:make"]

    done = mlxkv("compare", *words, *how, "--out", tmp_path / "out")

    assert done.returncode == 0, done.stdout + done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["outcome"] == "agree"
    (environment,) = [of for name, of in verdict["environment"].items() if name != "oracle"]
    assert (environment["ranks"], environment["backend"]) == (2, "ring")
    gates = {gate["name"] for gate in verdict["gates"] if gate["ran"]}
    assert {"keys worst row", "values worst row", "sigma"} <= gates
    assert ("algebra (float64)" in gates) == (engine == "port")


def test_locate_reads_what_ranks_get_wrong_from_their_cache(tmp_path: Path) -> None:
    """mlx-lm loses a theta that stands in rope_parameters alone."""
    config = models.config("gqa")
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e5}
    folder = models.save(tmp_path / "model", config)
    words = ["--tokens", "3,7,11,2,19,5", "--steps", 1, "--quick", "--engine", "mlx-lm"]

    done = mlxkv("locate", folder, *words, "--ranks", 2, "--json", "--out", tmp_path / "out")

    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["outcome"] == "located"
    assert (found["layer"], found["tap"]) == (0, "keys")


def test_a_rank_that_dies_ends_all(tmp_path: Path) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa", **NINE))
    of = job(tmp_path / "out", {"dies": "killed"}, folder, ranks=3)

    done = subprocess.run(
        [sys.executable, "-P", "-m", "mlxkv.engines.ranks", str(of.save()), "on_ranks"],
        capture_output=True,
        text=True,
        timeout=120,
    )

    refused(done, "rank 1: its process was ended by signal 9, expected a result")
    assert running(tmp_path) == []


def test_a_port_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa", **NINE))
    of = job(tmp_path / "out", {"of": []}, folder, ranks=3)
    assert ranks.free_ports(3) in range(20000, 32000)
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        port = held.getsockname()[1]
        monkeypatch.setattr(ranks, "free_ports", lambda _: port)

        with pytest.raises(Refusal, match=r"ranks: cannot reach the other ranks .*see that each"):
            ranks.launch(of, str(of.save()), "on_ranks")

    assert running(tmp_path) == []


def test_a_host_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ssh that waits for ever, and for longer than a rank does."""
    folder = models.save(tmp_path / "model", models.config("gqa", **NINE))
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text("#!/bin/sh\nsleep 600\n")
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(ranks, "MEETING", 2)
    monkeypatch.setattr(ranks, "PATIENCE", 0.5)
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "far", "ips": ["127.0.0.1"]}]
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    of = job(tmp_path / "out", {"of": []}, folder, hostfile=str(tmp_path / "hosts.json"))

    with pytest.raises(Refusal) as caught:
        ranks.launch(of, str(of.save()), "on_ranks")

    assert str(caught.value).startswith(
        "rank 0: waited 2 s for the others, expected every host to answer; see that they can "
    )
    assert running(tmp_path) == []


def far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> dict[str, Any]:
    """A run's hostfile with another host, which is this one, that this script of ssh's reaches."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f"#!/bin/bash\n{script}\n")
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{ssh.parent}{os.pathsep}{os.environ['PATH']}")
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}, {"ssh": "far", "ips": ["127.0.0.1"]}]
    (tmp_path / "hosts.json").write_text(json.dumps(hosts))
    return {"hostfile": str(tmp_path / "hosts.json")}


def test_a_host_that_goes_silent_in_the_middle_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rank stops once the ranks have met, and says nothing more."""
    folder = models.save(tmp_path / "model", models.config("gqa", **NINE))
    hosts = far(tmp_path, monkeypatch, 'exec env -u MLXKV_PARENT bash -c "${@: -1}"')
    monkeypatch.setattr(ranks, "QUIET", 1)
    monkeypatch.setattr(ranks, "TIMES", 0)
    of = job(tmp_path / "out", {"dies": "stops"}, folder, **hosts)

    with pytest.raises(Refusal) as caught:
        ranks.launch(of, str(of.save()), "on_ranks")

    assert str(caught.value) == (
        "ranks: no rank ended a call for 1 s, expected one; see whether each host still answers "
        "(far)"
    )
    assert (tmp_path / "out" / "alive.txt").exists()
    assert running(tmp_path) == []


@pytest.mark.parametrize("said", ["ssh: connect to host far port 22: Connection refused", ""])
def test_a_ssh_that_fails_is_no_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa", **NINE))
    hosts = far(tmp_path, monkeypatch, f"echo '{said}' >&2; exit 255")
    monkeypatch.setattr(ranks, "PATIENCE", 0.5)
    of = job(tmp_path / "out", {"of": []}, folder, **hosts)

    with pytest.raises(Refusal) as caught:
        ranks.launch(of, str(of.save()), "on_ranks")

    why = f"its last line was: {said}" if said else "it said nothing; see that `ssh far true` works"
    what = "rank 1 on far: ssh ended with exit code 255, expected a connection until the run ends"
    assert str(caught.value).startswith(f"{what}; {why}")
    assert running(tmp_path) == []


def test_what_is_interrupted_leaves_no_rank_behind(tmp_path: Path) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa", **NINE))
    of = job(tmp_path / "out", {"dies": "waits"}, folder, ranks=2)

    with Process(["mlxkv.engines.ranks", str(of.save()), "waiting"]) as process:
        assert process.popen is not None
        while len(running(tmp_path)) < 4:  # the two that start them, and the ranks
            assert process.popen.poll() is None
            time.sleep(0.05)

    assert running(tmp_path) == []


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "not JSON"),
        ("3", "no list of hosts, expected one"),
        ({"hosts": 1}, "no list of hosts"),
        ({"backend": "mpi", "hosts": [HOST, HOST]}, "backend is 'mpi', expected 'ring'"),
        ([HOST], "1 hosts, expected two or more of which the first is this machine"),
        ([HOST, {"ips": []}], "host 1"),
        ([HOST, {"ssh": "far"}], "host 1 has no ips"),
        ([{"ssh": "far", "ips": ["10.0.0.1"]}, HOST], "host 0 has ssh 'far', expected '127.0.0.1'"),
        ([{"ssh": "127.0.0.1"}, HOST], "host 0 has no ips"),
        ([HOST, HOST | {"port": 1}], "unknown key 'port'"),
    ],
)
def test_a_hostfile_that_is_none(value: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / "hosts.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))

    with pytest.raises(Refusal, match=r"hosts\.json") as caught:
        ranks.hosts_of(path)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "size", "words"),
    [
        ({}, 3, "num_attention_heads is 4, expected a multiple of the 3 ranks; take 2 ranks"),
        ({}, 4, "num_key_value_heads is 2, expected a multiple of the 4 ranks; take 2 ranks"),
        ({"num_key_value_heads": 1}, 2, "num_key_value_heads is 1, expected a multiple of the 2"),
        ({"intermediate_size": 45}, 2, "intermediate_size is 45, expected a multiple of the 2"),
    ],
)
def test_what_does_not_divide(
    changes: dict[str, Any], size: int, words: str, tmp_path: Path
) -> None:
    folder = models.save(tmp_path / "model", models.config("gqa", **changes))
    path = "--tokens", "1,2,3", "--ranks", size, "--out", tmp_path / "out"

    refused(mlxkv("compare", folder, *path), "config.json", words)


def test_packed_groups_are_not_cut(tmp_path: Path) -> None:
    plain = models.save(tmp_path / "plain", models.config("gqa", intermediate_size=64))
    packed = packed_models.quantised(plain, tmp_path / "packed", group_size=32)

    with pytest.raises(Refusal) as caught:
        require_splits(resolve(str(packed)), 2)

    assert str(caught.value).partition("config.json: ")[2] == (
        "model.layers.0.self_attn.o_proj.weight has 32 columns packed in groups of 32, expected a "
        "multiple of 2 ranks x 32; take fewer ranks, or weights that are floats"
    )


def test_what_cannot_run_on_ranks(
    folder_of: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts.json").write_text(json.dumps([HOST, HOST]))
    (tmp_path / "own.py").write_text("def load(path, dtype): ...")
    for words, expected in (
        (["--ranks", 2, "--hostfile", tmp_path / "hosts.json"], "--ranks and --hostfile"),
        (["--ranks", 2, "--engine", f"{tmp_path}/own.py:load"], "is not known to have shard"),
        (["--hostfile", tmp_path / "none.json"], "none.json: cannot be read"),
    ):
        done = mlxkv("compare", folder_of("gqa"), "--tokens", "1,2", *words, "--out", tmp_path)
        refused(done, expected)
    monkeypatch.setattr(launch, "entry_points", lambda **_: ())
    done = mlxkv("compare", folder_of("gqa"), "--tokens", "1,2", "--ranks", 2, "--out", tmp_path)
    refused(done, "ranks: this MLX has no mlx.launch")


def test_a_part_in_words() -> None:
    assert str(Part(1, 3)) == "rank 1 of 3"
    assert Part(1, 3).heads(3) == "KV head 1 of 3, rank 1 of 3"
    assert Part(1, 3).heads(6) == "KV heads 2 to 3 of 6, rank 1 of 3"
    assert list(Part(2, 3).of(9)) == [6, 7, 8]
