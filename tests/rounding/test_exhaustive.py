"""Every float16 and every bfloat16 number, to every narrow format, in every way."""

import itertools

import numpy as np
import pytest
import torch

from halp import quantize
from tests.rounding.oracles import (
    EIGHT_BITS,
    ELEMENTWISE,
    HALVES,
    MODES,
    OVERFLOWS,
    all_halves,
    assert_same,
    oracle,
    rounded,
    tensor_of,
    without_nan,
)

half = pytest.mark.parametrize("half", HALVES, ids=lambda half: half.__name__)
every_mode = pytest.mark.parametrize("rounding", MODES)
WAYS = list(itertools.product(OVERFLOWS, [True, False]))


@every_mode
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_fp16_value_to_every_narrow_format(name, rounding):
    """In float16 tensors, and the same numbers in float32 and float64 tensors."""
    halves = without_nan(all_halves(np.float16), name)
    for (overflow, subnormals), carrier in itertools.product(WAYS, [np.float16, np.float32]):
        x = halves.astype(carrier)
        expected = oracle(name).round(x, rounding, overflow, subnormals)
        actual = rounded(x, name, rounding, overflow=overflow, subnormals=subnormals)
        assert_same(actual, expected, x)
    x = halves.astype(np.float64)
    assert_same(rounded(x, name, rounding), oracle(name).round(x, rounding), x)


#: Tensors of random bits, and how many of them an element uses: all, but 23 of 32 in float32.
RANDOM = {torch.uint8: 8, torch.int16: 16, torch.int32: 23}


@pytest.mark.parametrize("dtype", RANDOM, ids=str)
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_fp16_value_to_every_narrow_format_with_given_random_bits(name, dtype):
    x, count = without_nan(all_halves(np.float16), name), RANDOM[dtype]
    integers = np.random.default_rng(4).integers(0, 2**count, len(x))
    words = torch.from_numpy(integers << (9 if count == 23 else 0)).to(dtype)  # wraps
    for overflow, subnormals in WAYS:
        expected = oracle(name).round(x, "stoc", overflow, subnormals, random=(integers, count))
        way = {"overflow": overflow, "subnormals": subnormals}
        assert_same(rounded(x, name, "stoc", **way, random_bits=words), expected, x)


@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_fp16_value_with_each_of_256_random_bytes(name):
    x = without_nan(all_halves(np.float16), name)
    for byte in range(256):
        expected = oracle(name).round(x, "stoc", random=(np.full(len(x), byte), 8))
        words = torch.full((len(x),), byte, dtype=torch.uint8)
        assert_same(rounded(x, name, "stoc", random_bits=words), expected, x)


@half
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_half_precision_tensors_are_rounded_and_keep_their_dtype(name, half):
    """Formats wider than the tensor's dtype too: what it cannot hold saturates, or is infinite."""
    x = without_nan(all_halves(half), name)
    for rounding, overflow in itertools.product(MODES, OVERFLOWS):
        result = rounded(x, name, rounding, overflow=overflow)
        assert_same(result, oracle(name).round(x, rounding, overflow), x)


@half
@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fp6_e2m3", "e5m7", "fixed8"])
def test_half_precision_tensors_are_rounded_stochastically_as_their_float32_values(name, half):
    x = without_nan(all_halves(half), name)
    x = tensor_of(x)
    x = x[x.abs() <= oracle(name).range_in(half)[1]]
    result = quantize(x, name, "stoc", seed=1)
    assert torch.equal(result, quantize(x.float(), name, "stoc", seed=1).to(x.dtype))
