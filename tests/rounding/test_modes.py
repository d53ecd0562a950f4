"""Every mode that draws nothing is exact in every format of single values."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from halp import formats, quantize
from tests.rounding.oracles import (
    BLOCKS,
    CARRIERS,
    ELEMENTWISE,
    FIXED,
    FLOATS,
    MODES,
    OVERFLOWS,
    assert_same,
    hard_cases,
    oracle,
    random_patterns,
    rounded,
)

carrier = pytest.mark.parametrize("carrier", CARRIERS, ids=lambda c: c.__name__)
every_mode = pytest.mark.parametrize("rounding", MODES)
every_overflow = pytest.mark.parametrize("overflow", OVERFLOWS)
every_format = pytest.mark.parametrize("name", ELEMENTWISE)
#: Formats with few enough values to list them all.
LISTED = [name for name in ELEMENTWISE if oracle(name).info.k <= 16]


def test_every_registered_format_is_tested():
    assert set(formats.names()) - set(BLOCKS) - set(FIXED) == set(FLOATS)


@every_overflow
@carrier
@every_mode
@every_format
def test_every_mode_is_what_gfloat_computes(name, rounding, carrier, overflow):
    x = hard_cases(name, carrier)
    expected = oracle(name).round(x, rounding, overflow)
    assert_same(rounded(x, name, rounding, overflow=overflow), expected, x)


@carrier
@every_mode
@pytest.mark.parametrize("name", LISTED)
def test_every_mode_finds_its_value_in_the_list_of_all(name, rounding, carrier):
    x = hard_cases(name, carrier)
    x = x[~np.isnan(x)]
    assert_same(rounded(x, name, rounding), oracle(name).in_list(x, rounding), x)


@pytest.mark.parametrize(
    "name, carrier",
    [(name, np.float32) for name in ELEMENTWISE if oracle(name).scalar is not None]
    + [("fp16", np.float64), ("fp32", np.float64)],
)
def test_nearest_is_the_cast_of_numpy_and_ml_dtypes(name, carrier):
    x = hard_cases(name, carrier)
    assert_same(rounded(x, name, overflow="inf"), oracle(name).cast(x), x)


@pytest.mark.parametrize("name", [name for name in FLOATS if oracle(name).dtype is not None])
def test_nearest_is_the_cast_of_torch(name):
    x = hard_cases(name, np.float32)
    if not formats.get(name).has_infinity:  # what torch makes of overflow depends on its version
        x = x[~(np.abs(x) > formats.get(name).max)]
    cast = torch.from_numpy(x).to(oracle(name).dtype).float().numpy()
    assert_same(rounded(x, name, overflow="inf"), cast, x)


@carrier
@every_mode
@every_format
def test_without_subnormals_a_subnormal_result_is_zero(name, rounding, carrier):
    """What rounds up to the smallest normal number stays; zero has the sign of the result."""
    x = hard_cases(name, carrier)
    expected = oracle(name).round(x, rounding, subnormals=False)
    assert_same(rounded(x, name, rounding, subnormals=False), expected, x)


@carrier
@every_mode
@every_format
def test_beyond_the_range_is_the_largest_value_infinity_or_nan(name, rounding, carrier):
    """The largest value is the largest that the tensor can hold; infinity is never cut off."""
    known = oracle(name)
    low, high = known.range_in(np.dtype(carrier))
    x = np.array([np.inf, -np.inf] + [np.nan] * known.has_nan, dtype=carrier)
    saturated = np.array([high, low, np.nan][: len(x)], dtype=carrier)
    assert_same(rounded(x, name, rounding), saturated, x)
    beyond = [np.inf, -np.inf] if known.has_infinity else [np.nan, np.nan]
    if not (known.has_infinity or known.has_nan):
        beyond = [high, low]
    expected = np.array([*beyond, np.nan][: len(x)], dtype=carrier)
    assert_same(rounded(x, name, rounding, overflow="inf"), expected, x)


@carrier
@every_mode
@every_format
def test_zero_keeps_its_sign_where_the_format_has_one(name, rounding, carrier):
    x = np.array([0.0, -0.0, -np.finfo(carrier).smallest_subnormal], dtype=carrier)
    result = rounded(x, name, rounding)
    zeros = result == 0
    assert zeros[:2].all()
    signs = np.signbit(result[zeros])
    assert (signs == (np.signbit(x[zeros]) & oracle(name).info.has_nz)).all()


def test_what_a_format_lacks_is_known_to_it():
    for name in ELEMENTWISE:
        known, ours = oracle(name), formats.get(name)
        assert ours.has_infinity == known.has_infinity
        assert ours.has_nan == known.has_nan
        assert ours.has_negative_zero == known.info.has_nz


def test_float64_is_rounded_once():
    """Through float32 the number would first become a tie."""
    x = torch.tensor([1 + 2**-11 + 2**-40, -(1 + 2**-11 + 2**-40)], dtype=torch.float64)
    assert quantize(x, "fp16").tolist() == [1.0009765625, -1.0009765625]


@every_mode
@pytest.mark.parametrize("name", ["fp16", "fp8_e4m3", "e11m3", "fixed8"])
def test_exact_arithmetic_agrees_next_to_ties_that_only_float64_holds(name, rounding):
    """Ties of random values, moved by one unit in float64's last place; in fractions."""
    rng = np.random.default_rng(7)
    values = rng.uniform(1, 2, 200) * np.exp2(rng.integers(-6, 7, 200))
    low, high = oracle(name).neighbours(np.concatenate([values, -values]))
    ties = ((low + high) / 2)[low < high]
    for x in (ties, np.nextafter(ties, 100), np.nextafter(ties, -100)):
        result = rounded(x, name, rounding)
        for value, ours in zip(x.tolist(), result.tolist(), strict=True):
            down, up = (v.item() for v in oracle(name).neighbours(np.array([value])))
            assert ours == choose(Fraction(value), Fraction(down), Fraction(up), rounding, name)


def choose(x: Fraction, down: Fraction, up: Fraction, rounding: str, name: str) -> Fraction:
    """The one of two neighbours that the definition of the mode picks."""
    toward_zero, away = (down, up) if x > 0 else (up, down)
    nearer = down if x - down < up - x else up
    if x - down == up - x:
        step = up - down
        nearer = down if (down / step) % 2 == 0 else up
        if rounding == "near-away":
            nearer = away
    picks = {"up": up, "down": down, "zero": toward_zero, "near": nearer, "near-away": nearer}
    return picks[rounding]


@carrier
@pytest.mark.parametrize("name", [*ELEMENTWISE, *BLOCKS])
def test_void_changes_nothing(name, carrier):
    x = random_patterns(carrier, 10_000)
    for scale in (None, "auto"):
        assert (rounded(x, name, "void", scale=scale).view("uint8") == x.view("uint8")).all()


@carrier
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fp4_e2m1", "fixed8", "e8m2"])
def test_directed_rounding_of_the_smallest_float_is_a_whole_step_or_nothing(name, carrier):
    tiny, step = np.finfo(carrier).smallest_subnormal, formats.get(name).smallest_subnormal
    x = np.array([tiny, -tiny])
    assert rounded(x, name, "up").tolist() == [step, 0]
    assert rounded(x, name, "down").tolist() == [0, -step]
    assert rounded(x, name, "zero").tolist() == [0, 0]
