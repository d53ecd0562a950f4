"""What the bit-centering solvers share: moving deltas about a center, and the center."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor

from halp.bitcenter import BitCenteredTensor
from halp.bitcenter.cache import OffsetCache
from halp.bitcenter.offsets import Context
from halp.optim.base import Closure
from halp.optim.preserve import RandomState, generators_of
from halp.optim.shared import Shared
from halp.optim.snapshots import SnapshotSolver
from halp.optim.state import Saved
from halp.optim.updates import LowPrecision
from halp.precision import Rounder


class BitCenterSolver(LowPrecision, SnapshotSolver):
    """What the bc-* solvers share: they move z, and w̃ in the outer step."""

    moves_deltas = True
    iterate_name = "z"
    kept_from_snapshot = ("offset", "delta")
    #: Whether inner steps read what was computed at w̃, so that w̃ must still be there.
    reads_snapshot = True

    #: Each parameter's w̃ and its version, as the snapshot left them.
    _centers: Shared[dict[Tensor, tuple[Tensor, int]]] = Shared({})
    #: What was random when the snapshot recorded cached offsets: enough to record them again.
    _recorded_at: Shared[dict[str, Any] | None] = Shared(None)
    #: The parameters that were trained when cached offsets were recorded.
    _recorded_for: Shared[list[Tensor]] = Shared([])

    @property
    def snapshot_due(self) -> bool:
        """Whether there is no snapshot yet, T steps have been taken, or w̃ was written to since.

        Or a parameter is trained that was frozen then; or cached offsets are missing, since a
        state dict was loaded, or are of a pass that trained other parameters.
        """
        return (
            super().snapshot_due
            or not self._is_centered()
            or any(cache.is_empty for cache in self._caches())
            or self._records_another_pass()
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
        in_cycle = not super().snapshot_due and self._is_centered()
        if in_cycle and any(cache.is_empty for cache in caches):
            return self._record_again(loader, closure, weight)
        return super().snapshot(loader, closure, weight)

    def _record_again(
        self,
        loader: Iterable[Any],
        closure: Callable[..., Any],
        weight: Callable[[Any], float] | None,
    ) -> float | None:
        self._check_loader(loader)
        generators = generators_of(loader)
        now, positions = RandomState(generators), self._stream_positions()
        at = self._recorded_at
        if at is not None:
            RandomState.from_state_dict(at["random"], generators).restore()
            self._set_stream_positions(at["positions"])
        try:
            loss, _ = self._full_gradient(loader, closure, weight)
        finally:
            now.restore()
            self._set_stream_positions(positions)
        return loss

    def _full_gradient(
        self,
        loader: Iterable[Any],
        closure: Callable[..., Any],
        weight: Callable[[Any], float] | None,
    ) -> tuple[float | None, list[Tensor | None]]:
        if not self._caches():
            return super()._full_gradient(loader, closure, weight)
        self._recorded_at = {
            "random": RandomState(generators_of(loader)).state_dict(),
            "positions": self._stream_positions(),
        }
        found = super()._full_gradient(loader, closure, weight)
        self._recorded_for = self._trained()
        return found

    def _trained(self) -> list[Tensor]:
        return [p for p in self._parameters() if p.requires_grad]

    def _records_another_pass(self) -> bool:
        """Whether there are cached offsets, and of a pass that trained other parameters."""
        return bool(self._caches()) and set(self._trained()) != set(self._recorded_for)

    def _is_centered(self) -> bool:
        """Whether each parameter's w̃ is as the snapshot left it."""
        return all(
            p in self._centers
            and self._centers[p][0] is p.offset  # type: ignore[attr-defined]
            and self._centers[p][1] == p.offset._version  # type: ignore[attr-defined]
            for p in self._parameters()
        )

    def _note_centers(self) -> None:
        self._centers = {p: (p.offset, p.offset._version) for p in self._parameters()}  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        kept = super().__getstate__()
        return {**kept, "_shared": {**kept["_shared"], "_centers": self._is_centered()}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        # Of a copy: its tensors are new, and so are their versions.
        centered, self._centers = self._centers, {}
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
                p.offset.add_(p.delta)  # type: ignore[attr-defined]
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
        self._check_snapshot()
        for context in self._contexts():
            context.new_step()
        if closure is not None and self._caches():  # which clears them itself, in one way or other
            for p in self._parameters():
                p.grad = None
        return super()._evaluate(closure)

    def _check_snapshot(self) -> None:
        """Raise RuntimeError where what the snapshot has left is not of this step."""
        caches, what = self._caches(), None
        if (caches or self.reads_snapshot) and not self._is_centered():
            what = "the parameters were written to since the snapshot"
        elif any(cache.is_empty for cache in caches):
            what = "cached offsets have to be recorded again after a state was loaded"
        elif self._records_another_pass():
            what = (
                "a parameter was frozen or unfrozen since the snapshot that cached offsets are of"
            )
        if what is not None:
            raise RuntimeError(
                f"{type(self).__name__}: {what}; call optimizer.snapshot(...) when snapshot_due is "
                "true"
            )

    def _iterate(self, p: Tensor) -> Tensor:
        return p.delta  # type: ignore[attr-defined]

    def _rounder(self, p: Tensor) -> Rounder:
        return p.context.rounder  # type: ignore[attr-defined]

    def _decayed(self, p: Tensor, gradient: Tensor, group: dict[str, Any]) -> Tensor:
        """Add ``λw̃`` to a high-precision gradient at w̃: the update itself adds ``λz``."""
        decay = group["weight_decay"]
        if decay == 0:
            return gradient
        return gradient.add(p.offset, alpha=-decay if group["maximize"] else decay)  # type: ignore[attr-defined]

    def _group_of(self, p: Tensor) -> dict[str, Any]:
        return next(g for g in self.param_groups if any(q is p for q in g["params"]))

    def _delta_gradient(self, p: Tensor) -> Tensor | None:
        if p.grad is not None and not isinstance(p.grad, BitCenteredTensor):
            raise RuntimeError(
                f"{type(self).__name__}: a gradient is a plain tensor; the closure must run the "
                "bit-centered model itself, outside halp.materialize"
            )
        return None if p.grad is None else p.grad.delta

    # State: w̃ and z live in the parameters.

    def _stream_positions(self) -> list[int]:
        """Return the position of the random stream of each parameter."""
        return [p.context.rounder.position for p in self._parameters()]  # type: ignore[attr-defined]

    def _set_stream_positions(self, positions: list[int]) -> None:
        for p, position in zip(self._parameters(), positions, strict=True):
            p.context.rounder.position = position  # type: ignore[attr-defined]

    def _solver_state(self) -> dict[str, Any]:
        state = {**super()._solver_state(), "stream_positions": self._stream_positions()}
        if self._caches():
            state["recorded_at"] = self._recorded_at
        return state if self._is_centered() else {**state, "position": None}

    def _add_state(self, state_dict: dict[str, Any]) -> None:
        self._check_parameters()
        super()._add_state(state_dict)
        state, parameters = state_dict["state"], self._parameters()
        state_dict["state"] = {i: state.pop(i, {}) for i in range(len(parameters))} | state
        for i, p in enumerate(parameters):
            entry = state_dict["state"][i]
            entry |= {"offset": p.offset, "delta": p.delta}  # type: ignore[attr-defined]
            # Rules skip deltas that are known to be zero, and draw no random bits for them.
            if p.is_constant:  # type: ignore[attr-defined]
                entry["constant"] = True

    def state_dict(self) -> dict[str, Any]:
        """As :meth:`Solver.state_dict`, with each parameter's w̃ and z among its state."""
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load :meth:`state_dict`, w̃ and z of the parameters included."""
        super().load_state_dict(state_dict)

    def _check_state(self, saved: Saved) -> None:
        self._check_parameters()
        super()._check_state(saved)
        assert saved.solver is not None
        positions = saved.solver["stream_positions"]
        if len(positions) not in (1, len(saved.order)):
            raise ValueError(
                f"the state dict has {len(positions)} positions of random streams for "
                f"{len(saved.order)} parameters"
            )

    def _load(self, saved: Saved) -> None:
        for context in self._contexts():
            context.settle()
        parameters = self._parameters()
        for index, entry in saved.entries.items():
            p = parameters[index]
            constant = entry.pop("constant", False)
            if "offset" in entry:
                p.offset.copy_(entry.pop("offset"))  # type: ignore[attr-defined]
                p.delta.copy_(entry.pop("delta"))  # type: ignore[attr-defined]
                if constant and not p.delta.any():  # type: ignore[attr-defined]
                    p._constant = (p.delta, p.delta._version)  # type: ignore[attr-defined]
        super()._load(saved)
        assert saved.solver is not None
        self._set_stream_positions(_in_order(saved, saved.solver["stream_positions"]))
        at = saved.solver.get("recorded_at")
        self._recorded_at = at and {**at, "positions": _in_order(saved, at["positions"])}
        for cache in self._caches():
            cache.clear()
        self._note_centers()


def _in_order(saved: Saved, positions: list[int]) -> list[int]:
    """Return positions of random streams by own parameter: there may be one for all."""
    return saved.in_order(positions if len(positions) > 1 else positions * len(saved.order))
