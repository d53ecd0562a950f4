"""Convolutions of any dimension, plain and transposed: linear in the input and in the weight."""

from typing import Any

import torch
from torch import Tensor

from halp.bitcenter.dispatch import register_rule
from halp.bitcenter.operands import Operand
from halp.bitcenter.rules.linear import bilinear

aten = torch.ops.aten


@register_rule(aten.convolution.default)
def convolution(x: Operand, weight: Operand, bias: Operand | None, *geometry: Any) -> Tensor | None:
    """``δ(x ∗ w + b) = e_x ∗ (u_w + e_w) + u_x ∗ e_w + e_b``, one kernel."""
    delta = bilinear(lambda x, w: torch.convolution(x, w, None, *geometry), x, weight)
    if bias is None or bias.delta is None:
        return delta
    channels = bias.delta.view(-1, *[1] * (len(weight.shape) - 2))
    if delta is None:
        shape = torch.convolution(x.offset, weight.offset, None, *geometry)
        return channels.expand_as(shape).contiguous()
    return delta.add_(channels)


@register_rule(aten.convolution_backward.default)
def convolution_backward(
    gradient: Operand,
    x: Operand,
    weight: Operand,
    bias_sizes: list[int] | None,
    *geometry_and_mask: Any,
) -> tuple[Tensor | None, ...]:
    """Of the input: linear in gradient and weight; of the weight: in gradient and input."""
    *geometry, wanted = geometry_and_mask

    def backward(index: int, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        only = [i == index for i in range(3)]
        return aten.convolution_backward(gradient, x, weight, bias_sizes, *geometry, only)[index]

    like = next(z.delta for z in (gradient, x, weight) if z.delta is not None)
    any_x, any_weight = (like.new_empty(z.shape) for z in (x, weight))  # only a shape is read
    return (
        bilinear(lambda g, w: backward(0, g, any_x, w), gradient, weight) if wanted[0] else None,
        bilinear(lambda g, x: backward(1, g, x, any_weight), gradient, x) if wanted[1] else None,
        backward(2, gradient.delta, any_x, any_weight)
        if wanted[2] and gradient.delta is not None
        else None,
    )
