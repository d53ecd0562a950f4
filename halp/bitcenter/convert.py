"""Turning a model into a bit-centered one, and back."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from halp.bitcenter.cache import OffsetCache
from halp.bitcenter.offsets import Context
from halp.bitcenter.state import ParameterValue
from halp.bitcenter.swapping import (
    KeepsAttached,
    check_attached,
    forget_computed,
    replace_parameters,
    swap_back,
)
from halp.bitcenter.tensor import BitCenteredTensor
from halp.bitcenter.writes import assign
from halp.formats import Format
from halp.memory import Content
from halp.messages import quoted
from halp.precision import Precision
from halp.recurrent import unfuse
from halp.rounding import Scale

_WIDE = (torch.float32, torch.float64)


def bit_center(
    model: nn.Module,
    format: str | Format = "fp16",
    rounding: str = "near",
    *,
    scale: Scale = "auto",
    offsets: str = "on-site",
    arithmetic: str = "auto",
    offset_dtype: torch.dtype | None = None,
    seed: int = 0,
    offset_cache_dir: str | Path | None = None,
) -> nn.Module:
    """Make every parameter of ``model`` a bit-centered tensor, in place; return the model.

    The parameters keep their identity, so tied weights stay tied and an optimizer made earlier goes
    on working. Each starts with its value as the offset and a delta of zero. From then on the whole
    forward and backward pass carries offsets and low-precision deltas; see
    :class:`halp.bitcenter.BitCenteredTensor`.

    Args:
        model: any module with float32 or float64 parameters. That dtype is what deltas are computed
            and stored in.
        format: the number format of the deltas.
        rounding: how every delta is rounded: any mode of :func:`halp.quantize`.
        scale: scale of the deltas, see :func:`halp.quantize`. With ``None``, fp16 deltas underflow
            once updates get small.
        offsets: ``"on-site"``: each pass computes offsets and deltas side by side, with any
            batches. ``"cached"``: the solver's snapshot keeps each batch's offsets, rounded to the
            format, on the host, and inner steps do no high-precision work; the loader must repeat
            its batches. How many bytes that takes is logged, by the logger ``"halp"``, before they
            are allocated.
        arithmetic: ``"auto"`` or ``"emulated"``: low-precision values are stored in a wide dtype.
        offset_dtype: dtype of the offsets w̃ and of all that is computed from them; by default the
            model's. float32 offsets end at gradient norms of about 5e-8, float64 ones at 1e-16.
        seed: names the random bits of ``"stoc"``.
        offset_cache_dir: folder in which cached offsets are kept in a memory-mapped file, which is
            gone with the process; by default they are in memory.

    Raises:
        ValueError: the model has no floating-point parameters, is bit-centered already, or an
            argument is none of the accepted values.
        TypeError: a parameter is neither float32 nor float64, or a module is there to exchange
            parameters with other processes or devices.
    """
    precision = Precision(format, rounding, scale, seed=seed)  # type: ignore[arg-type]
    if offsets not in ("on-site", "cached"):
        raise ValueError(f'offsets must be "on-site" or "cached", not {quoted(offsets)}')
    if offset_cache_dir is not None and offsets != "cached":
        raise ValueError(
            f'offset_cache_dir is for offsets="cached", not for offsets={quoted(offsets)}'
        )
    if arithmetic not in ("auto", "emulated"):
        raise ValueError(f'arithmetic must be "auto" or "emulated", not {quoted(arithmetic)}')
    if offset_dtype is not None and offset_dtype not in _WIDE:
        raise ValueError(f"offset_dtype must be torch.float32 or torch.float64, not {offset_dtype}")
    _refuse_several_processes(model)
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if isinstance(parameter, BitCenteredTensor):
            raise ValueError(
                f"parameter {name!r} is bit-centered already; halp.to_plain(model) first"
            )
        if isinstance(parameter, nn.parameter.UninitializedParameter):
            raise TypeError(f"parameter {name!r} is not initialized; run a forward pass first")
        if parameter.dtype not in _WIDE:
            raise TypeError(
                f"parameter {name!r} is {parameter.dtype}; bit centering takes torch.float32 or "
                "torch.float64 parameters and emulates the low precision"
            )
        check_attached(name, parameter)
    if not parameters:
        raise ValueError("the model has no parameters to bit-center")
    forget_computed(model)
    cache = None
    if offsets == "cached":
        cache = OffsetCache(None if offset_cache_dir is None else Path(offset_cache_dir))
    context = Context(precision, cache)
    replace_parameters(model, lambda p: _center(p, context, offset_dtype or p.dtype))
    for module in model.modules():
        hooks = [
            module._register_state_dict_hook(_plain_state),
            module.register_load_state_dict_pre_hook(_refuse_assignment),
        ]
        module.__dict__["_apply"] = KeepsAttached(module)
        if isinstance(module, nn.RNNBase):
            hooks += unfuse(module, is_bit_centered)
        module.__dict__["_halp_hooks"] = hooks
    return model


def _refuse_several_processes(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        shares = kinds & {"DistributedDataParallel", "FullyShardedDataParallel"}
        if shares or (isinstance(module, nn.DataParallel) and len(module.device_ids) > 1):
            where = f"module {name!r}" if name else "the model"
            raise TypeError(
                f"{where} is a {type(module).__name__}, which exchanges parameters and gradients "
                "with other processes or devices, and cannot do so with bit-centered ones: "
                "bit-center the model that is not wrapped and train it in one process, or keep it "
                "plain, with a plain solver"
            )


def _center(parameter: Tensor, context: Context, offset_dtype: torch.dtype) -> BitCenteredTensor:
    if isinstance(parameter, BitCenteredTensor):  # a tied weight, met before
        return parameter
    offset = parameter.detach().to(offset_dtype, copy=True)
    return BitCenteredTensor.constant(offset, context, parameter.dtype)


def _plain_state(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Give plain ``w̃ + z`` in ``state_dict()``; with ``keep_vars`` the parameters themselves."""
    for name, parameter in module._parameters.items():
        entry: Any = state.get(prefix + name)
        if isinstance(entry, BitCenteredTensor) and entry is not parameter:
            state[prefix + name] = ParameterValue.of(parameter)  # type: ignore[arg-type]


def _refuse_assignment(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    if metadata.get("assign_to_params_buffers"):
        raise RuntimeError(
            "load_state_dict(assign=True) would put plain tensors in the place of bit-centered "
            "parameters: leave out assign=True, which loads the values, or halp.to_plain(model) "
            "first"
        )


def is_bit_centered(model: nn.Module) -> bool:
    """Whether any parameter of ``model`` is bit-centered."""
    return any(isinstance(p, BitCenteredTensor) for p in model.parameters())


def to_plain(model: nn.Module, *, dtype: torch.dtype | None = None) -> nn.Module:
    """Make a bit-centered model plain for good, in place; return it.

    Every parameter becomes ``w̃ + z`` in the model's own dtype, and keeps its identity. With a
    ``dtype`` they and the floating-point buffers are in that one. A plain model is returned as it
    is.
    """
    if is_bit_centered(model):
        replace_parameters(model, lambda p: _plain(p, dtype))
        for module, name, buffer in _buffers_not_in(model, dtype):
            module._buffers[name] = buffer.to(dtype)
    for module in model.modules():
        for hook in module.__dict__.pop("_halp_hooks", ()):
            hook.remove()
        module.__dict__.pop("_apply", None)
    return model


@contextmanager
def materialize(model: nn.Module, *, dtype: torch.dtype | None = None) -> Iterator[nn.Module]:
    """Within the block, the parameters of ``model`` are plain tensors ``w̃ + z``.

    For evaluation, export, or anything that wants the plain model. A parameter that is written to
    inside the block becomes a new center (with a delta of zero); others return unchanged. The
    parameters have no gradients inside, and get their own back afterwards. A plain model is left
    alone.

    Args:
        model: any module.
        dtype: dtype of the plain parameters and of floating-point buffers; by default the model's
            own, whatever the dtype of its offsets.
    """
    if not is_bit_centered(model):
        yield model
        return
    with _buffers_in(model, dtype), _plain_parameters(model, dtype):
        yield model


@contextmanager
def _buffers_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Within the block, floating-point buffers are in a dtype; what is written to them stays."""
    originals = _buffers_not_in(model, dtype)
    copies = [buffer.to(dtype) for _, _, buffer in originals]
    for (module, name, _), copy in zip(originals, copies, strict=True):
        module._buffers[name] = copy
    try:
        yield
    finally:
        with torch.no_grad():
            for (module, name, buffer), copy in zip(originals, copies, strict=True):
                module._buffers[name] = buffer.copy_(copy)


def _buffers_not_in(
    model: nn.Module, dtype: torch.dtype | None
) -> list[tuple[nn.Module, str, Tensor]]:
    """Return floating-point buffers of another dtype than this, with where they are held."""
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_floating_point() and dtype not in (None, buffer.dtype)
    ]


@contextmanager
def _plain_parameters(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Within the block, the parameters of a bit-centered model are plain."""
    saved: dict[int, tuple[Tensor, Tensor | None]] = {}
    contents: dict[int, tuple[int, Content]] = {}
    for parameter in model.parameters():
        if isinstance(parameter, BitCenteredTensor):
            saved[id(parameter)] = (parameter.detach(), parameter.grad)
            parameter.grad = None
    try:
        replace_parameters(model, lambda p: _plain(p, dtype))
    except RuntimeError:
        for parameter in model.parameters():
            parameter.grad = saved[id(parameter)][1]
        raise
    for parameter in model.parameters():
        if id(parameter) in saved:
            contents[id(parameter)] = (parameter._version, Content(parameter))
    try:
        yield
    finally:
        written = {
            id(p): p.detach().clone()
            for p in model.parameters()
            if id(p) in contents and _is_written(p, *contents[id(p)])
        }
        for parameter in model.parameters():
            if id(parameter) in saved:
                parameter.grad = None
        swap_back(model, {key: tensor for key, (tensor, _) in saved.items()})
        for parameter in model.parameters():
            if id(parameter) in saved:
                if id(parameter) in written:
                    assign(parameter.detach(), written[id(parameter)])  # type: ignore[arg-type]
                parameter.grad = saved[id(parameter)][1]


def _is_written(parameter: Tensor, version: int, content: Content) -> bool:
    """Whether something has written to a parameter: NumPy and ``.data`` leave its version alone."""
    return parameter._version != version or not content.is_in(parameter)


def value(t: Tensor) -> Tensor:
    """Return the plain tensor ``offset + delta`` of a bit-centered one, in the offset's dtype.

    The result is detached and aliases nothing. Of a plain tensor, a detached copy.
    """
    return t.value if isinstance(t, BitCenteredTensor) else t.detach().clone()


def _plain(parameter: Tensor, dtype: torch.dtype | None) -> Tensor:
    if not isinstance(parameter, BitCenteredTensor):
        return parameter
    return parameter.value.to(dtype or parameter.delta.dtype)
