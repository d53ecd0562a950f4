"""Cached offsets: a snapshot records what inner steps read of offsets, and they replay it.

Everything recorded is found again by the computation that it comes from: an operation, what it was
called with, and the computations that its operands come from, down to parameters and plain tensors.
Of these the cache keeps a fingerprint, by which the batch of a step is recognized: a batch that the
snapshot did not see is refused, since its offsets would be another's.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halp.bitcenter.cache_files import HostMemory, MappedFile, in_words
from halp.bitcenter.offsets import EXACT, LOW, SIGNED, Context, Form, Offset
from halp.bitcenter.packing import from_signs, pack, unpack, with_signs
from halp.fingerprints import fingerprint

_log = logging.getLogger("halp")

_ALIGNMENT = 16


NOT_RECORDED = (
    "the snapshot did not record what this step reads: with cached offsets the closure must run "
    "the same operations at every step and in the snapshot. Evaluate and log under "
    'halp.materialize(model), or use halp.bit_center(..., offsets="on-site")'
)


class CacheError(RuntimeError):
    """Cached offsets that cannot serve; the message says why, and what would do."""


class Entry(NamedTuple):
    """Where in a batch's memory a tensor lies, and how to make it again."""

    number: int  # of its scale
    start: int
    codes: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    form: Form


class Layout(NamedTuple):
    """What a result's offset looks like where its delta does not tell."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass
class Program:
    """What the batches of one shape have in common: where everything lies."""

    entries: dict[tuple[int, str], Entry] = field(default_factory=dict)
    #: None for a result that an operation was not asked for.
    layouts: dict[int, Layout | None] = field(default_factory=dict)


class Batch(NamedTuple):
    """What is kept of one batch."""

    fingerprints: tuple[int, ...]
    program: Program
    memory: Any


class Plain(NamedTuple):
    """A plain tensor that a pass has met."""

    number: int
    fingerprint: int
    tensor: Tensor  # held on to, lest its memory become another's


class Source(NamedTuple):
    """Something that inner steps read: a form of an offset, or what is computed from several."""

    form: Form
    offset: Offset | None = None
    #: Of what is computed: its key, the computation, and the offsets or tensors that it takes.
    key: int | None = None
    compute: Callable[..., Tensor] | None = None
    operands: tuple[Any, ...] = ()

    def touch(self, context: Context, dtype: torch.dtype) -> bool:
        """As :meth:`Offset.touch`."""
        if self.offset is not None:
            return self.offset.touch(self.form, context, dtype)
        assert context.cache is not None and self.key is not None
        return context.cache.keep(self.key, self.form, self.evaluate, dtype)

    def read(self, context: Context, dtype: torch.dtype, batch: Any = None) -> Tensor | None:
        """Return what inner steps read of a batch; None where the cache does not have it."""
        if self.offset is None:
            assert context.cache is not None and self.key is not None
            return context.cache.fetch(self.key, self.form, dtype, batch)
        if isinstance(self.offset, KeptOffset):
            return self.offset.fetch(self.form, context, dtype)
        return self.offset.read(self.form, context, dtype)

    def fetched(self, context: Context, dtype: torch.dtype) -> Tensor:
        """Return what inner steps read.

        Raises:
            CacheError: the cache does not have it.
        """
        value = self.read(context, dtype)
        if value is None:
            raise CacheError(NOT_RECORDED)
        return value

    def evaluate(self) -> Tensor:
        """Compute it from unrounded offsets."""
        assert self.compute is not None
        return self.compute(*(x.computed if isinstance(x, Offset) else x for x in self.operands))


class Recipe(NamedTuple):
    """How to compute an offset from what is kept of others, so that it need not be kept."""

    sources: tuple[Source, ...]
    compute: Callable[..., Tensor]

    def touch(self, context: Context, dtype: torch.dtype) -> bool:
        """Note that inner steps will need it; whether they can have it."""
        touched = [source.touch(context, dtype) for source in self.sources]
        return all(touched)

    def read(self, context: Context, dtype: torch.dtype, batch: Any) -> Tensor | None:
        """Return the offset; None where the cache lacks a source."""
        values = [source.read(context, dtype, batch) for source in self.sources]
        return None if any(value is None for value in values) else self.compute(*values)


Recipes = dict[Form, Recipe]


class KeptOffset(Offset):
    """An offset of which a cache keeps what inner steps read.

    While the cache records, the offset is there; in inner steps it is not, and reading it means
    fetching what has been kept.
    """

    __slots__ = ("_batch", "_cache", "_context", "_delta_dtype", "_made", "_recipes", "_version")

    def __init__(
        self,
        context: Context,
        tensor: Tensor | None = None,
        *,
        key: int | None = None,
        delta_dtype: torch.dtype,
        recipes: Recipes | None = None,
        view: "tuple[Any, Callable[[Tensor], Tensor], int] | None" = None,
        batch: Any = None,
    ) -> None:
        assert context.cache is not None
        super().__init__(tensor, view=view)
        self._key = key
        self._context = context
        self._cache = context.cache
        self._batch = batch or context.cache.current
        self._delta_dtype = delta_dtype
        self._recipes = recipes or {}
        #: What recipes have made, by form and dtype.
        self._made: dict[Any, Tensor] = {}
        self._version = None if tensor is None else tensor._version

    @property
    def is_computed(self) -> bool:
        """Always: there is nothing to defer."""
        return True

    @property
    def tensor(self) -> Tensor:
        """The unrounded offset: kept as it is if it is read while the cache records."""
        if self._tensor is not None:
            self.touch(EXACT, self._context, self._delta_dtype)
            return self._tensor
        return self.read(EXACT, self._context, self._delta_dtype)

    @property
    def computed(self) -> Tensor:
        """The unrounded offset, without keeping it."""
        return self.tensor if self._tensor is None else self._tensor

    @property
    def is_at_hand(self) -> bool:
        """Never."""
        return False

    @property
    def is_recorded(self) -> bool:
        """Whether the offset itself is there: while the cache records."""
        return self._tensor is not None

    def low(self, context: Context, dtype: torch.dtype) -> Tensor:
        """As :meth:`read` does."""
        return self.read(LOW, context, dtype)

    def view(self, see: Callable[[Tensor], Tensor], name: int) -> Offset:
        """Return a view of which nothing is kept but what is of the whole."""
        return KeptOffset(
            self._context,
            None if self._tensor is None else see(self._tensor),
            delta_dtype=self._delta_dtype,
            view=(self, see, name),
            batch=self._batch,
        )

    def frozen(self) -> "KeptOffset":
        """Return what stays as this offset is now, whatever is written to it later."""
        base = None if self._view is None else self._view[0].frozen()
        frozen = KeptOffset(
            self._context,
            self._tensor,
            key=self._key,
            delta_dtype=self._delta_dtype,
            recipes=self._recipes,
            view=None if self._view is None else (base, *self._view[1:]),
        )
        frozen._version, frozen._batch = self._version, self._batch
        frozen._made = self._made
        return frozen

    def written(self, key: int, source: Offset | None) -> None:
        """Note that the memory holds something else now: what has this key, that of a source."""
        super().written(key, source)
        if isinstance(source, KeptOffset):
            self._batch = source._batch
        self._recipes = source._recipes if isinstance(source, KeptOffset) else {}
        self._made = {}
        self._version = None if self._tensor is None else self._tensor._version

    def touch(self, form: Form, context: Context, dtype: torch.dtype) -> bool:
        """Note, while the cache records, that inner steps will read this form; they can."""
        if self._view is not None:
            return self._view[0].touch(form, context, dtype)
        recipe = self._recipes.get(form)
        if recipe is not None and recipe.touch(context, dtype):
            return True
        return self._cache.keep(self.key, form, self._unchanged, dtype)

    def _unchanged(self) -> Tensor | None:
        tensor = self._tensor
        return None if tensor is None or tensor._version != self._version else tensor

    def read(self, form: Form, context: Context, dtype: torch.dtype) -> Tensor:
        """Return what has been kept of the offset in one form, or raise CacheError."""
        value = self.fetch(form, context, dtype)
        if value is None:
            raise CacheError(NOT_RECORDED)
        return value

    def fetch(self, form: Form, context: Context, dtype: torch.dtype) -> Tensor | None:
        """Return what has been kept of the offset in one form; None if nothing has."""
        if self._tensor is not None:  # recording: rules run to see what they read
            return self._tensor.to(dtype) if form.rounds else self._tensor
        if self._view is not None:
            base = self._view[0]
            seen = Source(form, base).read(context, dtype)
            return None if seen is None else self._view[1](seen)
        recipe = self._recipes.get(form)
        if recipe is None:
            return self._cache.fetch(self.key, form, dtype, self._batch)
        if (form, dtype) not in self._made:
            value = recipe.read(context, dtype, self._batch)
            if value is None:
                value = self._cache.fetch(self.key, form, dtype, self._batch)
            if value is None:
                return None
            self._made[form, dtype] = value
        return self._made[form, dtype]


class OffsetCache:
    """What the snapshot keeps of every batch's offsets, in the low-precision format, on the host.

    Args:
        folder: where memory-mapped files hold the cache; by default it is in memory.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        #: What the tensors of the model share: set when it is made.
        self.context: Any = None
        self.device = torch.device("cpu")
        self.recording = False
        self._suspended = False
        #: The batch that inner steps replay.
        self.current: Any = None
        #: The operation under way, and its key once that has been asked for.
        self._call: Any = None
        self._key_of_call: int | None = None
        #: What rules read, by operation and the kinds of its operands.
        self.plans: dict[Any, Any] = {}
        self._announced: int | None = None
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._batches: list[Batch] = []
        self._programs: dict[Any, Program] = {}
        self._store: HostMemory | MappedFile | None = None
        self._bytes_by_op: Counter[str] = Counter()
        self._units = 0
        self.current = None
        self._next = 0
        self.new_pass()

    def empty_copy(self) -> "OffsetCache":
        """Return a cache with the same settings and nothing in it: it is not copied or pickled."""
        return OffsetCache(self.folder)

    @property
    def is_empty(self) -> bool:
        """Whether a snapshot has to record first."""
        return not self._batches

    @property
    def is_active(self) -> bool:
        """Whether operations record or replay; before the first snapshot they run on site."""
        return (self.recording or bool(self._batches)) and not self._suspended

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Within the block, operations run on site: what they read is there."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    @property
    def nbytes(self) -> int:
        """Bytes of all that is kept."""
        return 0 if self._store is None else self._store.nbytes

    @property
    def bytes_by_op(self) -> dict[str, int]:
        """Bytes by the operation whose result they are of."""
        return dict(self._bytes_by_op.most_common())

    # Recording.

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Within the block, a snapshot's passes are recorded; if it fails, nothing is kept."""
        self.clear()
        self._store = HostMemory() if self.folder is None else MappedFile(self.folder)
        self.recording = True
        self.context.rounder.new_step()
        try:
            yield
            self._store.finish()
        except BaseException:
            self.recording = False
            self.clear()
            raise
        self.recording = False
        self.current = None
        self.new_pass()

    @contextmanager
    def recorded_batch(self, n_batches: int | None) -> Iterator[None]:
        """Within the block, one batch is recorded, the next of so many."""
        self.new_pass()
        self._fresh = False
        self._kept: dict[tuple[int, str], tuple[Tensor, float, Form, str]] = {}
        self._layouts: dict[int, Layout | None] = {}
        yield
        self._finish_batch(n_batches)

    def _finish_batch(self, n_batches: int | None) -> None:
        assert self._store is not None
        kept = self._kept
        start = len(kept) * 8
        entries: dict[tuple[int, str], Entry] = {}
        for key, (codes, _, form, op) in kept.items():
            start += -start % _ALIGNMENT
            shape, stride = tuple(codes.shape), codes.stride()
            entries[key] = Entry(len(entries), start, codes.dtype, shape, stride, form)
            start += codes.nbytes
            self._bytes_by_op[op] += codes.nbytes
        device = next((codes.device for codes, *_ in kept.values()), None)
        self.device = device or self.device
        pinned = self.device.type == "cuda"
        if not self._batches:
            self._announce(start, n_batches)
        memory = self._store.allocate(start, pinned=pinned)
        scales = torch.tensor([scale for _, scale, _, _ in kept.values()], dtype=torch.float64)
        memory[: len(kept) * 8].view(torch.float64).copy_(scales)
        for (codes, *_), entry in zip(kept.values(), entries.values(), strict=True):
            _at(memory, entry).copy_(codes)
        signature = (tuple(entries.items()), tuple(self._layouts.items()))
        program = self._programs.setdefault(signature, Program(entries, self._layouts))
        prints = tuple(plain.fingerprint for plain in self._plain.values())
        self._batches.append(Batch(prints, program, self._store.keep(memory)))
        self._kept, self._layouts = {}, {}

    def _announce(self, nbytes: int, n_batches: int | None) -> None:
        """Say how much there will be, once; refuse what there is no room for."""
        assert self._store is not None
        total = nbytes * (n_batches or 1)
        self._store.check_room(total)
        if self._announced != total:
            each = f"{in_words(nbytes)} for the first batch"
            whole = "" if n_batches is None else f", about {in_words(total)} for all {n_batches}"
            _log.info("cached offsets: %s%s, %s", each, whole, self._store)
        self._announced = total

    def keep(
        self, key: int, form: Form, compute: Callable[[], Tensor | None], dtype: torch.dtype
    ) -> bool:
        """Keep a tensor in one form, unless it is kept already; whether it is kept."""
        if not self.recording:
            return True
        if (key, form.name) in self._kept or (form is LOW and (key, SIGNED.name) in self._kept):
            return True
        value = compute()
        if value is None:
            return False
        self._kept[key, form.name] = self._encoded(value, form, dtype)
        if form is SIGNED:
            self._kept.pop((key, LOW.name), None)
        return True

    def _encoded(
        self, value: Tensor, form: Form, dtype: torch.dtype
    ) -> tuple[Tensor, float, Form, str]:
        op = "loss" if self._call is None else self._call[0]._schema.name.removeprefix("aten::")
        if not form.rounds:
            return value.clone(), 1.0, form, op
        value = value if form.encode is None else form.encode(value)
        rounded = self.context.rounder.copy(value)
        if rounded is value:  # nothing is rounded
            rounded = value.clone()
        if form is SIGNED:
            rounded = with_signs(rounded, value)
        codes, scale = pack(rounded.to(dtype), self.context.precision, signed_zeros=form is SIGNED)
        return codes, scale, form, op

    def keep_gradient(self, offset: Offset, gradient: Tensor, dtype: torch.dtype) -> None:
        """Keep what BC-SGD reads of a parameter's gradient: its offset, with weight decay."""
        self.keep(hash(("gradient", offset.key)), LOW, lambda: gradient, dtype)

    def gradient(self, offset: Offset, dtype: torch.dtype) -> Tensor:
        """Return what was kept of a gradient with this offset.

        Raises:
            CacheError: there is none, since it is of several passes.
        """
        batch = offset._batch if isinstance(offset, KeptOffset) else None
        value = self.fetch(hash(("gradient", offset.key)), LOW, dtype, batch)
        if value is None:
            raise CacheError(NOT_RECORDED)
        return value

    def keep_layout(self, key: int, offset: Tensor | None) -> None:
        """Keep what a result's offset looks like."""
        self._layouts[key] = None
        if offset is not None:
            self._layouts[key] = Layout(tuple(offset.shape), offset.stride(), offset.dtype)

    def layout(self, key: int) -> Layout | None:
        """Return what a result's offset looks like; None if that goes without saying."""
        return None if self.current is None else self.current.program.layouts.get(key)

    def layout_of_constant(self, key: int) -> Layout | None:
        """Return what a constant looks like; None for one that was not asked for.

        Raises:
            CacheError: the snapshot had no such constant.
        """
        if self.current is None or key not in self.current.program.layouts:
            raise CacheError(NOT_RECORDED)
        return self.current.program.layouts[key]

    # Replaying.

    def new_pass(self) -> None:
        """A new pass over the model may begin: with the next operation, if there is one."""
        self._fresh = True
        self._plain: dict[Any, Plain] = {}
        self._draws: Counter[int] = Counter()

    def fetch(self, key: int, form: Form, dtype: torch.dtype, batch: Any = None) -> Tensor | None:
        """Return what was kept under a key in one form; None if nothing was."""
        loaded = batch or self.current
        if loaded is None:
            return None
        entry = loaded.program.entries.get((key, form.name))
        if entry is None and form is LOW:
            entry = loaded.program.entries.get((key, SIGNED.name))
        if entry is None:
            return None
        return loaded.value(entry, form, dtype)

    # Keys.

    def key_of(self, x: Tensor) -> int:
        """Return the key of an operand: of the computation behind it, or of a plain tensor."""
        offset = getattr(x, "_offset", None)
        if offset is None:
            return self._key_of_plain(x)
        if x.context.cache is not self:  # type: ignore[attr-defined]
            raise CacheError(
                "one bit-centered model takes the results of another, and their offsets are cached "
                "apart: bit-center a module that holds both"
            )
        return offset.key

    def begin_call(self, func: Any, args: tuple, kwargs: dict) -> Any:
        """Note that an operation is under way; return what :meth:`end_call` is to be given."""
        outer = self._call, self._key_of_call, self.current
        self._call, self._key_of_call = (func, args, kwargs), None
        if not self.recording:
            batches = {id(b): b for b in _batches_of((args, tuple(kwargs.values())))}
            if batches:
                self.current = next(iter(batches.values())) if len(batches) == 1 else MIXED
        if func._schema.is_mutable:  # then its operands' keys are about to change
            self.key_of_result(0)
        return outer

    def end_call(self, outer: Any) -> None:
        """Go back to the operation that this one was part of."""
        self._call, self._key_of_call, current = outer
        if self._call is not None or self.current is MIXED:
            self.current = current

    def _flatten(self, values: Any, flat: list[Any]) -> None:
        """Append what tells arguments apart: Python's hashes of −1 and −2 are the same."""
        for value in values:
            if isinstance(value, Tensor):
                flat.append(self.key_of(value))
            elif type(value) is int:
                flat.append(value + 2**40)
            elif type(value) is list or type(value) is tuple:
                flat.append(len(value))
                self._flatten(value, flat)
            else:
                flat.append(repr(value) if type(value) is float else value)

    def key_of_result(self, i: int) -> int:
        """Return the key of a result of the operation under way."""
        if self._key_of_call is None:
            if self._fresh and not self.recording:
                self._begin()
            func, args, kwargs = self._call
            flat: list[Any] = [func._schema.name, func._overloadname]
            self._flatten(args, flat)
            for name, value in kwargs.items():
                flat.append(name)
                self._flatten((value,), flat)
            self._key_of_call = hash(tuple(flat))
        return hash((self._key_of_call, i))

    def draw(self, key: int) -> int:
        """Return a key for the next random tensor that is drawn in a place."""
        self._draws[key] += 1
        return hash(("draw", key, self._draws[key]))

    def _key_of_plain(self, x: Tensor) -> int:
        where: tuple = (x.data_ptr(), x.numel(), x.dtype, x._version)
        if not (x.is_contiguous() or (x.dim() == 2 and x.t().is_contiguous())):
            where = (*where, x.shape, x.stride())  # it may skip some of its memory
        if where not in self._plain:
            mark = fingerprint(x)
            if not self.recording:
                self._find(mark)
            self._plain[where] = Plain(len(self._plain), mark, x)
        return hash(("plain", self._plain[where].number, tuple(x.shape), x.stride()))

    def _begin(self) -> None:
        """Begin a pass with the batch that follows the last one, until a tensor says otherwise."""
        self._fresh = False
        if self._batches:
            self._load(self._next % len(self._batches))

    def _load(self, index: int, loaded: "Loaded | None" = None) -> None:
        """Load a batch; in the place of one that was loaded by a wrong guess, if there is one."""
        assert self._store is not None
        batch = self._batches[index]
        self._index, self._next = index, index + 1
        memory = self._store.load(batch.memory, self.device)
        if loaded is None:
            self._of_pass = self.current = Loaded(batch.program, memory)
        else:
            loaded.__init__(batch.program, memory)  # type: ignore[misc]

    def _find(self, mark: int) -> None:
        """Load the batch whose plain tensors are those of this pass.

        Raises:
            CacheError: the snapshot saw no such batch.
        """
        seen = [*(plain.fingerprint for plain in self._plain.values()), mark]
        if self._batches and self._batches[self._index].fingerprints[: len(seen)] == tuple(seen):
            return
        for marks in (seen, [mark]):  # or another pass begins
            for index, batch in enumerate(self._batches):
                if batch.fingerprints[: len(marks)] != tuple(marks):
                    continue
                if len(marks) < len(seen):
                    self._plain.clear()
                    self._draws.clear()
                    self._load(index)
                elif self._draws:
                    raise CacheError(
                        "random numbers (a dropout mask) were drawn before this pass met anything "
                        "that tells its batch from others: with cached offsets, take the batches "
                        "in the order of the snapshot, or use "
                        'halp.bit_center(..., offsets="on-site")'
                    )
                else:  # what has been read so far is the same in both
                    self._load(index, self._of_pass)
                return
        raise CacheError(
            f"this batch is none of the {len(self._batches)} that the snapshot saw: cached offsets "
            "need the same batches in the snapshot and in the steps. The loader shuffles or "
            "augments, or the data has changed; make it repeat its batches, or use "
            'halp.bit_center(..., offsets="on-site"). (Evaluate under halp.materialize(model).)'
        )


class Loaded:
    """A batch's memory on the device of the model."""

    def __init__(self, program: Program, memory: Tensor) -> None:
        self.program = program
        self._memory = memory
        self._scales = memory[: len(program.entries) * 8].view(torch.float64).tolist()
        self._values: dict[Any, Tensor] = {}

    def value(self, entry: Entry, form: Form, dtype: torch.dtype) -> Tensor:
        """Return what lies at an entry, as rules read it; it is unpacked once."""
        what = entry.number, form.name, dtype
        if what not in self._values:
            self._values[what] = self._unpacked(entry, form, dtype)
        return self._values[what]

    def _unpacked(self, entry: Entry, form: Form, dtype: torch.dtype) -> Tensor:
        codes = _at(self._memory, entry)
        if not form.rounds:
            return codes
        value = unpack(codes, self._scales[entry.number], dtype)
        if form is SIGNED:
            return from_signs(value)
        return value if form.decode is None else form.decode(value)


def _batches_of(values: Any) -> Iterator[Any]:
    """Yield the batches that bit-centered operands belong to."""
    for value in values:
        offset = getattr(value, "_offset", None)
        if isinstance(offset, KeptOffset):
            yield offset._batch
        elif type(value) is list or type(value) is tuple:
            yield from _batches_of(value)


#: In the place of a batch: of results that belong to several, of which nothing is kept.
MIXED = Loaded(Program(), torch.empty(0, dtype=torch.uint8))


def _at(memory: Tensor, entry: Entry) -> Tensor:
    """Return the tensor at an entry, without copying it."""
    count = 1
    for size in entry.shape:
        count *= size
    flat = memory[entry.start : entry.start + count * entry.codes.itemsize].view(entry.codes)
    return flat.as_strided(entry.shape, entry.stride)
