"""Watching a training for trouble: overflow, numbers that a format loses, deltas that outgrow."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from halp.bitcenter import BitCenteredTensor, CacheError
from halp.messages import quoted
from halp.optim.base import Solver
from halp.optim.preserve import preserved
from halp.precision import Precision, Rounder

EVERY = 100
"""Steps between two looks at the sizes of deltas."""

NOTABLE = 0.01
"""Share of entries that underflow from which a summary speaks of it."""


class Diverged(ArithmeticError):  # noqa: N818 - what happened, as people call it
    """A loss, a gradient, a delta or a parameter holds NaN or infinity; the message says where."""


@dataclass
class Counts:
    """What became of the entries of one tensor when they were rounded, in all steps together."""

    rounded: int = 0
    saturated: int = 0  # beyond the format's range
    underflowed: int = 0  # not zero before, zero after


class Watch:
    """Watches a model and its solver from the outside; the training loop stays as it is.

    * NaN or infinity in the loss, a gradient or the full gradient, or in any result before it is
      rounded, ends training before the update; in new parameters, deltas or momentum, after it.
      The message names the first tensor in which it appeared, for which the closure is run once
      more, with the same random state.
    * Of every rounding of deltas, momentum, full gradients and low-precision parameters it counts
      the entries that saturate and those that underflow, by parameter; see `summary`.
    * A delta that is larger than its offset is reported once: bit centering has stopped helping.
      (Of tensors with two dimensions or more; biases start at zero.)

    It changes no number of the training. It ends with `close`, or a ``with`` block.

    Args:
        model: the model that is trained, plain or bit-centered.
        optimizer: any solver of `halp.optim`; it has one watch at a time.
        on_overflow: ``"stop"`` raises `Diverged` at NaN or infinity; ``"warn"`` reports it, once
            for each tensor, and goes on.
        report: is told what should be known.

    Raises:
        ValueError: ``on_overflow`` is neither.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Solver,
        *,
        on_overflow: str = "stop",
        report: Callable[[str], object] = warnings.warn,
    ) -> None:
        if on_overflow not in ("stop", "warn"):
            raise ValueError(f'on_overflow must be "stop" or "warn", not {quoted(on_overflow)}')
        self.model = model
        self.optimizer = optimizer
        self.on_overflow = on_overflow
        #: Steps that have been watched.
        self.steps = 0
        #: By parameter and what of it was rounded: "z", "momentum", "full gradient", "weights".
        self.counts: dict[tuple[str, str], Counts] = {}
        self._report = report
        self._reported: set[str] = set()
        self._names: dict[Tensor, str] = {p: name for name, p in model.named_parameters()}
        optimizer.watch = self
        self._start_noting()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop watching."""
        if self.optimizer.watch is self:
            self.optimizer.watch = None
            for rounder in self._rounders():
                rounder.overflowed = None

    # What solvers tell.

    def evaluated(
        self, closure: Callable[[], Any] | None, loss: Any, moves: Iterable[tuple[Tensor, Tensor]]
    ) -> None:
        """Look at a step's loss, and the gradients that parameters are about to move along.

        Raises:
            Diverged: NaN or infinity is among them.
        """
        self.steps += 1
        seen = {"the loss": _number_of(loss)}
        for p, name in self._names.items():
            if p.requires_grad:  # in a frozen one lies that of another step
                seen[f"the gradient of {name}"] = _number_of(p.grad)
        for p, gradient in moves:
            seen[f"the step's direction of {self._name(p)}"] = gradient
        where = _first_overflow(seen)
        if where is not None or self._has_overflowed():
            first = None if closure is None else self._first_in(closure)
            what = where or "a result that was rounded"
            self._overflowed(*(first or (what, seen.get(what))))
            self._start_noting()
        if self.steps % EVERY == 0:
            self._compare_deltas()

    def updated(self) -> None:
        """Look at new parameters or deltas, and momentum.

        Raises:
            Diverged: NaN or infinity is among them.
        """
        seen = {}
        for p, name in self._names.items():
            seen[self._iterate_of(name, p)] = _number_of(p)
            buffer = self.optimizer.state.get(p, {}).get("momentum_buffer")
            seen[f"the momentum of {name}"] = buffer
        self._look_at(seen)

    def recentering(self) -> None:
        """Look at deltas before an outer step adds them to their offsets."""
        self._compare_deltas()

    def took_snapshot(self, loss: Any, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Look at the loss and the full gradient at a snapshot.

        Raises:
            Diverged: NaN or infinity is among them.
        """
        seen = {"the loss at the snapshot": None if loss is None else torch.tensor(float(loss))}
        for p, gradient in gradients:
            seen[f"the full gradient of {self._name(p)}"] = gradient
        self._look_at(seen)

    def rounded(
        self, p: Tensor, what: str, before: Tensor, after: Tensor, precision: Precision
    ) -> None:
        """Count what became of a tensor's entries when they were rounded."""
        counts = self.counts.setdefault((self._name(p), what), Counts())
        counts.rounded += before.numel()
        if precision.rounding == "void":
            return
        counts.saturated += before.numel() - int(precision.in_range(before).sum())
        counts.underflowed += int(after.eq(0).logical_and_(before != 0).sum())

    # What is made of it.

    def summary(self) -> list[str]:
        """Return a line for every tensor of which the format has lost much, with advice."""
        lines = []
        for (name, what), counts in self.counts.items():
            if counts.saturated:
                lines.append(
                    f"{what} of {name}: {_share(counts.saturated, counts.rounded)} of the entries "
                    "that were rounded lay beyond the format's range; scale='auto', a larger scale "
                    "or a smaller mu holds them"
                )
            if counts.underflowed > NOTABLE * counts.rounded:
                lines.append(
                    f"{what} of {name}: {_share(counts.underflowed, counts.rounded)} of the "
                    "entries that were rounded became zero; scale='auto', rounding='stoc' or a "
                    "format with more exponents keeps them"
                )
        return lines

    def state_dict(self) -> dict[str, Any]:
        """Return the counts."""
        counts = [
            [name, what, c.rounded, c.saturated, c.underflowed]
            for (name, what), c in self.counts.items()
        ]
        return {"steps": self.steps, "counts": counts, "reported": sorted(self._reported)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load `state_dict`."""
        self.steps = state["steps"]
        self.counts = {(name, what): Counts(*rest) for name, what, *rest in state["counts"]}
        self._reported = set(state["reported"])

    def _look_at(self, seen: dict[str, Tensor | None]) -> None:
        where = _first_overflow(seen)
        if where is not None or self._has_overflowed():
            what = where or "a result that was rounded"
            self._overflowed(what, seen.get(what))
            self._start_noting()

    def _rounders(self) -> list[Rounder]:
        """Return what rounds the results of the model's operations."""
        contexts = {id(c): c for p in self._names if (c := getattr(p, "context", None))}
        rounders = [context.rounder for context in contexts.values()]
        own = getattr(self.optimizer, "rounder", None)
        return rounders if own is None else [*rounders, own]

    def _start_noting(self) -> None:
        """Have NaN and infinity noted that rounding saturates."""
        for rounder in self._rounders():
            rounder.overflowed = False

    def _has_overflowed(self) -> bool:
        return any(rounder.overflowed for rounder in self._rounders())

    def _overflowed(self, what: str, tensor: Tensor | None) -> None:
        kinds = "NaN or infinity"
        if tensor is not None:
            bad = tensor[~tensor.isfinite()]
            value = "NaN" if bool(bad[0].isnan()) else f"{bad[0].item()}"
            kinds = f"{value} in {len(bad)} of {tensor.numel()} elements"
        rates = sorted({float(group["lr"]) for group in self.optimizer.param_groups})
        advice = f"try a lower learning rate than {rates[-1]:g}"
        if any(isinstance(p, BitCenteredTensor) for p in self._names):
            advice += ", a smaller T or a format with a wider range"
        elif hasattr(self.optimizer, "rounder"):
            advice += ", scale='auto' or a format with a wider range"
        message = f"step {self.steps}: {what} holds {kinds}; {advice}, and look at the data"
        if self.on_overflow == "stop":
            raise Diverged(message)
        self._report_once(what, message)

    def _compare_deltas(self) -> None:
        for p, name in self._names.items():
            if not isinstance(p, BitCenteredTensor) or p.dim() < 2 or p.is_constant:
                continue
            delta, offset = p.delta.norm().item(), p.offset.norm().item()
            if delta > offset > 0:
                self._report_once(
                    f"size of {name}",
                    f"step {self.steps}: the delta of {name} has norm {delta:.3g}, its offset "
                    f"{offset:.3g}: bit centering has stopped helping, so try a smaller T or a "
                    "lower learning rate",
                )

    def _report_once(self, what: str, message: str) -> None:
        if what not in self._reported:
            self._reported.add(what)
            self._report(message)

    def _name(self, p: Tensor) -> str:
        return self._names.get(p, f"a parameter of shape {tuple(p.shape)}")

    def _iterate_of(self, name: str, p: Tensor) -> str:
        return f"the delta of {name}" if isinstance(p, BitCenteredTensor) else name

    def _first_in(self, closure: Callable[[], Any]) -> tuple[str, Tensor | None] | None:
        """Run the closure once more; return the first tensor that overflows, if one does."""
        found: list[tuple[str, Tensor | None]] = []
        self._start_noting()

        def look(what: str, value: Any) -> None:
            if found:
                return
            for x in _tensors_in(value):
                number = _number_of(x)
                if number is not None and not bool(number.isfinite().all()):
                    found.append((what, number))
                    return
            if self._has_overflowed():
                found.append((f"what was rounded for {what}", None))

        handles = []
        for name, module in self.model.named_modules():
            if next(module.children(), None) is None:
                what = f"the output of {name or 'the model'} ({type(module).__name__})"
                handles.append(
                    module.register_forward_hook(lambda m, i, out, what=what: look(what, out))
                )
        for p, name in self._names.items():
            if p.requires_grad:
                what = f"the gradient of {name}"
                handles.append(
                    p.register_post_accumulate_grad_hook(lambda p, what=what: look(what, p.grad))
                )
        gradients = {p: p.grad for p in self._names}
        try:
            with preserved(self.model), self._streams_preserved():
                loss = self.optimizer._call(closure)
        finally:
            for handle in handles:
                handle.remove()
            for p, gradient in gradients.items():
                p.grad = gradient
        in_forward = bool(found) and "the output" in found[0][0]
        number = _number_of(loss)
        if not in_forward and number is not None and not bool(number.isfinite().all()):
            return "the loss", number
        return found[0] if found else None

    @contextmanager
    def _streams_preserved(self) -> Iterator[None]:
        """Within the block, random bits may be drawn for rounding; the run's own stay its own."""
        rounders = self._rounders()
        positions = [rounder.position for rounder in rounders]
        for context in {p.context for p in self._names if isinstance(p, BitCenteredTensor)}:
            context.new_step()
        try:
            yield
        finally:
            for rounder, position in zip(rounders, positions, strict=True):
                rounder.position = position


def _number_of(x: Any) -> Tensor | None:
    """Return what of a tensor can overflow in a step: of a bit-centered one the delta first."""
    if not isinstance(x, Tensor):
        return None
    if not isinstance(x, BitCenteredTensor):
        return x.detach() if x.is_floating_point() else None
    if not x.dtype.is_floating_point or not bool(x.delta.isfinite().all()):
        return x.delta if x.dtype.is_floating_point else None
    try:
        offset = x._offset.tensor if x._offset.is_computed else x.delta
    except CacheError:  # in an inner step with cached offsets there is the delta alone
        offset = x.delta
    return offset if not bool(offset.isfinite().all()) else x.delta


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return (
        [t for part in value for t in _tensors_in(part)] if isinstance(value, list | tuple) else []
    )


def _first_overflow(tensors: dict[str, Tensor | None]) -> str | None:
    """Return the name of the first tensor with NaN or infinity; read from a device at once."""
    named = {name: t for name, t in tensors.items() if t is not None and t.numel()}
    if not named:
        return None
    largest = torch._foreach_norm([t.detach() for t in named.values()], math.inf)
    device = largest[0].device
    finite = torch.stack([n.to(device, torch.float64) for n in largest]).isfinite()
    if bool(finite.all()):
        return None
    return list(named)[int(finite.logical_not().nonzero()[0])]


def _share(part: int, whole: int) -> str:
    return f"{part / max(whole, 1):.1%} ({part})"
