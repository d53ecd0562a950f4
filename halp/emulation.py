"""Running a plain model as if its hardware computed in a low-precision format."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from halp.calls import call, not_emulated, own_arithmetic
from halp.formats import Format
from halp.precision import Precision, RoundedCopies, Rounder
from halp.recomputation import Region, regions_under_way, repeat_in
from halp.recurrent import UnfusedLayers
from halp.rounding import Scale

#: Arguments and results that are no values of a computation: a module's running statistics, and
#: the number of samples that a loss is the mean over.
_EXEMPT = frozenset({"running_mean", "running_var", "total_weight"})


class Emulation(TorchDispatchMode):
    """The context manager that :func:`emulate` returns; ``rounder`` keeps the stream position."""

    def __init__(self, rounder: Rounder) -> None:
        super().__init__()
        self.rounder = rounder
        self._copies = RoundedCopies(rounder)
        self._layers = UnfusedLayers()
        #: The checkpointed regions that the block lies in.
        self._around: list[Region] = []
        #: How often the block has been entered, and how many regions of it are being recomputed.
        self._depth = 0
        self._repeats = 0

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        skips = func.is_view or func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        if skips or own_arithmetic.is_running or not self._applies():
            return func(*args, **kwargs)
        for t in types:
            if hasattr(t, "__tensor_flatten__"):
                raise RuntimeError(
                    f"emulate() rounds plain models; a {t.__name__} among the operands of {func} "
                    "does its own arithmetic: leave the emulate block, or halp.to_plain(model)"
                )
        with not_emulated():  # outer blocks leave it alone
            return self._run(func, args, kwargs)

    def _applies(self) -> bool:
        """Whether to round: not in the recomputation of what ran outside of the block.

        A checkpointed region that runs inside is recomputed as part of the block, wherever the
        backward pass is.
        """
        regions = regions_under_way()
        if not regions:
            return True
        inside = [region for region in regions if region not in self._around]
        repeat_in(self._again, self, inside)
        return self._repeats > 0 or all(region.name is not None for region in inside)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Within the block, a region is recomputed that ran inside of this one."""
        # PyTorch leaves dispatch modes on in a backward pass, and function modes off.
        self._repeats += 1
        try:
            with UnfusedLayers() if self._depth else self:
                yield
        finally:
            self._repeats -= 1

    def _run(self, func: OpOverload, args: tuple, kwargs: dict) -> Any:
        roles = _roles(func)
        written = _tensors_in(_pick(roles.written, func, args, kwargs))
        exempt = {id(x) for x in _tensors_in(_pick(roles.exempt, func, args, kwargs))}
        for x in written:
            self._round_in_place(x)
        exempt |= {id(x) for x in written}

        def enter(x: Tensor) -> Tensor:
            if not x.dtype.is_floating_point or id(x) in exempt:
                return x
            return self._copies.rounded(x, x.dtype)

        result = call(func, args, kwargs, enter)
        for x in written:
            self._round_in_place(x)
        if isinstance(result, tuple):
            parts = zip(result, roles.exempt_results, strict=True)
            return tuple(r if keep else self._leave(r, exempt) for r, keep in parts)
        if isinstance(result, list):
            return [self._leave(r, exempt) for r in result]
        return self._leave(result, exempt)

    def __enter__(self) -> "Emulation":
        if self._depth == 0:
            self._around = regions_under_way()
            self.rounder.new_step()
        self._depth += 1
        self._layers.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._depth -= 1
        self._layers.__exit__(*exception)
        self._copies.forget()  # also lets parameters be swapped, which weak references would forbid
        super().__exit__(*exception)

    def _leave(self, x: Any, exempt: set[int]) -> Any:
        """Return a result, rounded."""
        if not isinstance(x, Tensor) or not x.dtype.is_floating_point or id(x) in exempt:
            return x
        result = self.rounder(x)
        self._copies.remember(result)
        return result

    def _round_in_place(self, x: Tensor) -> None:
        self._copies.forget(x)
        if x.dtype.is_floating_point:
            x.copy_(self.rounder(x))


def emulate(
    format: str | Format,
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
    they are; the parameters themselves are rounded only where an operation writes to them. What
    activation checkpointing recomputes is computed as it was the first time, wherever
    ``backward()`` runs.

    Args:
        format: a name or a format.
        rounding: any mode of :func:`halp.quantize`. Blocks lie along the last dimension.
        scale: scale of every tensor, see :func:`halp.quantize`.
        seed: names the random bits of ``"stoc"``.

    Raises:
        ValueError: an unknown format or rounding, or a scale that is not positive.
        RuntimeError: inside the block, an operation on a bit-centered tensor.

    Example:
        >>> with halp.emulate("fp16"):
        ...     loss = torch.nn.functional.cross_entropy(model(x), y)
        ...     loss.backward()
    """
    return Emulation(Rounder(Precision(format, rounding, scale, seed=seed)))  # type: ignore[arg-type]


class _Roles(NamedTuple):
    """Names of an operation's arguments that are exempt or written to; which results are exempt."""

    exempt: frozenset[str]
    written: frozenset[str]
    exempt_results: tuple[bool, ...]


@cache
def _roles(func: OpOverload) -> _Roles:
    arguments = func._schema.arguments
    exempt = frozenset(a.name for a in arguments if a.name in _EXEMPT)
    written = frozenset(a.name for a in arguments if a.alias_info and a.alias_info.is_write)
    results = tuple(r.name in _EXEMPT for r in func._schema.returns)
    return _Roles(exempt, written - exempt, results)


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
