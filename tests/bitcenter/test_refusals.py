"""What a bit-centered model cannot do is refused with what would do."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import halp


def test_rounding_a_parameter_says_how_to_take_its_value():
    layer = halp.bit_center(nn.Linear(4, 3))
    with pytest.raises(NotImplementedError, match=r"take halp\.value\(t\)"):
        halp.quantize(layer.weight, "fp8_e4m3")
    layer.weight.delta.fill_(0.25)
    expected = halp.quantize(layer.weight.offset + 0.25, "fp8_e4m3")
    assert torch.equal(halp.quantize(halp.value(layer.weight), "fp8_e4m3"), expected)


def test_a_rounding_layer_in_the_model_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4), halp.Quantize("fp8_e4m3"), nn.Linear(4, 3))
    with pytest.raises(NotImplementedError, match=r"leave halp\.Quantize out"):
        halp.bit_center(model)(torch.ones(2, 4))


def attend(model: nn.MultiheadAttention, x: torch.Tensor) -> None:
    model(x, x, x, need_weights=False)[0].square().sum().backward()


def test_fused_attention_names_the_form_that_works():
    model = halp.bit_center(nn.MultiheadAttention(4, 2, batch_first=True))
    with pytest.raises(NotImplementedError, match=r"SDPBackend\.MATH"):
        attend(model, torch.ones(1, 3, 4))


def test_and_it_works():
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(4, 2, batch_first=True).double()
    model = halp.bit_center(copy.deepcopy(plain), rounding="void")
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.delta.fill_(0.01)
            q.add_(0.01)
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    with sdpa_kernel(SDPBackend.MATH):
        attend(model, x)
        attend(plain, x)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert (halp.value(p.grad) - q.grad).norm() <= 1e-12 * q.grad.norm()
