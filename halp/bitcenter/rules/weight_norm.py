"""Weight normalization (T. Salimans and D. Kingma, arXiv 1602.07868): ``w = g·v / ‖v‖``.

PyTorch's fused operations run as the plain ones that define them.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from halp.bitcenter.dispatch import register_handler
from halp.bitcenter.tensor import BitCenteredTensor

aten = torch.ops.aten


@register_handler(aten._weight_norm_interface.default)
def weight_norm(
    func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict
) -> tuple[Tensor, Tensor]:
    """Return w, and the norms of the slices of v along a dimension."""
    return _weight_norm(*args, **kwargs)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norms = v.square().sum(_others(v, dim), keepdim=True).sqrt()
    return v * (g / norms), norms


@register_handler(aten._weight_norm_interface_backward.default)
def weight_norm_backward(
    func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict
) -> tuple[Tensor, Tensor]:
    """``∂v = (g/‖v‖)·(∂w − v·⟨∂w, v⟩/‖v‖²)`` and ``∂g = ⟨∂w, v⟩/‖v‖``."""
    return _weight_norm_backward(*args, **kwargs)


def _weight_norm_backward(
    gradient: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    along = (gradient * v).sum(_others(v, dim), keepdim=True) / norms
    return (g / norms) * (gradient - v * (along / norms)), along


def _others(v: Any, dim: int) -> list[int]:
    return [d for d in range(v.dim()) if d != dim % v.dim()]
