"""What was measured of each variant, and all of it together, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from mlxkv.commands.cost import metrics
from mlxkv.commands.cost.held import Bytes, Held
from mlxkv.commands.cost.metrics import Bin, Figures, Known
from mlxkv.commands.cost.probe import TELLS
from mlxkv.commands.cost.rows import Rows
from mlxkv.commands.cost.scoring import Facts
from mlxkv.commands.cost.variants import PLAIN, Variant

FORMAT = "mlxkv-cost/1"


@dataclass(frozen=True, slots=True)
class Measured:
    """A variant's cost; `failed` says why there is none.

    `parts` are its figures over "all" positions, those "prefilled" and those "decoded"; of a window
    also "within" it and "beyond". `bins` are by position. `none` says that its KL cannot be told
    from float32's own noise. Speeds in tokens per second; `rates` are the retrieval probe's share
    of hits by distance in tokens.
    """

    variant: Variant
    failed: str = ""
    parts: Mapping[str, Figures] = field(default_factory=dict)
    bins: tuple[Bin, ...] = ()
    none: bool = False
    known: Known | None = None
    held: Held | None = None
    far: Bytes | None = None
    prefill_speed: float = 0.0
    decode_speed: float = 0.0
    rates: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        variant: Variant,
        facts: Facts,
        rows: Rows,
        noise: Rows,
        length: int,
        known: Known | None,
        rates: Mapping[int, float],
    ) -> Self:
        """From what its process left; `noise` are the full cache's rows."""
        n, window = len(rows.kl), variant.window
        slices = {"all": slice(n), "prefilled": slice(length), "decoded": slice(length, n)}
        if window is not None:
            slices |= {"within": slice(min(window, n)), "beyond": slice(window, n)}
        parts = {
            name: metrics.figures(rows, noise, at)
            for name, at in slices.items()
            if rows.kl[at].size
        }
        return cls(
            variant,
            parts=parts,
            bins=tuple(metrics.bins(rows)),
            none=bool(rows.kl.mean() <= metrics.NOISE * noise.kl.mean()),
            known=known,
            held=facts.held,
            far=facts.far,
            prefill_speed=_speed(length, facts.prefill_seconds),
            decode_speed=_speed(n - length, facts.decode_seconds),
            rates=rates,
        )

    @property
    def all(self) -> Figures:
        return self.parts["all"]

    @property
    def per_token(self) -> float:
        """Bytes of all layers after FAR tokens, for each of them: on a short text most of what a
        cache has allocated may be rows that it has not filled.
        """
        assert self.far is not None
        return self.far.allocated / self.far.tokens


def _speed(tokens: int, seconds: float) -> float:
    return tokens / seconds if seconds else 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """All variants on one text; `distances` are the retrieval probe's, none where it did not run.

    `tokens` are those fed, of which the first `length` in calls of `chunk`. Variants named in
    `beside` ran on one thread in a process beside the others. `environment` is that of each side.
    """

    model: str
    source: str
    fingerprint: str
    title: str
    tokens: tuple[int, ...]
    length: int
    chunk: int
    measured: tuple[Measured, ...]
    distances: tuple[int, ...]
    beside: tuple[str, ...]
    environment: Mapping[str, Mapping[str, Any]]

    @property
    def shown(self) -> tuple[Measured, ...]:
        """Those that could be measured."""
        return tuple(one for one in self.measured if not one.failed)

    @property
    def noise(self) -> Measured:
        """The full cache in float32."""
        return next(one for one in self.measured if one.variant == PLAIN)

    @property
    def tells(self) -> tuple[int, ...]:
        """The distances at which the full cache finds enough for others to be judged."""
        return tuple(far for far, rate in self.noise.rates.items() if rate >= TELLS)

    def forgets(self, one: Measured) -> tuple[int, ...]:
        """The distances at which a variant finds clearly less than the full cache."""
        full = self.noise.rates
        return tuple(far for far in self.tells if one.rates[far] < TELLS * full[far])

    @property
    def away(self) -> tuple[Measured, ...]:
        """Those that missed their known answer."""
        return tuple(one for one in self.shown if one.known and not one.known.met)

    @property
    def exit_code(self) -> int:
        """0 when measured, 1 where a known answer is missed, 2 where nothing asked was measured."""
        if len(self.measured) > 1 and len(self.shown) == 1:
            return 2
        return 1 if any(not one.variant.fault for one in self.away) else 0

    def to_json(self) -> dict[str, Any]:
        """`mlxkv-cost/1`: KL in nats, bytes, tokens per second; what was not seen is null."""
        variants = [_variant(one) for one in self.measured]
        value = asdict(self) | {"measured": variants, "tokens": list(self.tokens)}
        return {"format": FORMAT, **value, "tells": list(self.tells), "exit_code": self.exit_code}


def _variant(one: Measured) -> dict[str, Any]:
    """A variant as JSON; its name and options beside its figures."""
    value = asdict(one)
    named = value.pop("variant")
    if one.failed:
        return {**named, "failed": one.failed}
    return {**named, **value, "bytes_per_token": one.per_token}
