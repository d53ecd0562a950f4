"""Options of parameter groups: those that a step reads, and those it must not ignore."""

import math
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from halp.messages import quoted

#: Options that every group has.
REQUIRED = ("lr", "momentum", "weight_decay")

#: What PyTorch fills in where a state of one of its earlier versions lacks it.
FILLED_IN = {"nesterov": False, "maximize": False, "foreach": None}

#: Options of PyTorch's optimizers that change what a step does, and that no solver has.
FOREIGN = ("dampening", "differentiable", "fused", "capturable", "decoupled_weight_decay")


def check_options(solver: str, group: dict[str, Any], of_the_solver: Iterable[str] = ()) -> None:
    """Raise ValueError for options of a group that the solver would ignore, and numbers differ.

    Args:
        solver: its name.
        group: of parameters, or of a state dict.
        of_the_solver: options that the solver as a whole takes.
    """
    for name in FOREIGN:
        if group.get(name):
            raise ValueError(
                f"{solver} has no {name}, and a parameter group has {name}={quoted(group[name])}: "
                "leave it out or set it to 0 or False, or use torch.optim"
            )
    for name in of_the_solver:
        if name in group:
            raise ValueError(
                f"{name}={quoted(group[name])} is in a parameter group, but it is an option of the "
                f"whole solver: pass it to {solver}(...), or make two solvers"
            )


def check_not_negative(name: str, number: float | Tensor) -> None:
    """Raise TypeError or ValueError unless an option is 0 or a positive number."""
    if not isinstance(number, int | float | Tensor) or isinstance(number, bool):
        raise TypeError(f"{name} must be a number, not {quoted(number)}")
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"{name} must be 0 or a positive number, not {quoted(number)}")
