"""Rounding sees the elements of a tensor, not its memory; the result is new and detached."""

import pytest
import torch

from halp import quantize
from tests.rounding.oracles import MODES

NAMES = ["fp32", "tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2fnuz", "fp4_e2m1", "e11m3", "fixed8"]
BLOCKED = ["mxfp8_e4m3", "mxint8"]

LAYOUTS = {
    "0-dim": lambda x: x[5, 3],
    "empty": lambda x: x[:0],
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[1::3, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 7),
    "expanded scalar": lambda x: x[2, 2].expand(3, 4),
    "channels last": lambda x: x.view(2, 4, 8, 8).to(memory_format=torch.channels_last),
    "offset": lambda x: x.reshape(-1)[1:],
    "reversed by a view": lambda x: x.flip(0).t()[::2],
    "half precision": lambda x: x.half().t(),
}
#: Everything that decides which code a tensor runs through.
WAYS = [
    {"rounding": rounding, "scale": scale, "overflow": overflow}
    for rounding in (*MODES, "stoc", "void")
    for scale in (None, 0.5, "auto")
    for overflow in ("saturate", "inf")
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", NAMES)
def test_layout_does_not_matter(name, layout):
    """Row-major order numbers the elements, and so the random bits."""
    x = LAYOUTS[layout](torch.randn(16, 32, generator=torch.Generator().manual_seed(0)))
    before = x.clone()
    for way in WAYS:
        result = quantize(x, name, **way, seed=3)
        assert result.shape == x.shape
        expected = quantize(before.contiguous().reshape(-1), name, **way, seed=3)
        assert torch.equal(result.reshape(-1), expected), way
        assert torch.equal(x, before), way


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", BLOCKED)
def test_layout_does_not_matter_to_blocks(name, layout):
    """Rows and columns do."""
    x = LAYOUTS[layout](torch.randn(16, 32, generator=torch.Generator().manual_seed(0)))
    before = x.clone()
    for way in WAYS:
        for axis in range(-x.dim(), x.dim()):
            result = quantize(x, name, **way, axis=axis, seed=3)
            assert torch.equal(
                result, quantize(before.contiguous(), name, **way, axis=axis, seed=3)
            )
            assert torch.equal(x, before), way


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(map(str, way.values())))
@pytest.mark.parametrize("name", [*NAMES, *BLOCKED])
def test_the_result_is_new_and_the_input_unchanged(name, way):
    for dtype in (torch.float32, torch.float64, torch.float16):
        x = torch.randn(100, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        before = x.detach().clone()
        result = quantize(x, name, **way)
        assert not result.requires_grad
        assert result.dtype == dtype
        result.fill_(7)
        assert torch.equal(x.detach(), before)
        assert x._version == 0


def test_a_parameter_gives_a_plain_tensor():
    result = quantize(torch.nn.Parameter(torch.ones(3)), "fp16")
    assert type(result) is torch.Tensor
