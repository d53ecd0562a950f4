"""Exchanging the tensors behind a model's parameters, which stay who they are.

A parameter's hooks, attributes and class hang partly on its Python object and partly on the tensor
behind it; PyTorch's own exchange (``torch.utils.swap_tensors``) loses them on the way.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halp.bitcenter.tensor import OWN_ATTRIBUTES, BitCenteredTensor


class Attached(NamedTuple):
    """What hangs on a parameter.

    Attributes:
        attributes: that users have set on it, by name.
        hooks: on its gradient.
        post_hooks: called after its gradient has been accumulated.
        plain_class: the class that it has as a plain parameter.
    """

    attributes: dict[str, Any]
    hooks: Any
    post_hooks: Any
    plain_class: type


def attached_to(p: Any) -> Attached:
    """Return what hangs on a parameter."""
    attributes = {name: value for name, value in vars(p).items() if name not in OWN_ATTRIBUTES}
    plain_class = p._plain_class if isinstance(p, BitCenteredTensor) else type(p)
    return Attached(attributes, p._backward_hooks, p._post_accumulate_grad_hooks, plain_class)


def attach(p: Any, what: Attached) -> None:
    """Hang on a parameter, behind which another tensor has come, what hung on it before."""
    vars(p).update(what.attributes)
    if isinstance(p, BitCenteredTensor):
        p._plain_class = what.plain_class
    else:
        p.__class__ = what.plain_class
    # The dictionaries that the hooks' handles remove them from; setting them registers them anew.
    if what.hooks is not None:
        p._backward_hooks = what.hooks
    if what.post_hooks is not None:
        p._post_accumulate_grad_hooks = what.post_hooks


class KeepsAttached:
    """A module's ``_apply``, of ``to``, ``double`` or ``share_memory``: its parameters keep all."""

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply, as the module's class does."""
        module: Any = self._module()
        attached = {p: attached_to(p) for p in module._parameters.values() if p is not None}
        try:
            return type(module)._apply(module, *args, **kwargs)
        finally:
            for p, what in attached.items():
                attach(p, what)

    def __deepcopy__(self, memo: dict[int, Any]) -> "KeepsAttached":
        return KeepsAttached(copy.deepcopy(self._module(), memo))  # type: ignore[arg-type]

    def __reduce__(self) -> tuple:
        return KeepsAttached, (self._module(),)


def replace_parameters(model: nn.Module, replace: Callable[[Tensor], Tensor]) -> None:
    """Swap each parameter's tensor for ``replace(it)``, keeping its identity; its gradient alike.

    ``Module._apply`` knows how: also for modules that hold their weights twice, like ``nn.LSTM``.

    Raises:
        RuntimeError: a parameter is part of an autograd graph that is alive, or has weak
            references. None is replaced then.
    """
    attached = {p: attached_to(p) for p in model.parameters()}
    originals = {id(p): p.detach() for p in attached}
    gradients = [(p, p.grad) for p in attached if p.grad is not None]
    for parameter, _ in gradients:
        parameter.grad = None

    def apply(t: Tensor) -> Tensor:
        return replace(t) if id(t) in originals else t

    swap = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model._apply(apply)
    except RuntimeError as error:
        if "swap" not in str(error):
            raise
        why = _why_not(model)
        swap_back(model, originals)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        raise RuntimeError(why) from error
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swap)
        for parameter, what in attached.items():
            attach(parameter, what)
    with torch.no_grad():
        for parameter, gradient in gradients:
            if _is_whole(gradient):
                parameter.grad = replace(gradient)


def _is_whole(gradient: Tensor) -> bool:
    """Whether a gradient has an offset: of a step with cached offsets there is the delta alone."""
    return not isinstance(gradient, BitCenteredTensor) or gradient._offset.root.is_at_hand


def swap_back(model: nn.Module, originals: dict[int, Tensor]) -> None:
    """Give converted parameters their original tensors again, whatever still refers to theirs."""
    for parameter in model.parameters():
        original = originals.get(id(parameter), parameter)
        if isinstance(parameter, BitCenteredTensor) != isinstance(original, BitCenteredTensor):
            attached = attached_to(parameter)
            parameter.grad = None
            if parameter.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                node.register_prehook(_refuse_gradient)
            other = nn.Parameter(original, requires_grad=parameter.requires_grad)
            parameter.__class__, other.__class__ = other.__class__, parameter.__class__
            parameter.__dict__, other.__dict__ = other.__dict__, parameter.__dict__
            torch._C._swap_tensor_impl(parameter, other)
            attach(parameter, attached)


def _refuse_gradient(_: Any) -> None:
    raise RuntimeError(
        "backward() reached a parameter that has been converted since the forward pass, by "
        "halp.materialize or another conversion; call it before, or run the forward pass again"
    )


def _why_not(model: nn.Module) -> str:
    """Return the sentence for whom a parameter could not be swapped."""
    for name, parameter in model.named_parameters():
        if weakref.getweakrefs(parameter):
            return (
                f"parameter {name!r} has weak references, which compiled code and some containers "
                "keep, and cannot be converted: convert the model before it is compiled, or "
                "delete what refers to it"
            )
    return (
        "a parameter is still part of an autograd graph, because an output or a loss computed with "
        "it is alive: delete it, or compute it under torch.no_grad(), before converting the model"
    )


def check_attached(name: str, p: Tensor) -> None:
    """Raise TypeError or ValueError for what a bit-centered parameter could not keep."""
    kind = type(p)
    own_way = {"__torch_function__", "__torch_dispatch__"} & set(kind.__dict__)
    if kind is not nn.Parameter and own_way:
        raise TypeError(
            f"parameter {name!r} is a {kind.__name__}, which computes in its own way; bit "
            "centering takes torch.nn.Parameters"
        )
    taken = [a for a in vars(p) if a in OWN_ATTRIBUTES or hasattr(BitCenteredTensor, a)]
    taken = [a for a in taken if a != "_is_param"]
    if taken:
        raise ValueError(
            f"parameter {name!r} has an attribute {taken[0]!r}, which a bit-centered tensor has "
            "itself: name it otherwise"
        )


def forget_computed(model: nn.Module) -> None:
    """Detach the tensors that modules compute from parameters before every forward pass.

    As ``torch.nn.utils.prune`` and the old ``weight_norm`` and ``spectral_norm`` do.

    Raises:
        ValueError: a module has such a tensor, and nothing computes it again.
    """
    for path, module in model.named_modules():
        hooks = module._forward_pre_hooks.values()
        computed = {getattr(h, "name", None) or getattr(h, "_tensor_name", None) for h in hooks}
        for name, value in list(vars(module).items()):
            if not isinstance(value, Tensor) or value.grad_fn is None:
                continue
            if name not in computed:
                raise ValueError(
                    f"{name!r} of module {path!r} was computed from parameters once, and would not "
                    "be of the bit-centered ones: compute it in forward(), or detach() it"
                )
            setattr(module, name, value.detach())
