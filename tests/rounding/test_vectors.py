"""Numbers on which other simulators go wrong."""

import contextlib
import math

import numpy as np
import pytest
import torch

from halp import quantize
from tests.rounding.oracles import (
    BLOCKS,
    CARRIERS,
    MODES,
    array_of,
    assert_same,
    hard_cases,
    oracle,
    round_blocks,
    tensor_of,
    with_largest,
)

F32, F64, F16, BF16 = torch.float32, torch.float64, torch.float16, torch.bfloat16
INF = math.inf

#: (value, dtype, format, rounding, overflow) and the result.
VECTORS = [
    # The tie 1 + 2⁻¹¹ goes to the even neighbour.
    ((1.00048828125, F32, "fp16", "near", "saturate"), 1.0),
    ((1.00048828125, F32, "fp16", "near-away", "saturate"), 1.0009765625),
    # What float32 holds is left alone.
    *(((value, F32, "e8m23", "near", "saturate"), value) for value in (3.0, 1.5, -2.0)),
    # Beyond the range.
    ((INF, F32, "fp8_e4m3", "near", "saturate"), 448.0),
    ((-INF, F32, "fp8_e4m3", "near", "saturate"), -448.0),
    ((INF, F32, "fp8_e4m3", "near", "inf"), math.nan),
    ((INF, F32, "fp8_e5m2", "near", "inf"), INF),
    ((INF, F32, "fp8_e5m2", "zero", "inf"), INF),
    ((464.0, F32, "fp8_e4m3", "near", "saturate"), 448.0),
    ((464.0, F32, "fp8_e4m3", "near", "inf"), 448.0),
    ((464.0, F32, "fp8_e4m3", "near-away", "inf"), math.nan),
    ((math.nextafter(464.0, 500), F64, "fp8_e4m3", "near", "inf"), math.nan),
    ((61440.0, F32, "fp8_e5m2", "near", "saturate"), 57344.0),
    ((61440.0, F32, "fp8_e5m2", "near", "inf"), INF),
    ((-61440.0, F32, "fp8_e5m2", "near", "inf"), -INF),
    ((61440.0, F32, "fp8_e5m2", "down", "inf"), 57344.0),
    ((-61440.0, F32, "fp8_e5m2", "up", "inf"), -57344.0),
    ((65520.0, F32, "fp16", "near", "saturate"), 65504.0),
    ((65520.0, F32, "fp16", "near", "inf"), INF),
    ((math.nextafter(65520.0, 0), F64, "fp16", "near", "inf"), 65504.0),
    ((65504.0, F16, "bf16", "near", "saturate"), 65280.0),
    ((65504.0, F16, "bf16", "near", "inf"), INF),
    ((1e30, BF16, "fp16", "near", "saturate"), 65280.0),
    ((1e30, BF16, "fp16", "zero", "inf"), 65280.0),
    ((INF, F16, "fp32", "near", "saturate"), 65504.0),
    ((INF, F32, "e11m52", "near", "saturate"), torch.finfo(F32).max),
    ((3.4e38, F32, "e11m3", "near", "saturate"), 1.875 * 2.0**127),
    ((3.4e38, F32, "e11m3", "near", "inf"), INF),
    ((1e10, F32, "fixed32", "near", "saturate"), 2.0**31 - 128),
    ((1e10, F64, "fixed32", "near", "saturate"), 2.0**31 - 1),
    ((-1e10, F32, "fixed32", "near", "saturate"), -(2.0**31)),
    ((1e10, F32, "fixed8", "near", "inf"), 127.0),
    ((-1e10, F32, "fixed8", "near", "inf"), -128.0),
    ((-128.4, F32, "fixed8", "down", "saturate"), -128.0),
    ((7.0, F32, "fp4_e2m1", "near", "inf"), 6.0),
    # −0 where there is one.
    ((-1e-12, F32, "fp16", "near", "saturate"), -0.0),
    ((-1e-12, F64, "fp16", "near", "saturate"), -0.0),
    ((-1e-12, F32, "fp8_e4m3fnuz", "near", "saturate"), 0.0),
    ((-0.0, F32, "fp8_e5m2fnuz", "near", "saturate"), 0.0),
    ((-0.3, F32, "fixed8", "near", "saturate"), 0.0),
    ((-0.3, F32, "fixed8", "up", "saturate"), 0.0),
    ((-0.3, F32, "fp4_e2m1", "up", "saturate"), -0.0),
    ((-1e-3, F32, "mxint8", "up", "saturate"), -65 * 2.0**-16),
    # Ties, in formats of few bits and in subnormals.
    ((1.1875, F32, "fp8_e4m3", "near", "saturate"), 1.25),
    ((1.0625, F32, "fp8_e4m3", "near", "saturate"), 1.0),
    ((5.0, F32, "fp4_e2m1", "near", "saturate"), 4.0),
    ((5.0, F32, "fp4_e2m1", "near-away", "saturate"), 6.0),
    ((0.25, F32, "fp4_e2m1", "near", "saturate"), 0.0),
    ((0.75, F32, "fp4_e2m1", "near", "saturate"), 1.0),
    ((2.0**-25, F32, "fp16", "near", "saturate"), 0.0),
    ((2.0**-25, F32, "fp16", "near-away", "saturate"), 2.0**-24),
    ((3 * 2.0**-25, F32, "fp16", "near", "saturate"), 2.0**-23),
    ((2.5, F32, "fixed8", "near", "saturate"), 2.0),
    ((-2.5, F32, "fixed8", "near", "saturate"), -2.0),
    ((-2.5, F32, "fixed8", "near-away", "saturate"), -3.0),
    # Adding a half first, then cutting, rounds this up.
    ((0.49999997, F32, "fixed8", "near", "saturate"), 0.0),
    ((0.49999997, F32, "fixed8", "near-away", "saturate"), 0.0),
    ((math.nextafter(0.5, 0), F64, "fixed32", "near-away", "saturate"), 0.0),
    ((8388609.0, F32, "fixed32", "near", "saturate"), 8388609.0),
    # float64 is rounded once.
    ((1 + 2**-11 + 2**-40, F64, "fp16", "near", "saturate"), 1.0009765625),
    # Just below 2¹¹⁹: its exponent by a rounded logarithm is one too large.
    ((6.6461399789245764e35, F64, "bf16", "zero", "saturate"), 2.0**119 - 2.0**111),
    ((6.6461399789245764e35, F64, "bf16", "near", "saturate"), 2.0**119),
    ((6.6461399789245764e35, F32, "bf16", "zero", "saturate"), 2.0**119),
]


@pytest.mark.parametrize("given, expected", VECTORS, ids=str)
def test_a_number_on_which_others_fail(given, expected):
    value, dtype, format, rounding, overflow = given
    x = torch.tensor([value], dtype=dtype)
    (result,) = quantize(x, format, rounding, overflow=overflow).tolist()
    assert result == expected or math.isnan(expected) and math.isnan(result)
    assert math.isnan(expected) or math.copysign(1, result) == math.copysign(1, expected)


def test_a_nan_in_a_block_leaves_the_others_their_values():
    x = torch.linspace(-3, 3, 32)
    x[0] = 0
    expected = quantize(x, "mxfp8_e4m3")
    x[0] = math.nan
    result = quantize(x, "mxfp8_e4m3")
    assert result[0].isnan()
    assert torch.equal(result[1:], expected[1:])


@contextlib.contextmanager
def flushing_subnormals():
    """The processor reads and writes subnormal float32 and float64 as zeros."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("given, expected", VECTORS, ids=str)
def test_the_same_where_the_processor_flushes_subnormals(given, expected):
    value, dtype, format, rounding, overflow = given
    x = torch.tensor([value], dtype=dtype)
    plain = quantize(x, format, rounding, overflow=overflow)
    with flushing_subnormals():
        flushed = quantize(x, format, rounding, overflow=overflow)
    assert_same(array_of(flushed), array_of(plain), array_of(x))


@pytest.mark.parametrize("carrier", CARRIERS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("name", ["fp16", "bf16", "tf32", "fp8_e4m3", "fp8_e5m2fnuz", "fixed8"])
def test_subnormal_input_and_results_survive_flushing(name, rounding, carrier):
    """Directed rounding turns the smallest float into a whole step of the format."""
    x = hard_cases(name, carrier)
    tiny = np.finfo(carrier).smallest_subnormal * np.arange(-100, 100).astype(carrier)
    x = np.concatenate([x, tiny])
    expected = oracle(name).round(x, rounding)
    tensor = tensor_of(x)
    with flushing_subnormals():
        result = quantize(tensor, name, rounding)
    assert_same(array_of(result), expected, x)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8_e4m3", "fixed8"])
def test_stochastic_rounding_is_the_same_under_flushing(name):
    x = hard_cases(name, np.float32)
    tensor = tensor_of(x)
    expected = quantize(tensor, name, "stoc", seed=0)
    with flushing_subnormals():
        result = quantize(tensor, name, "stoc", seed=0)
    assert_same(array_of(result), array_of(expected), x)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_the_same_under_flushing(name):
    for largest in (1.0, 1e-30, 2.0**-126):
        x = np.resize(with_largest(largest, np.float32, smallest=2.0**-126), (32, 32))
        expected = round_blocks(x, name)
        tensor = tensor_of(x)
        with flushing_subnormals():
            result = quantize(tensor, name)
        assert_same(array_of(result), expected, x)
