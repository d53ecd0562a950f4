"""Offsets: the high-precision half of a bit-centered tensor, and the ways in which it is read."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from halp.precision import Precision, RoundedCopies, Rounder
from halp.random_bits import is_traced

if TYPE_CHECKING:
    from halp.bitcenter.cache import OffsetCache


class Form(NamedTuple):
    """How something about offsets is read, and how a cache keeps it."""

    name: str
    #: Whether a cache rounds it to the low-precision format; else it is kept as it is.
    rounds: bool
    #: What a cache applies before it rounds, and after it has read.
    encode: Callable[[Tensor], Tensor] | None = None
    decode: Callable[[Tensor], Tensor] | None = None


#: Rounded to the low-precision format: what arithmetic reads.
LOW = Form("low", rounds=True)
#: For rules that decide by sign: a cache rounds it, but positive numbers stay above zero, and
#: others do not.
SIGNED = Form("signed", rounds=True)
#: Unrounded, in a cache too.
EXACT = Form("exact", rounds=False)
#: Logarithms of probabilities, of which a cache keeps the probabilities.
LOG_PROBABILITY = Form("probability", rounds=True, encode=torch.exp, decode=torch.log)


class Offset:
    """One tensor's offset, and its low-precision copy once an operation has read it.

    In a backward pass an offset is computed when it is first read: that of a parameter's gradient,
    a third of the offset pass, is then computed only by solvers that use it.
    """

    __slots__ = ("_compute", "_key", "_low", "_low_version", "_tensor", "_view", "__weakref__")

    def __init__(
        self,
        tensor: Tensor | None,
        compute: Callable[[], Tensor] | None = None,
        view: "tuple[Any, Callable[[Tensor], Tensor], int] | None" = None,
    ) -> None:
        self._tensor = tensor
        self._compute = compute
        #: The offset that this one is a view of, how to see it, and a name of that.
        self._view = view
        self._low: Tensor | None = None
        self._low_version = (-1, 0)
        #: Of the computation that it comes from: what a cache finds it by.
        self._key: int | None = None

    @property
    def tensor(self) -> Tensor:
        """The unrounded offset, as a rule or a user reads it."""
        return self.computed

    @property
    def computed(self) -> Tensor:
        """The unrounded offset, as further offsets are computed from it."""
        if self._tensor is None:
            assert self._compute is not None
            self._tensor = self._compute()
            self._compute = None
        return self._tensor

    @property
    def is_computed(self) -> bool:
        """Whether reading the offset costs nothing."""
        return self._tensor is not None

    def low(self, context: "Context", dtype: torch.dtype) -> Tensor:
        """Return the offset rounded once to the low-precision format, stored in ``dtype``."""
        tensor, rounder = self.computed, context.rounder
        if is_traced(tensor):
            return rounder.copy(tensor).to(dtype)
        version = (0 if tensor.is_inference() else tensor._version, rounder.generation)
        if self._low is None or self._low_version != version or self._low.dtype != dtype:
            if self._view is not None and context.precision.format.commutes_with_views:
                base, view, _ = self._view
                self._low = view(base.low(context, dtype))
            else:
                self._low = rounder.copy(tensor).to(dtype)
            self._low_version = version
        return self._low

    def view(self, see: Callable[[Tensor], Tensor], name: int) -> "Offset":
        """Return a view of this offset; ``name`` tells it from others."""
        return Offset(see(self.computed), view=(self, see, name))

    # What a cache asks for.

    @property
    def is_at_hand(self) -> bool:
        """Whether the offset is there in inner steps too: a parameter's, or computed from one."""
        return True

    @property
    def is_recorded(self) -> bool:
        """Whether a cache is recording what is read of it."""
        return False

    def written(self, key: int, source: "Offset | None") -> None:
        """Note that the memory holds something else now: what has this key, that of a source."""
        self._key = key

    @property
    def key(self) -> int:
        """Of the computation that the offset comes from."""
        if self._view is not None:
            return hash((self._view[2], self._view[0].key))
        if self._key is None:  # a parameter's: stays, also where a view of it is named later
            self._key = hash(id(self))
        return self._key

    def is_named(self, args: tuple) -> bool:
        """Whether it is known which computation the offset comes from: it may be an argument's."""
        return (
            self._key is not None
            or self._view is not None
            or any(getattr(x, "_offset", None) is self for x in args)
        )

    def name(self, key: int) -> None:
        """Say which computation the offset comes from."""
        self._key = key

    @property
    def root(self) -> "Offset":
        """The offset whose memory this one shares."""
        return self if self._view is None else self._view[0].root

    def frozen(self) -> "Offset":
        """Return what stays as this offset is now, whatever is written to it later."""
        return self

    def read(self, form: Form, context: "Context", dtype: torch.dtype) -> Tensor:
        """Return the offset in one form; all but ``LOW`` are the offset itself here."""
        return self.low(context, dtype) if form is LOW else self.computed

    def touch(self, form: Form, context: "Context", dtype: torch.dtype) -> bool:
        """Note, while a cache records, that inner steps will read this form; they can."""
        if form is LOW:
            self.low(context, dtype)
        return True


class Context:
    """What all tensors of one bit-centered model share.

    Attributes:
        precision: what deltas, and the copies of offsets that operations read, are rounded to.
        rounder: does the rounding.
        copies: the rounded copies of constants: network inputs, masks.
        cache: what keeps offsets from a snapshot for the inner steps; None where they are computed
            on site.
        offsets_only: while true (in a snapshot), operations compute offsets alone and leave deltas
            zero: the model is the plain model at w̃.
    """

    def __init__(self, precision: Precision, cache: "OffsetCache | None" = None) -> None:
        self.precision = precision
        self.rounder = Rounder(precision)
        self.copies = RoundedCopies(self.rounder)
        self.cache = cache
        if cache is not None:
            cache.context = self
        self.offsets_only = False
        self._pending: list[weakref.ref[Offset]] = []

    def __getstate__(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "position": self.rounder.position,
            "cache": None if self.cache is None else self.cache.empty_copy(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["precision"], state.get("cache"))  # type: ignore[misc]
        self.rounder.position = state["position"]

    def __repr__(self) -> str:
        return f"Context({self.precision})"

    @property
    def is_cached(self) -> bool:
        """Whether operations record what is read of offsets, or replay it."""
        return self.cache is not None and self.cache.is_active

    def new_step(self) -> None:
        """Start a training step: nothing it draws may depend on what earlier ones remembered."""
        self.copies.forget()
        # With a cache, low-precision copies of parameters serve until the next snapshot.
        self.rounder.new_step(keeps_copies=self.cache is not None)
        if self.cache is not None:
            self.cache.new_pass()

    def defer(self, compute: Callable[[], Tensor]) -> Offset:
        """Return an offset that is computed when first read."""
        offset = Offset(None, compute)
        if len(self._pending) > 4096:
            self._pending = [ref for ref in self._pending if _is_pending(ref())]
        self._pending.append(weakref.ref(offset))
        return offset

    def settle(self) -> None:
        """Compute every deferred offset that is still in use: its operands are about to change."""
        for ref in self._pending:
            offset = ref()
            if offset is not None:
                offset.computed  # noqa: B018
        self._pending.clear()


def _is_pending(offset: Offset | None) -> bool:
    return offset is not None and not offset.is_computed
