"""Activation checkpointing: its recomputation repeats what the forward pass drew.

``torch.utils.checkpoint`` runs a region of the forward pass once more during the backward pass. It
sets PyTorch's random generators back for that, and knows nothing of what else goes on from call to
call: a count that random bits come from, a mode that has been left. Whoever keeps such a thing says
so while the region runs for the first time, and how to go back to it: :func:`repeat_in`.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointFunction

_MODULE = CheckpointFunction.__module__
#: The code of functions that checkpointing with ``use_reentrant=True`` runs a region in.
_REENTRANT_FORWARD = CheckpointFunction.forward.__code__
_REENTRANT_BACKWARD = CheckpointFunction.backward.__code__
#: Where it keeps what runs a region again.
_REENTRANT = "run_function"


class Region(NamedTuple):
    """A checkpointed region that is running.

    Attributes:
        keeper: what checkpointing keeps of the region.
        name: the keeper's attribute that is called to run the region again; None while it does.
    """

    keeper: Any
    name: str | None


def regions_under_way() -> list[Region]:
    """Return the checkpointed regions that are running, for the first time or again.

    Raises:
        RuntimeError: PyTorch's checkpointing is another than this module knows.
    """
    found = list(_regions_of_hooks())
    if not torch.is_grad_enabled() or torch._C._current_autograd_node() is not None:
        found += _reentrant_regions()
    return found


def _regions_of_hooks() -> Iterator[Region]:
    """Yield those with ``use_reentrant=False``, which save tensors by hooks of their own."""
    autograd = torch._C._autograd
    hooks = autograd._top_saved_tensors_default_hooks(False)
    above = []  # a stack that shows its top only
    try:
        while hooks is not None:
            if hooks[0].__module__ == _MODULE:
                yield _region_of_hook(hooks[0])
            above.append(hooks)
            autograd._pop_saved_tensors_default_hooks()
            hooks = autograd._top_saved_tensors_default_hooks(False)
    finally:
        for pack, unpack in reversed(above):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def _region_of_hook(hook: Any) -> Region:
    if hook.__qualname__.startswith("_recomputation_hook"):
        return Region(hook, None)
    frame = _variable(hook, "frame")
    if not hasattr(frame, "recompute_fn"):
        raise RuntimeError(
            f"stochastic rounding and halp.emulate cannot be repeated by the activation "
            f"checkpointing of PyTorch {torch.__version__}, which is another than halp knows; "
            "train without checkpointing, or with another version"
        )
    return Region(frame, "recompute_fn")


def _reentrant_regions() -> Iterator[Region]:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _REENTRANT_FORWARD:
            yield Region(frame.f_locals["ctx"], _REENTRANT)
        elif frame.f_code is _REENTRANT_BACKWARD:
            if torch.is_grad_enabled():  # in the region, not in the backward pass after it
                yield Region(frame.f_locals["ctx"], None)
            return
        frame = frame.f_back  # type: ignore[assignment]


class _Recomputation:
    """Runs a region again, in the contexts that have been asked for."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self.run = run
        self.contexts: dict[Any, Callable[[], AbstractContextManager]] = {}

    def __call__(self, *args: Any) -> Any:
        with ExitStack() as stack:
            for enter in self.contexts.values():
                stack.enter_context(enter())
            return self.run(*args)


def repeat_in(
    context: Callable[[], AbstractContextManager], owner: Any, regions: list[Region]
) -> bool:
    """Have regions that run for the first time repeated in a context; return whether any is new.

    Only the first call of an owner within a region counts: what it is about to do must be what
    the region does first.
    """
    new = False
    for keeper, name in regions:
        if name is None:
            continue
        run = getattr(keeper, name)
        if not isinstance(run, _Recomputation):
            run = _Recomputation(run)
            setattr(keeper, name, run)
        if owner not in run.contexts:
            run.contexts[owner] = context
            new = True
    return new


def repeats_every_operation(regions: list[Region]) -> bool:
    """Whether recomputing these regions runs the operations that ran, each of them.

    Selective checkpointing keeps the results of some. With ``use_reentrant=True`` a region runs
    without autograd first, where PyTorch leaves out copies that it makes with it.
    """
    return not any(
        name == _REENTRANT
        or type(_variable(getattr(keeper, name), "recompute_context")).__module__ == _MODULE
        for keeper, name in regions
        if name is not None
    )


def _variable(function: Any, name: str) -> Any:
    """Return a variable of the function that another one is defined in; None if it has none."""
    if isinstance(function, _Recomputation):
        function = function.run
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    return function.__closure__[names.index(name)].cell_contents if name in names else None
