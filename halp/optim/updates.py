"""The arithmetic of an update: in full precision, or rounded to a format."""

from dataclasses import replace
from typing import Any

from torch import Tensor
from torch.optim.sgd import sgd

from halp.optim.base import Solver
from halp.precision import Rounder


class FullPrecision(Solver):
    """The update of the solvers in full precision: PyTorch's own, ``foreach`` included."""

    def __init__(self, *args: Any, foreach: bool | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self.defaults["foreach"] = foreach
        for group in self.param_groups:
            group.setdefault("foreach", foreach)

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        buffers = [self.state[p].get("momentum_buffer") for p in parameters]
        sgd(
            parameters,
            gradients,
            buffers,
            has_sparse_grad=False,
            foreach=group["foreach"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=0.0,
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"] != 0:
            for p, buffer in zip(parameters, buffers, strict=True):
                self.state[p]["momentum_buffer"] = buffer


class LowPrecision(Solver):
    """The update of the solvers in low precision, one simulated kernel a parameter.

    It reads gradient, momentum buffer and iterate on their grids, computes wide, and rounds the
    buffer and the iterate once each.
    """

    #: What the update moves, for whoever counts.
    iterate_name = "weights"

    def _note(self, p: Tensor, what: str, before: Tensor, after: Tensor) -> None:
        """Tell who looks on that something of a parameter has been rounded."""
        if self.watch is not None:
            precision = self._rounder(p).precision
            if what == self.iterate_name and "scale" in self.state[p]:
                precision = replace(precision, scale=self.state[p]["scale"])
            self.watch.rounded(p, what, before, after, precision)

    def _iterate(self, p: Tensor) -> Tensor:
        """Return what the update moves: the parameter, or its delta."""
        return p

    def _rounder(self, p: Tensor) -> Rounder:
        """Return what rounds the iterate and its momentum buffer."""
        raise NotImplementedError

    def _stored_iterate(self, p: Tensor, iterate: Tensor) -> Tensor:
        """Return the new iterate on its grid."""
        return self._rounder(p)(iterate)

    def _stored_momentum(self, p: Tensor, buffer: Tensor) -> Tensor:
        iterate = self._iterate(p)  # to nearest, so that no random bits of the run are used up
        copy = buffer.detach().to(device=iterate.device, dtype=iterate.dtype, copy=True)
        return self._rounder(p).precision.nearest(copy)

    def _gradients(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        parameters, gradients = super()._gradients(group)
        if group["maximize"]:
            gradients = [-gradient for gradient in gradients]
        decay = group["weight_decay"]
        if decay != 0:
            iterates = map(self._iterate, parameters)
            gradients = [g.add(w, alpha=decay) for g, w in zip(gradients, iterates, strict=True)]
        return parameters, gradients

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        momentum, lr = group["momentum"], float(group["lr"])
        for p, gradient in zip(parameters, gradients, strict=True):
            iterate, rounder, direction = self._iterate(p), self._rounder(p), gradient
            if momentum != 0:
                buffer = gradient
                if "momentum_buffer" in self.state[p]:
                    buffer = gradient.add(self.state[p]["momentum_buffer"], alpha=momentum)
                self.state[p]["momentum_buffer"] = rounder(buffer)
                self._note(p, "momentum", buffer, self.state[p]["momentum_buffer"])
                direction = gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
            wide = iterate.sub(direction, alpha=lr)
            iterate.copy_(self._stored_iterate(p, wide))
            self._note(p, self.iterate_name, wide, iterate)
