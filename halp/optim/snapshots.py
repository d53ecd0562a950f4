"""The outer step that variance-reduced solvers share."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from halp.bitcenter import value
from halp.messages import quoted
from halp.optim.base import Solver, check_loss
from halp.optim.loaders import (
    check_finite,
    check_visits_each_sample_once,
    check_weight,
    length_of,
    run_on_batch,
)
from halp.optim.preserve import Buffers, generators_of, preserved
from halp.optim.shared import Shared
from halp.optim.state import Saved


class SnapshotSolver(Solver):
    """A solver with an outer step every T inner steps.

    What is remembered of a snapshot is of the parameters that are trained then. One that is frozen
    later stands still, and moves on when it is unfrozen; one that was frozen then makes a snapshot
    due when it is unfrozen, and stands still until there is one.

    Args:
        T: inner steps between two snapshots, a positive int.
        buffers: the model's buffers (``model.buffers()``): running statistics that move once a
            step, and never in a snapshot or at w̃. Or the model itself, which has to be given where
            a module assigns new tensors to its buffers.
    """

    T: Shared[int] = Shared(1)
    _buffers: Shared[Buffers] = Shared(Buffers(()))
    #: Inner steps since the snapshot; None while there is none.
    _position: Shared[int | None] = Shared(None)
    #: The parameters that the snapshot was of.
    _snapshot_of: Shared[list[Tensor]] = Shared([])

    solver_options: tuple[str, ...] = ("T", "buffers")
    #: What each parameter's state holds while there is a snapshot.
    kept_from_snapshot: tuple[str, ...] = ()

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        T: int,  # noqa: N803
        buffers: nn.Module | Iterable[Tensor] = (),
        **options: Any,
    ) -> None:
        if not isinstance(T, int) or isinstance(T, bool) or T < 1:
            raise ValueError(f"T must be a positive number of steps, not {quoted(T)}")
        self.T = T
        self.buffers = buffers
        super().__init__(params, lr, momentum, weight_decay, **options)

    @property
    def buffers(self) -> nn.Module | Iterable[Tensor]:
        """What is kept from moving in snapshots: the model, or its buffers."""
        return self._buffers.now()

    @buffers.setter
    def buffers(self, buffers: nn.Module | Iterable[Tensor]) -> None:
        self._buffers = Buffers(buffers)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own. A snapshot becomes due."""
        super().add_param_group(param_group)
        self._position = None

    @property
    def snapshot_due(self) -> bool:
        """Whether there is no snapshot yet, or T steps have been taken since the last.

        Or a parameter is trained that was frozen then.
        """
        position = self._position if self._has_snapshot() else None
        return position is None or position >= self.T or self._lacks_terms()

    def _has_snapshot(self) -> bool:
        """Whether there is a snapshot, of the parameters that there are now."""
        return self._position is not None and set(self._snapshot_of) == set(self._parameters())

    def _lacks_terms(self) -> bool:
        """Whether a parameter is trained that was frozen at the snapshot."""
        return any(p.requires_grad and self._was_frozen(p) for p in self._parameters())

    def _was_frozen(self, p: Tensor) -> bool:
        return self.state.get(p, {}).get("frozen", False)

    def _trains(self, p: Tensor) -> bool:
        return super()._trains(p) and not self._was_frozen(p)

    def snapshot(
        self,
        loader: Iterable[Any],
        closure: Callable[..., Any],
        weight: Callable[[Any], float] | None = None,
    ) -> float | None:
        """Do the outer step: make the current point w̃ and compute the full gradient there.

        Random state, ``buffers`` and gradients are afterwards as they were. May be called early.

        Args:
            loader: yields every sample once; batches of any kind and size.
            closure: called as ``closure(*batch)`` for tuples and lists, ``closure(**batch)`` for
                mappings, else ``closure(batch)``. Clears the gradients, computes the batch's mean
                loss, calls ``backward()`` and returns the loss.
            weight: the number of units (samples, tokens) that a batch's mean loss is over; by
                default the length of the batch's first tensor.

        Returns:
            The mean loss over all units at w̃ (without weight decay), if the closure returns it.

        Raises:
            ValueError: the loader is empty or does not visit each sample once, or a batch holds
                NaN or infinity.
        """
        self._check_parameters()
        self._check_loader(loader)
        self._position = None  # until this is done, there is no snapshot
        with torch.no_grad():
            if self.watch is not None:
                self.watch.recentering()
            self._recenter()
        loss, gradients = self._full_gradient(loader, closure, weight)
        if self.watch is not None:
            self.watch.took_snapshot(loss, zip(self._parameters(), gradients, strict=True))
        with torch.no_grad():
            for p, gradient in zip(self._parameters(), gradients, strict=True):
                self._remember(p, gradient)
        self._position, self._snapshot_of = 0, self._parameters()
        return loss

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one inner step; see :meth:`Solver.step`.

        Raises:
            RuntimeError: there has been no snapshot yet.
            ValueError: the closure left no gradient.
        """
        if not self._has_snapshot():
            raise RuntimeError(
                f"{type(self).__name__}.step() needs a snapshot first: call optimizer.snapshot("
                "loader, closure) whenever optimizer.snapshot_due is true"
            )
        loss = super().step(closure)
        assert self._position is not None
        self._position += 1
        return loss

    def _remember(self, p: Tensor, gradient: Tensor | None) -> None:
        """Keep a parameter's full gradient, or that it was frozen."""
        entry = self.state[p]
        for key in ("full_gradient", "frozen"):
            entry.pop(key, None)
        if gradient is not None:
            entry["full_gradient"] = self._stored(p, gradient)
        elif not p.requires_grad:
            entry["frozen"] = True

    def _check_loader(self, loader: Iterable[Any]) -> None:
        check_visits_each_sample_once(loader)

    def _full_gradient(
        self,
        loader: Iterable[Any],
        closure: Callable[..., Any],
        weight: Callable[[Any], float] | None,
    ) -> tuple[float | None, list[Tensor | None]]:
        """Return ``Σ n_b f_b / Σ n_b`` and its gradient, accumulated in float64."""
        parameters = self._parameters()
        sums: list[Tensor | None] = [None] * len(parameters)
        total, loss_sum, has_loss = 0.0, 0.0, True
        kept = preserved(self.buffers, generators_of(loader))
        with self._at_snapshot(), self._gradients_kept(), kept:
            for index, batch in enumerate(loader):
                check_finite(batch, index)
                units = check_weight((weight or length_of)(batch), index)
                if units == 0:
                    continue
                for p in parameters:
                    p.grad = None
                with self._at_batch(loader):
                    with torch.enable_grad():
                        loss = run_on_batch(closure, batch)
                    check_loss(loss, "snapshot")
                    total += units
                    if loss is None:
                        has_loss = False
                    else:
                        loss_sum += units * float(value(loss) if isinstance(loss, Tensor) else loss)
                    for i, p in enumerate(parameters):
                        if p.grad is not None:
                            gradient = self._gradient_at_snapshot(p)
                            if sums[i] is None:
                                sums[i] = torch.zeros_like(gradient, dtype=torch.float64)
                            sums[i].add_(gradient, alpha=units)  # type: ignore[union-attr]
        if total == 0:
            raise ValueError("snapshot() got an empty loader; it must yield every training batch")
        if all(s is None for s in sums):
            self._refuse_no_gradient("snapshot")
        means = [None if s is None else s.div_(total) for s in sums]
        return (loss_sum / total if has_loss else None), means

    def _check_gradients(self) -> None:
        if all(p.grad is None for p in self._parameters()):
            self._refuse_no_gradient("step")

    def _refuse_no_gradient(self, caller: str) -> None:
        """Raise ValueError, unless every parameter is frozen."""
        if any(p.requires_grad for p in self._parameters()):
            raise ValueError(
                f"the closure of {caller}() left no gradient in any parameter of this solver; it "
                "must call loss.backward(), and on a model that has these parameters: where "
                "load_state_dict(..., assign=True) or an assignment has replaced them, make a new "
                "solver of model.parameters()"
            )

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        gradients = [p.grad for p in self._parameters()]
        try:
            yield
        finally:
            for p, gradient in zip(self._parameters(), gradients, strict=True):
                p.grad = gradient

    def _recenter(self) -> None:
        """Make the current point the snapshot w̃."""
        raise NotImplementedError

    def _gradient_at_snapshot(self, p: Tensor) -> Tensor:
        """Return ∇f_b(w̃) as a plain tensor, after the closure has run at w̃."""
        assert p.grad is not None
        return p.grad

    @contextmanager
    def _at_snapshot(self) -> Iterator[None]:
        """Within the block, the closure sees the plain model at w̃."""
        yield

    @contextmanager
    def _at_batch(self, loader: Iterable[Any]) -> Iterator[None]:
        """Within the block, the closure runs on one batch of the loader."""
        yield

    def _stored(self, p: Tensor, gradient: Tensor) -> Tensor:
        """Return the float64 full gradient as the inner steps read it."""
        return gradient.to(p.dtype)

    def _takes_foreign_state(self, saved: Saved) -> bool:
        return False  # there would be no snapshot in it

    def _solver_state(self) -> dict[str, Any]:
        position = self._position if self._has_snapshot() else None
        return {**super()._solver_state(), "T": self.T, "position": position}

    def _check_state(self, saved: Saved) -> None:
        super()._check_state(saved)
        if saved.solver is None or saved.solver["position"] is None:
            return
        for index in range(len(self._parameters())):
            for key in self.kept_from_snapshot:
                if key not in saved.entries.get(index, {}):
                    raise ValueError(
                        f"the state dict is of the middle of a cycle, and lacks the {key!r} of "
                        f"parameter {index}"
                    )

    def _load(self, saved: Saved) -> None:
        super()._load(saved)
        assert saved.solver is not None
        self._position, self._snapshot_of = saved.solver["position"], self._parameters()
