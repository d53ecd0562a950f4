"""Stochastic rounding: exact for given bits, unbiased for drawn ones, and never the same twice."""

import math

import numpy as np
import pytest
import torch

from halp import quantize
from tests.rounding.oracles import (
    BLOCKS,
    CARRIERS,
    ELEMENTWISE,
    assert_same,
    hard_cases,
    oracle,
    rounded,
)

carrier = pytest.mark.parametrize("carrier", CARRIERS, ids=lambda c: c.__name__)
every_format = pytest.mark.parametrize("name", ELEMENTWISE)

# --- given random bits

#: (tensor of random bits, carrier): how many of an element's bits decide.
GIVEN = {
    (torch.uint8, np.float32): 8,
    (torch.uint8, np.float64): 8,
    (torch.int16, np.float32): 16,
    (torch.int16, np.float64): 16,
    (torch.int32, np.float32): 23,
    (torch.int32, np.float64): 32,
}


def words_of(integers: np.ndarray, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Random bits for ``random_bits``: ``count``-bit integers at the top of each word."""
    width = 8 * torch.empty(0, dtype=dtype).element_size()
    return torch.from_numpy(integers << (width - count)).to(dtype)  # wraps


@pytest.mark.parametrize("dtype, carrier", GIVEN, ids=lambda v: getattr(v, "__name__", str(v)))
@every_format
def test_given_bits_decide_as_in_gfloat(name, dtype, carrier):
    x, count = hard_cases(name, carrier), GIVEN[dtype, carrier]
    integers = np.random.default_rng(3).integers(0, 2**count, len(x))
    words = words_of(integers, count, dtype)
    for overflow in ("saturate", "inf"):
        expected = oracle(name).round(x, "stoc", overflow, random=(integers, count))
        result = rounded(x, name, "stoc", overflow=overflow, random_bits=words)
        assert_same(result, expected, x)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32], ids=str)
def test_the_threshold_is_half_a_step_above_the_random_number(dtype):
    """Around each of many thresholds: at (R + ½)/2^k up, one float64 below not; signs alike."""
    count = GIVEN[dtype, np.float64]
    integers = np.unique(np.random.default_rng(5).integers(0, 2**count, 1000))
    words = words_of(integers, count, dtype)
    at = torch.from_numpy((integers + 0.5) / 2**count)  # of the way from 2 to 3
    for sign in (1, -1):
        up = quantize(sign * (2 + at), "fixed8", "stoc", random_bits=words)
        assert (up == 3 * sign).all()
        below = torch.nextafter(2 + at, torch.tensor(0.0, dtype=at.dtype))
        assert (quantize(sign * below, "fixed8", "stoc", random_bits=words) == 2 * sign).all()


@pytest.mark.parametrize("words", [torch.uint8, torch.int16, torch.int32], ids=str)
@carrier
def test_given_bits_follow_their_elements_through_any_layout(carrier, words):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 8, generator=generator, dtype=torch.float64)
    x = x.to(torch.float32 if carrier is np.float32 else torch.float64)
    bits = torch.randint(0, 100, x.shape, generator=generator).to(words)
    expected = quantize(x, "fixed8", "stoc", scale=0.25, random_bits=bits)
    transposed = quantize(x.t(), "fixed8", "stoc", scale=0.25, random_bits=bits.t())
    assert torch.equal(transposed.t(), expected)


@pytest.mark.parametrize("words", [torch.uint8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("name", ["fp16", "bf16", "fixed8", "e11m3", "mxfp4"])
def test_given_bits_are_left_as_they_are(name, words):
    bits = torch.randint(0, 100, (50,), generator=torch.Generator().manual_seed(0)).to(words)
    before = bits.clone()
    for dtype in (torch.float32, torch.float64):
        for scale in (None, 0.5, "auto"):
            x = torch.linspace(-3, 3, 50, dtype=dtype)
            quantize(x, name, "stoc", scale=scale, random_bits=bits)
            assert torch.equal(bits, before)


def test_float32_and_float64_tensors_take_given_bits_alike():
    """Whichever arithmetic rounds them: bf16 in float32 drops bits, in float64 it does not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(10_000, generator=generator)
    bits = torch.randint(0, 256, x.shape, generator=generator).to(torch.uint8)
    for name in ("bf16", "tf32", "e8m1", "fp16", "fp8_e4m3", "e11m3", "mxfp8_e4m3"):
        narrow, wide = (quantize(t, name, "stoc", random_bits=bits) for t in (x, x.double()))
        assert torch.equal(narrow.double(), wide)


# --- a limited number of random bits


def probability_up(name: str, x: float, count: int) -> float:
    """How many of all ``count``-bit numbers round |x| up, by gfloat."""
    numbers = np.arange(2**count)
    results = oracle(name).round(np.full(len(numbers), x), "stoc", random=(numbers, count))
    return float((np.abs(results) > np.abs(oracle(name).round(np.array([x]), "zero"))).mean())


@carrier
@pytest.mark.parametrize("count", range(1, 9))
def test_k_random_bits_have_the_bias_that_their_definition_predicts(count, carrier):
    """Within 5 standard errors at distances between, at and next to the 2^k thresholds."""
    draws = 20_000
    for seed, (name, low, step) in enumerate(
        [("fp16", 1.0, 2.0**-10), ("fp16", 0.0, 2.0**-24), ("fp8_e4m3", 0.0, 2.0**-9)]
    ):
        for part in (1 / 3, 0.05, 0.5, 0.5 / 2**count, 0.49 / 2**count, 0.99, 1 - 0.5 / 2**count):
            for sign in (1, -1):
                x = carrier(sign * (low + part * step))
                result = rounded(np.full(draws, x), name, "stoc", random_bits=count, seed=seed)
                ups = (np.abs(result) > low).sum()
                p = probability_up(name, float(x), count)
                assert abs(ups - draws * p) <= 5 * math.sqrt(draws * p * (1 - p))


@carrier
@pytest.mark.parametrize("count", range(1, 9))
def test_k_random_bits_are_one_uniform_number_of_k_bits(count, carrier):
    """Raising r from 0 to 1 shows each element's number: it goes up from (R + ½)/2^k on."""
    elements, halves = 4096, 2 ** (count + 1)
    thresholds = np.full(elements, halves + 1)
    for j in range(halves, -1, -1):
        x = np.full(elements, 2 + j / halves, dtype=carrier)
        went_up = rounded(x, "fixed8", "stoc", random_bits=count, seed=1) == 3
        thresholds[went_up] = j
    assert (thresholds % 2 == 1).all()  # of an odd number of half steps: R + ½
    counts = np.bincount((thresholds - 1) // 2, minlength=2**count)
    assert len(counts) == 2**count
    chi_square = ((counts - elements / 2**count) ** 2 / (elements / 2**count)).sum()
    freedom = 2**count - 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


# --- unbiased

#: What is rounded a million times. fp16: normal values, subnormals, below the smallest subnormal.
STOCHASTIC_CASES = {
    "fp16": [1.2345, 1e-3, 1e-6, 1e-7, 1e-8, 2.0**-34, 1 - 2.0**-13, 65500.0],
    "bf16": [1.2345, 1e-3, 1e-8, 1e-39, 1e-40, 2.0**-135],
    "tf32": [1.2345, 1e-39],
    "fp8_e4m3": [1.2345, 0.1, 1e-2, 3e-3, 1e-3, 1e-6, 447.0],
    "fp8_e5m2fnuz": [1.2345, 1e-5],
    "fp4_e2m1": [0.1, 1.2345, 5.9],
    "fixed8": [0.1, 1.2345, 126.7],
    "e11m3": [1.2345, 1e-30],
    "fp32": [1.2345678901234, 1e-8 / 3, 1e-40 / 3, 1e-46],
}


@pytest.mark.parametrize("sign", [1, -1])
@carrier
@pytest.mark.parametrize(
    "name, value", [(name, value) for name, values in STOCHASTIC_CASES.items() for value in values]
)
def test_stochastic_rounding_is_unbiased(name, value, carrier, sign):
    """Within 5 standard errors of the mean of independent choices between the neighbours."""
    if name == "fp32" and carrier is np.float32:
        pytest.skip("float32 values are fp32 values")
    count = 1 << 20
    x = sign * np.array(value, dtype=carrier)
    low, high = (v.item() for v in oracle(name).neighbours(x[None]))
    result = rounded(np.broadcast_to(x, count).copy(), name, "stoc", seed=0)
    ups = int((result == high).sum())
    assert ups + int((result == low).sum()) == count
    probability = (float(x) - low) / (high - low)
    standard_error = math.sqrt(count * probability * (1 - probability))
    assert abs(ups - count * probability) < 5 * standard_error


FP8 = ["fp8_e4m3", "fp8_e5m2", "fp8_e4m3fnuz", "fp8_e5m2fnuz"]


@carrier
@pytest.mark.parametrize("name", FP8)
def test_stochastic_rounding_is_unbiased_at_every_fp8_subnormal(name, carrier):
    """Between each two of them, from zero to the smallest normal number; both signs."""
    count, info = 1 << 17, oracle(name).info
    step = float(info.smallest_subnormal)
    for low in step * np.arange(round(info.smallest_normal / step)):
        for part in (0.5, 0.3, 2.0**-8):
            for sign in (1, -1):
                x = np.full(count, sign * (low + part * step), dtype=carrier)
                result = np.abs(rounded(x, name, "stoc", seed=2))
                assert np.isin(result, [low, low + step]).all()
                ups, p = (result > low).sum(), (abs(float(x[0])) - low) / step
                assert abs(ups - count * p) < 5 * math.sqrt(count * p * (1 - p))


PARTS = ["bf16", "fp16", *FP8, "fp6_e2m3", "fp6_e3m2", "fp4_e2m1", "e5m7", "fixed8"]


@pytest.mark.parametrize("scale", [None, "auto"])
@carrier
@pytest.mark.parametrize("name", PARTS)
def test_the_probability_is_the_distance_in_every_part_of_the_range(name, carrier, scale):
    """Random values of all binades, grouped by the probability that should round them up."""
    rng, info = np.random.default_rng(3), oracle(name).info
    largest = float(info.max)
    low_end = max(math.log2(info.smallest_subnormal), -120) - 4
    x = np.exp2(rng.uniform(low_end, math.log2(largest), 400_000))
    x = (x * rng.choice([-1, 1], x.size)).astype(carrier)
    low, high = (v.astype(np.float64) for v in oracle(name).neighbours(x))
    inside = high > low
    x, low, high = x[inside], low[inside], high[inside]
    x = np.append(x, carrier(largest))  # "auto" is then a scale of one
    result = rounded(x, name, "stoc", seed=1, scale=scale)[:-1]
    went_up = result == high
    assert (went_up | (result == low)).all()
    probability = (x[:-1].astype(np.float64) - low) / (high - low)
    for group in np.array_split(np.argsort(probability), 20):
        p = probability[group]
        deviation = went_up[group].sum() - p.sum()
        assert abs(deviation) < 5 * math.sqrt((p * (1 - p)).sum())


@pytest.mark.parametrize("scale", [None, 2.0**-9, "auto"])
@carrier
@pytest.mark.parametrize("name", PARTS)
def test_values_of_the_format_never_move(name, carrier, scale):
    x = np.concatenate([oracle(name).values, [-0.0] * oracle(name).info.has_nz])
    if oracle(name).is_fixed and scale == "auto":
        x = x[1:]  # the most negative value is beyond the largest
    x = (x * (scale if isinstance(scale, float) else 1)).astype(carrier)
    for seed in range(5):
        assert_same(rounded(x, name, "stoc", scale=scale, seed=seed), x, x)


@pytest.mark.parametrize("overflow", ["saturate", "inf"])
@carrier
@every_format
def test_special_values_are_not_random(name, carrier, overflow):
    x = np.array([0.0, -0.0, np.inf, -np.inf] + [np.nan] * oracle(name).has_nan, dtype=carrier)
    near = rounded(x, name, overflow=overflow)
    for seed in range(5):
        assert_same(rounded(x, name, "stoc", overflow=overflow, seed=seed), near, x)


# --- where the bits come from

HALFWAY = torch.full((100_000,), 1 + 2**-11)


def moved(format="fp16", **kwargs) -> torch.Tensor:
    """Which of many ties between 1 and the next fp16 value went up."""
    return quantize(HALFWAY, format, "stoc", **kwargs) > 1


def assert_uncorrelated(*choices: torch.Tensor) -> None:
    signs = torch.stack(choices).double() * 2 - 1
    correlation = signs @ signs.t() / signs.shape[1] - torch.eye(len(choices))
    assert correlation.abs().max() < 5 / math.sqrt(signs.shape[1])


def test_a_seed_fixes_the_random_bits():
    state = torch.get_rng_state()
    assert torch.equal(moved(seed=5), moved(seed=5))
    assert torch.equal(moved(seed=5), moved(seed=torch.tensor(5)))
    assert torch.equal(moved(seed=5, random_bits=4), moved(seed=5, random_bits=4))
    assert torch.equal(torch.get_rng_state(), state)


def test_different_seeds_are_uncorrelated():
    assert_uncorrelated(*(moved(seed=seed) for seed in (0, 1, 2, 3, 1 << 32, -1)))


def test_two_calls_never_share_their_bits():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [moved() for _ in range(3)] + [moved(random_bits=1) for _ in range(2)]
        torch.manual_seed(1)
        drawn.append(moved())
    generator = torch.Generator().manual_seed(2)
    drawn += [moved(generator=generator) for _ in range(3)]
    assert_uncorrelated(*drawn)


def test_manual_seed_governs_when_neither_seed_nor_generator_is_given():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first, second = moved(), moved()
        torch.manual_seed(1)
        assert torch.equal(moved(), first)
        assert torch.equal(moved(), second)
        assert not torch.equal(first, second)
        torch.manual_seed(2)
        assert not torch.equal(moved(), first)


def test_a_generator_governs_and_leaves_the_global_one_alone():
    state = torch.get_rng_state()
    generator = torch.Generator().manual_seed(1)
    first, second = moved(generator=generator), moved(generator=generator)
    assert not torch.equal(first, second)
    assert torch.equal(moved(generator=torch.Generator().manual_seed(1)), first)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("rounding", ["near", "near-away", "zero", "up", "down", "void"])
def test_only_stochastic_rounding_draws(rounding):
    state = torch.get_rng_state()
    for name in ("fp16", "fixed8", *BLOCKS):
        quantize(HALFWAY, name, rounding)
    quantize(HALFWAY, "fp16", "stoc", random_bits=torch.zeros(len(HALFWAY), dtype=torch.uint8))
    assert torch.equal(torch.get_rng_state(), state)
