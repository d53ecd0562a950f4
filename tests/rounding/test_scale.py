"""``scale · Q(x / scale)``: with numbers, with tensors, and with the scale that fits best."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from halp import formats, quantize
from tests.rounding.oracles import (
    CARRIERS,
    FLOATS,
    HALVES,
    MODES,
    assert_same,
    oracle,
    rounded,
    with_largest,
)

NAMES = [*FLOATS, "e5m7", "e2m1", "e9m2", "e11m3", "fixed4", "fixed8", "fixed16"]
every_format = pytest.mark.parametrize("name", NAMES)
carrier = pytest.mark.parametrize("carrier", CARRIERS, ids=lambda c: c.__name__)


def auto_exponent(largest: float, name: str) -> int:
    """The smallest k with largest / 2^k ≤ the format's maximum, in exact arithmetic."""
    top = float(oracle(name).info.max)
    ratio = Fraction(largest) / Fraction(top)
    exponent = math.frexp(largest)[1] - math.frexp(top)[1] - 2
    while ratio > Fraction(2) ** exponent:
        exponent += 1
    return exponent


def auto_scaled(x: np.ndarray, name: str, rounding: str = "near") -> np.ndarray:
    """scale · Q(x / scale) with its own search of the scale; float64 holds all of it exactly."""
    exponent = auto_exponent(float(np.abs(x).max()), name)
    scaled = oracle(name).round(np.ldexp(x.astype(np.float64), -exponent), rounding)
    with np.errstate(under="ignore", over="ignore"):
        result = np.ldexp(scaled, exponent).astype(x.dtype)
        top = np.ldexp(float(ml_dtypes.finfo(x.dtype).max), -exponent)
        largest_held = np.ldexp(oracle(name).round(np.array(top), "zero"), exponent)
        beyond = np.isinf(result)
        result[beyond] = np.copysign(largest_held, result[beyond]).astype(x.dtype)
    return result


# --- a given scale


@pytest.mark.parametrize("scale", [2.0**-20, 2.0**7, 0.1, 3e-5])
@carrier
@every_format
def test_a_number_as_scale(name, carrier, scale):
    x = with_largest(100.0, carrier)
    for rounding in MODES:
        expected = oracle(name).round(x / carrier(scale), rounding) * carrier(scale)
        assert_same(rounded(x, name, rounding, scale=scale), expected, x)


@every_format
def test_a_tensor_as_scale_broadcasts(name):
    x = with_largest(100.0, np.float32).reshape(10, 100)
    scale = np.exp2(np.arange(-10, 10, 2, dtype=np.float32))[:, None]
    round = oracle(name).round
    for expected, factor in ((round(x / scale) * scale, scale), (round(x / 4) * 4, np.float32(4))):
        assert_same(rounded(x, name, scale=torch.tensor(factor)), expected, x)


@pytest.mark.parametrize("bits", [4, 8, 16])
def test_fixed_point_on_the_scale_of_the_design_reaches_both_ends(bits):
    """s = ‖g̃‖ / (μ(2^(b−1) − 1)): the largest value is ‖g̃‖/μ, the most negative one step more."""
    norm, mu = 0.3, 0.1
    scale = norm / (mu * (2 ** (bits - 1) - 1))
    x = torch.tensor([1e9, -1e9, scale, 0.4 * scale, -2.6 * scale], dtype=torch.float64)
    steps = [2 ** (bits - 1) - 1, -(2 ** (bits - 1)), 1, 0, -3]
    assert quantize(x, f"fixed{bits}", scale=scale).tolist() == [scale * step for step in steps]


@every_format
def test_a_power_of_two_as_scale_only_moves_the_exponents(name):
    x = with_largest(1.0, np.float32, smallest=1e-20)
    for rounding in MODES:
        moved = np.ldexp(rounded(np.ldexp(x, 9), name, rounding), -9)
        assert_same(rounded(x, name, rounding, scale=2.0**-9), moved, x)


@carrier
@pytest.mark.parametrize("name", ["fp16", "fp8_e4m3", "fixed8"])
def test_directed_rounding_of_a_tiny_value_on_a_large_scale_is_a_whole_step_or_nothing(
    name, carrier
):
    """Though dividing by the scale underflows."""
    step = float(oracle(name).info.smallest_subnormal) * 2.0**100
    x = np.array([1e-30, -1e-30, np.finfo(carrier).smallest_subnormal], dtype=carrier)
    for scale in (2.0**100, torch.tensor(2.0**100)):
        assert rounded(x, name, "up", scale=scale).tolist() == [step, 0, step]
        assert rounded(x, name, "down", scale=scale).tolist() == [0, -step, 0]


# --- "auto"

#: Where the significand of the largest magnitude lies relative to that of the format's maximum.
SIGNIFICANDS = {
    "at the maximum": lambda top, carrier: top,
    "just above": lambda top, carrier: np.nextafter(carrier(top), carrier(np.inf)),
    "just below": lambda top, carrier: np.nextafter(carrier(top), carrier(0)),
    "half a spacing above": lambda top, carrier: top + (2 - top) / 2,
    "a power of two": lambda top, carrier: 1.0,
    "in between": lambda top, carrier: 1.2345,
}


@pytest.mark.parametrize("significand", SIGNIFICANDS)
@carrier
@every_format
def test_auto_is_the_smallest_power_of_two_that_holds_the_largest(name, carrier, significand):
    top = float(oracle(name).info.max) / 2.0 ** oracle(name).top_exponent
    for exponent in (-70, -24, -1, 0, 1, 15, 16, 80, 105):
        x = with_largest(SIGNIFICANDS[significand](top, carrier) * 2.0**exponent, carrier)
        assert_same(rounded(x, name, scale="auto"), auto_scaled(x, name), x)


@carrier
@pytest.mark.parametrize("rounding", MODES)
@every_format
def test_auto_in_every_mode(name, rounding, carrier):
    for largest in (1.2345e-5, 100.0, 3e20):
        x = with_largest(largest, carrier)
        expected = auto_scaled(x, name, rounding)
        assert_same(rounded(x, name, rounding, scale="auto"), expected, x)


@pytest.mark.parametrize("rounding", ["up", "down"])
@every_format
def test_auto_moves_the_smallest_beside_the_largest_by_a_whole_step(name, rounding):
    x = np.array([1e38, 1e-40, -1e-40, 2.0**-149, -1e-30, 1e31], dtype=np.float32)
    for part in (x, x[1:]):
        expected = auto_scaled(part, name, rounding)
        assert_same(rounded(part, name, rounding, scale="auto"), expected, part)


#: The largest float32 magnitudes, the smallest that are normal there, and subnormal ones.
EXTREMES = [1e38, 1.6e38, 2e38, 3e38, 2.0**-126, 1.2e-38, 2e-38, 1e-36, 1e-30]
EXTREMES += [1e-38, 1e-40, 2.0**-148, 2.0**-149]


@pytest.mark.parametrize("largest", EXTREMES)
@every_format
def test_auto_holds_at_the_ends_of_float32(name, largest):
    """Among them values that float32 itself holds as subnormals."""
    for rounding in ("near", "zero", "near-away"):
        x = with_largest(largest, np.float32)
        expected = auto_scaled(x, name, rounding)
        assert_same(rounded(x, name, rounding, scale="auto"), expected, x)


@pytest.mark.parametrize("largest", [5e-324, 1e-310, 1e-300, 1e-100, 1e100, 1e300, 1.6e308])
@every_format
def test_auto_holds_far_beyond_the_range_of_float32(name, largest):
    x = with_largest(largest, np.float64)
    for rounding in ("near", "zero"):
        expected = auto_scaled(x, name, rounding)
        assert_same(rounded(x, name, rounding, scale="auto"), expected, x)


@pytest.mark.parametrize("half", HALVES, ids=lambda half: half.__name__)
@every_format
def test_auto_in_half_precision_tensors(name, half):
    for largest in (1.2345e-3, 1.0, 100.0, 30000.0):
        x = with_largest(largest, np.float32).astype(half)
        assert_same(rounded(x, name, scale="auto"), auto_scaled(x, name), x)


@carrier
@every_format
def test_auto_leaves_zeros_as_they_are(name, carrier):
    x = np.array([0.0, -0.0, 0.0], dtype=carrier)
    expected = x if oracle(name).info.has_nz else np.abs(x)
    for rounding in ("near", "stoc"):
        assert_same(rounded(x, name, rounding, scale="auto"), expected, x)
        assert rounded(x[:0], name, rounding, scale="auto").shape == (0,)


@carrier
@pytest.mark.parametrize("name", [name for name in NAMES if oracle(name).has_nan])
def test_auto_is_the_scale_of_the_numbers_beside_a_nan(name, carrier):
    x = with_largest(100.0, carrier)
    with_nans = np.concatenate([[np.nan], x, [-np.nan]]).astype(carrier)
    expected = np.concatenate([[np.nan], auto_scaled(x, name), [np.nan]]).astype(carrier)
    assert_same(rounded(with_nans, name, scale="auto"), expected, with_nans)


@carrier
@every_format
def test_auto_is_the_scale_of_the_finite_numbers_beside_an_infinity(name, carrier):
    """Which then is the largest value on that scale, or infinity (NaN in formats without)."""
    known, x = oracle(name), with_largest(100.0, carrier)
    scale = 2.0 ** auto_exponent(100.0, name)
    with_infinities = np.concatenate([[np.inf], x, [-np.inf]]).astype(carrier)
    top, bottom = known.info.max * scale, known.info.min * scale
    beyond = {"saturate": [top, bottom], "inf": [np.inf, -np.inf]}
    if not known.has_infinity:
        beyond["inf"] = [np.nan, np.nan] if known.has_nan else [top, bottom]
    for overflow, (high, low) in beyond.items():
        expected = np.concatenate([[high], auto_scaled(x, name), [low]]).astype(carrier)
        for rounding in ("near", "stoc"):
            ours = rounded(with_infinities, name, rounding, scale="auto", overflow=overflow)
            checked = slice(None) if rounding == "near" else [0, -1]
            assert_same(ours[checked], expected[checked], with_infinities[checked])


@carrier
@every_format
def test_auto_among_infinities_alone_gives_no_nan_unless_asked(name, carrier):
    x = np.array([np.inf, -np.inf], dtype=carrier)
    result = rounded(x, name, scale="auto")
    assert np.isfinite(result).all()
    assert result[0] > 0 > result[1]
    if formats.get(name).has_infinity:
        assert_same(rounded(x, name, scale="auto", overflow="inf"), x, x)
