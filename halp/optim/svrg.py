"""Stochastic variance-reduced gradient, in full and in low precision (Johnson & Zhang, 2013)."""

from typing import Any

from torch import Tensor

from halp.optim.base import Closure
from halp.optim.preserve import preserved
from halp.optim.sgd import Emulated
from halp.optim.snapshots import SnapshotSolver
from halp.optim.updates import FullPrecision


class VarianceReduced(SnapshotSolver):
    """What svrg and lp-svrg share: plain parameters, and a gradient of three terms.

    A step evaluates its closure at w̃ and then at w, with the same random state (dropout,
    augmentation), so that the closure is required. Afterwards ``p.grad`` is ∇f_b(w).
    """

    kept_from_snapshot = ("snapshot",)

    def _recenter(self) -> None:
        for p in self._parameters():
            self.state[p]["snapshot"] = p.detach().clone()

    def _evaluate(self, closure: Closure | None) -> Any:
        if closure is None:
            raise TypeError(
                f"{type(self).__name__}.step() needs a closure, which it evaluates at the snapshot "
                "and at the current point"
            )
        parameters = self._parameters()
        with preserved(self.buffers):
            current = [p.data for p in parameters]
            try:
                for p in parameters:
                    p.data = self.state[p]["snapshot"]
                    p.grad = None
                self._call(closure)
            finally:
                for p, data in zip(parameters, current, strict=True):
                    p.data = data
        self._gradients_at_snapshot = {p: p.grad for p in parameters}
        for p in parameters:
            p.grad = None
        return self._call(closure)

    def _gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor | None:
        full = self.state[p].get("full_gradient")
        terms = [(p.grad, 1), (self._gradients_at_snapshot.pop(p, None), -1), (full, 1)]
        gradient = None
        for term, sign in terms:
            if term is not None:
                gradient = sign * term if gradient is None else gradient.add(term, alpha=sign)
        return gradient


class SVRG(FullPrecision, VarianceReduced):
    """Full-precision SVRG: ``w ← w − lr·(∇f_b(w) − ∇f_b(w̃) + g̃)``.

    Its step evaluates the closure twice; see :class:`VarianceReduced`.

    Args:
        params: plain parameters, or groups of them.
        lr, momentum, weight_decay, nesterov, maximize, foreach: as in :class:`torch.optim.SGD`;
            momentum runs over the whole variance-reduced gradient.
        T: inner steps between two snapshots.
        buffers: ``model.buffers()``; they move once a step, at w.
    """

    solver_name = "SVRG"


class LPSVRG(Emulated, VarianceReduced):
    """Low-precision SVRG: SVRG's inner step with every result rounded to the format.

    g̃ is computed at w̃ in high precision and stored in the format; the inner steps are all low
    precision. The difference of two low-precision gradients leaves a noise floor.

    Args:
        params, lr, momentum, weight_decay, nesterov, maximize, T, buffers: see :class:`SVRG`.
        format, rounding, scale, seed: see :class:`LPSGD`.
    """

    solver_name = "LPSVRG"

    def _recenter(self) -> None:
        self._put_on_grid()
        super()._recenter()

    def _stored(self, p: Tensor, gradient: Tensor) -> Tensor:
        stored = self.rounder(gradient).to(p.dtype)
        self._note(p, "full gradient", gradient, stored)
        return stored
