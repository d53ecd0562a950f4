"""Packed numbers come back with the same bits, whatever their format, scale and size."""

import pytest
import torch
from torch import Tensor

from halp import formats
from halp.bitcenter.packing import container, from_signs, pack, unpack, with_signs
from halp.precision import Precision

FORMATS = [*formats.names(), "e5m7", "e8m3", "e4m2", "fixed4", "fixed8", "fixed12", "fixed16"]


def numbers(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, dtype=dtype, generator=generator)
    wide = x * torch.linspace(-30, 30, 500, dtype=dtype).exp()
    return {
        "normal": x,
        "wide": wide,
        "large": x * 1e30,
        "small": x * 1e-30,
        "subnormal": x * 1e-42,
        "zeros": torch.tensor([0.0, -0.0, 1.0, -1.0], dtype=dtype),
        "nothing but zeros": torch.zeros(3, dtype=dtype),
        "infinite": torch.tensor([1.0, torch.inf, -torch.inf, torch.nan], dtype=dtype),
        "empty": torch.zeros(0, 3, dtype=dtype),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [None, "auto", 0.037, 2.0**-20])
@pytest.mark.parametrize("format", FORMATS)
def test_the_same_bits_come_back(format, scale, dtype):
    precision = Precision(format, scale=scale)
    for what, x in numbers(dtype).items():
        rounded = precision.round(x)
        codes, factor = pack(rounded, precision)
        back = unpack(codes, factor, dtype)
        assert torch.equal(back.nan_to_num(nan=7.5), rounded.nan_to_num(nan=7.5)), what
        assert torch.equal(back.isnan(), rounded.isnan()), what


@pytest.mark.parametrize("format", FORMATS)
def test_signs_survive_where_numbers_underflow(format):
    precision = Precision(format, scale="auto")
    x = torch.tensor([1.0, 1e-30, -1e-30, 0.0, -0.0, 0.5, -0.5, -1e-12, 1e-12])
    codes, factor = pack(with_signs(precision.round(x), x), precision, signed_zeros=True)
    back = from_signs(unpack(codes, factor, torch.float32))
    assert torch.equal(back > 0, x > 0)
    close = precision.round(x)
    assert torch.equal(torch.where(back.abs() < 1e-37, 0.0, back), close + 0.0)


def test_containers_are_the_smallest_that_hold_the_format():
    expected = {
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "fp6_e2m3": torch.float8_e4m3fn,
        "fp4_e2m1": torch.float8_e4m3fn,
        "e5m7": torch.float16,
        "tf32": torch.float32,
        "fixed8": torch.int8,
        "fixed16": torch.int16,
        "mxfp4": torch.bfloat16,
    }
    assert {name: container(formats.get(name), False) for name in expected} == expected
