"""What a cache keeps that stores less: rounding, affine groups and windows, by hand."""

import itertools

import numpy as np
import pytest
import torch

from oracle.formats import stored
from oracle.formats.errors import Refusal
from oracle.formats.stored import BITS, Affine, Rounded, Window
from oracle.truth.stored import affine, band, rounded


def kept(values, **how):
    return affine(torch.tensor(values, dtype=torch.float64), **how).tolist()


def padded(values, size):
    return [*values, *[0.0] * (size - len(values))]


@pytest.mark.parametrize("size", [32, 64])
@pytest.mark.parametrize("bits", BITS)
def test_a_group_is_rounded_to_steps_from_its_edge(bits, size):
    most = 2.0**bits - 1
    # Steps of 1 down from the edge, which is odd: ties go to an even number of steps.
    given = [most, 0.4, 0.6, 1.5, 2.5]
    there = [most, 0.0, 1.0, 1.0, 3.0]
    group, expected = padded(given, size), padded(there, size)
    assert kept(group, bits=bits, group_size=size) == expected
    mirrored = [-x for x in group]
    assert kept(mirrored, bits=bits, group_size=size) == [-x for x in expected]
    # Two groups know nothing of one another.
    both = [group + [4 * x for x in mirrored]]
    assert kept(both, bits=bits, group_size=size) == [expected + [-4 * x for x in expected]]


def test_the_edge_further_from_zero_and_zero_itself_are_kept():
    # The span of 4 over 3 would be steps of 4/3; of 3 / 2 there are whole ones from 3 to 0.
    assert kept(padded([3.0, -1.0, 1.0], 32), bits=2, group_size=32)[:4] == [3.0, -1.5, 1.5, 0.0]
    assert kept(padded([-3.0, 1.0, -1.0], 32), bits=2, group_size=32)[:4] == [-3.0, 1.5, -1.5, 0.0]
    # 13 of 15 steps on one side; what lies beyond the last step is clamped to it.
    wide = kept(padded([1.3, -0.25, -0.2], 32), bits=4, group_size=32)
    step = float(np.float32(1.3 / 13))
    edge = float(np.float32(1.3))
    assert wide[:4] == [edge, edge - 15 * step, edge - 15 * step, edge - 13 * step]


def test_scale_and_bias_are_those_of_a_float32_cache():
    third = 0.3333333432674408  # float32
    found = kept(padded([1.0, 0.3, 0.6], 32), bits=2, group_size=32)
    assert found[:4] == [1.0, 1.0 - 2 * third, 1.0 - third, 1.0 - 3 * third]


@pytest.mark.parametrize("bits", BITS)
def test_a_constant_group_is_its_number_and_nothing_is_nothing(bits):
    how = {"bits": bits, "group_size": 32}
    assert kept([0.0] * 32, **how) == [0.0] * 32
    assert kept([0.1] * 32, **how) == [0.10000000149011612] * 32  # float32
    assert kept([-2.5] * 32, **how) == [-2.5] * 32
    assert kept([1e-9] * 32, **how) == [0.0] * 32  # less than half of the least scale, 1e-7


def test_a_group_of_one_sign_spans_its_own_numbers():
    low, high = 100.0, 103.0
    found = kept([low, high, 101.4, *[102.0] * 29], bits=2, group_size=32)
    assert found == [100.0, 103.0, 101.0, *[102.0] * 29]
    found = kept([-low, -high, -101.4, *[-102.0] * 29], bits=2, group_size=32)
    assert found == [-100.0, -103.0, -101.0, *[-102.0] * 29]


def test_float16_is_numpys_at_every_magnitude():
    random = np.random.default_rng(0)
    x = random.standard_normal(20000) * 2.0 ** random.integers(-30, 18, 20000)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float64)
    assert np.isinf(expected).any()
    assert (rounded(torch.tensor(x), "float16").numpy() == expected).all()


def test_bfloat16_is_torchs_where_float32_holds_the_number():
    random = np.random.default_rng(0)
    x = random.standard_normal(20000).astype(np.float32) * 2.0 ** random.integers(-40, 40, 20000)
    given = torch.tensor(x)
    expected = given.to(torch.bfloat16).to(torch.float64)
    assert torch.equal(rounded(given, "bfloat16"), expected)


@pytest.mark.parametrize(
    ("dtype", "given", "expected"),
    [
        ("float16", 1 + 2**-11, 1.0),
        ("float16", 1 + 3 * 2**-11, 1 + 2**-9),
        ("float16", 1 + 2**-11 + 2**-40, 1 + 2**-10),  # float32 in between would lose it
        ("float16", 65519.99, 65504.0),
        ("float16", -65520.0, -np.inf),
        ("float16", 2**-25, 0.0),
        ("float16", 3 * 2**-25, 2**-23),
        ("bfloat16", 1 + 2**-8, 1.0),
        ("bfloat16", 1 + 3 * 2**-8, 1 + 2**-6),
        ("bfloat16", 1 + 2**-8 + 2**-40, 1 + 2**-7),
        ("bfloat16", -(2.0**128), -np.inf),
    ],
)
def test_ties_go_to_even_and_what_lies_beside_them_to_its_side(dtype, given, expected):
    assert rounded(torch.tensor([given], dtype=torch.float64), dtype).tolist() == [expected]


@pytest.mark.parametrize(
    ("size", "keep"), [(s, k) for s, k in itertools.product((1, 2, 5, 9, 40), (0, 1, 4)) if k < s]
)
def test_a_window_hides_what_it_has_forgotten(size, keep):
    n = 13
    seen = []
    for own in range(n):
        before = list(range(own + 1))
        sinks, others = before[:keep], before[keep:]
        last = others[max(0, len(others) - (size - keep)) :]
        seen.append([key in sinks + last for key in range(n)])
    assert (~band(Window(size, keep), 0, n, n)).tolist() == seen
    assert (~band(Window(size, keep), 4, 3, 7)).tolist() == [row[:7] for row in seen[4:7]]


@pytest.mark.parametrize(
    ("text", "spec", "name"),
    [
        ("float16", Rounded("float16"), "float16"),
        ("bfloat16", Rounded("bfloat16"), "bfloat16"),
        ("affine", Affine(8, 8, 64), "affine:bits=8,group_size=64"),
        ("affine:group_size=32,bits=3", Affine(3, 3, 32), "affine:bits=3,group_size=32"),
        ("affine:keys=8,values=4", Affine(8, 4, 64), "affine:keys=8,values=4,group_size=64"),
        ("affine:values=4", Affine(8, 4, 64), "affine:keys=8,values=4,group_size=64"),
        ("affine:keys=4,values=4", Affine(4, 4, 64), "affine:bits=4,group_size=64"),
        ("affine:keys=0,values=2", Affine(0, 2, 64), "affine:keys=0,values=2,group_size=64"),
        ("window:size=64", Window(64), "window:size=64"),
        ("window:keep=0,size=64", Window(64), "window:size=64"),
        ("window:size=64,keep=4", Window(64, 4), "window:size=64,keep=4"),
    ],
)
def test_a_spec_has_one_canonical_name(text, spec, name):
    assert stored.parse(text) == spec
    assert spec.name == name
    assert stored.parse(name) == spec


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("float32", "unknown; take one of float16, bfloat16, affine"),
        ("", "unknown"),
        ("float16:bits=8", "option 'bits', expected none"),
        ("affine:bits=7", "bits is '7', expected one of 2, 3, 4, 5, 6, 8"),
        ("affine:bits=1", "bits is '1', expected one of"),
        ("affine:bits=0", "bits is '0', expected one of"),
        ("affine:bits=08", "bits is '08', expected one of"),
        ("affine:bits=8,keys=8", "option 'bits', expected keys, values, group_size"),
        ("affine:bits=8,bits=4", "expected options as key=value, each once"),
        ("affine:group_size=16", "group_size is '16', expected one of 32, 64, 128"),
        ("affine:keys=0,values=0", "keys=0 and values=0, expected bits for either"),
        ("affine:keys=1,values=4", "keys is '1', expected one of 0, 2"),
        ("window", "no size, expected size=NUMBER"),
        ("window:size=0", "size=0 and keep=0, expected a size from 1 and a smaller keep"),
        ("window:size=4,keep=4", "size=4 and keep=4, expected"),
        ("window:size=-1", "expected options as key=value"),
        ("window:size=1.5", "size is '1.5', expected a whole number"),
        ("window:64", "expected options as key=value"),
        ("window:size=64,bits=4", "option 'bits', expected size, keep"),
    ],
)
def test_another_spec_is_refused_with_what_there_is(text, says):
    with pytest.raises(Refusal) as refused:
        stored.parse(text)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "; " in str(refused.value)
