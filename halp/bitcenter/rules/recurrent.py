"""The fused LSTM cell that CUDA uses, as the operations that it stands for.

A whole recurrent layer in one operation (oneDNN, cuDNN) has no rule: see `halp.recurrent`.
"""

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from halp.bitcenter.dispatch import register_handler
from halp.bitcenter.tensor import BitCenteredTensor

aten = torch.ops.aten


@register_handler(aten._thnn_fused_lstm_cell.default)
def lstm_cell(
    func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict
) -> tuple[Tensor, Tensor, Tensor]:
    """``c′ = σ(f)·c + σ(i)·tanh(g)``, ``h′ = σ(o)·tanh(c′)`` with the gates i, f, g, o.

    The third result keeps the four activated gates for the backward pass.
    """
    of_input, of_hidden, c, *biases = args
    gates = of_input + of_hidden
    for bias in biases:
        gates = gates if bias is None else gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    new_c = f * c + i * g
    return o * new_c.tanh(), new_c, torch.cat([i, f, g, o], 1)


@register_handler(aten._thnn_fused_lstm_cell_backward_impl.default)
def lstm_cell_backward(
    func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict
) -> tuple[Any, ...]:
    """Return the gradients of the gates, of c and of the biases."""
    of_h, of_c, c, new_c, workspace, has_bias = args
    i, f, g, o = workspace.chunk(4, 1)
    squashed = new_c.tanh()
    total = of_c
    of_o = torch.zeros_like(o)
    if of_h is not None:
        of_o = of_h * squashed
        through_h = aten.tanh_backward(of_h * o, squashed)
        total = through_h if total is None else total + through_h
    of_gates = torch.cat(
        [
            aten.sigmoid_backward(total * g, i),
            aten.sigmoid_backward(total * c, f),
            aten.tanh_backward(total * i, g),
            aten.sigmoid_backward(of_o, o),
        ],
        1,
    )
    return of_gates, total * f, of_gates.sum(0) if has_bias else None
