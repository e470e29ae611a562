"""`mlxkv pitfalls --cache`: caches on all their lives, each engine in a process of its own."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from mlxkv.commands.pitfalls import ask, cachepage, known, run
from mlxkv.commands.pitfalls.ask import Request
from mlxkv.commands.pitfalls.behaviour import Right
from mlxkv.commands.pitfalls.caches import Caches, Column
from mlxkv.commands.pitfalls.lives import STEPS_LEAST, Talks, straight
from mlxkv.commands.pitfalls.scenarios import Setting
from mlxkv.commands.pitfalls.straight import DITHERS, Talk, left_at, rows_of
from mlxkv.commands.pitfalls.trial import Trial
from mlxkv.engines import kinds, machine, oracle, process
from mlxkv.engines.job import Job
from mlxkv.engines.kinds import Kind, Lossy
from mlxkv.engines.progress import announce, say, steps
from mlxkv.judge.case import read_case
from mlxkv.judge.floors import logit_floors
from mlxkv.judge.measure import truth_rows
from mlxkv.port.config.llama import LlamaConfig
from mlxkv.report.publish import Report
from mlxkv.report.text import pretty
from oracle.formats import trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan, Rows
from oracle.formats.trace import Trace
from oracle.model.checkpoint import Checkpoint

ALL = "all"
SECONDS, EACH = 60.0, 1.4e-7
"""About what the truth and the starts take, and more for each cache and parameter of the model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRequest(Request):
    """Which caches: by name, FILE.py:make, module:function, or "all"; `lossy` is said of all."""

    caches: tuple[str, ...] = ()
    lossy: Lossy = ""

    def __post_init__(self) -> None:
        ask.Request.__post_init__(self)
        if self.steps < STEPS_LEAST:
            what = f"--steps {self.steps} with --cache: expected at least {STEPS_LEAST}"
            raise Refusal(what, remedy="a cache lives as long as that")
        if ALL in self.caches and self.lossy:
            what = f"--lossy {self.lossy} with --cache {ALL}: expected it for a cache of your own"
            raise Refusal(what, remedy="leave one of them out")

    @property
    def kinds(self) -> list[Kind]:
        """Each once."""
        found = {}
        for text in self.caches:
            names = known.EVERY if text == ALL else (text,)
            for name in names:
                one = kinds.parse(name, lossy=self.lossy)
                found[one.name] = one
        return list(found.values())


def report(request: CacheRequest, *, out: Path, command: str) -> Report:
    caches = tried(request)
    files = cache_files(caches, commands=[command])
    text = cachepage.console(caches, report=str(out / "caches.md"))
    return Report(files, text, files["caches.json"], caches.exit_code)


def cache_files(caches: Caches, *, commands: Sequence[str]) -> dict[str, str]:
    text = cachepage.markdown(caches, commands=commands)
    return {"caches.json": pretty(caches.to_json()), "caches.md": text}


def tried(request: CacheRequest) -> Caches:
    """Asks the oracle how the talks should go, puts every cache through its lives, and judges."""
    machine.require_device(request.device)
    machine.require_mlx_lm()
    oracle.require_torch()
    asked = request.kinds
    checkpoint = request.checkpoint(steps())
    asked, without = _fitting(asked, checkpoint, every=ALL in request.caches)
    draft = ask.setting(request, checkpoint)
    seconds = SECONDS + EACH * checkpoint.parameters * len(asked)
    announce(f"pitfalls: {len(asked)} caches, {checkpoint.name}", seconds)
    prompts = {"first": draft.first, "second": draft.second}
    probe = oracle.probe_beside(ask.question(request, checkpoint, "first", draft.first))
    rights, probed = ask.rights_and_probe(request, checkpoint, prompts, probe)
    setting = ask.answered(draft, rights)
    truths = _truths(rights, setting) | _probe(probed)
    columns: list[Column] = []
    with process.scratch() as room:
        for i, group in enumerate(groups(asked)):
            say(f"pitfalls: {', '.join(kind.name for kind in group)}")
            follow = Follow(request, checkpoint, room / str(i))
            columns += _columns(follow, group, setting, truths)
            shutil.rmtree(room / str(i))
    columns.sort(key=lambda column: [kind.name for kind in asked].index(column.kind.name))
    return Caches(
        model=checkpoint.name,
        source=checkpoint.source,
        fingerprint=checkpoint.fingerprint,
        columns=tuple(columns),
        without=without,
    )


def groups(asked: Sequence[Kind]) -> list[list[Kind]]:
    """Those that one process runs: mlx-lm's and ours together, transformers' too, any other by
    itself.
    """
    inside = [kind for kind in asked if kind.whose in ("mlx-lm", "ours")]
    theirs = [kind for kind in asked if kind.whose == "transformers"]
    others = [[kind] for kind in asked if kind not in (*inside, *theirs)]
    return [group for group in (inside, *others, theirs) if group]


def _fitting(
    asked: Sequence[Kind], checkpoint: Checkpoint, *, every: bool
) -> tuple[list[Kind], dict[str, str]]:
    """Those that the model can have; where all are asked for, the others and why not."""
    config, found, without = LlamaConfig.of(checkpoint), [], {}
    for kind in asked:
        try:
            kinds.require(kind, config.head_dim)
            found.append(kind)
        except Refusal as error:
            if not every:
                raise
            without[kind.name] = str(error)
    return found, without


def _truths(rights: Mapping[str, Right], setting: Setting) -> dict[str, Talk]:
    tokens = {"first": setting.sequence, "second": setting.other_sequence}
    return {
        name: Talk(ids, np.arange(len(ids)), rights[name].rows, rights[name].floor)
        for name, ids in tokens.items()
    }


def _probe(answer: oracle.Answer | None) -> dict[str, Talk]:
    """The model's probe, whose truth is known at some positions; none where there is no room."""
    if answer is None:
        return {}
    case = read_case(answer.folder)
    floor = logit_floors(case, truth_rows(case.truth)).rms
    at = np.asarray(case.truth.positions)
    return {"long": Talk(tuple(case.manifest.tokens), at, case.truth.logits, floor)}


def _columns(
    follow: Follow, group: Sequence[Kind], setting: Setting, truths: Mapping[str, Talk]
) -> list[Column]:
    """What came of the caches that one process runs."""
    long = truths.get("long")
    rows: Rows = tuple(int(at) for at in long.positions) if long else "all"
    talks = Talks(setting, long.tokens if long else (), rows)
    trials = {
        f"c{i}": Trial(kind, talks, _window(follow, kind, talks, truths))
        for i, kind in enumerate(group)
    }
    traces = follow(group, {key: trial.plans for key, trial in trials.items()})
    lossy = {key: trial.straights for key, trial in trials.items() if trial.straights}
    again = [follow(group, lossy, dither=n) for n in DITHERS] if lossy else []
    columns = []
    for key, trial in trials.items():
        own = trial.measure(traces[key], [one[key] for one in again if key in one], truths)
        came = trial.judge(traces[key], truths, own)
        first = next(iter(traces[key].values()))
        columns.append(Column.of(trial, came, first.meta, own))
    return columns


def _window(follow: Follow, kind: Kind, talks: Talks, truths: Mapping[str, Talk]) -> int | None:
    """How many tokens a window keeps: as it was made, or of one's own where its rows, fed one by
    one, leave the truth.
    """
    if kind.lossy != "window":
        return None
    if isinstance(size := kind.options.get("size"), int):
        return size
    for name in ("first", "long"):
        if name in truths:
            talk, kept = truths[name], talks.rows[name]
            plan = straight("window", talk.tokens, [1] * len(talk.tokens), kept)
            made = follow([kind], {"c0": [plan]})["c0"]["window"]
            if (found := left_at(rows_of(made, talk), talk)) is not None:
                return found
    return None


class Files(Mapping[str, Trace]):
    """Traces in files, each read when it is asked for: hundreds of them have too many arrays to be
    open at once.
    """

    def __init__(self, paths: Mapping[str, Path]) -> None:
        self.paths = paths

    def __getitem__(self, name: str) -> Trace:
        return trace.read(self.paths[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.paths)

    def __len__(self) -> int:
        return len(self.paths)


@dataclass(frozen=True, slots=True)
class Follow:
    """Runs plans on caches of one group, in a process of their own; files lie in `room`."""

    request: Request
    checkpoint: Checkpoint
    room: Path

    def __call__(
        self, group: Sequence[Kind], asked: Mapping[str, Sequence[Plan]], *, dither: int = 0
    ) -> dict[str, Files]:
        """The traces by key, which is "c" and the kind's number in the group, and plan's name."""
        out = self.room / f"{dither}-{len(list(self.room.glob('*')))}"
        out.mkdir(parents=True)
        named = {
            key: [replace(plan, name=f"{key}-{plan.name}") for plan in plans]
            for key, plans in asked.items()
        }
        of = {f"c{i}": kind for i, kind in enumerate(group)}
        whose = group[0].whose
        follow = self._transformers if whose == "transformers" else self._job
        follow(
            {plan.name: of[key] for key, some in named.items() for plan in some},
            [plan for some in named.values() for plan in some],
            out,
            dither,
        )
        return {
            key: Files(
                {
                    plan.name.removeprefix(f"{key}-"): out / f"{plan.name}.safetensors"
                    for plan in some
                }
            )
            for key, some in named.items()
        }

    def _job(self, of: Mapping[str, Kind], plans: Sequence[Plan], out: Path, dither: int) -> None:
        kind = next(iter(of.values()))
        port = kind.whose == "port"
        job = Job.on(
            self.checkpoint,
            plans,
            out,
            dtype="float32",
            device=self.request.device,
            guarded=kind.options.get("mode") != "candle",
            caches={} if port else {name: one.text for name, one in of.items()},
            dither=dither,
        )
        with job.begin(process.PORT if port else process.MLX_LM) as running:
            job.end(running)

    def _transformers(
        self, of: Mapping[str, Kind], plans: Sequence[Plan], out: Path, dither: int
    ) -> None:
        more = [f"--dither={dither}", *(f"--cache={of[plan.name].name}" for plan in plans)]
        with run.transformers(self.checkpoint, plans, out, more) as running:
            running.wait()
