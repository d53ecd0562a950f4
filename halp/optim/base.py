"""What the six solvers share: one loop, one update, one kind of state dict."""

import numbers
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from halp.bitcenter import BitCenteredTensor, value
from halp.optim.options import REQUIRED, check_not_negative, check_options
from halp.optim.shared import Shared
from halp.optim.state import Saved, pack, put, read

Closure = Callable[[], Any]


class Solver(Optimizer):
    """A minibatch solver with the arguments and momentum of :class:`torch.optim.SGD`.

    With ``v`` the solver's gradient, weight decay λ and momentum m: ``buf ← m·buf + v + λw`` and
    ``w ← w − lr·buf``. lr is applied last and nothing cached contains it, so that schedulers work
    at any time.

    A subclass supplies its gradient: :meth:`_evaluate` runs the closure, :meth:`_gradient` returns
    one parameter's v. :meth:`_update` is the arithmetic: see :mod:`halp.optim.updates`.

    A frozen parameter (``requires_grad_(False)``) stands still at once, momentum and weight decay
    included, also where a gradient of before still lies in it.
    """

    #: As state dicts call the solver, whatever a wrapper calls itself.
    solver_name: str
    #: Options that are of the solver as a whole: groups cannot have their own.
    solver_options: tuple[str, ...] = ()

    #: Whether the solver moves deltas of bit-centered parameters.
    moves_deltas = False
    #: What looks on, a `halp.training.Watch`; None costs nothing.
    watch: Shared[Any] = Shared(None)

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
        check_not_negative("lr", lr)
        check_not_negative("momentum", momentum)
        check_not_negative("weight_decay", weight_decay)
        if nesterov and momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        self.watch = None
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, as in any PyTorch optimizer."""
        super().add_param_group(param_group)
        try:
            group = self.param_groups[-1]
            for name in REQUIRED:
                check_not_negative(name, group[name])
            self._check_options(group)
            if not self.moves_deltas:
                self._check_parameters()
        except (TypeError, ValueError):
            self.param_groups.pop()
            raise

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

        Raises:
            TypeError: the closure returned something else. Nothing has moved.
        """
        self._check_parameters()
        for group in self.param_groups:
            self._check_options(group)
        loss = self._evaluate(closure)
        check_loss(loss, "step")
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
        """Return the parameters of a group that move, and what they move along."""
        parameters, gradients = [], []
        for p in filter(self._trains, group["params"]):
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

    def _trains(self, p: Tensor) -> bool:
        """Whether a parameter is to move, if it has a gradient."""
        return p.requires_grad

    def _gradient(self, p: Tensor, group: dict[str, Any]) -> Tensor | None:
        """Return v for one parameter, or None to leave it as it is."""
        return p.grad

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
                    "snapshot or step, and again where load_state_dict(..., assign=True) or an "
                    "assignment has put plain tensors in its place"
                )
            raise TypeError(
                f"{name} is bit-centered; use BitCenterSGD or BitCenterSVRG, or "
                "halp.to_plain(model) first"
            )

    def _check_options(self, group: dict[str, Any]) -> None:
        """Raise ValueError for options of a group that the update would ignore."""
        of_the_solver = [o for c in type(self).__mro__ for o in vars(c).get("solver_options", ())]
        check_options(self.solver_name, group, of_the_solver)

    def _check_gradients(self) -> None:
        """Raise where a step's closure should have left gradients: SGD then does nothing."""

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    # State.

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles keep: all but hooks and what a scheduler has wrapped."""
        kept = {
            k: v for k, v in vars(self).items() if k != "step" and not k.startswith("_optimizer_")
        }
        shared = {k: v for k, v in kept.get("_shared", {}).items() if k != "watch"}
        return {**kept, "_shared": shared}

    def _solver_state(self) -> dict[str, Any]:
        """Return what the state dict holds beside tensors: plain values only."""
        return {"name": self.solver_name}

    def _add_state(self, state_dict: dict[str, Any]) -> None:
        """Put into a state dict what PyTorch's own does not have."""
        state_dict["solver"] = self._solver_state()

    def state_dict(self) -> dict[str, Any]:
        """Return all that a resumed run needs to go on bit for bit, also in the middle of a cycle.

        PyTorch's own entries, and ``"solver"``: the solver's name, its position in the cycle and
        that of its random stream. ``torch.load(..., weights_only=True)`` reads it.
        """
        return pack(self, self._add_state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load :meth:`state_dict`, keeping each tensor's dtype.

        The state of :class:`torch.optim.SGD` is taken by the solvers without snapshots. Where both
        sides have names of parameters (``SGD(model.named_parameters(), …)``) each one gets what is
        saved under its name; else their order decides.

        Raises:
            ValueError: the state is another solver's, or of other parameters, or has options that
                this solver lacks. Nothing is loaded.
        """
        saved = read(self, state_dict)
        self._check_state(saved)
        self._load(saved)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    def _load(self, saved: Saved) -> None:
        """Take over a state that has been checked."""
        put(self, saved)
        if saved.solver is None:  # PyTorch's momentum is on no grid
            for p in self._parameters():
                if "momentum_buffer" in self.state.get(p, {}):
                    buffer = self._stored_momentum(p, self.state[p]["momentum_buffer"])
                    self.state[p]["momentum_buffer"] = buffer

    def _check_state(self, saved: Saved) -> None:
        """Raise ValueError unless the state is one of this solver and these parameters."""
        ours = self.solver_name
        solver = None if saved.solver is None else saved.solver["name"]
        if solver is None and not self._takes_foreign_state(saved):
            raise ValueError(f"this is no state dict of {ours}: it has no 'solver' entry of it")
        if solver not in (None, ours):
            raise ValueError(f"a state dict of {solver} cannot be loaded into {ours}")
        for index, group in enumerate(saved.groups):
            for name in REQUIRED:
                if name not in group:
                    raise ValueError(f"parameter group {index} of the state dict has no {name!r}")
            self._check_options(group)
        parameters = self._parameters()
        for index, entry in saved.entries.items():
            p = parameters[index]
            for key, tensor in entry.items():
                if isinstance(tensor, Tensor) and tensor.shape != p.shape:
                    raise ValueError(
                        f"the state dict is of another model: {key!r} of parameter {index} has "
                        f"shape {tuple(tensor.shape)}, the parameter {tuple(p.shape)}"
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

    def _takes_foreign_state(self, saved: Saved) -> bool:
        """Whether a state dict without a solver's name is torch.optim.SGD's, and enough."""
        groups_fit = all(
            "nesterov" in group and ("dampening" in group or "maximize" in group)
            for group in saved.groups
        )
        return groups_fit and all(
            entry.keys() <= {"momentum_buffer"} for entry in saved.entries.values()
        )


def check_loss(loss: Any, caller: str) -> None:
    """Raise TypeError for what a closure returns unless it is one number, or None."""
    if loss is None or isinstance(loss, numbers.Real):
        return
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the closure of {caller}() must return the mean loss alone, and returned a "
            f"{type(loss).__name__}: leave what else it computes in a variable outside of it"
        )
    if loss.numel() != 1:
        raise TypeError(
            f"the closure of {caller}() must return the mean loss, one number, and returned a "
            f"tensor of shape {tuple(loss.shape)}"
        )
