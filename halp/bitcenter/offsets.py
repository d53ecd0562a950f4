"""Offsets: the high-precision half of a bit-centered tensor, and the ways in which it is read."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from halp.memory import Unchanged, version_of
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


class _Low(NamedTuple):
    """A low-precision copy of an offset or of a view of one, and what tells whether it still is."""

    tensor: Tensor
    source: Unchanged
    generation: int
    copy: Tensor


class Offset:
    """One tensor's offset, and its low-precision copies once operations have read it.

    A view's is the view of the whole's, unless the format has blocks: they lie along the last
    dimension of the operand as it is read. Nobody but halp writes to an offset, and its version
    tells of that, until it is shown; from then on its content is compared.

    In a backward pass an offset is computed when it is first read: that of a parameter's gradient,
    a third of the offset pass, is then computed only by solvers that use it.
    """

    __slots__ = (
        "_compute",
        "_is_shown",
        "_key",
        "_lows",
        "_notes",
        "_tensor",
        "_view",
        "__weakref__",
    )

    def __init__(
        self,
        tensor: Tensor | None,
        compute: Callable[[], Tensor] | None = None,
        view: "tuple[Any, Callable[[Tensor], Tensor], int] | None" = None,
        *,
        is_shown: bool = False,
    ) -> None:
        self._tensor = tensor
        self._compute = compute
        #: The offset that this one is a view of, how to see it, and a name of that.
        self._view = view
        #: Whether somebody may write to the memory past its version: of a root, for its views too.
        self._is_shown = is_shown
        #: Of a root: the copies of it and of its views, by place, shape and dtype.
        self._lows: dict[tuple, _Low] = {}
        #: What :meth:`noted` has returned.
        self._notes: list[weakref.ref[Unchanged]] = []
        #: Of the computation that it comes from: what a cache finds it by.
        self._key: int | None = None

    @property
    def tensor(self) -> Tensor:
        """The unrounded offset, as a rule or a user reads it."""
        return self.computed

    def shown(self) -> Tensor:
        """Return the unrounded offset for somebody who may write to it, with NumPy say."""
        tensor, root = self.tensor, self.root
        if not root._is_shown:
            root._is_shown = True
            for key, low in list(root._lows.items()):
                if low.source.holds(low.tensor, version_of(low.tensor)):
                    low.source.hand_out(low.tensor)
                else:
                    del root._lows[key]
            for note in filter(None, (ref() for ref in root._notes)):
                if note.holds(root.computed, version_of(root.computed)):
                    note.hand_out(root.computed)
        return tensor

    def noted(self) -> Unchanged:
        """Return what tells later whether this root still holds what it holds now."""
        note = self._unchanged_now()
        self._notes = [ref for ref in self._notes if ref() is not None] + [weakref.ref(note)]
        return note

    def _unchanged_now(self) -> Unchanged:
        tensor = self.computed
        compares = self.root._is_shown or tensor.is_inference()
        return Unchanged(tensor, None if compares else tensor._version)

    def is_as_noted(self, note: Unchanged) -> bool:
        """Whether it holds what it held when this was noted."""
        is_of_this = any(ref() is note for ref in self._notes)
        return is_of_this and note.holds(self.computed, version_of(self.computed))

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
            return rounder.copy(tensor, dtype)
        if self._view is not None and rounder.precision.commutes_with_views:
            base, see, _ = self._view
            return see(base.low(context, dtype))
        root = self.root
        key = (tensor.storage_offset(), tensor.shape, tensor.stride(), dtype)
        low = root._lows.get(key)
        if (
            low is None
            or low.generation != rounder.generation
            or not low.source.holds(tensor, version_of(tensor))
        ):
            copy = rounder.copy(tensor, dtype)
            low = _Low(tensor, self._unchanged_now(), rounder.generation, copy)
            root._lows[key] = low
        return low.copy

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

    def rounded(self, delta: Tensor, dtype: torch.dtype, like: Any = None) -> Tensor:
        """Return a result's delta on the grid, laid out like another tensor if one is given."""
        rounded = self.rounder(delta, dtype=dtype)
        if like is not None:
            rounded = in_layout_of(like, rounded)
        self.remember(rounded)
        return rounded

    def remember(self, delta: Tensor) -> None:
        """Note that a delta has been rounded in its own shape."""
        if not self.precision.commutes_with_views:
            self.copies.remember(delta)

    def read(self, delta: Tensor) -> Tensor:
        """Return a delta as an operation reads it: blocks lie along its own last dimension.

        It was rounded when it was made, and is again only where it is a view with other blocks.
        """
        recording = self.cache is not None and self.cache.recording  # then it is a stand-in
        if recording or self.precision.commutes_with_views:
            return delta
        return self.copies.rounded(delta, delta.dtype)

    def defer(self, compute: Callable[[], Tensor], view: Any = None) -> Offset:
        """Return an offset that is computed when first read; ``view`` as for :class:`Offset`."""
        offset = Offset(None, compute, view)
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


def in_layout_of(model: Tensor, x: Tensor) -> Tensor:
    """Return ``x`` with the strides of ``model``: views must be able to take both parts alike."""
    if x.stride() == model.stride():
        return x
    return torch.empty_strided(model.shape, model.stride(), dtype=x.dtype, device=x.device).copy_(x)


def _is_pending(offset: Offset | None) -> bool:
    return offset is not None and not offset.is_computed
