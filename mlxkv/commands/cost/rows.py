"""What a variant reads at each position of a text, reduced block by block as its logits come.

Axes: L tokens of a call, n positions of the text, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mlxkv.judge.delta import divergence
from mlxkv.judge.measure import blocks

Array = npt.NDArray[Any]
_BEST = 5


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Each (n,) in float64, NaN where there is nothing: a text's last token is followed by none.

    `kl` is KL(truth || variant) of the next token's distribution in nats; `p` and `nll` are the
    right token's probability and -log of it, `p_truth` and `nll_truth` the truth's. `same` is 1
    where the most probable token is the truth's, `five` the share of the truth's most probable five
    that are the variant's too. `peak` is the largest error of a logit about the row's mean error,
    `margin` how far the truth's best logit lies above its second.
    """

    kl: Array = field()
    p: Array = field()
    p_truth: Array = field()
    nll: Array = field()
    nll_truth: Array = field()
    same: Array = field()
    five: Array = field()
    peak: Array = field()
    margin: Array = field()

    @classmethod
    def of(cls, n: int) -> Self:
        """For a text of so many tokens, with nothing in it yet."""
        return cls(**{each.name: np.full(n, np.nan) for each in fields(cls)})

    def put(self, start: int, logits: Array, truth: Array, tokens: Array) -> None:
        """Reduces a call's rows; its first token stands at `start` in the text `tokens`, (n,).

        `logits` and `truth` are (L, V); a row that is not finite stays NaN.
        """
        for part in blocks(*logits.shape):
            t = np.asarray(truth[part], np.float64)
            x = np.asarray(logits[part], np.float64)
            at = slice(start + part.start, start + part.start + len(t))
            finite = np.isfinite(x.sum(1))
            self._put(at, t, np.where(finite[:, None], x, t), tokens)
            for name in () if finite.all() else ("kl", "p", "nll", "same", "five", "peak"):
                getattr(self, name)[at][~finite] = np.nan

    def _put(self, at: slice, t: Array, x: Array, tokens: Array) -> None:
        e = x - t
        self.kl[at] = np.maximum(divergence(t, e), 0.0)
        self.peak[at] = np.abs(e - e.mean(1, keepdims=True)).max(1)
        k = min(_BEST, t.shape[1])
        best = np.argpartition(t, -k, axis=1)[:, -k:]
        ranked = np.sort(np.take_along_axis(t, best, 1), 1)
        self.margin[at] = ranked[:, -1] - ranked[:, -2] if k > 1 else np.inf
        self.same[at] = t.argmax(1) == x.argmax(1)
        least = np.partition(x, -k, axis=1)[:, -k]
        self.five[at] = (np.take_along_axis(x, best, 1) >= least[:, None]).mean(1)
        right = tokens[at.start + 1 : at.stop + 1]
        some = slice(at.start, at.start + len(right))
        self.nll[some] = _nll(x, right)
        self.nll_truth[some] = _nll(t, right)
        self.p[some], self.p_truth[some] = np.exp(-self.nll[some]), np.exp(-self.nll_truth[some])

    @property
    def finite(self) -> npt.NDArray[np.bool_]:
        """Whether each row of the variant's logits was finite, (n,)."""
        return np.isfinite(self.kl)


def _nll(z: Array, right: Array) -> Array:
    """-log of the probability of each row's right token, for as many rows as there are such."""
    z = z[: len(right)]
    most = z.max(1)
    total = most + np.log(np.exp(z - most[:, None]).sum(1))
    return np.asarray(total - z[np.arange(len(right)), right])
