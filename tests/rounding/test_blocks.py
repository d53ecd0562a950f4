"""MX formats: blocks of 32 along an axis, each on the shared scale of the OCP rule."""

import gfloat
import numpy as np
import pytest
import torch
from gfloat.block import compute_scale_amax

from halp import formats, quantize
from tests.rounding.oracles import (
    BLOCKS,
    CARRIERS,
    HALVES,
    MODES,
    assert_same,
    oracle,
    round_blocks,
    rounded,
    with_largest,
)

every_format = pytest.mark.parametrize("name", BLOCKS)
carrier = pytest.mark.parametrize("carrier", CARRIERS, ids=lambda c: c.__name__)


def blocks(carrier: type, count: int, seed: int = 0) -> np.ndarray:
    """Rows of 32 whose largest magnitudes and spreads differ by many binades."""
    rng = np.random.default_rng(seed)
    widest = 120 if carrier is np.float32 else 140
    binades = rng.uniform(-widest, widest, (count, 1))
    spread = rng.choice([0, 1, 3, 10, 40, 200], (count, 1))
    x = rng.choice([-1, 1], (count, 32)) * np.exp2(
        binades - rng.uniform(0, 1, (count, 32)) * spread
    )
    x *= rng.random((count, 32)) > 0.1
    return x.astype(carrier)


def elements_of(name: str):
    return oracle(BLOCKS[name][1])


@carrier
@every_format
def test_a_block_is_what_gfloat_makes_of_it(name, carrier):
    info = BLOCKS[name][0]
    for x in blocks(carrier, 60):
        expected = gfloat.quantize_block(info, x.astype(np.float64), compute_scale_amax)
        if oracle(BLOCKS[name][1]).info.has_nz:
            expected = np.copysign(expected, x)
        assert_same(rounded(x, name), expected.astype(carrier), x)


@carrier
@pytest.mark.parametrize("rounding", MODES)
@every_format
def test_blocks_in_every_mode(name, rounding, carrier):
    x = blocks(carrier, 50, seed=1)
    for subnormals in (True, False):
        expected = round_blocks(x, name, rounding, subnormals=subnormals)
        assert_same(rounded(x, name, rounding, subnormals=subnormals), expected, x)


@pytest.mark.parametrize("dtype, count", [(torch.uint8, 8), (torch.int16, 16)])
@every_format
def test_blocks_with_given_random_bits(name, dtype, count):
    x = blocks(np.float32, 50, seed=2)
    integers = np.random.default_rng(2).integers(0, 2**count, x.shape)
    expected = round_blocks(x, name, "stoc", random=(integers, count))
    words = torch.from_numpy(integers).to(dtype)
    assert_same(rounded(x, name, "stoc", random_bits=words), expected, x)


#: Powers of two, what lies just below and above them, and the ends of the carriers.
LARGEST = [1.0, 1.9999999, 2.0000002, 448.0, 479.9, 480.0, 65504.0, 3e38, 2.0**-126, 1e-38, 1e-40]


@pytest.mark.parametrize("largest", [*LARGEST, 2.0**-149])
@every_format
def test_the_scale_is_right_at_the_ends_of_float32(name, largest):
    """Where the scale of the rule is below 2^−127, elements become subnormal or zero."""
    x = np.resize(with_largest(largest, np.float32), (32, 32))
    for rounding in ("near", "zero", "up"):
        assert_same(rounded(x, name, rounding), round_blocks(x, name, rounding), x)


@pytest.mark.parametrize("largest", [1e-300, 1e-45, 1e39, 1e300])
@every_format
def test_the_scale_stays_within_its_eight_bits_in_float64(name, largest):
    """2^±127, whatever the tensor: beyond it elements saturate."""
    x = np.resize(with_largest(largest, np.float64), (32, 32))
    assert_same(rounded(x, name), round_blocks(x, name), x)


def test_the_most_negative_element_of_mxint8_is_used_but_never_infinite():
    x = torch.tensor([-3.4e38, 1.0])
    assert quantize(-x.sign() * 1.999, "mxint8").tolist() == [127 / 64, -2.0]
    assert quantize(x, "mxint8").tolist() == [-127 / 64 * 2.0**127, 0.0]
    assert quantize(torch.tensor([-65504.0], dtype=torch.float16), "mxint8").tolist() == [-65024.0]


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.__name__)
@every_format
def test_blocks_in_half_precision_tensors(name, half):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((50, 32)) * np.exp2(rng.integers(-12, 12, (50, 1)))).astype(half)
    for rounding in MODES:
        assert_same(rounded(x, name, rounding), round_blocks(x, name, rounding), x)


@pytest.mark.parametrize("length", [1, 5, 31, 32, 33, 64, 77])
@every_format
def test_the_last_block_may_be_short(name, length):
    x = np.random.default_rng(4).standard_normal((3, length)).astype(np.float32)
    x *= np.exp2(np.arange(length) // 4, dtype=np.float32)
    assert_same(rounded(x, name), round_blocks(x, name), x)


@pytest.mark.parametrize("shape", [(40,), (40, 3), (2, 40, 3), (2, 3, 40), (2, 0, 3), (1, 1, 70)])
@every_format
def test_blocks_lie_along_the_named_axis(name, shape):
    x = np.random.default_rng(5).standard_normal(shape).astype(np.float32)
    x *= np.exp2(np.random.default_rng(6).integers(-9, 9, shape)).astype(np.float32)
    for axis in range(-len(shape), len(shape)):
        if x.size:
            assert_same(rounded(x, name, axis=axis), round_blocks(x, name, axis=axis), x)
        else:
            assert rounded(x, name, axis=axis).shape == shape
    last = round_blocks(x, name) if x.size else x
    assert_same(rounded(x, name), last, x)


@every_format
def test_a_scalar_is_a_block_of_its_own(name):
    x = torch.tensor(1.2345)
    result = quantize(x, name)
    assert result.shape == ()
    assert result == quantize(x[None], name)[0]


@every_format
def test_a_block_does_not_see_its_neighbours(name):
    x = torch.from_numpy(blocks(np.float32, 20, seed=7))
    together = quantize(x.reshape(-1), name).view_as(x)
    assert torch.equal(together, quantize(x, name))
    assert torch.equal(together, torch.stack([quantize(block, name) for block in x]))


@carrier
@every_format
def test_an_all_zero_block_is_zeros(name, carrier):
    x = np.zeros((2, 40), dtype=carrier)
    x[0, ::2] = -0.0
    expected = x if elements_of(name).info.has_nz else np.abs(x)
    for rounding in (*MODES, "stoc"):
        assert_same(rounded(x, name, rounding), expected, x)


@carrier
@pytest.mark.parametrize("name", [name for name in BLOCKS if elements_of(name).has_nan])
def test_one_nan_leaves_the_31_numbers_beside_it(name, carrier):
    x = blocks(carrier, 20, seed=8)
    expected = round_blocks(x, name)
    for column in (0, 13, 31):
        with_nan, others = x.copy(), x.copy()
        with_nan[:, column], others[:, column] = np.nan, 0
        expected = round_blocks(others, name)
        expected[:, column] = np.nan
        assert_same(rounded(with_nan, name), expected, with_nan)


@carrier
@every_format
def test_an_infinity_saturates_on_the_scale_of_the_finite_numbers(name, carrier):
    x = blocks(carrier, 20, seed=9)
    x[:, 5], x[:, 6] = np.inf, -np.inf
    assert_same(rounded(x, name), round_blocks(x, name), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@every_format
def test_stochastic_blocks_are_unbiased_and_seeded(name, dtype):
    count = 4000
    row = torch.tensor([1.0, *np.linspace(-0.97, 0.97, 31)], dtype=dtype)
    x = row.expand(count, 32).contiguous()
    result = quantize(x, name, "stoc", seed=0).double()
    assert torch.equal(result, quantize(x, name, "stoc", seed=0).double())
    low, high = (quantize(x[0], name, mode).double() for mode in ("down", "up"))
    step = high - low
    moving = step > 0
    p = ((x[0].double() - low) / step)[moving]
    ups = (result == high)[:, moving].sum(0)
    assert ((result == high) | (result == low)).all()
    assert ((ups - count * p).abs() < 5 * (count * p * (1 - p)).sqrt()).all()


@every_format
def test_auto_is_what_blocks_have_already(name):
    x = blocks(np.float32, 20, seed=10)
    assert_same(rounded(x, name, scale="auto"), rounded(x, name), x)


@every_format
def test_a_block_format_knows_its_elements(name):
    info, ours = BLOCKS[name][0], formats.get(name)
    assert ours.name == name == str(ours)
    assert not ours.has_infinity  # elements saturate
    assert ours.has_nan == (info.etype.num_nans > 0)
    assert ours.has_negative_zero == info.etype.has_nz
