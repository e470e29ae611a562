"""What a run folder may not get away with, although every sha256 and digest in it fits.

Each forgery is refused, or the judge cannot tell by it, and `oracle check` refuses it too.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import save_file
from synthetic import make_probe

from mlxkv.commands.compare import ask
from mlxkv.engines import port
from mlxkv.judge.admission import by_plan
from mlxkv.judge.case import read_case
from mlxkv.judge.controls import Trust
from mlxkv.judge.result import Control, Verdict
from mlxkv.judge.verdict import judge
from mlxkv.port.llama import Llama
from oracle import folder as folders
from oracle.formats import disk, noise, plan, run_folder, tensors, trace
from oracle.formats.errors import Refusal
from oracle.formats.run_folder import FLOORS, SEQUENTIAL, Manifest, Pool
from oracle.formats.trace import Trace
from oracle.pool import errors

Array = npt.NDArray[Any]
Change = Callable[[Array], Array]
EAGER, SDPA = ("eager-full", "eager-step"), ("sdpa-full", "sdpa-step", "sdpa-chunked")


class Forged:
    """A copy of a run folder, to be changed; `close` makes every sha256 and digest fit again."""

    def __init__(self, honest: Path, copy: Path) -> None:
        self.folder = Path(shutil.copytree(honest, copy))
        self.manifest = run_folder.read_manifest(copy)
        self.unlisted: set[str] = set()

    @property
    def pool(self) -> Pool:
        return run_folder.read_floors(self.folder / FLOORS)[0]

    def says(self, **changes: Any) -> None:
        """Of the manifest."""
        self.manifest = dataclasses.replace(self.manifest, **changes)

    def run(self, name: str, change: Callable[[Trace], Trace]) -> None:
        """Another trace in the place of one."""
        path = self.folder / name
        made = change(trace.read(path))
        arrays = {key: np.array(array) for key, array in made.arrays.items()}
        trace.write(path, made.meta, arrays)

    def floors(self, change: Callable[[dict[str, Array]], None], pool: Pool | None = None) -> None:
        """Other stored errors, and what they say of the pool's members."""
        path = self.folder / FLOORS
        arrays = {name: np.array(of) for name, of in run_folder.read_floors(path)[1].items()}
        said = pool or self.pool
        change(arrays)
        shapes = {name: (of.dtype.type, of.shape) for name, of in arrays.items()}
        with tensors.writer(path, shapes) as out:
            for name, of in arrays.items():
                out.arrays[name][...] = of
            out.finish(said.to_json())

    def widen(
        self, members: Sequence[str], names: Sequence[str], change: Change = lambda a: 60 * a
    ) -> None:
        """The stored errors of these members, under these names."""

        def wider(arrays: dict[str, Array]) -> None:
            for name in names:
                of = self.pool.kinds if name == "cached" else self.pool.members
                for member in members:
                    arrays[name][of.index(member)] = change(arrays[name][of.index(member)])

        self.floors(wider)

    def drop(self, name: str) -> None:
        """A plan, and whatever is there of it."""
        members = [m for m in self.pool.members if not m.endswith(f"-{name}")]
        kept = [self.pool.members.index(m) for m in members]

        def fewer(arrays: dict[str, Array]) -> None:
            for key, of in arrays.items():
                arrays[key] = of if key == "cached" else of[kept]

        self.floors(
            fewer, Pool(members, self.pool.kinds, min(len(members) - 1, self.pool.distinct))
        )
        plans = {key: of for key, of in self.manifest.plans.items() if key != name}
        self.says(plans=plans, pool=members, pool_distinct=self.pool.distinct)
        for gone in (f"plans/{name}.json", f"reference-{name}.safetensors"):
            (self.folder / gone).unlink(missing_ok=True)

    def close(self) -> Path:
        paths = [p for p in self.folder.rglob("*") if p.is_file() and p.name != "manifest.json"]
        names = {p.relative_to(self.folder).as_posix(): p for p in paths}
        names = {name: path for name, path in names.items() if not name.startswith("probe/")}
        self.says(
            files={n: disk.sha256(path) for n, path in names.items() if n not in self.unlisted},
        )
        run_folder.write_manifest(self.folder, self.manifest)
        return self.folder


@pytest.fixture
def forged(answer: Path, tmp_path: Path) -> Forged:
    return Forged(answer, tmp_path / "forged")


def judged(folder: Path, model: Llama) -> Verdict:
    """The port's verdict by a folder."""
    case = read_case(folder)
    plans = run_folder.read_plans(folder, case.manifest)
    runs = {p.digest: port.run(model, p) for p in plans.values()}
    return judge(case, by_plan(case.manifest, runs.values()))


def doubts(folder: Path, model: Llama) -> str:
    """Why the folder is refused, or why nothing can be told by it."""
    with pytest.raises(Refusal) as refused:
        folders.check(folder)
    try:
        verdict = judged(folder, model)
    except Refusal as error:
        return str(error)
    assert verdict.outcome == "cannot tell", verdict.outcome
    assert "\n" not in str(refused.value)
    return " / ".join(verdict.reasons)


def at(position: int, factor: float = 60) -> Change:
    def one(errors: Array) -> Array:
        errors = errors.copy()
        errors[..., position] *= factor
        return errors

    return one


NUMBERS: dict[str, tuple[Callable[[Forged], None], str]] = {
    "rms of eager": (lambda f: f.widen(EAGER, ["rms"]), "eager-step beside them"),
    "shift of one": (lambda f: f.widen(EAGER[:1], ["shift"]), "eager-step beside them"),
    "peak of eager": (lambda f: f.widen(EAGER, ["peak"]), "eager-step beside them"),
    "keys of eager": (lambda f: f.widen(EAGER, ["keys"]), "eager-step beside them"),
    "values of one": (lambda f: f.widen(EAGER[1:], ["values"]), "eager-step beside them"),
    "all at one position": (
        lambda f: f.widen(EAGER, ["rms", "peak", "keys"], at(20)),
        "eager-step beside them",
    ),
    "less, at one position": (
        lambda f: f.widen(EAGER[:1], ["rms"], at(20, 25)),
        "eager-step beside them",
    ),
    "cached of eager": (lambda f: f.widen(["eager"], ["cached"]), "eager-step beside them"),
    "cached of sdpa": (lambda f: f.widen(["sdpa"], ["cached"]), "stored cached of sdpa-step"),
    "rms of sdpa-full": (lambda f: f.widen(SDPA[:1], ["rms"]), "stored rms of sdpa-full"),
    "a hundredth at one position": (
        lambda f: f.widen(SDPA[2:], ["peak"], lambda a: a * (1 + 0.01 * (a == a.max()))),
        "stored peak of sdpa-chunked",
    ),
    "keys of sdpa-full": (lambda f: f.widen(SDPA[:1], ["keys"]), "stored keys of sdpa-full"),
    "values of sdpa-step": (lambda f: f.widen(SDPA[1:2], ["values"]), "stored values of sdpa-step"),
    "rms of the sequential": (
        lambda f: f.widen([SEQUENTIAL], ["rms"]),
        "sequential-full beside them",
    ),
    "keys of the sequential": (
        lambda f: f.widen([SEQUENTIAL], ["keys"]),
        "sequential-full beside them",
    ),
    "everybody": (lambda f: f.widen([*EAGER, *SDPA], ["rms"]), "stored rms of sdpa-"),
    "everybody less": (
        lambda f: f.widen([*EAGER, *SDPA], ["rms"], lambda a: a / 2),
        "stored rms of sdpa-",
    ),
}


@pytest.mark.parametrize("forgery", NUMBERS)
def test_errors_that_are_not_those_of_the_runs_tell_nothing(
    forged: Forged, model_of: Callable[..., Llama], forgery: str
) -> None:
    forge, control = NUMBERS[forgery]
    forge(forged)
    found = doubts(forged.close(), model_of())
    assert found.startswith("control '")
    assert control in found


def noisier(forged: Forged, factor: float) -> None:
    """A pool that was computed with so much more noise, and says so in everything."""
    measure = trace.read(forged.folder / "truth.safetensors")

    def rougher(run: Trace) -> Trace:
        arrays = {
            name: of + (factor * (of - measure.arrays[name])).astype(np.float32)
            for name, of in run.arrays.items()
            if name not in ("positions", "steps")
        }
        return dataclasses.replace(run, arrays=dict(run.arrays) | arrays)

    runs = {}
    for member in SDPA:
        name = f"reference-{member.removeprefix('sdpa-')}.safetensors"
        forged.run(name, rougher)
        runs[member] = trace.read(forged.folder / name)

    def all_of_it(arrays: dict[str, Array]) -> None:
        for member, run in runs.items():
            for name, of in errors.of_member(run, measure).items():
                arrays[name][forged.pool.members.index(member)] = list(of)
        arrays["cached"][1] = errors.apart(runs["sdpa-step"], runs["sdpa-full"])
        for name, of in arrays.items():
            of[[0] if name == "cached" else [0, 1, 5]] *= factor

    forged.floors(all_of_it)


def test_a_pool_of_reduced_precision_tells_nothing(
    forged: Forged, model_of: Callable[..., Llama]
) -> None:
    """As a build of torch would make it without malice, whose products are rounded."""
    noisier(forged, 60)
    found = doubts(forged.close(), model_of())
    assert "control 'noise of the pool': ratio to the float32 parts is 1" in found
    assert "expected to agree" in found


def unlist(name: str) -> Callable[[Forged], None]:
    return lambda f: f.unlisted.add(name)


def another_token(f: Forged) -> None:
    f.says(tokens=[*f.manifest.tokens[:-1], f.manifest.tokens[-1] ^ 1])


def swapped(f: Forged) -> None:
    paths = [f.folder / f"reference-{name}.safetensors" for name in ("full", "step")]
    first, second = (path.read_bytes() for path in paths)
    paths[0].write_bytes(second)
    paths[1].write_bytes(first)


def of_another_plan(f: Forged) -> None:
    other = plan.judged_plans(f.manifest.tokens, prompt=3)["step"]
    f.run(
        "reference-step.safetensors",
        lambda t: dataclasses.replace(t, meta=dataclasses.replace(t.meta, plan=other)),
    )


def with_meta(name: str, **changes: Any) -> Callable[[Forged], None]:
    return lambda f: f.run(
        name, lambda t: dataclasses.replace(t, meta=dataclasses.replace(t.meta, **changes))
    )


def without_array(file: str, name: str) -> Callable[[Forged], None]:
    return lambda f: f.run(
        file,
        lambda t: dataclasses.replace(
            t, arrays={key: of for key, of in t.arrays.items() if key != name}
        ),
    )


def without_cache(f: Forged) -> None:
    """Neither in the truth nor in the floors."""

    def bare(arrays: dict[str, Array]) -> None:
        for kind in ("keys", "values"):
            arrays[kind] = arrays[kind][:, :0, :0]

    f.floors(bare)
    f.run(
        "truth.safetensors",
        lambda t: dataclasses.replace(
            t, arrays={key: of for key, of in t.arrays.items() if not key.startswith("kv/")}
        ),
    )


def says_of_pool(**changes: Any) -> Callable[[Forged], None]:
    """Both the floors and the manifest."""

    def forge(f: Forged) -> None:
        said = {
            key: getattr(f.pool, key) for key in ("members", "kinds", "distinct", "widest")
        } | changes
        f.floors(lambda arrays: None, Pool(**said))
        f.says(pool=said["members"], pool_distinct=said["distinct"])

    return forge


def extra(f: Forged) -> None:
    save_file({"a": np.zeros(1)}, f.folder / "other.safetensors")


def put(name: str, value: float) -> Callable[[Forged], None]:
    def one(arrays: dict[str, Array]) -> None:
        arrays[name][1, ..., 5] = value

    return lambda f: f.floors(one)


STRUCTURE: dict[str, tuple[Callable[[Forged], None], str]] = {
    "another prompt length": (
        lambda f: f.says(prompt_tokens=20),
        "plan step is ",
    ),
    "a shorter prompt than a chunk": (
        lambda f: f.says(prompt_tokens=4),
        "do not add up to the prompt's 4",
    ),
    **{
        f"no {name}": (lambda f, name=name: f.drop(name), f"lacks plan {name}, expected full, step")
        for name in ("full", "step", "prefixes", "chunked", "mixed")
    },
    **{
        f"{name} unlisted": (unlist(name), name)
        for name in (FLOORS, "truth.safetensors", "plans/step.json")
    },
    "reference unlisted": (
        unlist("reference-chunked.safetensors"),
        "files lack reference-chunked.safetensors, expected it",
    ),
    "a file of nobody": (extra, "files hold other.safetensors, which no such run writes"),
    "one token": (another_token, "plan full is "),
    "references swapped": (swapped, "reference-full.safetensors: plan digest is "),
    "a run of another plan": (of_another_plan, "reference-step.safetensors: plan digest is "),
    "weights undeclared": (
        with_meta("reference-step.safetensors", fingerprint=None),
        "reference-step.safetensors: fingerprint is None",
    ),
    "another config": (
        with_meta("truth.safetensors", config_digest="0" * 64),
        "truth.safetensors: config digest is 0000",
    ),
    "other rounding": (
        with_meta("truth.safetensors", weights_dtype="bfloat16"),
        "truth.safetensors: weights dtype is bfloat16, expected float32",
    ),
    "a step that failed": (
        with_meta("reference-full.safetensors", outcomes=[trace.Outcome(error="no memory")] * 2),
        "reference-full.safetensors: failed steps is [0, 1], expected []",
    ),
    "no keys of one layer": (
        without_array("reference-chunked.safetensors", "kv/a/001/keys"),
        "reference-chunked.safetensors: kv/a/001/keys is missing of 3 layers",
    ),
    "no values of one layer of the truth": (
        without_array("truth.safetensors", "kv/a/002/values"),
        "truth.safetensors: kv/a/00",
    ),
    "no keys and values of the truth": (
        without_cache,
        "truth.safetensors: holds no keys and values, expected those of every layer",
    ),
    "a longer sum": (
        says_of_pool(widest=10**6),
        "the sequential member added up rows of 1000000, expected ",
    ),
    "more distinct members": (says_of_pool(distinct=7), "7 members are distinct, expected 5"),
    "fewer distinct members": (says_of_pool(distinct=3), "3 members are distinct, expected 5"),
    "members renamed": (
        says_of_pool(members=["a-full", "a-step", *SDPA, SEQUENTIAL]),
        "members are a-full, a-step, sdpa-full, ",
    ),
    "one member twice": (
        says_of_pool(members=[*EAGER, *SDPA[:2], SDPA[1], SEQUENTIAL]),
        "members are eager-full, eager-step, sdpa-full, sdpa-step, sdpa-step, ",
    ),
    "the kinds the other way": (
        says_of_pool(kinds=["sdpa", "eager"]),
        "kinds are sdpa, eager, expected eager, sdpa",
    ),
    "the manifest's pool": (lambda f: f.says(pool=[]), "manifest.json: members are none"),
    "an error that is no number": (put("shift", np.nan), "shift holds a value that is not finite"),
    "an error below 0": (put("keys", -1.0), "keys holds an error below 0"),
    "no peaks": (
        lambda f: f.floors(lambda arrays: arrays.update(peak=arrays["peak"][:, 1:])),
        "peak has shape [6, 23], expected [6, 24]",
    ),
    "one token, two texts": (
        lambda f: f.says(texts=[str(i) for i in range(len(f.manifest.tokens))]),
        ", expected one text",
    ),
}


@pytest.mark.parametrize("forgery", STRUCTURE)
def test_a_folder_whose_files_are_not_one_runs_is_refused_by_both(
    forged: Forged, forgery: str
) -> None:
    forge, words = STRUCTURE[forgery]
    forge(forged)
    folder = forged.close()
    for reads in (read_case, folders.check):
        with pytest.raises(Refusal) as refused:
            reads(folder)
        assert words in str(refused.value)
        assert "\n" not in str(refused.value)


def proofs(**changes: Any) -> Callable[[Manifest], Mapping[str, Any]]:
    def of(manifest: Manifest) -> Mapping[str, Any]:
        both = manifest.proofs | changes
        return {name: value for name, value in both.items() if value is not None}

    return of


@pytest.mark.parametrize(
    "change",
    [
        proofs(truth_agreement=2e-10),
        proofs(transformers_double=7e-5),
        proofs(transformers_double=None),
        proofs(truth_agreement=7e-5, truth_agreement_limit=1.0),
        proofs(transformers_double=7e-5, transformers_double_limit=1.0),
        proofs(truth_max=None),
        proofs(truth_max=8.0),
        proofs(float32_parts=None),
        proofs(float32_parts=6e-6),
    ],
)
def test_proofs_that_do_not_hold_or_do_not_fit_tell_nothing(
    forged: Forged,
    model_of: Callable[..., Llama],
    change: Callable[[Manifest], Mapping[str, Any]],
) -> None:
    forged.says(proofs=change(forged.manifest))
    doubts(forged.close(), model_of())


def test_a_text_that_is_not_the_tokenizers_is_refused(
    forged: Forged, folder_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ask.tokenizers, "load", lambda folder: SimpleNamespace(token_text=str))
    texts = [str(token) for token in forged.manifest.tokens]
    forged.says(texts=texts)
    asked = ask.Request(model=str(folder_of("gqa")), oracle=forged.close())
    assert ask.ask([asked]).each[0].case.manifest.texts == texts
    once = next(i for i, text in enumerate(texts) if texts.count(text) == 1)
    forged.says(texts=[*texts[:once], "x", *texts[once + 1 :]])
    forged.close()
    with pytest.raises(Refusal, match=rf"texts\[{once}\] is 'x', expected '{texts[once]}' as the"):
        ask.ask([asked])


def test_the_honest_folder_passes_both(forged: Forged, model_of: Callable[..., Llama]) -> None:
    folder = forged.close()
    assert folders.check(folder) == forged.manifest
    verdict = judged(folder, model_of())
    assert (verdict.outcome, verdict.reasons) == ("agree", ())
    assert len(verdict.controls) == 5
    assert json.loads((folder / "manifest.json").read_text())["files"]


def test_a_check_that_is_no_number_does_not_pass() -> None:
    assert noise.Check("a", "b", 1.0, 1.0).passed
    assert not noise.Check("a", "b", float("nan"), 1.0).passed


@pytest.mark.parametrize(
    ("value", "end"),
    [(2.0, "again"), (float("inf"), "are no noise to measure by")],
)
def test_a_pool_whose_runs_are_equal_is_told_from_one_that_is_damaged(
    value: float, end: str
) -> None:
    control = Control(
        "sequential-full beside them", "agree", False, value, 1.0, "part of the limit"
    )
    (reason,) = Trust((), (), (control,)).reasons
    assert reason.endswith(end)
    assert "make the oracle folder again" in reason


def test_an_error_is_bounded_by_those_at_positions_near_it_not_in_rows_near_it() -> None:
    """The probe keeps a sample of rows: its last ladder's steps are further apart than NEAR."""
    case = make_probe().case
    kept = [name for name in case.pool.members if name != SEQUENTIAL]
    row = next(
        i for i, gap in enumerate(np.diff(case.truth.positions)) if gap > noise.NEAR and i > 0
    )
    rms = np.array(case.floors["rms"])
    rms[:, row + 1 :] *= 50
    rms[-1, row] *= 50
    largest = float(np.abs(case.truth.logits).max())
    _, beside, _ = noise.checks(
        case.manifest,
        case.pool,
        dict(case.floors) | {"rms": rms},
        {name: {} for name in kept},
        largest=largest,
        positions=case.truth.positions,
    )
    assert not beside.passed
    assert beside.name == f"{SEQUENTIAL} beside them"
