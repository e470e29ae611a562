"""For somebody's own test suite: does my model agree with the oracle's folder? Does my cache?

Everything runs in the caller's process and leaves it as it was: no BLAS is loaded, no environment
variable is set, and MLX keeps its device. On a GPU that rounds float32 products (TF32) set
MLX_ENABLE_TF32=0 before MLX starts. torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mlxkv.engines import machine
from mlxkv.engines.job import repeated
from mlxkv.judge.assign import Assigned, assign
from mlxkv.judge.case import PROBE, Case, Probed, read_case, read_probe
from mlxkv.report import terminal
from mlxkv.report.phrases import oracle_side, side
from mlxkv.report.text import filled
from oracle.formats import run_folder, trace
from oracle.formats.errors import Refusal
from oracle.formats.plan import Plan
from oracle.formats.trace import Meta, Trace

_ALGEBRA = "float64"


def assert_agrees(
    model_or_trace: object,
    oracle_dir: Path | str,
    *,
    plans: Collection[str] | None = None,
    dtype: str | None = None,
    quick: bool = False,
) -> None:
    """Passes if the verdict is "agree"; "cannot tell" fails too.

    model_or_trace: an `mlxkv.Llama`; or any object with `model(tokens, cache=cache) -> (B, L, V)`
    and `make_cache()`; or a trace, its path, or a mapping from plan names to either (of the probe's
    plans "probe full" and "probe chunked").
    oracle_dir: a folder that `mlxkv-oracle run` made.
    plans: names of judged plans; None: all of them and the folder's probe, or those that the traces
    are of.
    dtype: what the model computes in; None: a Llama's own, for any other model the folder's. Only
    a Llama can be judged in float64, by algebra alone.
    quick: leaves the probe out.

    Raises an AssertionError with what `mlxkv compare` would print; and a ValueError
    (`mlxkv.Refusal`) where there is nothing to judge.
    """
    folder = Path(oracle_dir)
    case = read_case(folder)
    _require_plans(plans, case)
    probe = None if quick or plans is not None else read_probe(folder)
    # A module of MLX is a mapping too, of its weights.
    if isinstance(model_or_trace, Trace | str | Path | Mapping) and not callable(model_or_trace):
        found = _given(model_or_trace, case, probe, plans)
    else:
        follow = _follower(model_or_trace, case, dtype)
        found = _followed(follow, folder, case, probe, plans)
    verdict = found.judge()
    if verdict.outcome != "agree":
        sides = (side(_first(found).meta), oracle_side(case.manifest))
        raise AssertionError(terminal.console(verdict, case.manifest, sides=sides))


def assert_cache_behaves(
    make: Callable[[Any], Any],
    *,
    lossy: str = "",
    model: Any = None,
    scenarios: Collection[str] | None = None,
) -> None:
    """Passes if a cache of your own is nowhere silently wrong and fails in no call that it takes.

    make: `make(config)` is given mlx-lm's ModelArgs and returns one cache per layer with mlx-lm's
    protocol (`update_and_fetch(keys, values)` and `offset`; `trim`, `state` and others if it can).
    lossy: "" if it keeps all that it is given; "quantised" or "window" if it does not. Its rows are
    then compared with those of the same cache fed straight, where they are not within the noise of
    a full one. "depends" if it is quantised and what it keeps depends on the calls in which it is
    fed: then with those of a fresh one fed in the same calls.
    model: a Llama of mlx-lm's in float32; None: a small random one.
    scenarios: names of those to try; None: all, as `mlxkv pitfalls --cache` has them.

    Runs in a few seconds, without torch and without an oracle: what is right is what mlx-lm's own
    KVCache gives. What a lossy cache costs it cannot say: see `mlxkv cost`.

    Raises an AssertionError with a table of everything that came, and a ValueError
    (`mlxkv.Refusal`) where there is nothing to try.
    """
    machine.require_mlx_lm()
    from mlxkv.commands.pitfalls import cachepage, known, suite, unexercised

    trial, came = suite.tried(make, lossy=lossy, model=model, only=tuple(scenarios or ()))
    kind = trial.kind
    odd = [one for one in came if known.odd(kind, one)]
    if odd:
        names = ", ".join(one.life for one in odd)
        lines = [f"{kind.name} does not behave: {names}", "", *cachepage.table(came)]
        for line in (unexercised.ends_missed(trial), known.depends(kind, came)):
            lines += filled(line) if line else []
        raise AssertionError("\n".join(lines))


def _first(found: Assigned) -> Trace:
    lanes = [found.candidates, found.algebra]
    lanes += [found.probe.candidates, found.probe.algebra] if found.probe is not None else []
    return next(one for lane in lanes for one in lane.values())


def _followed(
    follow: Callable[[Plan], Trace],
    folder: Path,
    case: Case,
    probe: Case | None,
    plans: Collection[str] | None,
) -> Assigned:
    """The model's runs of the judged plans, of one of them twice, and of the probe's."""
    judged = run_folder.read_plans(folder, case.manifest)
    wanted = {name: plan for name, plan in judged.items() if plans is None or name in plans}
    traces = {name: follow(plan) for name, plan in wanted.items()}
    again, repeats = repeated(wanted.values()), {}
    if traces[again.name].meta.dtype != _ALGEBRA:
        made = follow(again)
        repeats[again.name] = replace(made, meta=replace(made.meta, repeat=1))
    probed = {}
    if probe is not None:
        its = run_folder.read_plans(folder / PROBE, probe.manifest)
        probed = {name: follow(plan) for name, plan in its.items()}
    return _assigned(case, traces, repeats, probe, probed)


def _assigned(
    case: Case,
    traces: Mapping[str, Trace],
    repeats: Mapping[str, Trace],
    probe: Case | None,
    probed: Mapping[str, Trace],
) -> Assigned:
    """Traces by plan, those in float64 apart."""
    lanes = [
        {name: one for name, one in of.items() if (one.meta.dtype == _ALGEBRA) == exact}
        for of in (traces, probed)
        for exact in (False, True)
    ]
    of_probe = Probed(probe, lanes[2], lanes[3]) if probe is not None else None
    return Assigned(case, lanes[0], lanes[1], repeats, of_probe)


def _require_plans(plans: Collection[str] | None, case: Case) -> None:
    known = case.manifest.plans
    unknown = ", ".join(sorted(set(plans or ()) - set(known)))
    if unknown or (plans is not None and len(plans) == 0):
        expected = ", ".join(sorted(known))
        raise Refusal(f"{unknown or 'none'}, expected some of {expected}", where="plans")


def _given(
    found: Trace | str | Path | Mapping[Any, Any],
    case: Case,
    probe: Case | None,
    plans: Collection[str] | None,
) -> Assigned:
    if isinstance(found, Mapping):
        traces = {str(name): _read(one) for name, one in found.items()}
    else:
        one = _read(found)
        of = assign(case, [one], probe=probe)
        names = [f"{PROBE} {name}" for name in (of.probe.candidates if of.probe else ())]
        traces = dict.fromkeys([*of.candidates, *of.repeats, *names], one)
    missing = sorted(set(plans or ()) - set(traces))
    if missing or not traces:
        what = f"none of plan {', '.join(missing) or 'any name'}, expected one"
        raise Refusal(what, where="traces", remedy="write it or leave the plan out")
    start = f"{PROBE} "
    of_probe = {name: one for name, one in traces.items() if name.startswith(start)}
    rest = {name: one for name, one in traces.items() if name not in of_probe}
    chosen = {name: one for name, one in rest.items() if plans is None or name in plans}
    probed = {name.removeprefix(start): one for name, one in of_probe.items()}
    return _assigned(case, chosen, {}, probe, probed)


def _read(found: Trace | str | Path) -> Trace:
    return found if isinstance(found, Trace) else trace.read(found)


def _follower(model: Any, case: Case, dtype: str | None) -> Callable[[Plan], Trace]:
    machine.require_mlx()
    from mlxkv.engines import port
    from mlxkv.port.llama import Llama
    from mlxkv.port.ops import name_of

    if not isinstance(model, Llama):
        return _of_another(model, case, dtype)
    own = name_of(model.dtype)
    if dtype not in (None, own):
        raise Refusal(f"dtype: {dtype!r}, expected {own!r} as the model's own; load it in {dtype}")
    about = _meta("mlxkv", machine.version("mlxkv"), own)
    probes = port.probe() if own == _ALGEBRA else {}
    known = partial(about, fingerprint=model.fingerprint, probes=probes)
    return lambda plan: port.run(model, plan, meta=known(plan))


def _of_another(model: Any, case: Case, dtype: str | None) -> Callable[[Plan], Trace]:
    from mlxkv.engines import own

    name = type(model).__qualname__
    own.require(model, name)
    if dtype == _ALGEBRA:
        what = f"{dtype!r}, expected {case.manifest.dtype!r}"
        raise Refusal(f"{what}: only an mlxkv.Llama can be judged in float64", where="dtype")
    about = _meta(name, "", dtype or case.manifest.dtype, own.says(model))
    vocab = case.truth.logits.shape[1]

    def follow(plan: Plan) -> Trace:
        runner = own.OwnRunner(model, plan, name=name, vocab=vocab).run()
        return Trace(about(plan, outcomes=runner.outcomes), runner.arrays())

    return follow


def _meta(
    engine: str, version: str, dtype: str, says: Mapping[str, Any] | None = None
) -> Callable[..., Meta]:
    """Makes the metadata of a plan's trace: what all of this process's traces say.

    `says` is what the model says of itself, for the environment.
    """
    import mlx.core as mx

    device = "gpu" if dtype != _ALGEBRA and mx.default_device() == mx.gpu else "cpu"
    return partial(
        Meta,
        engine=engine,
        engine_version=version,
        dtype=dtype,
        weights_dtype=dtype,
        device=device,
        environment={
            **machine.host(),
            "mlx": machine.version("mlx"),
            "device": device,
            **(says or {}),
        },
    )
