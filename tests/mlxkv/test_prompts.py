"""Many prompts: each is a comparison of its own, the worst decides, and what is wrong with any is
refused before all.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import command
import numpy as np
import own_llama
import pytest
from synthetic import PROMPT, make_algebra, make_candidates, make_case

from mlxkv.cli import cli
from mlxkv.commands.compare import overview as pages
from mlxkv.commands.compare import prompts
from mlxkv.commands.compare.many import Judged
from mlxkv.commands.compare.many import line as line_of
from mlxkv.commands.compare.prompts import Prompt
from mlxkv.judge.many import Prompts
from mlxkv.judge.result import Verdict
from mlxkv.judge.verdict import judge
from mlxkv.report.phrases import Side
from oracle.formats import plan
from oracle.formats.errors import Refusal
from oracle.formats.plan import PREFIXES_MOST, judged_plans, prefixes_feed

LINES = (
    '{"tokens": [3, 7, 11, 2, 19], "name": "one", "steps": 4}\n# left out\n\n'
    '{"tokens": [5, 1, 8, 30], "name": "two"}\n'
)


def mlxkv(*arguments: str | Path, cache: Path | None = None) -> command.Done:
    return command.mlxkv(*arguments, env={"MLXKV_CACHE": str(cache)} if cache else {})


def written(folder: Path, text: str, name: str = "prompts.jsonl") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.fixture(scope="module")
def run(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, command.Done]:
    """A comparison over two prompts."""
    folder = tmp_path_factory.mktemp("prompts")
    path = written(folder, LINES)
    return folder, mlxkv(
        "compare",
        folder_of("gqa"),
        "--prompts",
        path,
        "--steps",
        "3",
        "--out",
        folder / "out",
        cache=folder / "cache",
    )


def test_each_prompt_has_a_report_of_its_own_and_all_an_overview(
    run: tuple[Path, command.Done],
) -> None:
    folder, done = run
    assert done.returncode == 0, done.stderr
    files = sorted(
        str(p.relative_to(folder / "out")) for p in (folder / "out").rglob("*") if p.is_file()
    )
    each = ["compare.json", "compare.md", "compare.svg"]
    assert files == [
        *each,
        *(f"{name}/{file}" for name in ("one", "two") for file in each),
    ]
    value = json.loads((folder / "out" / "compare.json").read_text())
    assert (value["format"], value["outcome"], value["scopes"]) == (
        "mlxkv-prompts/1",
        "agree",
        ["algebra", "logits", "cache"],
    )
    assert [(p["name"], p["folder"], p["tokens"], p["outcome"]) for p in value["prompts"]] == [
        ("one", "one", 8, "agree"),
        ("two", "two", 6, "agree"),
    ]
    page = (folder / "out" / "compare.md").read_text()
    assert page.count("agree (algebra, logits, cache) |") == 2
    assert "[report](one/compare.md)" in page


def test_the_terminal_has_a_line_for_each_and_names_the_worst(
    run: tuple[Path, command.Done],
) -> None:
    folder, done = run
    worst = json.loads((folder / "out" / "compare.json").read_text())["worst"]
    lines = done.stdout.splitlines()
    other = {"one": "two", "two": "one"}[worst]
    assert [line.split()[0] for line in lines[2:5]] == ["prompt", worst, other]
    assert lines[-2] == f"agree (algebra, logits, cache); of 2 prompts the worst is {worst}"
    assert lines[-1] == f"report: {folder / 'out' / 'compare.md'}"


def test_a_prompt_among_others_is_judged_as_it_is_alone(
    run: tuple[Path, command.Done],
    folder_of: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder, _ = run
    done = mlxkv(
        "compare",
        folder_of("gqa"),
        "--tokens",
        "5,1,8,30",
        "--steps",
        "3",
        "--json",
        "--out",
        tmp_path,
        cache=folder / "cache",
    )
    assert (tmp_path / "compare.json").read_bytes() == (
        folder / "out" / "two" / "compare.json"
    ).read_bytes()
    assert json.loads(done.stdout)["took"]["oracle"] is None


JSON = "write an object with prompt or tokens"


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ('{"prompt": "a"}\n{"prompt": ', 2, ("not JSON", JSON)),
        ('{"prompt": "a"}\nplain', 2, ("not JSON", JSON)),
        ('{"prompt": "a"}\n[1, 2]', 2, ("[1, 2]", "expected object", JSON)),
        ('{"prompt": "a", "prompt": "b"}', 1, ("key 'prompt' is there twice",)),
        ('# first\n\n{"text": "a"}', 3, ("unknown field text", JSON, "name", "steps")),
        ('{"name": "a"}', 1, ("neither prompt nor tokens", "expected one of them")),
        ('{"prompt": "a", "tokens": [1]}', 1, ("both prompt and tokens", "expected one of them")),
        ('{"prompt": ""}', 1, ("prompt is ''", "expected str of length >= 1")),
        ('{"prompt": 3}', 1, ("prompt is 3", "expected str")),
        ('{"tokens": []}', 1, ("tokens is []", "expected array of length >= 1")),
        ('{"prompt": null}', 1, ("prompt is None", "expected str")),
        ('{"tokens": [1, true]}', 1, ("tokens[1] is True", "expected int")),
        ('{"tokens": [1, -2]}', 1, ("tokens[1] is -2", "expected int >= 0")),
        ('{"tokens": "1"}', 1, ("tokens is '1'", "expected array")),
        ('{"tokens": [1], "steps": 0}', 1, ("steps is 0", "expected int >= 1")),
        ('{"tokens": [1], "steps": 2.0}', 1, ("steps is 2.0", "expected int")),
        ('{"tokens": [1], "name": "../up"}', 1, ("name is '../up'", "names a folder")),
        ('{"tokens": [1], "name": "compare.md"}', 1, ("name is 'compare.md'", "names a folder")),
        ('{"tokens": [1], "name": "a\\n"}', 1, (r"name is 'a\n'", "names a folder")),
        (
            '{"tokens": [1], "name": "a"}\n\n{"tokens": [2], "name": "A"}',
            3,
            ('name "A" is that of line 1 too', "expected another"),
        ),
        (
            '{"tokens": [1], "name": "line-2"}\n{"tokens": [2]}',
            2,
            ('name "line-2" is that of line 1 too',),
        ),
    ],
)
def test_a_line_that_will_not_do_is_refused_by_its_number(
    tmp_path: Path, text: str, line: int, words: tuple[str, ...]
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(Refusal) as refusal:
        prompts.read(path)
    assert str(refusal.value).startswith(f"{path}: line {line}: ")
    assert "\n" not in str(refusal.value)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n   # here\n"])
def test_a_file_without_prompts_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(Refusal, match=r"no prompts, expected a line or more"):
        prompts.read(written(tmp_path, text))


def test_a_file_that_is_missing_or_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name in ("bytes", "absent"):
        with pytest.raises(Refusal, match=r"cannot be read as UTF-8 text"):
            prompts.read(tmp_path / name)


def test_plain_text_is_a_prompt_a_line(tmp_path: Path) -> None:
    path = written(tmp_path, "# four lines\r\n\r\n It is late \r\nuno\u2028due\n", "prompts.txt")
    assert prompts.read(path) == (
        Prompt("line-3", " It is late "),
        Prompt("line-4", "uno\u2028due"),
    )


def test_the_built_in_prompts_are_four_kinds() -> None:
    assert [(p.name, p.steps) for p in prompts.named("builtin")] == [
        ("prose", 8),
        ("code", 8),
        ("numbers", 8),
        ("rare", 8),
    ]
    assert all(p.prompt for p in prompts.builtin())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--prompt", "x"),
        ("--tokens", "1,2"),
        ("--prompt-file", "x.txt"),
        ("--chunks", "3,2"),
        ("--oracle", "x"),
        ("--candidate", "x"),
    ],
)
def test_an_option_of_one_sequence_beside_many_is_refused(
    tmp_path: Path, option: str, value: str
) -> None:
    arguments = [
        "compare",
        "--prompts",
        str(written(tmp_path, LINES)),
        option,
        value,
        "--out",
        str(tmp_path / "out"),
    ]
    with pytest.raises(Refusal, match=f"^--prompts and {option}: expected --prompts alone"):
        cli(arguments, standalone_mode=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (
            '{"tokens": [3, 40], "name": "two"}',
            "prompt two: tokens: id 40 at place 1, expected 0 to 39",
        ),
        ('{"tokens": [3], "name": "two", "steps": 99}', "prompt two: --steps 99"),
        ('{"prompt": "a"}', "prompt line-2: "),
    ],
)
def test_what_is_wrong_with_the_last_prompt_is_refused_before_the_first_runs(
    folder_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    last: str,
    words: str,
) -> None:
    monkeypatch.setenv("MLXKV_CACHE", str(tmp_path / "cache"))
    path = written(tmp_path, f'{{"tokens": [1, 2]}}\n{last}\n')
    with pytest.raises(Refusal, match=f"^{words}"):
        cli(
            [
                "compare",
                str(folder_of("gqa")),
                "--prompts",
                str(path),
                "--out",
                str(tmp_path / "out"),
            ],
            standalone_mode=False,
        )
    assert not (tmp_path / "cache" / "oracle").exists()
    assert not (tmp_path / "out").exists()


CASE = make_case()
GOOD = judge(CASE, make_candidates(CASE), algebra=make_algebra(CASE))
NOISY = replace(
    GOOD, gates=tuple(replace(g, value=3.0) if g.name == "sigma" else g for g in GOOD.gates)
)
UNTOLD = replace(GOOD, outcome="cannot tell", scopes=(), reasons=("no truth",))
WRONG = replace(
    GOOD,
    outcome="differ",
    gates=tuple(replace(g, value=9.0) if g.name == "sigma" else g for g in GOOD.gates),
)


@pytest.mark.parametrize(
    ("verdicts", "outcome", "code", "order"),
    [
        ({"a": GOOD, "b": GOOD}, "agree", 0, ["a", "b"]),
        ({"a": GOOD, "b": NOISY}, "agree", 0, ["b", "a"]),
        ({"a": GOOD, "b": UNTOLD}, "cannot tell", 2, ["b", "a"]),
        ({"a": GOOD, "b": UNTOLD, "c": WRONG}, "differ", 1, ["c", "b", "a"]),
    ],
)
def test_the_worst_prompt_decides(
    verdicts: dict[str, Verdict], outcome: str, code: int, order: list[str]
) -> None:
    found = Prompts(verdicts)
    assert (found.outcome, found.exit_code, found.worst_first, found.worst) == (
        outcome,
        code,
        order,
        order[0],
    )
    assert [p["name"] for p in found.to_json()["prompts"]] == list(verdicts)


def test_where_there_is_no_truth_all_prompts_together_agree_with_transformers_and_no_more() -> None:
    found = Prompts(
        {
            "a": replace(GOOD, against="transformers"),
            "b": replace(GOOD, against="transformers", scopes=("logits",)),
        }
    )
    expected = "agrees with transformers (logits); of 2 prompts the worst is a"
    assert pages.sentence_on_all(found) == expected
    assert (pages.sentence_on_all(Prompts({"a": GOOD})), found.to_json()["against"]) == (
        "agree (algebra, logits, cache); of 1 prompt the worst is a",
        "transformers",
    )


def test_a_line_of_json_names_the_gate_its_place_and_its_ratio() -> None:
    def line(verdict: Verdict) -> list[object]:
        one = Judged("a", verdict, {}, (), "tiny", {}, {})
        names = ("outcome", "gate", "plan", "position", "layer", "head", "ratio")
        return [json.loads(line_of(one))[name] for name in names]

    runs = make_candidates(CASE)

    def lost(name: str, index: tuple[int, ...]) -> Verdict:
        arrays = dict(runs["mixed"].arrays) | {name: runs["mixed"].arrays[name].copy()}
        arrays[name][index] = np.nan
        return judge(CASE, runs | {"mixed": replace(runs["mixed"], arrays=arrays)})

    assert line(lost("logits", (7, 3))) == ["differ", "finite", "mixed", 7, None, None, 1.0]
    place = ["differ", "keys worst row", "mixed", 11, 1, 0, None]
    assert line(lost("kv/a/001/keys", (0, 11, 2))) == place
    outcome, *_, ratio = line(GOOD)
    assert isinstance(ratio, float)
    assert (outcome, 0 < ratio < 1) == ("agree", True)


def test_scopes_are_those_that_every_prompt_covers() -> None:
    assert Prompts({"a": GOOD, "b": replace(GOOD, scopes=("logits", "cache"))}).scopes == (
        "logits",
        "cache",
    )


def test_the_overview_says_the_worst_prompts_verdict() -> None:
    found = Prompts({"a": GOOD, "b": WRONG})
    side = Side("port", "mlx", ())
    page = pages.markdown(found, sides=[side, side], commands=["mlxkv compare"], svg="c.svg")
    expected = (
        "of 2 prompts the worst is b: differ (logits): no position is wrong by itself; gates: sigma"
    )
    assert f"**{expected}**" in page
    assert "What the comparison of a, the longest prompt, does not speak of." in page
    lines = [line for line in page.splitlines() if "/compare.md)" in line]
    assert [line.split("|")[1].strip() for line in lines] == ["b", "a"]
    shown = pages.console(found, sides=(side, side), report="r")
    assert f"\n{expected}\n" in shown
    assert "\na: not exercised: positions beyond 23; " in shown


def test_a_long_sequence_leaves_the_growing_prefixes_out() -> None:
    assert prefixes_feed(7, 5) == 5 + 6 + 7
    most = next(n for n in range(1, PREFIXES_MOST) if prefixes_feed(n + 1, 1) > PREFIXES_MOST)
    assert "prefixes" in judged_plans([1] * most, prompt=1)
    assert sorted(judged_plans([1] * (most + 1), prompt=1)) == ["full", "mixed", "step"]
    assert sorted(judged_plans([1] * 1024, prompt=sum(prompts.LONG_CHUNKS))) == [
        "chunked",
        "full",
        "mixed",
        "step",
    ]


def test_the_verdict_says_why_the_growing_prefixes_were_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "PREFIXES_MOST", 289)
    left = {name: digest for name, digest in CASE.manifest.plans.items() if name != "prefixes"}
    files = {name: of for name, of in CASE.manifest.files.items() if "prefixes" not in name}
    case = replace(CASE, manifest=replace(CASE.manifest, plans=left, files=files))
    runs = {name: t for name, t in make_candidates(CASE).items() if name != "prefixes"}
    found = judge(case, runs)
    assert (found.outcome, found.plans) == ("agree", ("full", "step", "chunked", "mixed"))
    assert (
        f"prefixes was not run: it would feed {sum(range(PROMPT, 25))} tokens, at most 289 are fed"
        in found.notes
    )
    assert not any("prefixes was not run" in note for note in GOOD.notes)


def test_drawn_ids_are_the_same_everywhere_and_within_the_vocabulary() -> None:
    ids = prompts.drawn(1024, vocab_size=49152)
    assert ids[:4] == (44856, 31969, 38638, 7051)
    assert len(set(ids)) > 1000
    assert max(prompts.drawn(200, vocab_size=40)) == 39


def test_a_prompt_that_the_engine_cannot_follow_leaves_the_others_their_verdicts(
    folder_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """One at which its code raises, and one at which its process dies."""
    text, call = Path(own_llama.__file__).read_text(), "    def __call__(self, tokens, cache):\n"
    assert text.count(call) == 1
    broken = "        ids = tokens.tolist()[0]\n"
    broken += "        if 33 in ids:\n            raise ValueError(33)\n"
    broken += "        if 34 in ids:\n            os._exit(7)\n"
    (tmp_path / "mine.py").write_text("import os\n" + text.replace(call, call + broken))
    lines = (
        '{"tokens": [3, 7, 11, 2, 19], "name": "one"}\n'
        '{"tokens": [5, 33, 8, 30, 2, 9], "name": "raises"}\n'
        '{"tokens": [34, 1, 8], "name": "dies"}\n{"tokens": [5, 1, 8], "name": "last"}\n'
    )
    given = ["--prompts", written(tmp_path, lines), "--engine", f"{tmp_path / 'mine.py'}:load"]
    given += ["--quick", "--steps", "1", "--jsonl", tmp_path / "lines", "--out", tmp_path / "out"]
    done = mlxkv("compare", folder_of("gqa"), *given, cache=tmp_path / "cache")
    assert done.returncode == 2, done.stdout + done.stderr
    value = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert [(one["name"], one["outcome"], one["tokens"]) for one in value["prompts"]] == [
        ("one", "agree", 5),
        ("raises", "cannot tell", 6),
        ("dies", "cannot tell", 3),
        ("last", "agree", 3),
    ]
    why = {one["name"]: one["reasons"] for one in value["prompts"]}
    assert (why["one"], why["last"]) == ([], [])
    for name, words in {"raises": "failed with ValueError: 33 ", "dies": "exit code 7"}.items():
        (reason,) = why[name]
        assert re.match(rf"plan \w+: mine\.py:load: .*{words}", reason), reason
        assert f"cannot tell: {reason}" in (tmp_path / "out" / name / "compare.md").read_text()
        assert f"  cannot tell: {reason}\n" in done.stdout
    told = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert {one["name"]: (one["outcome"], one["reasons"]) for one in told} == {
        one["name"]: (one["outcome"], one["reasons"]) for one in value["prompts"]
    }
    assert re.search("\nof 4 prompts the worst is (raises|dies): cannot tell: ", done.stdout)
