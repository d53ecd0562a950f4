"""Softmax and the losses: one kernel each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halp.bitcenter.cache import Recipe, Recipes
from halp.bitcenter.dispatch import register_recipe, register_rule
from halp.bitcenter.offsets import EXACT, LOG_PROBABILITY, LOW
from halp.bitcenter.operands import Operand

aten = torch.ops.aten

_MEAN, _SUM = 1, 2


@register_rule(aten._log_softmax.default)
def log_softmax(x: Operand, dim: int, half_to_float: bool) -> Tensor:
    """Per row: ``e′ − log1p(Σ p_k·expm1(e′_k))`` with ``e′ = e − e_r``, r the likeliest class.

    p is the softmax of the unrounded offset, r taken with the deltas: without it, the rows of a
    confident model cancel. Where the sum is not small, ``log Σ p_k·exp(e′_k)`` does not cancel; it
    is taken relative to class r.
    """
    log_probability = x.keep(*_log_probability(dim), form=LOG_PROBABILITY)
    full = log_probability + x.delta
    top, likeliest = full.max(dim, keepdim=True)
    shifted = x.delta - x.delta.gather(dim, likeliest)
    gain = (log_probability.exp() * torch.expm1(shifted)).sum(dim, keepdim=True)
    large = (full - top).exp().sum(dim, keepdim=True).log_()
    large += log_probability.gather(dim, likeliest)
    return shifted - torch.where(gain.abs() <= 0.5, torch.log1p(gain), large)


@register_rule(aten._softmax.default)
def softmax(x: Operand, dim: int, half_to_float: bool) -> Tensor:
    """``p_j·expm1(δ log p_j)``."""
    log_probability = x.keep(*_log_probability(dim), form=LOG_PROBABILITY)
    return _exp_change(log_probability, log_softmax(x, dim, half_to_float))


def _log_probability(dim: int) -> tuple[Any, Callable[[Tensor], Tensor]]:
    return ("log-probability", dim), lambda u: torch.log_softmax(u, dim)


@register_recipe(aten._log_softmax.default)
def log_softmax_of_kept(x: Operand, dim: int, half_to_float: bool) -> Recipes:
    """Of the offset: the logarithms of the probabilities that are kept."""
    return _from_probabilities(x, dim, lambda log_p: log_p)


@register_recipe(aten._softmax.default)
def softmax_of_kept(x: Operand, dim: int, half_to_float: bool) -> Recipes:
    """Of the offset: the probabilities that are kept."""
    return _from_probabilities(x, dim, torch.exp)


def _from_probabilities(x: Operand, dim: int, compute: Callable[[Tensor], Tensor]) -> Recipes:
    (source,) = x.sources(*_log_probability(dim), form=LOG_PROBABILITY)
    return {
        LOW: Recipe((source,), lambda log_p: x.nearest(compute(log_p))),
        EXACT: Recipe((source,), compute),
    }


def _exp_change(u: Tensor, e: Tensor) -> Tensor:
    """``exp(u + e) − exp(u) = sgn(e)·exp(max(u, u + e))·(−expm1(−|e|))``: nothing overflows."""
    size = torch.exp(torch.maximum(u, u + e)) * torch.expm1(-e.abs())
    return torch.copysign(size, e)


@register_rule(aten._log_softmax_backward_data.default)
def log_softmax_backward(gradient: Operand, y: Operand, dim: int, input_dtype: Any) -> Tensor:
    """``δ(g − p·Σg) = e_g − p·Σe_g − δp·Σ(u_g + e_g)``, p = exp(y_o), ``δp = p·expm1(y_d)``."""
    delta = torch.zeros_like(y.exact)
    if y.delta is not None:
        delta = -_exp_change(y.exact, y.delta) * _full(gradient).sum(dim, keepdim=True)
    if gradient.delta is not None:
        sum_of_deltas = gradient.delta.sum(dim, keepdim=True)
        delta = delta + gradient.delta - torch.exp(y.exact) * sum_of_deltas
    return delta


@register_rule(aten._softmax_backward_data.default)
def softmax_backward(gradient: Operand, y: Operand, dim: int, input_dtype: Any) -> Tensor:
    """``y·(g − Σ y·g)``: with s = g − Σ y·g, ``δ = y_d·(s_o + δs) + y_o·δs``."""
    p, g = y.exact, gradient.offset
    e_y = torch.zeros_like(p) if y.delta is None else y.delta
    e_g = torch.zeros_like(g) if gradient.delta is None else gradient.delta
    centered = g - (p * g).sum(dim, keepdim=True)
    change = e_g - (e_y * (g + e_g) + p * e_g).sum(dim, keepdim=True)
    return e_y * (centered + change) + p * change


def _full(x: Operand) -> Tensor:
    return x.offset if x.delta is None else x.offset + x.delta


@register_rule(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    x: Operand, target: Tensor, weight: Operand | None, reduction: int, ignore_index: int
) -> tuple[Tensor, None]:
    """Linear in the log-probabilities; the total weight does not depend on them."""
    forward = aten.nll_loss_forward.default
    if x.delta.dim() > 2:
        forward = aten.nll_loss2d_forward.default
    class_weight = None if weight is None else weight.offset
    return forward(x.delta, target, class_weight, reduction, ignore_index)[0], None


@register_rule(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    gradient: Operand,
    x: Operand,
    target: Tensor,
    weight: Operand | None,
    reduction: int,
    ignore_index: int,
    total_weight: Any,
) -> Tensor | None:
    """Linear in the gradient; of the log-probabilities only the shape is read."""
    if gradient.delta is None:
        return None
    shape_only = gradient.delta.new_empty(x.shape)
    backward = aten.nll_loss_backward.default
    if len(x.shape) > 2:
        backward = aten.nll_loss2d_backward.default
    class_weight = None if weight is None else weight.offset
    total = total_weight.exact.to(shape_only.dtype)
    return backward(
        gradient.delta, shape_only, target, class_weight, reduction, ignore_index, total
    )


@register_rule(aten.mse_loss.default)
def mse_loss(x: Operand, target: Operand, reduction: int = _MEAN) -> Tensor:
    """With the residual r = x − y: ``δ(r²) = e_r·(2u_r + e_r)``, r unrounded lest it cancel."""
    e = _residual_delta(x, target)
    squares = e * (2 * x.keep("residual", torch.sub, target) + e)
    return _reduced(squares, reduction)


@register_rule(aten.mse_loss_backward.default)
def mse_loss_backward(gradient: Operand, x: Operand, target: Operand, reduction: int) -> Tensor:
    """``δ(c·g·r) = c·(e_r·(u_g + e_g) + u_r·e_g)`` with c = 2, or 2/n for the mean."""
    e = _residual_delta(x, target)
    factor = 2 / e.numel() if reduction == _MEAN else 2
    delta = e * _full(gradient)
    if gradient.delta is not None:
        delta = delta + x.keep("residual", torch.sub, target) * gradient.delta
    return factor * delta


def _residual_delta(x: Operand, target: Operand) -> Tensor:
    if target.delta is None:
        return x.delta.expand(torch.broadcast_shapes(x.shape, target.shape))
    return -target.delta if x.delta is None else x.delta - target.delta


@register_rule(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(
    x: Operand,
    target: Operand,
    weight: Operand | None = None,
    pos_weight: Operand | None = None,
    reduction: int = _MEAN,
) -> Tensor:
    """``(1 − t)·x + l·log(1 + exp(−x))`` with ``l = 1 + (pos_weight − 1)·t``, t constant.

    ``δ log(1 + exp(−x)) = log1p(σ(−u)·expm1(−e))``.
    """
    if target.delta is not None:
        raise NotImplementedError("the target of a bit-centered binary cross-entropy is a constant")
    miss = x.keep("σ(−u)", lambda u: torch.sigmoid(-u))
    change = torch.log1p(miss * torch.expm1(-x.delta))
    log_weight = 1 if pos_weight is None else 1 + (pos_weight.offset - 1) * target.offset
    delta = (1 - target.offset) * x.delta + log_weight * change
    if weight is not None:
        delta = delta * weight.offset
    return _reduced(delta, reduction)


def _reduced(t: Tensor, reduction: int) -> Tensor:
    if reduction == _MEAN:
        return t.mean()
    return t.sum() if reduction == _SUM else t
