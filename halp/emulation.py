"""Running a plain model as if its hardware computed in a low-precision format."""

from functools import cache
from typing import Any

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from halp.calls import call
from halp.formats import FloatFormat
from halp.precision import Precision, RoundedCopies, Rounder, Scale, as_wide

#: Arguments of normalizations that are state of the module and stay in high precision.
_BUFFERS = frozenset({"running_mean", "running_var"})


class Emulation(TorchDispatchMode):
    """The context manager that :func:`emulate` returns; ``rounder`` keeps the stream position."""

    def __init__(self, rounder: Rounder) -> None:
        super().__init__()
        self.rounder = rounder
        self._copies = RoundedCopies(rounder)

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.is_view or func._schema.name.startswith(("aten::empty", "aten::new_empty")):
            return func(*args, **kwargs)
        for t in types:
            if hasattr(t, "__tensor_flatten__"):
                raise TypeError(
                    f"emulate() rounds plain models; a {t.__name__} among the operands of {func} "
                    "does its own arithmetic: leave the emulate block, or halp.to_plain(model)"
                )
        buffers, written = _roles(func)
        targets = _tensors_in(_pick(written, func, args, kwargs))
        exempt = {id(x) for x in targets + _tensors_in(_pick(buffers, func, args, kwargs))}

        def enter(x: Tensor) -> Tensor:
            if not x.dtype.is_floating_point or id(x) in exempt:
                return x
            return self._copies.rounded(x, x.dtype)

        result = call(func, args, kwargs, enter)
        if written:
            for target in targets:
                self._round_in_place(target)
            return result
        if isinstance(result, Tensor):
            return self._round(result)
        if isinstance(result, tuple | list):
            return type(result)(self._round(r) if isinstance(r, Tensor) else r for r in result)
        return result

    def __exit__(self, *exception: Any) -> None:
        self._copies.forget()  # also lets parameters be swapped, which weak references would forbid
        super().__exit__(*exception)

    def _round(self, x: Tensor) -> Tensor:
        if not x.dtype.is_floating_point:
            return x
        result = self.rounder(as_wide(x)).to(x.dtype)
        self._copies.remember(result, result)
        return result

    def _round_in_place(self, x: Tensor) -> None:
        if x.dtype.is_floating_point:
            x.copy_(self.rounder(as_wide(x)))
            self._copies.remember(x, x)


def emulate(
    format: str | FloatFormat,
    rounding: str = "near",
    *,
    scale: Scale = None,
    seed: int = 0,
) -> Emulation:
    """Return a context manager in which plain PyTorch computes in a low-precision format.

    It rounds what enters (parameters, inputs, constants) and the result of every ATen operation:
    each operation is one simulated kernel, which reads low-precision operands, computes in the wide
    dtype of its tensors and rounds each result once. Of the backward pass too, if ``backward()``
    runs inside the block. Views, integers, and the running statistics of normalizations stay as
    they are; the parameters themselves are rounded only where an operation writes to them.

    Args:
        format: a name or a format.
        rounding: ``"near"``, ``"stoc"`` or ``"void"``.
        scale: scale of every tensor, see :func:`halp.quantize`.
        seed: names the random bits of ``"stoc"``.

    Raises:
        ValueError: an unknown format or rounding, or a scale that is not positive.
        TypeError: inside the block, an operation on a bit-centered tensor.

    Example:
        >>> with halp.emulate("fp16"):
        ...     loss = torch.nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
    """
    return Emulation(Rounder(Precision(format, rounding, scale, seed=seed)))  # type: ignore[arg-type]


@cache
def _roles(func: OpOverload) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of arguments that are buffers, and of the others that are written to."""
    arguments = func._schema.arguments
    buffers = frozenset(a.name for a in arguments if a.name in _BUFFERS)
    written = frozenset(a.name for a in arguments if a.alias_info and a.alias_info.is_write)
    return buffers, written - buffers


def _pick(names: frozenset[str], func: OpOverload, args: tuple, kwargs: dict) -> list:
    """Return the values of the arguments with these names."""
    positional = zip(func._schema.arguments, args, strict=False)
    return [value for a, value in positional if a.name in names] + [
        value for name, value in kwargs.items() if name in names
    ]


def _tensors_in(values: list) -> list[Tensor]:
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, list | tuple):
            tensors += _tensors_in(list(value))
        elif isinstance(value, Tensor):
            tensors.append(value)
    return tensors
