"""mlx-lm's models with the head for some rows of a long call, and all else as they are.

mlx-lm computes the logits of all rows of a call: of 8,191 tokens and 49,152 ids 1.6 GB, where 412
rows are kept. Here the model is called as ever, and what it calls for its head meanwhile (`lm_head`
or the embedding's `as_linear`) is given some of the rows. Nothing of its `__call__` is left out.
Axes as in `mlxkv.port.llama`; R rows that are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn

from mlxkv.engines.estimate import LEAST, WHOLE


class Head:
    """The head of mlx-lm's `model`, which can be given some rows of its input.

    `takes` are the width and the dtype of what it was given last.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.takes = 0, mx.float32

    @classmethod
    def of(cls, model: Any, vocab: int, calls: Iterable[int]) -> Head | None:
        """The model's, if a call has more than WHOLE logits; `calls` are the rows of each.

        None too where the model is of another make, or where a short call or the head alone does
        not give the same bits in both ways: then all rows are computed.
        """
        if max(calls, default=0) * vocab <= WHOLE:
            return None
        ours = type(model).__module__.startswith("mlx_lm.models.")
        found = cls(model) if ours and (_own(model) or _embedding(model)) is not None else None
        return found if found and found._exact(vocab) and found._same_bits() else None

    def rows(self, batch: int, length: int, vocab: int, places: Sequence[int]) -> list[int] | None:
        """The rows of a call that the head is given, `places` among them; None for all."""
        some = sorted({*places, *range(min(length, LEAST))})
        return some if batch * length * vocab > WHOLE and len(some) < length else None

    @contextmanager
    def given(self, rows: Sequence[int]) -> Iterator[None]:
        """Within the block the head of [B, L, E] is that of these rows: [B, R, V]"""
        some, own, tied = mx.array([*rows]), _own(self.model), _embedding(self.model)
        head = own if own is not None else tied.as_linear

        def of_some(x: mx.array) -> Any:
            self.takes = x.shape[2], x.dtype
            return head(x[:, some])

        if own is not None:
            self.model.lm_head = _Instead(of_some)
        else:
            tied.as_linear = of_some
        try:
            yield
        finally:
            if own is not None:
                self.model.lm_head = own
            else:
                del tied.as_linear

    def _exact(self, vocab: int) -> bool:
        """Whether a short call gives each row as it gives it among all; three of them give three.

        As many rows as the call has, some of them twice, so that the products are of one shape.
        """
        tokens = mx.array([[i % vocab for i in range(8)]])
        whole, some = self._call(tokens), [7, 7, 5, 5, 2, 2, 0, 0]
        with self.given(some):
            again = self._call(tokens)
        with self.given([6, 3, 1]):
            three = self._call(tokens)
        shapes = whole.shape[:2] == (1, 8) and three.shape == (1, 3, whole.shape[2])
        return bool(shapes and mx.array_equal(whole[:, mx.array(some)], again))

    def _call(self, tokens: mx.array) -> mx.array:
        from mlx_lm.models.cache import make_prompt_cache

        logits: mx.array = self.model(tokens, cache=make_prompt_cache(self.model))
        mx.eval(logits)
        return logits

    def _same_bits(self) -> bool:
        """Whether LEAST rows of the head have the bits that they have among half as many more."""
        own, tied = _own(self.model), _embedding(self.model)
        head, (E, dtype) = own if own is not None else tied.as_linear, self.takes
        x = mx.random.normal((1, LEAST * 3 // 2, E), key=mx.random.key(0)).astype(dtype)
        some = mx.array([i for i in range(x.shape[1]) if i % 3])
        return bool(mx.array_equal(head(x)[:, some], head(x[:, some])))


class _Instead(nn.Module):  # type: ignore[misc]
    """A function in a module's place."""

    def __init__(self, function: Callable[[mx.array], Any]) -> None:
        super().__init__()
        self._function = function

    def __call__(self, x: mx.array) -> Any:
        return self._function(x)


def _own(model: Any) -> Any:
    return getattr(model, "lm_head", None)


def _embedding(model: Any) -> Any:
    """The embedding of a model without a head of its own; None where it is nowhere usual."""
    found = getattr(getattr(model, "model", None), "embed_tokens", None)
    return found if callable(getattr(found, "as_linear", None)) else None
