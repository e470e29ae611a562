"""`python -m oracle`: one line and exit code 2 for what cannot be done, nothing half-written."""

import json
import os
import signal
import subprocess
import sys
import time

import command
import models
import pytest

from oracle import folder
from oracle.formats import run_folder, trace

PYTHON = [sys.executable, "-m", "oracle"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(models.make(tmp_path_factory.mktemp("models") / "tiny", "mqa"))


def oracle(*arguments):
    """The command line in this process: (exit code, stdout, stderr)."""
    done = command.oracle(*arguments)
    return done.returncode, done.stdout, done.stderr


def test_a_run_says_what_it_takes_and_prints_the_folder(model, tmp_path):
    out = tmp_path / "out"
    code, stdout, stderr = oracle(
        "run",
        model,
        "--tokens",
        "5,6,7,8,9",
        "--steps",
        4,
        "--chunks",
        "1,4",
        "--threads",
        1,
        "--out",
        out,
    )
    assert (code, stdout) == (0, f"{out}\n")
    first, *proofs = stderr.splitlines()
    assert first.startswith("oracle: 8 tokens and a probe of 128 tokens, about ")
    assert [line.endswith(": holds") for line in proofs] == [True, True]
    code, stdout, stderr = oracle("check", out)
    assert (code, stderr) == (0, "")
    assert [line for line in stdout.splitlines() if line.startswith("probe: ")] == [
        "probe: 128 ids from 0 to 60, 106 of them in the first call",
        *(f"probe: {line}" for line in folder.proofs(run_folder.read_manifest(out / "probe"))),
    ]
    listed = oracle("show", out)[1].split("\n\n")[1].splitlines()[1:]
    assert stdout.splitlines()[0] == f"{out}: {len(listed)} files, whole and finite"
    code, stdout, _ = oracle("show", out)
    assert code == 0
    assert stdout.splitlines()[-2].endswith(
        "to the machine with MLX and run there: mlxkv compare MODEL --oracle out"
    )
    for name in ("show", "check"):
        code, stdout, _ = oracle(name, out, "--json")
        assert (code, json.loads(stdout)["inputs"]) == (0, run_folder.read_manifest(out).inputs)


def test_follow_writes_a_trace_of_each_plan_right_or_not(model, tmp_path):
    steps = [{"do": "new", "cache": "a"}, {"do": "call", "cache": "a", "tokens": [5, 6]}]
    for name, more in (
        ("well", []),
        ("ill", [{"do": "call", "cache": "a", "tokens": [7], "index_pos": 0}]),
    ):
        (tmp_path / f"{name}.json").write_text(
            json.dumps({"format": "mlxkv-plan/1", "name": name, "steps": steps + more})
        )
    given = ["--plan", tmp_path / "well.json", "--plan", tmp_path / "ill.json"]
    code, stdout, stderr = oracle(
        "follow", model, *given, "--threads", 1, "--out", tmp_path / "out"
    )
    assert (code, stderr) == (0, "")
    assert stdout.splitlines() == [
        str(tmp_path / "out" / f"{name}.safetensors") for name in ("well", "ill")
    ]
    well, ill = (trace.read(tmp_path / "out" / f"{name}.safetensors") for name in ("well", "ill"))
    assert well.logits.shape == ill.logits.shape == (2, models.VOCAB)
    assert [o.error for o in well.meta.outcomes] == [None, None]
    assert ill.meta.outcomes[2].error.startswith(
        "cannot be expressed: index_pos 0 with 2 tokens cached"
    )
    named = ["--cache=DynamicCache", "--cache=StaticCache:size=8"]
    code, _, stderr = oracle("follow", model, *given, *named, "--out", tmp_path / "each")
    assert (code, stderr) == (0, "")
    each = [trace.read(tmp_path / "each" / f"{name}.safetensors") for name in ("well", "ill")]
    assert [one.meta.environment["cache"] for one in each] == ["DynamicCache", "StaticCache:size=8"]
    code, _, stderr = oracle("follow", model, *given, *named, named[0], "--out", tmp_path / "each")
    assert (code, stderr) == (
        2,
        "error: --cache: 3 for 2 plans, expected one for all or one for each; give as many as "
        "plans, in their order\n",
    )
    code, _, stderr = oracle("follow", model, *given[:2], *given[:2], "--out", tmp_path / "twice")
    assert (code, stderr) == (
        2,
        "error: plans: well is the name of more than one, expected one trace a name; rename one\n",
    )
    assert not (tmp_path / "twice").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["run"], "Missing option '--out'"),
        (
            ["run", "--out", "{tmp}/x"],
            "no prompt: expected one of --prompt, --prompt-file, --tokens",
        ),
        (
            ["run", "--out", "{tmp}/x", "--prompt", "a", "--tokens", "1"],
            "--prompt and --tokens: expected one of",
        ),
        (
            ["run", "--out", "{tmp}/x", "--prompt-file", "{tmp}/none.txt"],
            "none.txt: cannot be read as UTF-8 text",
        ),
        (
            ["run", "{tmp}/none", "--out", "{tmp}/x", "--tokens", "1"],
            "none': no such folder or file",
        ),
        (["run", "{tmp}", "--out", "{tmp}/x", "--tokens", "1"], "no config.json"),
        (
            ["run", "{model}", "--out", "{tmp}/x", "--tokens", "1,b"],
            "--tokens: 'b' at place 1, expected whole numbers separated by commas",
        ),
        (["run", "{model}", "--out", "{tmp}/x", "--tokens", "1,61"], "id 61 at place 1"),
        (
            ["run", "{model}", "--out", "{tmp}/x", "--tokens", "1,2", "--chunks", "1,2"],
            "chunks 1,2 do not add up",
        ),
        (["run", "{model}", "--out", "{tmp}/x", "--tokens", "1,2", "--dtype", "float8"], "float8"),
        (["run", "{model}", "--out", "{tmp}/x", "--tokens", "1,2", "--steps", "-1"], "--steps"),
        (
            ["run", "{model}", "--out", "{model}", "--tokens", "1,2"],
            "expected a new folder or one that the oracle made",
        ),
        (
            ["run", "{model}", "--out", "{model}/config.json/x", "--tokens", "1,2"],
            "config.json/x: cannot be written",
        ),
        (["check", "{tmp}"], "manifest.json: cannot be read"),
        (["show", "{tmp}"], "manifest.json: cannot be read"),
        (["frobnicate"], "No such command"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(model, tmp_path, arguments, named):
    code, stdout, stderr = oracle(*(a.format(tmp=tmp_path, model=model) for a in arguments))
    assert (code, stdout) == (2, "")
    *notes, line = stderr.splitlines()
    assert all("about" in note for note in notes)
    assert line.startswith("error: ")
    assert named in line
    assert list(tmp_path.iterdir()) == []


def test_an_architecture_that_transformers_does_not_know_is_refused(tmp_path):
    model = models.make(tmp_path / "m", "mha", model_type="not-there", architectures=None)
    code, _, stderr = oracle("run", model, "--tokens", "1,2", "--out", tmp_path / "x")
    assert (code, [line for line in stderr.splitlines() if line.startswith("oracle: ")]) == (
        2,
        stderr.splitlines()[:-1],
    )
    assert "model_type is 'not-there', and transformers " in stderr.splitlines()[-1]


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_missing_package_is_named_with_what_installs_it(model, tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    code, _, stderr = oracle("run", model, "--tokens", "1,2", "--out", tmp_path / "x")
    assert (code, stderr) == (
        2,
        f"error: {package} is not installed; pip install -c constraints.txt '.[oracle]' "
        "in a clone of the repository\n",
    )


def test_a_prompt_file_is_taken_as_it_is(model, tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xff")
    code, _, stderr = oracle(
        "run", model, "--prompt-file", tmp_path / "p.txt", "--out", tmp_path / "x"
    )
    assert code == 2
    assert "p.txt: cannot be read as UTF-8 text" in stderr


def test_help_is_quick_and_imports_nothing_heavy():
    heavy = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "rich", "mlx", "mlxkv")
    code = (
        "import sys; sys.argv = ['oracle', '--help']\n"
        "from oracle.cli import main\n"
        "try: main()\n"
        f"finally: print([n for n in {heavy} if n in sys.modules], file=sys.stderr)"
    )
    begun = time.perf_counter()
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (made.returncode, made.stderr) == (0, "[]\n")
    assert all(name in made.stdout for name in ("run", "check", "show"))
    assert time.perf_counter() - begun < 5  # 0.2 s on an idle machine; not a measurement


def test_everything_works_where_mlx_cannot_be_imported_and_an_interrupt_leaves_nothing(
    model, tmp_path
):
    out = tmp_path / "out"
    code = (
        "import sys; sys.modules.update(dict.fromkeys(('mlx', 'mlx_lm', 'mlxkv')))\n"
        "from oracle.cli import main\n"
        "main()"
    )
    arguments = ["run", model, "--tokens", "1,2,3", "--threads", "1", "--out", str(out)]
    first = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, "--steps", "100"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    until = time.monotonic() + 120
    while not list(tmp_path.glob(".out.*.part/*")) and time.monotonic() < until:
        time.sleep(0.005)
    os.kill(first.pid, signal.SIGINT)
    _, stderr = first.communicate(timeout=60)
    assert first.returncode == 130
    assert b"Traceback" not in stderr
    assert list(tmp_path.iterdir()) == []
    made = subprocess.run(
        command.torch_python("-c", code, *arguments), check=False, capture_output=True, text=True
    )
    assert (made.returncode, made.stdout) == (0, f"{out}\n"), made.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_warm_oracle_of_the_tests_computes_what_a_cold_one_does(model, tmp_path):
    def files(*python):
        arguments = ["run", model, "--tokens", "5,6,7,8,9", "--steps", "12", "--keep-pool"]
        done = subprocess.run(
            [*python, "-m", "oracle", *arguments, "--out", tmp_path / "out", "--force"],
            capture_output=True,
        )
        manifest = run_folder.read_manifest(tmp_path / "out")
        return done.returncode, done.stdout, done.stderr, manifest

    cold, warm = files(sys.executable), files(*command.torch_python())
    assert cold[0] == 0
    assert cold[3].environment["threads"] == os.cpu_count()
    assert warm == cold
