"""Recurrent layers step by step: PyTorch's fused layers are one operation on all time steps.

On the CPU oneDNN and on CUDA cuDNN compute a whole ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN`` at once.
To round every result, or to carry deltas, PyTorch has to go through the layer's cell instead.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

_LAYERS = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


@contextmanager
def unfused() -> Iterator[None]:
    """Within the block, recurrent layers run through their cells (and convolutions are slow)."""
    onednn, cudnn = torch._C._get_mkldnn_enabled(), torch._C._get_cudnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


class UnfusedLayers(TorchFunctionMode):
    """While active, recurrent layers, and only they, run unfused."""

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if func not in _LAYERS:
            return func(*args, **(kwargs or {}))
        with unfused():
            return func(*args, **(kwargs or {}))


def unfuse(module: nn.Module, needed: Callable[[nn.Module], bool]) -> list[Any]:
    """Let a recurrent layer run unfused whenever it is ``needed``; return the hooks' handles."""
    return [
        module.register_forward_pre_hook(_EnterUnfused(needed)),
        module.register_forward_hook(_leave_unfused, always_call=True),
    ]


class _EnterUnfused:
    """A hook that can be copied and pickled with its module."""

    def __init__(self, needed: Callable[[nn.Module], bool]) -> None:
        self.needed = needed

    def __call__(self, module: nn.Module, _: Any) -> None:
        if self.needed(module):
            stack = module.__dict__["_halp_unfused"] = ExitStack()
            stack.enter_context(unfused())


def _leave_unfused(module: nn.Module, *_: Any) -> None:
    stack = module.__dict__.pop("_halp_unfused", None)
    if stack is not None:
        stack.close()
