"""For somebody's own test suite: does my model agree with the oracle's folder?

Everything runs in the caller's process and leaves it as it was: no BLAS is loaded, no environment
variable is set, and MLX keeps its device. On a GPU that rounds float32 products (TF32) set
MLX_ENABLE_TF32=0 before MLX starts. torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlxkv.engines import machine
from mlxkv.judge.admission import by_plan
from mlxkv.judge.case import Case, read_case
from mlxkv.judge.verdict import judge
from mlxkv.report import terminal
from mlxkv.report.phrases import oracle_side, side
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
) -> None:
    """Passes if the verdict is "agree"; "cannot tell" fails too.

    model_or_trace: an `mlxkv.Llama`; or any object with `model(tokens, cache=cache) -> (B, L, V)`
    and `make_cache()`; or a trace, its path, or a mapping from plan names to either.
    oracle_dir: a folder that `mlxkv-oracle run` made.
    plans: names of judged plans; None: all of them, or those that the traces are of.
    dtype: what the model computes in; None: a Llama's own, for any other model the folder's. Only
    a Llama can be judged in float64, by algebra alone.

    Raises an AssertionError with what `mlxkv compare` would print; and a ValueError
    (`oracle.formats.errors.Refusal`) where there is nothing to judge.
    """
    folder = Path(oracle_dir)
    case = read_case(folder)
    _require_plans(plans, case)
    # A module of MLX is a mapping too, of its weights.
    if isinstance(model_or_trace, Trace | str | Path | Mapping) and not callable(model_or_trace):
        traces = _given(model_or_trace, case, plans)
    else:
        follow = _follower(model_or_trace, case, dtype)
        judged = run_folder.read_plans(folder, case.manifest).items()
        traces = {name: follow(plan) for name, plan in judged if plans is None or name in plans}
    exact = {name: one for name, one in traces.items() if one.meta.dtype == _ALGEBRA}
    rest = {name: one for name, one in traces.items() if name not in exact}
    verdict = judge(case, rest, algebra=exact)
    if verdict.outcome != "agree":
        sides = (side(next(iter(traces.values())).meta), oracle_side(case.manifest))
        raise AssertionError(terminal.console(verdict, case.manifest, sides=sides))


def _require_plans(plans: Collection[str] | None, case: Case) -> None:
    known = case.manifest.plans
    unknown = ", ".join(sorted(set(plans or ()) - set(known)))
    if unknown or (plans is not None and len(plans) == 0):
        expected = ", ".join(sorted(known))
        raise Refusal(f"{unknown or 'none'}, expected some of {expected}", where="plans")


def _given(
    found: Trace | str | Path | Mapping[Any, Any], case: Case, plans: Collection[str] | None
) -> dict[str, Trace]:
    if isinstance(found, Mapping):
        traces = {str(name): _read(one) for name, one in found.items()}
    else:
        traces = by_plan(case.manifest, [_read(found)])
    missing = sorted(set(plans or ()) - set(traces))
    if missing or not traces:
        what = f"none of plan {', '.join(missing) or 'any name'}, expected one"
        raise Refusal(what, where="traces", remedy="write it or leave the plan out")
    return {name: one for name, one in traces.items() if plans is None or name in plans}


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
    about = _meta(name, "", dtype or case.manifest.dtype)
    vocab = case.truth.logits.shape[1]

    def follow(plan: Plan) -> Trace:
        runner = own.OwnRunner(model, plan, name=name, vocab=vocab).run()
        return Trace(about(plan, outcomes=runner.outcomes), runner.arrays())

    return follow


def _meta(engine: str, version: str, dtype: str) -> Callable[..., Meta]:
    """Makes the metadata of a plan's trace: what all of this process's traces say."""
    import mlx.core as mx

    device = "gpu" if dtype != _ALGEBRA and mx.default_device() == mx.gpu else "cpu"
    return partial(
        Meta,
        engine=engine,
        engine_version=version,
        dtype=dtype,
        weights_dtype=dtype,
        device=device,
        environment=machine.host() | {"mlx": machine.version("mlx"), "device": device},
    )
