"""Stochastic gradient descent, in full and in low precision."""

from typing import Any

import torch
from torch import Tensor

from halp.emulation import Emulation
from halp.formats import Format
from halp.optim.base import Closure
from halp.optim.state import Saved
from halp.optim.updates import FullPrecision, LowPrecision
from halp.precision import Precision, Rounder
from halp.rounding import Scale


class SGD(FullPrecision):
    """Full-precision SGD: bit for bit :class:`torch.optim.SGD` without dampening.

    But for frozen parameters in which a gradient still lies: here they stand still.

    ``w ← w − lr·∇f_b(w)``. It takes part in the same loop as the other solvers and never asks for a
    snapshot.

    Args:
        params: plain parameters, or groups of them.
        lr, momentum, weight_decay, nesterov, maximize, foreach: as in :class:`torch.optim.SGD`.
    """

    solver_name = "SGD"


class Emulated(LowPrecision):
    """What the lp-* solvers share: plain parameters on the format's grid.

    The closure runs under :func:`halp.emulate`, so that every result of the forward and backward
    pass is rounded. Parameters that are not on the grid are rounded to nearest first.
    """

    solver_options: tuple[str, ...] = ("format", "rounding", "scale", "seed")

    def __init__(
        self,
        *args: Any,
        format: str | Format = "fp16",
        rounding: str = "near",
        scale: Scale = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        self.rounder = Rounder(Precision(format, rounding, scale, seed=seed))  # type: ignore[arg-type]
        super().__init__(*args, **options)

    def _rounder(self, p: Tensor) -> Rounder:
        return self.rounder

    def _call(self, closure: Closure) -> Any:
        with Emulation(self.rounder):
            return super()._call(closure)

    def _evaluate(self, closure: Closure | None) -> Any:
        self._put_on_grid()
        self.rounder.new_step()
        loss = super()._evaluate(closure)
        if closure is None:
            for p in filter(self._trains, self._parameters()):
                if p.grad is not None:
                    p.grad = self.rounder(p.grad)
        return loss

    @torch.no_grad()
    def _put_on_grid(self) -> None:
        """Round parameters that something else has written to: to nearest, whatever the mode.

        Rounded ones stay as they are. Which have been written to, no version tells for sure: NumPy
        and writes through ``.data`` leave it alone.
        """
        if self.rounder.precision.rounding == "void":
            return
        for p in self._parameters():
            rounded = self.rounder.precision.nearest(p)
            if not torch.equal(rounded, p):
                p.copy_(rounded)

    def _solver_state(self) -> dict[str, Any]:
        return {**super()._solver_state(), "stream_position": self.rounder.position}

    def _load(self, saved: Saved) -> None:
        super()._load(saved)
        if saved.solver is not None:
            self.rounder.position = saved.solver["stream_position"]


class LPSGD(Emulated):
    """Low-precision SGD: ``w ← w − lr·∇f_b(w)`` with every result rounded to the format.

    It stalls at the format's noise floor, which is what the bit-centered solvers are for.

    Args:
        params: plain parameters, or groups of them.
        lr, momentum, weight_decay, nesterov, maximize: as in :class:`torch.optim.SGD`.
        format: the number format of everything in a step.
        rounding: any mode of :func:`halp.quantize`.
        scale: of every tensor, see :func:`halp.quantize`; None is plain storage. In fixed point it
            is the step of the grid: all values then lie within ``±scale·2^(b−1)``.
        seed: names the random bits of ``"stoc"``.
    """

    solver_name = "LPSGD"
