"""Wrong input never becomes a wrong number: it is named, with what would do."""

import math

import numpy as np
import pytest
import torch

from halp import Quantize, quantize
from tests.rounding.oracles import BLOCKS, ELEMENTWISE, oracle

WITHOUT_NAN = [name for name in ELEMENTWISE if not oracle(name).has_nan]
WITHOUT_NAN += [name for name, (info, _) in BLOCKS.items() if info.etype.num_nans == 0]


@pytest.mark.parametrize(
    "wrong, kind",
    [
        (torch.tensor([1, 2]), "torch.int64"),
        (torch.tensor([True]), "torch.bool"),
        (torch.tensor([1j]), "torch.complex64"),
        (np.ones(2), "ndarray"),
        (1.5, "float"),
        ([1.5], "list"),
        (None, "NoneType"),
    ],
    ids=str,
)
@pytest.mark.parametrize("rounding", ["near", "stoc", "void"])
def test_what_is_no_floating_tensor_is_refused(wrong, kind, rounding):
    with pytest.raises(TypeError, match=f"floating-point tensor, not {kind}; convert it first"):
        quantize(wrong, "fp16", rounding)


BITS = torch.zeros(2, dtype=torch.uint8)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"format": "fp17"}, ValueError, "unknown format 'fp17'; known formats: .*fp16"),
        ({"format": 16}, TypeError, "a format is .* not 16"),
        ({"format": torch.float16}, TypeError, "a format is .* not torch.float16"),
        ({"rounding": "nearest"}, ValueError, "unknown rounding 'nearest'; known: near, .*void"),
        ({"rounding": None}, ValueError, "unknown rounding None; known: near, "),
        ({"overflow": "wrap"}, ValueError, "unknown overflow 'wrap'; known: saturate, inf"),
        ({"scale": 0}, ValueError, "scale must be .* not 0"),
        ({"scale": -1.0}, ValueError, "scale must be .* not -1.0"),
        ({"scale": math.inf}, ValueError, "scale must be .* not inf"),
        ({"scale": math.nan}, ValueError, "scale must be .* not nan"),
        ({"scale": "big"}, ValueError, "scale must be .* not 'big'"),
        ({"scale": torch.tensor([1.0, 0.0])}, ValueError, "scale must be "),
        ({"scale": torch.tensor([1.0, -2.0])}, ValueError, "scale must be "),
        ({"scale": torch.tensor([1.0, math.nan])}, ValueError, "scale must be "),
        ({"scale": torch.tensor([1.0, math.inf])}, ValueError, "scale must be "),
        ({"scale": torch.ones(3)}, (ValueError, RuntimeError), "3"),
        ({"format": "mxfp4", "axis": 1}, (ValueError, IndexError), "axis.* 1"),
        ({"format": "mxfp4", "axis": -2}, (ValueError, IndexError), "axis.* -2"),
        ({"format": "mxfp4", "axis": 0.5}, TypeError, "axis .*0.5"),
        ({"random_bits": 0}, ValueError, "random_bits .* 0"),
        ({"random_bits": -3}, ValueError, "random_bits .* -3"),
        ({"random_bits": 1000}, ValueError, "random_bits .* 1000"),
        ({"random_bits": 2.5}, TypeError, "random_bits .* 2.5"),
        ({"random_bits": "many"}, TypeError, "random_bits .* 'many'"),
        ({"random_bits": torch.zeros(2)}, (TypeError, ValueError), "random_bits .*float32"),
        ({"random_bits": BITS.bool()}, (TypeError, ValueError), "random_bits .*bool"),
        ({"random_bits": BITS.long()}, (TypeError, ValueError), "random_bits .*int64"),
        ({"random_bits": BITS[:1]}, ValueError, "random_bits .*1"),
        ({"seed": 1.5}, TypeError, "seed .* 1.5"),
        ({"seed": "zero"}, TypeError, "seed .* 'zero'"),
        ({"seed": torch.zeros(2).long()}, (TypeError, ValueError), "seed "),
        ({"seed": torch.tensor(1.5)}, (TypeError, ValueError), "seed "),
    ],
    ids=str,
)
def test_a_wrong_argument_is_named_with_what_would_be_right(arguments, error, message):
    with pytest.raises(error, match=message):
        quantize(torch.ones(2), **{"format": "fp16", "rounding": "stoc", **arguments})


@pytest.mark.parametrize("rounding", ["near", "stoc", "down"])
@pytest.mark.parametrize("scale", [None, 0.5, "auto"])
@pytest.mark.parametrize("name", WITHOUT_NAN)
def test_nan_is_refused_where_the_format_has_none(name, scale, rounding):
    for dtype in (torch.float16, torch.float32, torch.float64):
        x = torch.tensor([1.0, math.nan, math.inf], dtype=dtype)
        for overflow in ("saturate", "inf"):
            with pytest.raises(ValueError, match=f"{name} has no NaN"):
                quantize(x, name, rounding, scale=scale, overflow=overflow)
        assert not quantize(x[[0, 2]], name, rounding, scale=scale).isnan().any()


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"forward": None}, TypeError, "None"),
        ({"forward": 16}, TypeError, "16"),
        ({"forward": "fp17"}, ValueError, "unknown format 'fp17'"),
        ({"forward": "fp16", "backward": "fp17"}, ValueError, "unknown format 'fp17'"),
        ({"forward": "fp16", "backward": 8}, TypeError, "8"),
    ],
    ids=str,
)
def test_a_wrong_module_is_refused_when_it_is_made(arguments, error, message):
    with pytest.raises(error, match=message):
        Quantize(**arguments)


def test_a_module_refuses_what_is_no_floating_tensor():
    with pytest.raises(TypeError, match="floating-point tensor, not torch.int64"):
        Quantize("fp16")(torch.tensor([1, 2]))


@pytest.mark.parametrize("name", WITHOUT_NAN)
def test_a_module_shows_the_nan_of_a_diverged_run(name):
    """In formats without NaN too: it is no value, and must not become one."""
    result = Quantize(name)(torch.tensor([1.0, math.nan]))
    assert result.isnan().tolist() == [False, True]
