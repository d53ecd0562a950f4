"""What the six solvers share: one loop, one update, one kind of state dict."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.sgd import sgd

from halp.bitcenter import BitCenteredTensor, value
from halp.precision import Content, Rounder, as_wide

Closure = Callable[[], Any]


class Solver(Optimizer):
    """A minibatch solver with the arguments and momentum of :class:`torch.optim.SGD`.

    With ``v`` the solver's gradient, weight decay λ and momentum m: ``buf ← m·buf + v + λw`` and
    ``w ← w − lr·buf``. lr is applied last and nothing cached contains it, so that schedulers work
    at any time.

    A subclass supplies its gradient: :meth:`_evaluate` runs the closure, :meth:`_gradient` returns
    one parameter's v. :meth:`_update` is the arithmetic: :class:`FullPrecision` or
    :class:`LowPrecision`.
    """

    #: Whether the solver moves deltas of bit-centered parameters.
    moves_deltas = False
    #: What looks on, a `halp.training.Watch`; None costs nothing.
    watch: Any = None

    def __init__(
        self,
        params: Any,
        lr: float | Tensor,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        *,
        nesterov: bool = False,
        maximize: bool = False,
    ) -> None:
        _check_not_negative("lr", lr)
        _check_not_negative("momentum", momentum)
        _check_not_negative("weight_decay", weight_decay)
        if nesterov and momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, as in any PyTorch optimizer."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for name in ("lr", "momentum", "weight_decay"):
            _check_not_negative(name, group[name])
        if not self.moves_deltas:
            self._check_parameters()

    @property
    def snapshot_due(self) -> bool:
        """Whether :meth:`snapshot` should be called before the next step: never, for SGD."""
        return False

    def snapshot(
        self,
        loader: Iterable[Any],
        closure: Callable[..., Any],
        weight: Callable[[Any], float] | None = None,
    ) -> float | None:
        """Do nothing: a solver without variance reduction needs no outer step."""
        return None

    def step(self, closure: Closure | None = None) -> Any:
        """Do one inner step.

        Args:
            closure: clears the gradients, computes the minibatch's mean loss, calls ``backward()``
                and returns the loss. Without one, the gradients that are there are used.

        Returns:
            The loss that the closure returned, as a plain detached tensor; None without a closure.
        """
        self._check_parameters()
        loss = self._evaluate(closure)
        if closure is not None:
            self._check_gradients()
        with torch.no_grad():
            updates = [(group, *self._gradients(group)) for group in self.param_groups]
            self._clip([v for _, _, gradients in updates for v in gradients])
            if self.watch is not None:
                moves = [m for _, ps, vs in updates for m in zip(ps, vs, strict=True)]
                self.watch.evaluated(closure, loss, moves)
            for group, parameters, gradients in updates:
                if parameters:
                    self._update(group, parameters, gradients)
            if self.watch is not None:
                self.watch.updated()
        return value(loss) if isinstance(loss, Tensor) else loss

    def _gradients(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        """Return the parameters of a group that have a gradient, and what they move along."""
        parameters, gradients = [], []
        for p in group["params"]:
            gradient = self._gradient(p, group)
            if gradient is not None:
                if gradient.is_sparse:
                    raise RuntimeError(f"{type(self).__name__} does not take sparse gradients")
                parameters.append(p)
                gradients.append(gradient)
        return parameters, gradients

    # What subclasses supply.

    def _call(self, closure: Closure) -> Any:
        """Run the closure, in the arithmetic of an inner step."""
        with torch.enable_grad():
            return closure()

    def _evaluate(self, closure: Closure | None) -> Any:
        """Leave this step's gradients where :meth:`_gradient` finds them; return the loss."""
        return None if closure is None else self._call(closure)

    def _gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor | None:
        """Return v for one parameter, or None to leave it as it is."""
        return None if p.grad is None else self._read(p.grad)

    def _read(self, gradient: Tensor) -> Tensor:
        """Return a gradient that a closure has left as the update reads it."""
        return gradient

    def _clip(self, gradients: list[Tensor]) -> None:
        """Scale all gradients of a step down, in place, if they are too large together."""

    def _update(
        self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Move the parameters of a group."""
        raise NotImplementedError

    # Checks.

    def _check_parameters(self) -> None:
        """Raise TypeError for parameters of the wrong kind, naming the fix."""
        for index, p in enumerate(self._parameters()):
            if isinstance(p, BitCenteredTensor) == self.moves_deltas:
                continue
            name = f"{type(self).__name__}: parameter {index} (shape {tuple(p.shape)})"
            if self.moves_deltas:
                raise TypeError(
                    f"{name} is a plain tensor; call halp.bit_center(model) before the first "
                    "snapshot or step"
                )
            raise TypeError(
                f"{name} is bit-centered; use BitCenterSGD or BitCenterSVRG, or "
                "halp.to_plain(model) first"
            )

    def _check_gradients(self) -> None:
        """Raise where a step's closure should have left gradients: SGD then does nothing."""

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # State.

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles keep: all but hooks and what a scheduler has wrapped."""
        return {
            k: v
            for k, v in vars(self).items()
            if k not in ("step", "watch") and not k.startswith("_optimizer_")
        }

    def _solver_state(self) -> dict[str, Any]:
        """Return what the state dict holds beside tensors: plain values only."""
        return {"name": type(self).__name__}

    def _load_solver_state(self, state: dict[str, Any]) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs to go on bit for bit, also in the middle of a cycle.

        PyTorch's own entries, and ``"solver"``: the solver's name, its position in the cycle and
        that of its random stream. ``torch.load(..., weights_only=True)`` reads it.
        """
        return {**super().state_dict(), "solver": self._solver_state()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load :meth:`state_dict`, keeping each tensor's dtype.

        The state of :class:`torch.optim.SGD` is taken by the solvers without snapshots.

        Raises:
            ValueError: the state is another solver's, or of other parameters. Nothing is loaded.
        """
        self._check_state(state_dict)
        super().load_state_dict(state_dict)
        # PyTorch has cast the tensors to their parameters' dtype.
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, p in zip(indices, self._parameters(), strict=True):
            for key, saved in state_dict["state"].get(index, {}).items():
                if isinstance(saved, Tensor):
                    self.state[p][key] = saved.detach().to(device=p.device, copy=True)
        if "solver" in state_dict:
            self._load_solver_state(state_dict["solver"])

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        """Raise ValueError unless the state is one of this solver and these parameters."""
        name = type(self).__name__
        solver = state_dict.get("solver", {"name": None})["name"]
        if solver is None and not self._takes_foreign_state(state_dict):
            raise ValueError(f"this is no state dict of {name}: it has no 'solver' entry of it")
        if solver not in (None, name):
            raise ValueError(f"a state dict of {solver} cannot be loaded into {name}")
        indices = [i for group in state_dict["param_groups"] for i in group["params"]]
        for index, p in zip(indices, self._parameters(), strict=False):
            for key, saved in state_dict["state"].get(index, {}).items():
                if isinstance(saved, Tensor) and saved.shape != p.shape:
                    raise ValueError(
                        f"the state dict is of another model: {key!r} of parameter {index} has "
                        f"shape {tuple(saved.shape)}, the parameter {tuple(p.shape)}"
                    )

    def load_momentum(self, buffers: Mapping[Tensor, Tensor]) -> None:
        """Go on with momentum from elsewhere, possibly another solver's.

        A buffer sums up gradients, weight decay included and lr not, whatever the solver. Frozen
        parameters, and those of groups without momentum, take none.

        Args:
            buffers: by parameter; those that are missing start anew.

        Raises:
            ValueError: a key is no parameter of this solver, or a buffer's shape is another than
                its parameter's. Nothing is loaded.
        """
        groups = {p: group for group in self.param_groups for p in group["params"]}
        for p, buffer in buffers.items():
            if p not in groups:
                raise ValueError(
                    f"momentum of shape {tuple(buffer.shape)} is for a tensor that is no parameter "
                    f"of this {type(self).__name__}"
                )
            if buffer.shape != p.shape:
                raise ValueError(
                    f"momentum of shape {tuple(buffer.shape)} does not fit a parameter of shape "
                    f"{tuple(p.shape)}"
                )
        with torch.no_grad():
            for p, buffer in buffers.items():
                if p.requires_grad and groups[p]["momentum"] != 0:
                    self.state[p]["momentum_buffer"] = self._stored_momentum(p, buffer)

    def _stored_momentum(self, p: Tensor, buffer: Tensor) -> Tensor:
        """Return a copy of a momentum buffer as the update keeps it."""
        return buffer.detach().to(device=p.device, dtype=p.dtype, copy=True)

    def _takes_foreign_state(self, state_dict: dict[str, Any]) -> bool:
        """Whether a state dict without a solver's name is torch.optim.SGD's, and enough."""
        groups_fit = all(
            set(self.defaults) <= {*group, "foreach"} for group in state_dict["param_groups"]
        )
        keys = {key for state in state_dict["state"].values() for key in state}
        return groups_fit and keys <= {"momentum_buffer"}


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
    buffer and the iterate once each. An iterate or a buffer that something else has written to is
    rounded to nearest first, whatever the mode.
    """

    #: What the update moves, for whoever counts.
    iterate_name = "weights"

    def __init__(self, *args: Any, **options: Any) -> None:
        #: Iterates and momentum buffers by parameter, as they are known to lie on the grid.
        self._on_grid: dict[tuple[Tensor, str], Content] = {}
        super().__init__(*args, **options)

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
        return self._rounder(p)(iterate, dtype=self._iterate(p).dtype)

    def _nearest_iterate(self, p: Tensor) -> Tensor:
        """Return the iterate on its grid, to nearest."""
        return self._rounder(p).precision.nearest(self._iterate(p))

    def _stored_momentum(self, p: Tensor, buffer: Tensor) -> Tensor:
        iterate = self._iterate(p)  # to nearest, so that no random bits of the run are used up
        copy = buffer.detach().to(device=iterate.device, copy=True)
        return self._rounder(p).precision.nearest(copy, dtype=iterate.dtype)

    @torch.no_grad()
    def _put_on_grid(self) -> None:
        """Round iterates and momentum buffers that something else has written to."""
        for p in self._parameters():
            if self._rounder(p).precision.rounding == "void":
                continue
            if not self._is_on_grid(p, "iterate", self._iterate(p)):
                rounded = self._nearest_iterate(p)
                if not Content(rounded).is_in(self._iterate(p)):
                    self._iterate(p).copy_(rounded)
                self._note_on_grid(p, "iterate", rounded)
            buffer = self.state[p].get("momentum_buffer")
            if buffer is not None and not self._is_on_grid(p, "momentum", buffer):
                buffer = self.state[p]["momentum_buffer"] = self._stored_momentum(p, buffer)
                self._note_on_grid(p, "momentum", buffer)

    def _is_on_grid(self, p: Tensor, what: str, x: Tensor) -> bool:
        known = self._on_grid.get((p, what))
        return known is not None and known.is_in(x)

    def _note_on_grid(self, p: Tensor, what: str, x: Tensor) -> None:
        if self._rounder(p).precision.rounding != "void":
            self._on_grid[p, what] = Content(x)

    def _gradients(self, group: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
        parameters, gradients = super()._gradients(group)
        if group["maximize"]:
            gradients = [-gradient for gradient in gradients]
        decay = group["weight_decay"]
        if decay != 0:
            iterates = (as_wide(self._iterate(p)) for p in parameters)
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
                    before = as_wide(self.state[p]["momentum_buffer"])
                    buffer = gradient.add(before, alpha=momentum)
                stored = self.state[p]["momentum_buffer"] = rounder(buffer, dtype=iterate.dtype)
                self._note_on_grid(p, "momentum", stored)
                self._note(p, "momentum", buffer, stored)
                direction = gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
            wide = as_wide(iterate).sub(direction, alpha=lr)
            iterate.copy_(self._stored_iterate(p, wide))
            self._note_on_grid(p, "iterate", iterate)
            self._note(p, self.iterate_name, wide, iterate)


def _check_not_negative(name: str, number: float | Tensor) -> None:
    if not isinstance(number, int | float | Tensor) or isinstance(number, bool):
        raise TypeError(f"{name} must be a number, not {number!r}")
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be 0 or a positive number, not {number!r}")
