"""Rounding under ``torch.func``'s transforms is that of the tensors it is applied to."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

import halp

torch.manual_seed(0)
X, W = 100 * torch.randn(3, 5), torch.randn(3, 5)
#: PyTorch runs some operations of a vectorized function one by one, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")


@pytest.mark.parametrize("rounding", ["near", "zero", "up", "stoc"])
@pytest.mark.parametrize("format", ["fp8_e4m3", "fixed8", "mxfp4", "fp16", "e5m7"])
def test_each_row_is_rounded_as_it_is_alone(format, rounding):
    for scale, x in itertools.product((None, "auto", 0.25), (X, X.double())):

        def quantize(x: Tensor, scale=scale) -> Tensor:
            return halp.quantize(x, format, rounding, scale=scale, seed=3)

        assert torch.equal(vmap(quantize)(x), torch.stack(list(map(quantize, x)))), scale


LAYERS = pytest.mark.parametrize(
    "make",
    [
        lambda: halp.Quantize("fp8_e4m3"),
        lambda: halp.Quantize("fp8_e4m3", "fp8_e5m2", clip_gradient=True),
        lambda: halp.Quantize(halp.Precision("fixed8", scale="auto"), "fp16"),
        lambda: halp.Quantize(halp.Precision("fp8_e4m3", "stoc"), "fp8_e5m2"),
    ],
    ids=["forward", "clipped", "auto", "stoc"],
)


def loss_with(layer: halp.Quantize, x: Tensor, w: Tensor) -> Tensor:
    """Return a loss at the layer's first call."""
    layer.calls = torch.zeros_like(layer.calls)
    return (layer(x) * w * 300).square().sum()


def gradient(layer: halp.Quantize, x: Tensor, w: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss_with(layer, x, w).backward()
    assert x.grad is not None
    return x.grad


@LAYERS
def test_a_functions_gradient_through_a_layer_is_that_of_backward(make):
    layer = make()
    computed = grad(lambda x: loss_with(layer, x, W))(10 * X)
    assert torch.equal(computed, gradient(layer, 10 * X, W))
    layer(X)  # what is left of the transform disturbs no later call


@LAYERS
def test_gradients_by_sample_are_those_of_each_sample(make):
    layer = make()
    computed = vmap(grad(lambda x, w: loss_with(layer, x, w)))(10 * X, W)
    each = [gradient(layer, x, w) for x, w in zip(10 * X, W, strict=True)]
    assert torch.equal(computed, torch.stack(each))


def test_the_jacobian_of_rounding_is_the_identity():
    jacobian = jacrev(halp.Quantize("fp8_e4m3"))(X[0])
    assert torch.equal(jacobian, torch.eye(5))


def test_calls_are_counted_within_a_transform_and_stay_plain():
    layer = halp.Quantize(halp.Precision("fp8_e4m3", "stoc"))
    vmap(grad(lambda x: layer(x).sum()))(X)
    grad(lambda x: layer(x).sum())(X)
    assert not torch._C._functorch.is_functorch_wrapped_tensor(layer.calls)
    assert layer.calls.item() == 2
