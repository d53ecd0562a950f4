"""BitCenteredTensor: a high-precision offset plus a low-precision delta, in one tensor."""

import copy
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from halp.bitcenter.offsets import Context, Offset
from halp.random_bits import is_traced


def writes_counted() -> Any:
    """Return a context in which views and writes share and raise their tensors' version counters.

    PyTorch leaves versions alone inside ``__torch_dispatch__``; what is remembered of an offset, a
    constant or a center rests on them.
    """
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False)


#: Attributes of the tensors themselves; what else hangs on a parameter is the user's.
OWN_ATTRIBUTES = frozenset(
    {"_offset", "delta", "context", "decision", "_constant", "_is_param", "_plain_class"}
)


class BitCenteredTensor(Tensor):
    """``offset + delta``, of which every operation computes both parts.

    The offset is in high precision; the delta's values lie on the grid of a low-precision format.
    Operations map deltas to deltas by rules in which no large numbers cancel (see
    ``halp.bitcenter.rules``), so that the delta's *relative* error stays at the format's unit
    roundoff however small the delta is. PyTorch's autograd differentiates it: after
    ``loss.backward()``, ``p.grad.delta`` is ∇f(w̃+z) − ∇f(w̃) and ``p.grad.offset`` is ∇f(w̃).

    Integer and boolean tensors (comparisons, indices) carry two values as well: what the offset
    alone gives, and in ``delta`` what the full value gives.

    Attributes:
        offset: the high-precision part w̃, a plain tensor of this tensor's shape and dtype.
        delta: the low-precision part z, stored in the model's original dtype.
        context: what all tensors of one model share.
        decision: which elements of the full value a ReLU let through, for its backward pass.
    """

    #: Runs an operation: :func:`halp.bitcenter.dispatch.dispatch`, which needs this class first.
    dispatcher: ClassVar[Callable[[Any, tuple, dict], Any]]

    delta: Tensor
    context: Context
    decision: Tensor | None
    _offset: Offset
    #: A delta that is known to be zero as long as it has this version.
    _constant: tuple[Tensor, int] | None
    #: Of a parameter: the class that it has as a plain one.
    _plain_class: type = torch.nn.Parameter

    @staticmethod
    def __new__(
        cls: type["BitCenteredTensor"],
        offset: Tensor | Offset,
        delta: Tensor,
        context: Context,
        dtype: torch.dtype | None = None,
    ) -> "BitCenteredTensor":
        """Wrap two plain tensors of one shape; ``dtype`` is that of an offset not yet computed."""
        layout = delta
        if not isinstance(offset, Offset):
            dtype, layout = offset.dtype, offset
            offset = Offset(offset)
        elif offset.is_recorded:  # its delta is a stand-in
            layout = offset.computed
        self = Tensor._make_wrapper_subclass(
            cls,
            delta.shape,
            strides=layout.stride(),
            storage_offset=layout.storage_offset(),
            dtype=dtype,
            device=layout.device,
        )
        self._offset = offset
        self.delta = delta
        self.context = context
        self.decision = None
        self._constant = None
        return self

    @classmethod
    def constant(
        cls, offset: Tensor, context: Context, delta_dtype: torch.dtype | None = None
    ) -> "BitCenteredTensor":
        """Wrap a tensor whose delta is zero, and known to be until something writes to it."""
        delta = torch.zeros_like(offset, dtype=delta_dtype)
        self = cls(offset, delta, context)
        if not is_traced(delta) and not delta.is_inference():
            self._constant = (delta, delta._version)
        return self

    @property
    def is_constant(self) -> bool:
        """Whether the delta is known to be zero, so that rules can skip it."""
        known = self._constant
        return known is not None and known[0] is self.delta and known[1] == self.delta._version

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        return cls.dispatcher(func, args, kwargs or {})

    @property
    def offset(self) -> Tensor:
        """The high-precision part, computed now if it has not been needed before."""
        return self._offset.tensor

    @property
    def low_offset(self) -> Tensor:
        """The offset rounded to the low-precision format, stored in the delta's dtype."""
        return self._offset.low(self.context, self.delta.dtype)

    @property
    def value(self) -> Tensor:
        """``offset + delta`` as a plain tensor in the offset's dtype; aliases neither."""
        if not self.dtype.is_floating_point:
            return self.delta.clone()
        return self.offset + self.delta

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["offset", "delta"], (self.context, self.context.offsets_only)

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, Tensor], metadata: Any, outer_size: Any, outer_stride: Any
    ) -> "BitCenteredTensor":
        return cls(inner["offset"], inner["delta"], metadata[0])

    @classmethod
    def __metadata_guard__(cls, traced: tuple[Context, bool], seen: tuple[Context, bool]) -> bool:
        """Whether code compiled for one tensor serves another (or the same one in a snapshot)."""
        return (traced[0].precision, traced[1]) == (seen[0].precision, seen[1])

    def _stable_hash_for_caching(self) -> str:
        """What of a tensor compiled code depends on, for the compiler's cache on disk."""
        return f"{type(self).__name__}({self.context.precision}, {self.context.offsets_only})"

    @property
    def data(self) -> Tensor:
        """A detached alias of both parts: in-place operations on it change this tensor."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        raise RuntimeError(
            "p.data = t would drop one half of a bit-centered tensor; write p.data.copy_(t), which "
            "sets the offset to t and the delta to zero"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        if not self._offset.root.is_at_hand:
            return f"BitCenteredTensor(offset=cached, delta={self.delta})"
        if type(self.offset) is not Tensor:  # traced
            return f"BitCenteredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"
        suffix = ", requires_grad=True" if self.requires_grad else ""
        suffix = f", grad_fn=<{self.grad_fn.name()}>" if self.grad_fn is not None else suffix
        return (
            f"BitCenteredTensor(offset={self.offset}, delta={self.delta}, "
            f"format={self.context.precision.format}{suffix})"
        )

    def __format__(self, spec: str) -> str:
        return format(self.value.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def tolist(self) -> Any:
        """``offset + delta`` as nested lists of Python numbers."""
        return self.value.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """``offset + delta`` as a NumPy array; as for any tensor, not while it requires grad."""
        if self.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on a tensor that requires grad; use t.detach().numpy()"
            )
        return self.value.numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        array = self.numpy()
        return array if dtype is None else array.astype(dtype)

    def share_memory_(self) -> "BitCenteredTensor":
        """Move both parts to memory that processes share."""
        self.offset.share_memory_()
        self.delta.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether both parts are in memory that processes share."""
        return self.offset.is_shared() and self.delta.is_shared()

    def __deepcopy__(self, memo: dict[int, Any]) -> "BitCenteredTensor":
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "only leaf tensors (parameters, detached ones) can be deep-copied; detach() first"
            )
        context = copy.deepcopy(self.context, memo)
        new = _rebuild(
            self.offset.clone(),
            self.delta.clone(),
            context,
            *copy.deepcopy(self._extra_state(), memo),
        )
        memo[id(self)] = new
        grad: Any = self.grad
        if grad is not None and grad._offset.root.is_at_hand:  # of a cached step there is no whole
            new.grad = copy.deepcopy(self.grad, memo)
        return new

    def __reduce_ex__(self, protocol: Any) -> tuple:
        return _rebuild, (self.offset, self.delta, self.context, *self._extra_state())

    def _extra_state(self) -> tuple[bool, bool, type, dict[str, Any]]:
        attributes = {name: v for name, v in vars(self).items() if name not in OWN_ATTRIBUTES}
        is_parameter = getattr(self, "_is_param", False)
        return self.requires_grad, is_parameter, self._plain_class, attributes


def _rebuild(
    offset: Tensor,
    delta: Tensor,
    context: Context,
    requires_grad: bool,
    is_parameter: bool,
    plain_class: type = torch.nn.Parameter,
    attributes: dict[str, Any] | None = None,
) -> BitCenteredTensor:
    """Put a pickled or copied tensor together again."""
    tensor = BitCenteredTensor(offset, delta, context)
    if is_parameter:
        tensor._is_param = True
        tensor._plain_class = plain_class
    vars(tensor).update(attributes or {})
    tensor.requires_grad_(requires_grad)
    return tensor
