"""From an ATen operation on bit-centered tensors to the rule that computes its delta.

The order is: the operation's own rule; for an in-place operation, the out-of-place rule and a copy
into both parts; a decomposition into other operations; an error that names the operation.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.utils._python_dispatch import return_and_correct_aliasing

from halp.bitcenter.cache import Recipes
from halp.bitcenter.offsets import Offset
from halp.bitcenter.operands import Decided, Operand, all_constant, exact_of, on_offsets
from halp.bitcenter.replay import run_with_cache
from halp.bitcenter.tensor import BitCenteredTensor, writes_counted
from halp.bitcenter.writes import in_place, is_at_hand, target_of, writes
from halp.calls import call, replace_tensors
from halp.random_bits import is_traced

#: Runs an operation: takes it, the argument to model results on, and all arguments.
Handler = Callable[[OpOverload, BitCenteredTensor, tuple, dict], Any]

HANDLERS: dict[OpOverload, Handler] = {}

#: Of an operation: which arguments its offsets depend on, if not on all.
KEYS: dict[OpOverload, Callable[[tuple], tuple]] = {}

#: Of an operation: how inner steps compute its result's offset from what is kept of its operands.
RECIPES: dict[OpOverload, Callable[..., Recipes | tuple[Recipes, ...]]] = {}


def register_rule(*ops: OpOverload) -> Callable[[Callable], Callable]:
    """Register a delta rule for ATen operations.

    The rule is called with the operation's arguments, in which every floating-point tensor has
    become an :class:`Operand` with the attributes ``offset`` (u, rounded to the format), ``delta``
    (e, or None where the operand is a plain tensor, a constant) and ``exact`` (u unrounded). So
    have comparisons and indices of bit-centered tensors, with ``before`` and ``after`` besides;
    plain integer and boolean tensors stay as they are.

    It is only called where some operand has a delta. It returns the result's delta in a new tensor,
    computed wide: the dispatcher rounds it, and computes the offset with the operation itself. None
    stands for a delta of zero. An operation with several results gets a tuple.

    Example:
        >>> @register_rule(torch.ops.aten.cosh.default)
        ... def cosh(x):
        ...     return 2 * torch.sinh(x.offset + x.delta / 2) * torch.sinh(x.delta / 2)
    """

    def register(rule: Callable) -> Callable:
        for op in ops:
            HANDLERS[op] = _handler_of(rule)
        return rule

    return register


def register_recipe(*ops: OpOverload) -> Callable[[Callable], Callable]:
    """Register what saves cached offsets from keeping an operation's result.

    The function is called with the operation's arguments as a rule is, and returns for each form in
    which the result's offset may be read a :class:`~halp.bitcenter.cache.Recipe`; a tuple of such
    dicts where there are several results. Operands in it have no deltas.
    """

    def register(recipe: Callable) -> Callable:
        for op in ops:
            RECIPES[op] = recipe
        return recipe

    return register


def register_key(op: OpOverload) -> Callable[[Callable], Callable]:
    """Register what an operation's offsets depend on: a function that picks it from the arguments.

    By it cached offsets are found again; without one, they depend on all arguments.
    """

    def register(pick: Callable[[tuple], tuple]) -> Callable:
        KEYS[op] = pick
        return pick

    return register


def register_handler(*ops: OpOverload) -> Callable[[Handler], Handler]:
    """Register a function that runs an operation as a whole: for what is not arithmetic."""

    def register(handler: Handler) -> Handler:
        for op in ops:
            HANDLERS[op] = handler
        return handler

    return register


def model_of(args: Any, kwargs: dict) -> BitCenteredTensor | None:
    """Return the argument that results are modelled on: the first bit-centered one.

    A floating-point one comes before integer or boolean ones.
    """
    first = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is list or type(value) is tuple:
            value = model_of(value, {})
        if type(value) is BitCenteredTensor:
            if value.dtype.is_floating_point:
                return value
            first = value if first is None else first
    return first


def dispatch(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` on arguments with bit-centered tensors among them."""
    like = model_of(args, kwargs)
    if like is None:
        return func(*args, **kwargs)
    if _runs_each(func):
        return func._op_dk(_EACH, *args, **kwargs)
    if like.context.offsets_only:
        return _offsets_only(func, like, args, kwargs)
    cache = like.context.cache
    if cache is None or not cache.is_active:
        return _run(func, like, args, kwargs)
    if writes(func) and is_at_hand(target_of(args, kwargs)):
        root = target_of(args, kwargs)._offset.root
        root.written(hash(("written", root.key)), None)
        with cache.suspended():
            return _run(func, like, args, kwargs)
    if not torch.is_grad_enabled() and _is_of_parameters(func, args, kwargs):
        return _on_site(func, like, args, kwargs)
    if is_traced(like.delta):
        raise NotImplementedError(
            "cached offsets are recorded and replayed eagerly and cannot be compiled; use "
            'halp.bit_center(..., offsets="on-site") under torch.compile'
        )
    outer = cache.begin_call(func, KEYS[func](args) if func in KEYS else args, kwargs)
    try:
        result = _run(func, like, args, kwargs)
        for i, part in enumerate(result if isinstance(result, tuple | list) else (result,)):
            if type(part) is BitCenteredTensor and not part._offset.is_named(args):
                part._offset.name(cache.key_of_result(i))
    finally:
        cache.end_call(outer)
    return result


#: Where PyTorch keeps the form of an operation on lists that runs a plain one on each element.
_EACH = torch._C.DispatchKey.CompositeExplicitAutograd


@cache
def _runs_each(func: OpOverload) -> bool:
    """Whether an operation does to each tensor of a list what another one does to a tensor."""
    on_lists = func._schema.name.startswith("aten::_foreach_")
    return on_lists and func not in HANDLERS and func.has_kernel_for_dispatch_key(_EACH)


def _is_of_parameters(func: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether an operation reads parameters, parts of them and numbers, and nothing else.

    Outside of autograd that is what averages of models are made of, and other optimizers' steps.
    """
    tensors: list[Tensor] = []
    replace_tensors((args, tuple(kwargs.values())), tensors.append)
    return torch.Tag.nondeterministic_seeded not in func.tags and all(
        is_at_hand(x) or (type(x) is Tensor and x.dim() == 0 and x.device.type == "cpu")
        for x in tensors
    )


def _on_site(func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict) -> Any:
    """Run an operation without the cache, of whose operands the offsets are there."""
    assert like.context.cache is not None

    def key(x: Tensor) -> Any:
        return x._offset.key if type(x) is BitCenteredTensor else x.item()

    operands = replace_tensors((args, tuple(kwargs.items())), key)
    with like.context.cache.suspended():
        result = _run(func, like, args, kwargs)
    for i, part in enumerate(result if isinstance(result, tuple | list) else (result,)):
        if type(part) is BitCenteredTensor and not part._offset.is_named(args):
            part._offset.name(hash((func._schema, repr(operands), i)))
    return result


def _run(func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict) -> Any:
    handler = HANDLERS.get(func)
    if handler is not None:
        return handler(func, like, args, kwargs)
    if func._schema.is_mutable:
        return in_place(func, args, kwargs)
    if not like.dtype.is_floating_point:
        return on_both_values(func, like, args, kwargs)
    return _decompose(func, args, kwargs)


def _decompose(func: OpOverload, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` as the operations that PyTorch defines it by.

    Raises:
        NotImplementedError: there is no rule and no decomposition into operations with rules.
    """
    result = func.decompose(*args, **kwargs)
    if result is not NotImplemented:
        return result
    decomposition = decomposition_table.get(func)
    if decomposition is None or func.namespace == "prims":
        raise _no_rule(func)
    try:
        return decomposition(*args, **kwargs)
    except NotImplementedError as error:
        raise _no_rule(func) from error


@cache
def _is_derived(func: OpOverload) -> bool:
    """Whether an operation without a rule of its own may run by those of others."""
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return (
        func._schema.is_mutable
        or (func in decomposition_table and func.namespace != "prims")
        or func.has_kernel_for_dispatch_key(composite)
    )


#: What would do in the place of operations without a rule, by how their names begin.
_INSTEAD = {
    "aten.view.dtype": (
        "a bit-centered tensor cannot be rounded, nor read as bits: its deltas are in low "
        "precision already; take halp.value(t), which is plain, and leave halp.Quantize out of "
        "bit-centered models"
    ),
    "aten._scaled_dot_product": (
        "fused attention has no delta rule; run forward and backward pass in PyTorch's "
        "mathematical form of it, which has: with torch.nn.attention.sdpa_kernel("
        "torch.nn.attention.SDPBackend.MATH)"
    ),
    **dict.fromkeys(
        ("aten._transformer_encoder_layer_fwd", "aten._native_multi_head_attention"),
        "this layer in one operation, which PyTorch takes in evaluation, has no delta rule; "
        "evaluate under halp.materialize(model), or torch.backends.mha.set_fastpath_enabled(False)",
    ),
    "c10d.": (
        "processes of torch.distributed, as DistributedDataParallel starts them, cannot exchange "
        "bit-centered tensors; train in one process, or a plain model (halp.to_plain) with a plain "
        "solver, and send halp.value(t) elsewhere"
    ),
}


def _no_rule(func: OpOverload) -> NotImplementedError:
    for name, instead in _INSTEAD.items():
        if str(func).startswith(name):
            return NotImplementedError(f"{func}: {instead}")
    return NotImplementedError(
        f"{func} has no delta rule, so it cannot run on bit-centered tensors; give it one with "
        f"halp.bitcenter.register_rule(torch.ops.{func})"
    )


def _offsets_only(func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict) -> Any:
    """Run ``func`` at w̃, in a snapshot: on the offsets, with deltas of zero.

    Raises:
        NotImplementedError: an inner step could not run it, for want of a rule.
    """
    if func not in HANDLERS and like.dtype.is_floating_point and not _is_derived(func):
        raise _no_rule(func)
    if torch.Tag.inplace_view in func.tags and func in HANDLERS:
        return HANDLERS[func](func, like, args, kwargs)  # the wrapper changes its shape too
    dtype = like.dtype if like.dtype.is_floating_point else torch.get_default_dtype()
    with writes_counted():
        result = on_offsets(func, args, kwargs, dtype)
    if func._schema.is_mutable and func._schema.returns[0].alias_info is not None:
        return target_of(args, kwargs)

    def center(offset: Any) -> Any:
        return _constant(offset, like) if isinstance(offset, Tensor) else offset

    if isinstance(result, tuple | list):
        return type(result)(map(center, result))
    centered = center(result)
    if func.is_view and is_traced(like.delta):
        return return_and_correct_aliasing(func, args, kwargs, centered)
    return centered


def _handler_of(rule: Callable) -> Handler:
    """Make a rule into a handler: it adds the offset, and rounds the delta."""

    def handler(func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict) -> Any:
        context = like.context
        if not like.dtype.is_floating_point:
            return on_both_values(func, like, args, kwargs)
        dtype, delta_dtype = like.dtype, like.delta.dtype
        if context.is_cached:
            return run_with_cache(rule, RECIPES.get(func), func, like, args, kwargs)

        def operand(x: Tensor) -> Any:
            if x.dtype.is_floating_point or type(x) is BitCenteredTensor:
                return Operand(x, context, delta_dtype)
            return x

        def offset() -> Any:
            return on_offsets(func, args, kwargs, dtype)

        result = None if all_constant(args) else call(rule, args, kwargs, operand)
        if result is None:
            constants = offset()
            if isinstance(constants, tuple):
                return tuple(_constant(part, like) for part in constants)
            return _constant(constants, like)
        decision = None
        if type(result) is Decided:
            result, decision = result
        in_backward = torch._C._current_autograd_node() is not None
        deferred = in_backward and not is_traced(like.delta)
        if isinstance(result, tuple):
            if deferred and _mask_position(func) is not None:
                return _parts_deferred(func, args, kwargs, result, like)
            return tuple(
                _constant(part, like) if delta is None else wrap(part, delta, like)
                for part, delta in zip(offset(), result, strict=True)
            )
        if deferred:
            wrapped = _wrap_deferred(_later(func, args, kwargs, dtype), result, like)
        else:
            wrapped = wrap(offset(), result, like)
        wrapped.decision = decision  # in a backward pass too: it may repeat a forward one
        return wrapped

    return handler


def _constant(offset: Any, like: BitCenteredTensor) -> Any:
    if offset is None or not offset.dtype.is_floating_point:
        return offset
    return BitCenteredTensor.constant(offset, like.context, _delta_dtype(like, offset))


def wrap(offset: Tensor, delta: Tensor, like: BitCenteredTensor) -> BitCenteredTensor:
    """Round ``delta`` and put it together with its offset, in the offset's memory layout."""
    delta = like.context.rounder(delta).to(_delta_dtype(like, offset))
    return BitCenteredTensor(offset, _in_layout_of(offset, delta), like.context)


def _delta_dtype(like: BitCenteredTensor, offset: Tensor) -> torch.dtype:
    return like.delta.dtype if like.dtype.is_floating_point else offset.dtype


def _later(func: OpOverload, args: tuple, kwargs: dict, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Return what computes an operation's offset later, holding on to no autograd graph."""

    def keep(x: Tensor) -> Any:
        return _Kept(x._offset if type(x) is BitCenteredTensor else Offset(x.detach()))

    def offset_of(kept: Any) -> Any:
        if type(kept) is list:
            return [offset_of(value) for value in kept]
        return exact_of(kept.offset.tensor, dtype) if type(kept) is _Kept else kept

    kept_args = replace_tensors(args, keep)
    kept_kwargs = dict(zip(kwargs, replace_tensors(kwargs.values(), keep), strict=True))
    return lambda: func(
        *map(offset_of, kept_args), **{name: offset_of(v) for name, v in kept_kwargs.items()}
    )


class _Kept(NamedTuple):
    offset: Offset


@cache
def _mask_position(func: OpOverload) -> int | None:
    """Return where a backward operation is told which of its results are wanted."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("output_mask") if "output_mask" in names else None


def _parts_deferred(
    func: OpOverload, args: tuple, kwargs: dict, deltas: tuple, like: BitCenteredTensor
) -> tuple:
    """Return the gradients that are wanted; the offset of each is computed when it is read."""
    position = _mask_position(func)
    assert position is not None

    def part(i: int) -> Any:
        only = [j == i for j in range(len(deltas))]
        later = _later(func, (*args[:position], only, *args[position + 1 :]), kwargs, like.dtype)
        if deltas[i] is None:
            return _constant(later()[i], like)
        return _wrap_deferred(lambda: later()[i], deltas[i], like)

    return tuple(part(i) if wanted else None for i, wanted in enumerate(args[position]))


def _wrap_deferred(
    offset: Callable[[], Tensor], delta: Tensor, like: BitCenteredTensor
) -> BitCenteredTensor:
    rounded = like.context.rounder(delta).to(like.delta.dtype)
    deferred = like.context.defer(lambda: _in_layout_of(rounded, offset()))
    return BitCenteredTensor(deferred, rounded, like.context, like.dtype)


def _in_layout_of(model: Tensor, x: Tensor) -> Tensor:
    """Return ``x`` with the strides of ``model``: views must be able to take both parts alike."""
    if x.stride() == model.stride():
        return x
    return torch.empty_strided(model.shape, model.stride(), dtype=x.dtype, device=x.device).copy_(x)


def on_both_values(func: OpOverload, like: BitCenteredTensor, args: tuple, kwargs: dict) -> Any:
    """Run an operation that decides or jumps on the offset, and again on the full value.

    Integer and boolean results carry both; the delta of a floating-point result is the difference.
    """
    offsets = call(func, args, kwargs, lambda x: x.offset if type(x) is BitCenteredTensor else x)
    values = call(func, args, kwargs, lambda x: x.value if type(x) is BitCenteredTensor else x)

    def pair(offset: Any, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype.is_floating_point:
            return wrap(offset, value - offset, like)
        return BitCenteredTensor(offset, _in_layout_of(offset, value), like.context)

    if isinstance(values, tuple | list):
        return type(values)(map(pair, offsets, values))
    return pair(offsets, values)


BitCenteredTensor.dispatcher = staticmethod(dispatch)
