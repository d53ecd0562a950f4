"""State dicts of solvers: made and read as PyTorch's are, hooks included, and matched by name."""

from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from halp.optim.options import FILLED_IN

StateDict = dict[str, Any]


@dataclass
class Saved:
    """What a state dict holds, copied, for an optimizer's own parameters."""

    groups: list[dict[str, Any]]  # options of each of its groups
    entries: dict[int, dict[str, Any]]  # state by number of its parameter, where there is any
    others: dict[Any, Any]  # state of no parameter
    solver: dict[str, Any] | None  # the entry of this library
    order: list[int]  # the place in the state dict of each of its parameters

    def in_order(self, per_parameter: Sequence[Any]) -> list[Any]:
        """Return what the state dict has in the order of its parameters in that of the own."""
        return [per_parameter[place] for place in self.order]


def pack(optimizer: Optimizer, add: Callable[[StateDict], None]) -> StateDict:
    """Return an optimizer's state dict; ``add`` puts in what PyTorch's own does not have.

    What hooks return takes its place, as in PyTorch.
    """
    for pre_hook in optimizer._optimizer_state_dict_pre_hooks.values():
        pre_hook(optimizer)
    numbers: dict[Any, int] = {}
    for number, p in enumerate(p for group in optimizer.param_groups for p in group["params"]):
        numbers.setdefault(p, number)
    state_dict: StateDict = {
        # A tensor that has been taken out of its group is no parameter any more.
        "state": {
            numbers.get(key, key): dict(entry) if key in numbers else entry
            for key, entry in optimizer.state.items()
            if key in numbers or not isinstance(key, Tensor)
        },
        "param_groups": [
            {**_options(group), "params": [numbers[p] for p in group["params"]]}
            for group in optimizer.param_groups
        ],
    }
    add(state_dict)
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def read(optimizer: Optimizer, state_dict: StateDict) -> Saved:
    """Return what a state dict holds for an optimizer, once its hooks have seen it.

    Where both have names of parameters, these decide what belongs to which; else the order does.
    Nothing of the optimizer is changed.

    Raises:
        ValueError: it is of other parameters.
    """
    before = dict(state_dict.get("state", {}))
    state_dict = dict(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    own, saved, state = optimizer.param_groups, state_dict["param_groups"], state_dict["state"]
    numbers = [number for group in saved for number in group["params"]]
    names, saved_names = _names_in(own), _names_in(saved)
    if names is None or saved_names is None or names == saved_names:
        _check_sizes(own, saved)
        groups, order = list(range(len(own))), list(range(len(numbers)))
        places = order
    else:
        groups, order = _by_name(names, saved_names)
        places = _places(state, before, numbers, order)
    parameters = [p for group in own for p in group["params"]]
    own_number = {numbers[place]: number for number, place in enumerate(places)}
    return Saved(
        groups=[_named(saved[g], mine) for g, mine in zip(groups, own, strict=True)],
        entries={
            own_number[key]: _copied(entry, parameters[own_number[key]])
            for key, entry in state.items()
            if key in own_number
        },
        others={key: entry for key, entry in state.items() if key not in own_number},
        solver=deepcopy(state_dict.get("solver")),
        order=order,
    )


def put(optimizer: Optimizer, saved: Saved) -> None:
    """Make a saved state the optimizer's.

    In the objects that are there: wrappers that copy attributes, and schedulers, hold them too.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for group, options in zip(optimizer.param_groups, saved.groups, strict=True):
        for name, default in FILLED_IN.items():
            if name in optimizer.defaults:
                options.setdefault(name, default)
        members = group["params"]
        group.clear()
        group.update(options, params=members)
    optimizer.state.clear()
    optimizer.state.update(saved.others)
    optimizer.state.update((parameters[number], e) for number, e in saved.entries.items())


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: option for name, option in group.items() if name != "params"}


def _named(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of saved options, with names in the order of the group's own parameters."""
    options = deepcopy(_options(saved))
    if "param_names" in own:
        names = options.setdefault("param_names", own["param_names"])
        if set(names) == set(own["param_names"]):
            options["param_names"] = own["param_names"]
    return options


def _copied(entry: dict[str, Any], p: Tensor) -> dict[str, Any]:
    """Copy a parameter's state to its device; each tensor keeps its dtype.

    States of earlier versions of PyTorch have None where there is no momentum yet.
    """
    return {
        key: value.detach().to(device=p.device, copy=True)
        if isinstance(value, Tensor)
        else deepcopy(value)
        for key, value in entry.items()
        if value is not None
    }


def _names_in(groups: list[dict[str, Any]]) -> list[list[str]] | None:
    """Return the names of parameters by group; None unless all have them."""
    if not all("param_names" in group for group in groups):
        return None
    for group in groups:
        if len(group["param_names"]) != len(group["params"]):
            raise ValueError(
                f"a parameter group has {len(group['params'])} parameters and "
                f"{len(group['param_names'])} 'param_names'"
            )
    return [list(group["param_names"]) for group in groups]


def _check_sizes(own: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    if len(own) != len(saved):
        raise ValueError(
            f"the state dict has a different number of parameter groups, {len(saved)} and not "
            f"{len(own)}"
        )
    for index, (group, other) in enumerate(zip(own, saved, strict=True)):
        if len(group["params"]) != len(other["params"]):
            raise ValueError(
                f"parameter group {index} of the state dict has {len(other['params'])} parameters, "
                f"and not {len(group['params'])}"
            )


def _by_name(names: list[list[str]], saved_names: list[list[str]]) -> tuple[list[int], list[int]]:
    """Return where each own group, and each own parameter, is in a state dict.

    Raises:
        ValueError: there are other names, names that occur twice, or they are in other groups.
    """
    own = [name for group in names for name in group]
    saved = [name for group in saved_names for name in group]
    lacking, surplus = set(own) - set(saved), set(saved) - set(own)
    if lacking or surplus:
        parts = [f"lacks {_listed(lacking)}"] if lacking else []
        parts += [f"has {_listed(surplus)} besides"] if surplus else []
        raise ValueError(
            f"the state dict is of other parameters: it {' and '.join(parts)}; where they are the "
            "same by another name, rename them in a hook (register_load_state_dict_pre_hook)"
        )
    if len(set(own)) < len(own) or len(set(saved)) < len(saved):
        raise ValueError(
            "the state dict has its parameters in another order, and some names occur twice, so "
            "that it cannot be told which is which: give every parameter a name of its own"
        )
    groups: list[int] = []
    for group in names:
        same = [g for g, other in enumerate(saved_names) if set(other) == set(group)]
        left = [g for g in same if g not in groups]
        if not left:
            raise ValueError(
                f"the state dict divides the parameters into other groups: here {_listed(group)} "
                "are one, with options of their own; make the groups as they were"
            )
        groups.append(left[0])
    place = {name: k for k, name in enumerate(saved)}
    return groups, [place[name] for name in own]


def _places(
    state: dict[Any, Any], before: dict[Any, Any], numbers: list[int], order: list[int]
) -> list[int]:
    """Return where each own parameter's entry is, if names are in another order there.

    Hooks that put the entries in order may have left the names as they were.

    Raises:
        ValueError: hooks have changed the entries in another way and not the names.
    """
    if state.keys() == before.keys() and all(state[key] is before[key] for key in before):
        return order
    in_order = [before.get(numbers[place]) for place in order]
    if all(state.get(n) is entry for n, entry in zip(numbers, in_order, strict=True)):
        return list(range(len(numbers)))
    raise ValueError(
        "a load_state_dict pre-hook has changed the entries of the state and left 'param_names' in "
        "another order than this optimizer's, so that it cannot be told which entry is whose: the "
        "hook should return 'param_names' in the order of its entries"
    )


def _listed(names: Iterable[str]) -> str:
    names = sorted(names)
    shown = ", ".join(map(repr, names[:3]))
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
