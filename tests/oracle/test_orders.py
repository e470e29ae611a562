"""Other arithmetic in transformers' own code: float64 in every part, and sums in strict order."""

from __future__ import annotations

from functools import reduce

import models
import numpy as np
import pytest
import torch
from torch.nn import functional

from oracle.formats.plan import judged_plans
from oracle.formats.run_folder import SEQUENTIAL, ordinary
from oracle.model.checkpoint import resolve
from oracle.pool import errors, orders, reference

TOKENS = models.tokens(16)


def coarse(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values with the few bits of bfloat16, in float32."""
    seeded = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=seeded).to(torch.bfloat16).float()


def test_a_mean_adds_up_one_number_after_another() -> None:
    x = coarse(2, 3, 300)
    sums = [reduce(lambda a, b: np.float32(a + b), row) for row in x.reshape(-1, 300).numpy()]
    found = orders.sequential_mean(x)
    assert found.shape == (2, 3, 1)
    assert found.flatten().tolist() == [float(s * np.float32(1 / 300)) for s in sums]


def test_rows_are_alike_whatever_stands_beside_them() -> None:
    x = coarse(600, 8)
    rows = torch.cat([orders.sequential_mean(row[None]) for row in x])
    assert torch.equal(orders.sequential_mean(x), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "norm",
    [
        lambda x: x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5),
        lambda x: torch.mean(x.float().pow(2), dim=-1, keepdim=True),
        lambda x: functional.rms_norm(x, (2048,), torch.ones(2048, dtype=x.dtype), 1e-5),
        lambda x: functional.layer_norm(x, (2048,)),
    ],
)
def test_each_way_of_writing_a_norm_adds_up_in_order(norm, dtype) -> None:
    x = coarse(4, 2048).to(dtype)
    with orders.Sequential() as mode:
        found = norm(x).double()
    right, exact = norm(x).double(), norm(x.double().to(dtype).double())
    assert mode.widest == 2048
    if dtype == torch.float32:
        assert not torch.equal(found, right)
    assert (found - exact).abs().max() < 2 * (right - exact).abs().max() + 2e-5 * exact.abs().max()


def test_other_means_are_torchs_own() -> None:
    x = coarse(4, 3, 5)
    with orders.Sequential() as mode:
        assert torch.equal(x.mean(0), x.sum(0) / 4)
        assert torch.equal(x.mean(), torch.mean(x.flatten(), 0))
        assert x.double().mean(-1, keepdim=True).dtype == torch.float64
    assert torch.equal(x.mean((0, 1)), x.flatten(0, 1).mean(0))
    assert mode.widest == 0


def test_the_sequential_member_follows_the_full_plan_and_is_no_ordinary_one(tmp_path) -> None:
    reference.set_up(1)
    model = reference.Reference(resolve(str(models.make(tmp_path / "m"))))
    plans = judged_plans(TOKENS, prompt=5)
    names = errors.members_of(plans)
    assert names[-1] == SEQUENTIAL
    assert SEQUENTIAL not in ordinary(names)
    own, other = (model.run(plans["full"], in_order=order) for order in (False, True))
    assert 0 < np.abs(own.logits - other.logits).max() < 2e-5
    assert np.array_equal(own.logits, model.run(plans["full"]).logits)
