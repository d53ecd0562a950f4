"""Rounding inside a model: values in the forward pass, gradients in the backward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from halp.calls import not_emulated
from halp.formats import Format
from halp.precision import Precision, as_wide
from halp.random_bits import stream_key
from halp.recomputation import regions_under_way, repeat_in


class Quantize(nn.Module):
    """Rounds its input, and optionally the gradient that comes back.

    The gradient of rounding is taken to be 1 (the straight-through estimator: Y. Bengio et al.,
    arXiv 1308.3432). Stochastic rounding draws new bits at every call; they are decided by
    PyTorch's global generator when the module is made, by the precision's seed, and by the count of
    calls, which is part of the module's state. A call that activation checkpointing recomputes is
    repeated with its own bits.

    Args:
        forward: what values are rounded to: a format, its name, or a :class:`halp.Precision` that
            also has rounding, scale, overflow and seed.
        backward: what gradients are rounded to, likewise; by default they are not.
        clip_gradient: the gradient is zero where the input lies beyond the range of ``forward``.

    Shape:
        Any; the result is like the input. float16 and bfloat16 are rounded in float32.

    Raises:
        TypeError, ValueError: no format, or an unknown one.

    Example:
        >>> layer = nn.Sequential(halp.Quantize("fp8_e4m3", "fp8_e5m2"), nn.Linear(8, 8))
    """

    calls: Tensor
    stream: Tensor

    def __init__(
        self,
        forward: str | Format | Precision,
        backward: str | Format | Precision | None = None,
        clip_gradient: bool = False,
    ) -> None:
        super().__init__()
        self.forward_precision = _precision(forward)
        self.backward_precision = None if backward is None else _precision(backward)
        self.clip_gradient = clip_gradient
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("stream", torch.randint(2**63 - 1, (), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x``, rounded."""
        if not x.is_floating_point():
            raise TypeError(f"Quantize takes a floating-point tensor, not {x.dtype}")
        call = self.calls
        if self._is_random:
            self._count(call)
        return _StraightThrough.apply(
            x,
            self.stream,
            call,
            self.forward_precision,
            self.backward_precision,
            self.clip_gradient,
        )

    def _count(self, call: Tensor) -> None:
        """Go on to the next call; never in place: compiled code may read it again in backward."""
        if torch.compiler.is_compiling():
            self.calls = call + 1
            return
        repeat_in(partial(self._again, call), self, regions_under_way())
        with torch._C._DisableFuncTorch():  # what belongs to a transform would outlive it
            self.calls = call + 1

    @contextmanager
    def _again(self, call: Tensor) -> Iterator[None]:
        """Within the block, activation checkpointing repeats calls from this one on."""
        now, self.calls = self.calls, call
        try:
            yield
        finally:
            self.calls = now

    @property
    def _is_random(self) -> bool:
        both = (self.forward_precision, self.backward_precision)
        return any(p is not None and p.rounding == "stoc" for p in both)

    def extra_repr(self) -> str:
        """Name the formats."""
        text = str(self.forward_precision)
        if self.backward_precision is not None:
            text += f", backward={self.backward_precision}"
        return text + (", clip_gradient=True" if self.clip_gradient else "")


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        stream: Tensor,
        call: Tensor,
        precision: Precision,
        backward: Precision | None,
        clip: bool,
    ) -> Tensor:
        with not_emulated():
            rounded = _rounded(as_wide(x), precision, stream, call, 0).to(x.dtype)
        return rounded.clone() if precision.rounding == "void" else rounded

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        x, stream, call, precision, ctx.backward_precision, clip = inputs
        with not_emulated():
            inside = precision.in_range(as_wide(x)) if clip else None
        ctx.save_for_backward(stream, call, inside)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        stream, call, inside = ctx.saved_tensors
        with not_emulated():
            if inside is not None:
                gradient = torch.where(inside, gradient, 0)
            if ctx.backward_precision is not None:
                wide = _rounded(as_wide(gradient), ctx.backward_precision, stream, call, 1)
                gradient = wide.to(gradient.dtype)
        return gradient, None, None, None, None, None


def _rounded(
    x: Tensor, precision: Precision, stream: Tensor, call: Tensor, direction: int
) -> Tensor:
    key = None
    if precision.rounding == "stoc":
        key = stream_key(stream ^ precision.seed, call, direction)
    return precision.round(x, key)


def _precision(given: str | Format | Precision) -> Precision:
    return given if isinstance(given, Precision) else Precision(given)  # type: ignore[arg-type]
