"""Bit-centering solvers: low-precision inner steps on the delta of bit-centered parameters."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halp.bitcenter import BitCenteredTensor
from halp.bitcenter.cache import OffsetCache
from halp.bitcenter.offsets import Context
from halp.formats import FixedFormat
from halp.optim.base import Closure, LowPrecision
from halp.optim.preserve import RandomState, generators_of
from halp.optim.snapshots import SnapshotSolver
from halp.precision import Rounder, Unchanged


class BitCenterSolver(LowPrecision, SnapshotSolver):
    """What the bc-* solvers share: they move z, and w̃ in the outer step."""

    moves_deltas = True
    iterate_name = "z"

    def __init__(self, *args: Any, **options: Any) -> None:
        #: Of each parameter: tells whether w̃ is as the snapshot left it.
        self._centers: list[Unchanged] = []
        #: What was random when the snapshot recorded cached offsets: enough to record them again.
        self._recorded_at: dict[str, Any] | None = None
        super().__init__(*args, **options)

    @property
    def snapshot_due(self) -> bool:
        """Whether there is no snapshot yet, T steps have been taken, or w̃ was written to since.

        Or cached offsets are missing, since a state dict was loaded.
        """
        return (
            super().snapshot_due
            or not self._is_centered()
            or any(cache.is_empty for cache in self._caches())
        )

    def snapshot(
        self,
        loader: Iterable[Any],
        closure: Callable[..., Any],
        weight: Callable[[Any], float] | None = None,
    ) -> float | None:
        """Do the outer step; see :meth:`SnapshotSolver.snapshot`.

        Where a state dict of the middle of a cycle has been loaded and the model's offsets are
        cached, the first call only records them again at w̃: the cycle goes on.

        Raises:
            NoRoomError: cached offsets do not fit into the memory or the disk that is left.
        """
        self._check_parameters()
        caches = self._caches()
        if caches and not super().snapshot_due and self._is_centered() and caches[0].is_empty:
            return self._record_again(loader, closure, weight)
        return super().snapshot(loader, closure, weight)

    def _record_again(
        self,
        loader: Iterable[Any],
        closure: Callable[..., Any],
        weight: Callable[[Any], float] | None,
    ) -> float | None:
        self._check_loader(loader)
        generators, contexts = generators_of(loader), self._contexts()
        now, positions = RandomState(generators), [c.rounder.position for c in contexts]
        at = self._recorded_at
        if at is not None:
            RandomState.from_state_dict(at["random"], generators).restore()
            for context, position in zip(contexts, at["positions"], strict=True):
                context.rounder.position = position
        try:
            loss, _ = self._full_gradient(loader, closure, weight)
        finally:
            now.restore()
            for context, position in zip(contexts, positions, strict=True):
                context.rounder.position = position
        return loss

    def _full_gradient(
        self,
        loader: Iterable[Any],
        closure: Callable[..., Any],
        weight: Callable[[Any], float] | None,
    ) -> tuple[float | None, list[Tensor | None]]:
        if self._caches():
            self._recorded_at = {
                "random": RandomState(generators_of(loader)).state_dict(),
                "positions": [context.rounder.position for context in self._contexts()],
            }
        return super()._full_gradient(loader, closure, weight)

    def _is_centered(self) -> bool:
        return len(self._centers) == len(self._parameters()) and all(
            p._offset.is_as_noted(center)  # type: ignore[attr-defined]
            for p, center in zip(self._parameters(), self._centers, strict=True)
        )

    def _note_centers(self) -> None:
        self._centers = [p._offset.noted() for p in self._parameters()]  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_centers": self._is_centered()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        centered = state.get("_centers")
        self._centers = []
        if centered:
            self._note_centers()

    def _contexts(self) -> list[Context]:
        return list({id(p.context): p.context for p in self._parameters()}.values())  # type: ignore[attr-defined]

    def _caches(self) -> list[OffsetCache]:
        """Return the caches of offsets, if they are not computed on site."""
        return [context.cache for context in self._contexts() if context.cache is not None]

    def _recenter(self) -> None:
        """``w̃ ← w̃ + z``, ``z ← 0``; a parameter that never moved, a frozen one, stays constant."""
        for context in self._contexts():
            context.settle()
        for p in self._parameters():
            if p.requires_grad and p.context.cache is not None:  # type: ignore[attr-defined]
                p._constant = None  # type: ignore[attr-defined]  # what it is in steps to come
            if not p.is_constant:  # type: ignore[attr-defined]
                _center(p).add_(p.delta)  # type: ignore[attr-defined]
                p.delta.zero_()  # type: ignore[attr-defined]
        self._note_centers()

    @contextmanager
    def _at_snapshot(self) -> Iterator[None]:
        contexts = self._contexts()
        with ExitStack() as stack:
            for context in contexts:
                if context.cache is None:
                    context.offsets_only = True
                else:
                    stack.enter_context(context.cache.recorded())
            try:
                yield
            finally:
                for context in contexts:
                    context.offsets_only = False

    @contextmanager
    def _at_batch(self, loader: Iterable[Any]) -> Iterator[None]:
        try:
            n_batches = len(loader)  # type: ignore[arg-type]
        except TypeError:
            n_batches = None
        with ExitStack() as stack:
            for cache in self._caches():
                stack.enter_context(cache.recorded_batch(n_batches))
            yield

    def _gradient_at_snapshot(self, p: Tensor) -> Tensor:
        return p.grad._offset.computed  # type: ignore[union-attr]

    def _evaluate(self, closure: Closure | None) -> Any:
        if self._caches() and not self._is_centered():
            raise RuntimeError(
                f"{type(self).__name__}: the parameters were written to since the snapshot, of "
                "which cached offsets are; call optimizer.snapshot(...) when snapshot_due is true"
            )
        if self._position is not None and any(cache.is_empty for cache in self._caches()):
            raise RuntimeError(
                f"{type(self).__name__}: cached offsets have to be recorded again after a state "
                "was loaded; call optimizer.snapshot(...) when snapshot_due is true"
            )
        self._put_on_grid()
        for context in self._contexts():
            context.new_step()
        if closure is not None and self._caches():  # which clears them itself, in one way or other
            for p in self._parameters():
                p.grad = None
        return super()._evaluate(closure)

    def _iterate(self, p: Tensor) -> Tensor:
        return p.delta  # type: ignore[attr-defined]

    def _rounder(self, p: Tensor) -> Rounder:
        return p.context.rounder  # type: ignore[attr-defined]

    def _decayed(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Add ``λw̃`` to a high-precision gradient at w̃: the update itself adds ``λz``."""
        decay = group["weight_decay"]
        if decay == 0:
            return gradient
        return gradient.add(_center(p), alpha=-decay if group["maximize"] else decay)

    def _group_of(self, p: Tensor) -> dict[str, Any]:
        return next(g for g in self.param_groups if any(q is p for q in g["params"]))

    def _delta_gradient(self, p: Tensor) -> Tensor | None:
        if p.grad is not None and not isinstance(p.grad, BitCenteredTensor):
            raise RuntimeError(
                f"{type(self).__name__}: a gradient is a plain tensor; the closure must run the "
                "bit-centered model itself, outside halp.materialize"
            )
        return None if p.grad is None else p.context.read(p.grad.delta)  # type: ignore[attr-defined]

    # State: w̃ and z live in the parameters.

    def _solver_state(self) -> dict[str, Any]:
        positions = [context.rounder.position for context in self._contexts()]
        # Rules skip deltas that are known to be zero, and draw no random bits for them.
        constants = [i for i, p in enumerate(self._parameters()) if p.is_constant]  # type: ignore[attr-defined]
        state = {
            **super()._solver_state(),
            "stream_positions": positions,
            "constants": constants,
        }
        if self._caches():
            state["recorded_at"] = self._recorded_at
        return state if self._is_centered() else {**state, "position": None}

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Solver.state_dict`, with each parameter's w̃ and z among its state."""
        self._check_parameters()
        state_dict = super().state_dict()
        state_dict["state"] = {
            i: {**state_dict["state"].get(i, {}), "offset": p.offset, "delta": p.delta}  # type: ignore[attr-defined]
            for i, p in enumerate(self._parameters())
        }
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load :meth:`state_dict`, w̃ and z of the parameters included."""
        self._check_parameters()
        super().load_state_dict(state_dict)
        for context in self._contexts():
            context.settle()
        constants = state_dict["solver"].get("constants", ())
        for index, p in enumerate(self._parameters()):
            state = self.state[p]
            if "offset" in state:
                _center(p).copy_(state.pop("offset"))
                p.delta.copy_(state.pop("delta"))  # type: ignore[attr-defined]
                if index in constants:
                    p._constant = (p.delta, p.delta._version)  # type: ignore[attr-defined]
        self._note_centers()

    def _load_solver_state(self, state: dict[str, Any]) -> None:
        super()._load_solver_state(state)
        for context, position in zip(self._contexts(), state["stream_positions"], strict=True):
            context.rounder.position = position
        self._recorded_at = state.get("recorded_at")
        for cache in self._caches():
            cache.clear()


def _center(p: Tensor) -> Tensor:
    """Return w̃ of a parameter, for halp itself."""
    return p._offset.tensor  # type: ignore[attr-defined]


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

    def __init__(
        self,
        *args: Any,
        max_norm: float | None = None,
        mu: float | None = None,
        **options: Any,
    ) -> None:
        for name, number in (("max_norm", max_norm), ("mu", mu)):
            if number is not None and not 0 < number < float("inf"):
                raise ValueError(f"{name} must be positive or None, not {number!r}")
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
