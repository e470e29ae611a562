"""For somebody's own test suite: does my model agree with the oracle's folder?

Everything runs in the caller's process and leaves it as it was: no BLAS is loaded, no environment variable is set, and MLX
keeps its device. On a GPU that rounds float32 products (TF32) set MLX_ENABLE_TF32=0 before MLX starts. torch is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from mlxkv.engines import machine as runtime
from mlxkv.engines import oracle
from mlxkv.judge.case import Case, by_plan, read_case
from mlxkv.judge.verdict import judge
from mlxkv.report import page as markdown
from oracle.formats import trace
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
    """Passes when the verdict is "agree"; else an AssertionError with what `mlxkv compare` would print. "Cannot tell" fails too.

    The first argument is an `mlxkv.Llama`; or any object with `model(tokens, cache=cache) -> (B, L, V)` and `make_cache()`;
    or a trace, its path, or a mapping from plan names to either. `oracle_dir` is a folder of `mlxkv-oracle run`. `plans` are
    names of judged plans (None: all of them, or those that the traces are of). `dtype` is what the model computes in
    (None: a Llama says it itself, others are taken to compute in the folder's); float64 is judged by algebra alone, and
    only a Llama can be. Raises `oracle.formats.errors.Refusal`, a ValueError, where there is nothing to judge.
    """
    folder = Path(oracle_dir)
    case = read_case(folder)
    unknown = sorted(set(plans or ()) - set(case.manifest.plans))
    if unknown or (plans is not None and len(plans) == 0):
        raise Refusal(
            f"plans: {', '.join(unknown) or 'none'}, expected some of {', '.join(sorted(case.manifest.plans))}"
        )
    # A module of MLX is a mapping too, of its weights.
    if isinstance(model_or_trace, Trace | str | Path | Mapping) and not callable(model_or_trace):
        traces = _given(model_or_trace, case, plans)
    else:
        traces = _followed(model_or_trace, case, folder, plans, dtype)
    exact = {name: one for name, one in traces.items() if one.meta.dtype == _ALGEBRA}
    verdict = judge(
        case, {name: one for name, one in traces.items() if name not in exact}, algebra=exact
    )
    if verdict.outcome != "agree":
        side = markdown.side(next(iter(traces.values())).meta)
        raise AssertionError(
            markdown.console_report(
                verdict, case.manifest, sides=(side, markdown.oracle_side(case.manifest))
            )
        )


def _given(
    found: Trace | str | Path | Mapping[Any, Any], case: Case, plans: Collection[str] | None
) -> dict[str, Trace]:
    if isinstance(found, Mapping):
        traces = {str(name): _read(one) for name, one in found.items()}
    else:
        traces = by_plan(case.manifest, [_read(found)])
    missing = sorted(set(plans or ()) - set(traces))
    if missing or not traces:
        raise Refusal(
            f"traces: none of plan {', '.join(missing) or 'any name'}, expected one; write it or leave the plan out"
        )
    return {name: one for name, one in traces.items() if plans is None or name in plans}


def _read(found: Trace | str | Path) -> Trace:
    return found if isinstance(found, Trace) else trace.read(found)


def _followed(
    model: object, case: Case, folder: Path, plans: Collection[str] | None, dtype: str | None
) -> dict[str, Trace]:
    runtime.require_mlx()
    from mlxkv.port.llama import Llama

    follow = (
        _of_llama(model, dtype) if isinstance(model, Llama) else _of_another(model, case, dtype)
    )
    judged = oracle.judged(case.manifest, folder)
    return {name: follow(plan) for name, plan in judged.items() if plans is None or name in plans}


def _of_llama(model: Any, dtype: str | None) -> Callable[[Plan], Trace]:
    from mlxkv.engines import port
    from mlxkv.port.ops import name_of

    own = name_of(model.dtype)
    if dtype not in (None, own):
        raise Refusal(f"dtype: {dtype!r}, expected {own!r} as the model's own; load it in {dtype}")
    about = _meta(
        "mlxkv",
        runtime.version("mlxkv"),
        own,
        model.fingerprint,
        probes=port.probe() if own == _ALGEBRA else {},
    )
    return lambda plan: port.run(model, plan, meta=about(plan, outcomes=[]))


def _of_another(model: Any, case: Case, dtype: str | None) -> Callable[[Plan], Trace]:
    from mlxkv.engines import own as custom

    name = type(model).__qualname__
    custom.require(model, name)
    if dtype == _ALGEBRA:
        raise Refusal(
            f"dtype: {dtype!r}, expected {case.manifest.dtype!r}: only an mlxkv.Llama can be judged in float64"
        )
    about = _meta(name, "", dtype or case.manifest.dtype, None, probes={})
    vocab = case.truth.logits.shape[1]

    def follow(plan: Plan) -> Trace:
        runner = custom.OwnRunner(model, plan, name=name, vocab=vocab).run()
        return Trace(about(plan, outcomes=runner.outcomes), runner.arrays())

    return follow


def _meta(
    engine: str, version: str, dtype: str, fingerprint: str | None, *, probes: dict[str, float]
) -> Callable[..., Meta]:
    """What every plan's trace says of this process."""
    import mlx.core as mx

    device = "gpu" if dtype != _ALGEBRA and mx.default_device() == mx.gpu else "cpu"
    environment = runtime.host() | {"mlx": runtime.version("mlx"), "device": device}
    return partial(
        Meta,
        engine=engine,
        engine_version=version,
        dtype=dtype,
        weights_dtype=dtype,
        device=device,
        fingerprint=fingerprint,
        environment=environment,
        probes=probes,
    )
