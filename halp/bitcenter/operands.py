"""Arguments of an operation: as its delta rule sees them, and as offsets are computed from them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload

from halp.bitcenter.cache import Source
from halp.bitcenter.offsets import EXACT, LOW, SIGNED, Context, Form, Offset
from halp.bitcenter.tensor import BitCenteredTensor
from halp.calls import call, replace_tensors


class Operand:
    """An operand as a rule sees it: a floating-point tensor, or anything bit-centered.

    What a rule reads of offsets, and nothing else, is what cached offsets keep. Which it reads may
    depend on shapes and on which operands are constants, not on values.

    Attributes:
        delta: e, on the low-precision grid; None for a constant (a plain tensor, or one whose e is
            known to be zero).
        decides: whether this is a mask or an index that offset and full value may set differently.
        after: of a mask or an index: what the full value decides.
        decision: the elements of the full value that a ReLU let through, if this came out of one.
        shape, device: the operand's.
    """

    __slots__ = (
        "_context",
        "_dtype",
        "_number",
        "_offset",
        "_plain",
        "_reads",
        "after",
        "decides",
        "decision",
        "delta",
        "device",
        "shape",
    )

    def __init__(
        self, tensor: Tensor, context: Context, dtype: torch.dtype, number: int = 0
    ) -> None:
        self._context = context
        self._dtype = dtype
        #: Its place among the operands of the call, and where to note what is read of it.
        self._number = number
        self._reads: list[Read] | None = None
        self.shape = tensor.shape
        self.device = tensor.device
        self.decides = not tensor.dtype.is_floating_point
        self.delta: Any = None
        self.decision: Tensor | None = None
        self._plain: Any = tensor
        self._offset: Offset | None = None
        if type(tensor) is BitCenteredTensor:
            self._plain, self._offset, self.after = None, tensor._offset, tensor.delta
            if not tensor.is_constant:
                self.decision = tensor.decision
                if self.decides:  # a count, or a mask of zeros and ones
                    self.delta = tensor.delta.to(dtype) - tensor._offset.tensor.to(dtype)
                else:
                    self.delta = context.read(tensor.delta)

    @property
    def offset(self) -> Tensor:
        """u: the offset, rounded to the format and stored in the delta's dtype."""
        if self._offset is None:
            if self._reads is not None:  # no random bits are drawn only to see what a rule reads
                return self._plain.to(self._dtype)
            return self._context.copies.rounded(self._plain, self._dtype)
        return self._read(EXACT).to(self._dtype) if self.decides else self._read(LOW)

    @property
    def exact(self) -> Tensor:
        """u unrounded, in the offset's dtype: for rules that decide or that would cancel.

        Cached offsets keep it as it is, at 4 or 8 bytes an element: :attr:`signed` and
        :meth:`keep` are there for what needs less.
        """
        if self._offset is None:
            return self._plain
        return self._read(EXACT).to(self._dtype) if self.decides else self._read(EXACT)

    @property
    def signed(self) -> Tensor:
        """u for rules that decide by whether it is positive.

        On site it is unrounded. Cached offsets keep it rounded, but positive where u is and not
        where u is not.
        """
        return self._plain if self._offset is None else self._read(SIGNED)

    @property
    def before(self) -> Tensor:
        """Of a mask or an index: what the offset alone decides."""
        return self._read(EXACT)

    def keep(
        self,
        name: Any,
        compute: Callable[..., Any],
        *others: "Operand",
        form: Form = LOW,
        forms: tuple[Form, ...] | None = None,
        of: "Operand | int | None" = None,
    ) -> Any:
        """Return something computed from unrounded offsets, which cached offsets keep instead.

        Args:
            name: tells it from other things that are computed from these operands.
            compute: called with the unrounded offsets of this operand and the others. What else it
                depends on must be in the name.
            others: further operands.
            form: how the cache keeps it.
            forms: of each part, where ``compute`` returns a tuple.
            of: makes it the same thing in a forward and in its backward pass: a result of the
                forward operation, which it knows by its number and the backward one as an operand.
        """
        operands = (self, *others)
        if not self._context.is_cached or all(x._offset is None for x in operands):
            return compute(*(x._unrounded for x in operands))
        if self._reads is not None:
            of_number = of._number if isinstance(of, Operand) else of
            marks = (isinstance(of, Operand), of_number)
            numbers = tuple(x._number for x in others)
            self._reads.append(Read(self._number, form, (name, compute, numbers, forms, marks)))
        sources = self.sources(name, compute, *others, form=form, forms=forms, of=of)
        parts = [self._get(source) for source in sources]
        return parts[0] if forms is None else tuple(parts)

    def sources(
        self,
        name: Any,
        compute: Callable[..., Any],
        *others: "Operand",
        form: Form = LOW,
        forms: tuple[Form, ...] | None = None,
        of: "Operand | int | None" = None,
    ) -> list[Source]:
        """Return where the cache finds what :meth:`keep` keeps, for recipes; arguments alike."""
        cache = self._context.cache
        assert cache is not None
        operands = (self, *others)
        if isinstance(of, int):
            mark: Any = cache.key_of_result(of)
        elif of is not None:
            mark = of._key
        else:
            mark = tuple(x._key for x in others)
        key = hash((repr(name), self._key, mark))
        raw = tuple(x._plain if x._offset is None else x._offset for x in operands)
        if forms is None:
            return [Source(form, key=key, compute=compute, operands=raw)]
        once = _Once(compute)
        return [
            Source(part, key=hash((key, i)), compute=once.part(i), operands=raw)
            for i, part in enumerate(forms)
        ]

    @property
    def is_at_hand(self) -> bool:
        """Whether reading the unrounded offset costs nothing, since no cache has to keep it."""
        return not self._context.is_cached or self._offset is None

    @property
    def is_kept(self) -> bool:
        """Whether a cache may keep something of it: it is bit-centered, no plain tensor."""
        return self._offset is not None

    def source(self, form: Form) -> Source:
        """Return where a form of the offset is found, for recipes."""
        assert self._offset is not None
        return Source(form, offset=self._offset.frozen())

    def nearest(self, x: Tensor) -> Tensor:
        """Return ``x`` on the low-precision grid, for recipes."""
        return self._context.precision.nearest(x).to(self._dtype)

    @property
    def _unrounded(self) -> Tensor:
        return self._plain if self._offset is None else self._offset.computed

    @property
    def _key(self) -> int:
        cache = self._context.cache
        assert cache is not None
        return cache.key_of(self._plain) if self._offset is None else self._offset.key

    def _read(self, form: Form) -> Tensor:
        assert self._offset is not None
        if self._reads is not None:
            self._reads.append(Read(self._number, form))
            self._offset.touch(form, self._context, self._dtype)
        return self._offset.read(form, self._context, self._dtype)

    def _get(self, source: Source) -> Tensor:
        cache = self._context.cache
        assert cache is not None
        if cache.recording:
            source.touch(self._context, self._dtype)
            value = source.evaluate()
            return value.to(self._dtype) if source.form.rounds else value
        return source.fetched(self._context, self._dtype)


class Read(NamedTuple):
    """What a rule reads of the operand with a number."""

    number: int
    form: Form
    #: Of :meth:`Operand.keep`: name, computation, numbers of others, forms, and what it is of.
    kept: tuple | None = None


class _Once:
    """Calls a function that returns a tuple once for all parts."""

    def __init__(self, compute: Callable[..., tuple]) -> None:
        self._compute = compute
        self._result: tuple | None = None

    def part(self, i: int) -> Callable[..., Tensor]:
        def part(*offsets: Tensor) -> Tensor:
            if self._result is None:
                self._result = self._compute(*offsets)
            return self._result[i]

        return part


class Decided(NamedTuple):
    """A rule's delta together with the decision that the backward pass must repeat."""

    delta: Tensor
    decision: Tensor


def operands_of(
    like: BitCenteredTensor, args: tuple, kwargs: dict, *, with_deltas: bool = True
) -> tuple[list, dict, list[Operand]]:
    """Return arguments as a rule takes them, and the operands among them in order."""
    context, dtype = like.context, like.delta.dtype
    operands: list[Operand] = []

    def operand(x: Tensor) -> Any:
        if not (x.dtype.is_floating_point or type(x) is BitCenteredTensor):
            return x
        made = Operand(x, context, dtype, len(operands))
        if not with_deltas:
            made.delta = made.decision = None
        operands.append(made)
        return made

    new_args = replace_tensors(args, operand)
    new_kwargs = dict(zip(kwargs, replace_tensors(kwargs.values(), operand), strict=True))
    return new_args, new_kwargs, operands


def all_constant(args: Any) -> bool:
    """Whether no bit-centered tensor among positional arguments has a delta to speak of."""
    return all(
        all_constant(x) if type(x) is list else type(x) is not BitCenteredTensor or x.is_constant
        for x in args
    )


def on_offsets(func: OpOverload, args: tuple, kwargs: dict, dtype: torch.dtype) -> Any:
    """Run ``func`` on offsets alone, with plain tensors promoted to the offsets' dtype."""
    if func._schema.is_mutable:
        return call(func, args, kwargs, lambda x: exact_of(x, x.dtype))
    return call(func, args, kwargs, lambda x: exact_of(x, dtype))


def exact_of(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the unrounded offset; of a plain tensor, itself in a floating dtype."""
    if type(x) is BitCenteredTensor:
        return x._offset.computed
    return x.to(dtype) if x.dtype.is_floating_point and x.dtype != dtype else x
