"""Each rule's backward pass gives the change of the gradient, however small the deltas are.

The gradient differentiated is that of a loss whose own slope changes, so that what flows back has
a delta. The truth is PyTorch's autograd in float64: the difference of two gradients where float64
holds it, and the second derivative times the delta where the delta is small.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import halp
from halp.bitcenter import BitCenteredTensor
from tests.bitcenter.arithmetic_cases import BROADCAST, PRODUCTS
from tests.bitcenter.rule_cases import DECOMPOSED, RULES
from tests.bitcenter.test_rules import bit_centering, by_name, draw

DIFFERENTIABLE = [rule for rule in RULES + DECOMPOSED if rule.differentiable]
BINARY = [rule for rule in BROADCAST + PRODUCTS if len(rule.domains) == 2]


def loss_of(result: Tensor) -> Tensor:
    """Return a loss with an uneven slope that depends on the result."""
    weight = torch.linspace(0.5, 1.5, result.numel(), dtype=torch.float64).view(result.shape)
    return (weight * result).sum() + (result * result).sum() / 2


def gradients(run: Callable, operands: list[Tensor], **options: bool) -> list[Tensor]:
    """Return the gradient with respect to each operand."""
    leaves = [x if x.requires_grad else x.detach().clone().requires_grad_() for x in operands]
    return list(torch.autograd.grad(loss_of(run(*leaves)), leaves, **options))


def true_change(run: Callable, offsets: list[Tensor], deltas: list[Tensor]) -> list[Tensor]:
    """Return ∇(u + e) − ∇(u), as a difference or as the slope half way times e."""
    if max(e.abs().max() for e in deltas) > 1e-4:
        before = gradients(run, offsets)
        after = gradients(run, [u + e for u, e in zip(offsets, deltas, strict=True)])
        return [b - a for a, b in zip(before, after, strict=True)]
    middle = [(u + e / 2).requires_grad_() for u, e in zip(offsets, deltas, strict=True)]
    slopes = gradients(run, middle, create_graph=True)
    product = sum((g * e).sum() for g, e in zip(slopes, deltas, strict=True))
    return list(torch.autograd.grad(product, middle))


def assert_right(computed: Tensor, true: Tensor, relative: float = 1e-7) -> None:
    assert type(computed) is Tensor
    assert computed.shape == true.shape
    assert (computed - true).norm() <= relative * true.norm()


@by_name(DIFFERENTIABLE)
def test_gradients_of_bit_centered_operands_change_by_their_deltas(rule):
    for scale in (1e-1, 1e-2, 1e-6, 1e-12, 1e-30):
        offsets, deltas = draw(rule, scale, torch.float64)
        operands = [x.requires_grad_() for x in map(bit_centering(), offsets, deltas)]
        computed = gradients(rule.run, operands)
        at_offset = gradients(rule.run, offsets)
        changes = true_change(rule.run, offsets, deltas)
        for gradient, offset, change in zip(computed, at_offset, changes, strict=True):
            torch.testing.assert_close(gradient.offset, offset, rtol=1e-12, atol=1e-14)
            assert_right(gradient.delta, change)


@pytest.mark.parametrize("plain", [0, 1], ids=["left", "right"])
@by_name(BINARY)
def test_gradients_beside_a_constant(rule, plain):
    for scale in (1e-2, 1e-6, 1e-30):
        offsets, deltas = draw(rule, scale, torch.float64)
        constant, bit_centered = offsets[plain], 1 - plain

        def run(x: Tensor, constant: Tensor = constant) -> Tensor:
            return rule.run(constant, x) if plain == 0 else rule.run(x, constant)

        u, e = offsets[bit_centered], deltas[bit_centered]
        (computed,) = gradients(run, [bit_centering()(u, e).requires_grad_()])
        (true,) = true_change(run, [u], [e])
        assert_right(computed.delta, true)


#: Two operands of one shape whose gradients do not cancel if they are the same tensor.
ALIKE = [
    rule
    for rule in DIFFERENTIABLE
    if len(rule.domains) == 2
    and rule.domains[0].shape == rule.domains[1].shape
    and not rule.name.startswith("div")
]


@by_name(ALIKE)
def test_one_tensor_as_both_operands_gets_the_sum_of_their_gradients(rule):
    (u, _), (e, _) = draw(rule, 1e-6, torch.float64)

    def run(x: Tensor) -> Tensor:
        return rule.run(x, 2 * x)

    (computed,) = gradients(run, [bit_centering()(u, e).requires_grad_()])
    (true,) = true_change(run, [u], [e])
    assert_right(computed.delta, true)


@pytest.mark.parametrize("scale", [1e-2, 1e-5, 1e-8])
@pytest.mark.parametrize(
    ("run", "largest"), [(torch.tanh, 4.5), (torch.sigmoid, 9.0)], ids=["tanh", "sigmoid"]
)
def test_in_fp16_the_gradient_is_right_near_saturation(run, largest, scale):
    """There the slope 1 − y² of a rounded y would be anything; that of a rounded u is not."""
    torch.manual_seed(0)
    make = bit_centering("fp16", "near")
    u = torch.linspace(-largest, largest, 64)
    # The factors, and so the gradient that flows back, change in the same direction as the slope.
    factor = torch.ones(64)
    change = halp.quantize(scale * torch.rand(64), "fp16", scale="auto")
    for e in (torch.zeros(64), -u.sign() * change):
        x = make(u, e).requires_grad_()
        (run(x) * BitCenteredTensor(factor, change, x.context)).sum().backward()
        middle = (u.double() + e.double() / 2).requires_grad_()
        (slope,) = torch.autograd.grad(run(middle).sum(), middle, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), middle)
        full_slope = slope.detach() + curvature * e.double() / 2
        true = change.double() * full_slope + factor * curvature * e.double()
        assert ((x.grad.delta - true).abs() <= 5e-3 * true.abs()).all()
