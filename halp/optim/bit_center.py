"""Bit-centering solvers: low-precision inner steps on the delta of bit-centered parameters."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halp.formats import FixedFormat
from halp.messages import quoted
from halp.optim.centered import BitCenterSolver
from halp.optim.shared import Shared


class BitCenterSGD(BitCenterSolver):
    """Bit-centering SGD: ``z ← Q(z − lr·(δ∇f_b + ∇f_b(w̃)))``, every T steps ``w̃ ← w̃ + z``.

    ∇f_b(w̃) is recomputed at every step and rounded to the format; its snapshot recenters, and does
    not read the loader. Where offsets are cached, the snapshot runs over the loader and keeps every
    batch's ∇f_b(w̃) + λw̃ too: a change of weight decay takes full effect at the next one, and a step
    is of one batch.

    Args:
        params: the parameters of a bit-centered model, or groups of them.
        lr, momentum, weight_decay, nesterov, maximize: as in :class:`torch.optim.SGD`.
        T: inner steps between two recenterings.
        buffers: ``model.buffers()``.
    """

    solver_name = "BitCenterSGD"
    reads_snapshot = False

    def _check_loader(self, loader: Iterable[Any]) -> None:
        if self._caches():
            super()._check_loader(loader)

    def _full_gradient(
        self,
        loader: Iterable[Any],
        closure: Callable[..., Any],
        weight: Callable[[Any], float] | None,
    ) -> tuple[float | None, list[Tensor | None]]:
        loss = None
        if self._caches():
            loss, _ = super()._full_gradient(loader, closure, weight)
        return loss, [None] * len(self._parameters())

    def _gradient_at_snapshot(self, p: Tensor) -> Tensor:
        gradient, cache = super()._gradient_at_snapshot(p), p.context.cache  # type: ignore[attr-defined]
        if cache is not None:
            offset = self._decayed(p, gradient, self._group_of(p))
            of_grad: Any = p.grad
            cache.keep_gradient(of_grad._offset, offset, of_grad.delta.dtype)
        return gradient

    def _gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor | None:
        delta = self._delta_gradient(p)
        if delta is None:
            return None
        cache = p.context.cache  # type: ignore[attr-defined]
        if cache is not None:
            return delta + cache.gradient(p.grad._offset, delta.dtype)  # type: ignore[union-attr]
        offset = self._decayed(p, p.grad._offset.tensor, group)  # type: ignore[union-attr]
        return delta + self._rounder(p)(offset).to(delta.dtype)


class BitCenterSVRG(BitCenterSolver):
    """HALP: ``z ← Q(z − lr·(δ∇f_b + g̃))``; every T steps ``w̃ ← w̃ + z`` and ``g̃ ← ∇f(w̃)``.

    De Sa et al., "High-Accuracy Low-Precision Training", arXiv 1803.03383. The inner steps are all
    low precision; z, g̃ and the momentum buffer are stored in the format of the model's
    :func:`halp.bit_center`, each on its own scale. A change of weight decay takes full effect at
    the next snapshot, since λw̃ is part of g̃.

    Args:
        params: the parameters of a bit-centered model, or groups of them.
        lr, momentum, weight_decay, nesterov, maximize: as in :class:`torch.optim.SGD`; momentum
            runs over the whole variance-reduced gradient v = δ∇f_b + g̃ + λz.
        T: inner steps between two snapshots.
        buffers: ``model.buffers()``; they do not move in a snapshot.
        max_norm: v is scaled down to at most this norm over all parameters. (Clipping ``p.grad``
            would clip the delta alone.)
        mu: of fixed-point formats: z of each parameter lies on multiples of ``‖g̃‖ / (mu · max)``,
            the format's ``max`` being ``2^(b−1) − 1``, and saturates. In the paper (section 4) it
            is the strong convexity of f: no optimum is further from w̃ than ‖g̃‖/μ. By default z is
            scaled to its own magnitude at every update, as in floating point.

    Raises:
        ValueError: ``max_norm`` or ``mu`` is not positive, or there is a ``mu`` and the format is
            not fixed-point.
    """

    solver_name = "BitCenterSVRG"
    solver_options: tuple[str, ...] = ("max_norm", "mu")

    max_norm: Shared[float | None] = Shared(None)
    mu: Shared[float | None] = Shared(None)

    def __init__(
        self,
        *args: Any,
        max_norm: float | None = None,
        mu: float | None = None,
        **options: Any,
    ) -> None:
        for name, number in (("max_norm", max_norm), ("mu", mu)):
            if number is not None and not 0 < number < float("inf"):
                raise ValueError(f"{name} must be positive or None, not {quoted(number)}")
        self.max_norm = max_norm
        self.mu = mu
        super().__init__(*args, **options)

    @property
    def saturated(self) -> int:
        """How many entries of z lay beyond their range in an update, in all steps together."""
        return sum(state.get("saturated", 0) for state in self.state.values())

    def _check_parameters(self) -> None:
        super()._check_parameters()
        if self.mu is None:
            return
        for context in self._contexts():
            format = context.precision.format
            if not isinstance(format, FixedFormat):
                raise ValueError(
                    f"mu={self.mu} is for fixed-point formats, and {format} is not one"
                )

    def _stored(self, p: Tensor, gradient: Tensor) -> Tensor:
        gradient = self._decayed(p, gradient, self._group_of(p))
        if self.mu is not None:
            self._set_scale(p, gradient.norm().item() / self.mu)
        stored = self._rounder(p)(gradient).to(p.delta.dtype)  # type: ignore[attr-defined]
        self._note(p, "full gradient", gradient, stored)
        return stored

    def _set_scale(self, p: Tensor, largest: float) -> None:
        """Give z the grid that ends at ``largest``; if that is zero, the last one stays."""
        scale = largest / p.context.precision.format.max  # type: ignore[attr-defined]
        held = torch.finfo(p.delta.dtype)  # type: ignore[attr-defined]
        if scale > held.max:
            raise ValueError(f"mu={self.mu} is too small: {p.delta.dtype} does not hold {scale:g}")  # type: ignore[attr-defined]
        if scale >= held.smallest_normal:
            self.state[p]["scale"] = scale

    def _stored_iterate(self, p: Tensor, iterate: Tensor) -> Tensor:
        scale = self.state[p].get("scale")
        if scale is not None:
            inside = replace(p.context.precision, scale=scale).in_range(iterate)  # type: ignore[attr-defined]
            beyond = iterate.numel() - int(inside.sum())
            self.state[p]["saturated"] = self.state[p].get("saturated", 0) + beyond
        return self._rounder(p)(iterate, scale)

    def _nearest_iterate(self, p: Tensor) -> Tensor:
        precision, scale = self._rounder(p).precision, self.state[p].get("scale")
        return (precision if scale is None else replace(precision, scale=scale)).nearest(p.delta)  # type: ignore[attr-defined]

    def _clip(self, gradients: list[Tensor]) -> None:
        if self.max_norm is None or not gradients:
            return
        norm = torch.stack([v.double().norm() for v in gradients]).norm()
        if norm > self.max_norm:
            for v in gradients:
                v.mul_(self.max_norm / norm)

    def _gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor | None:
        delta, full = self._delta_gradient(p), self.state[p].get("full_gradient")
        if delta is None or full is None:
            only = full if delta is None else delta
            return None if only is None else only.clone()
        return delta + full
