"""What ``state_dict()`` shows of a bit-centered model: values that belong to its parameters."""

import copy
from typing import Any

import torch
from torch import Tensor

from halp.bitcenter.tensor import BitCenteredTensor
from halp.calls import replace_tensors

_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class ParameterValue(Tensor):
    """``w̃ + z`` of a parameter, as if it were the parameter's own memory.

    As in PyTorch, where the values of ``state_dict()`` alias the parameters: it shows what the
    parameter holds now, and what is written into it becomes the parameter's offset, with a delta of
    zero. Results of operations are plain tensors, and so is what is saved, copied or pickled.
    """

    #: The value of the whole parameter, if this is a view of it.
    _whole: "ParameterValue"
    _parameter: Tensor

    @staticmethod
    def of(parameter: BitCenteredTensor) -> "ParameterValue":
        """Return the value of a parameter."""
        self = parameter.value.as_subclass(ParameterValue)
        self._whole, self._parameter = self, parameter
        return self

    @property
    def _plain(self) -> Tensor:
        """The same memory as a plain tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def _read(self) -> Tensor:
        """Return the same memory, with what the parameter holds now in it."""
        whole, parameter = self._whole._plain, self._whole._parameter
        with torch.no_grad():
            value = parameter.value if isinstance(parameter, BitCenteredTensor) else parameter
            whole.copy_(value)
        return self._plain

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read: list[tuple[ParameterValue, Tensor, int]] = []

        def plain(x: Tensor) -> Tensor:
            if not isinstance(x, ParameterValue):
                return x
            value = x._read()
            read.append((x, value, value._version))
            return value

        new_args = replace_tensors(args, plain)
        new_kwargs = dict(zip(kwargs, replace_tensors(kwargs.values(), plain), strict=True))
        if func == _GET_DATA:  # a version counter of its own, by which no write would be seen
            return args[0]
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*new_args, **new_kwargs)
            for x, value, version in read:
                if value._version != version:
                    with torch.no_grad():
                        x._whole._parameter.copy_(x._whole._plain)
        if func is Tensor.numpy:
            result.flags.writeable = False  # nobody would see it
        return _aliases(result, read)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self._read().clone(), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._read().clone().__reduce_ex__(protocol)


def _aliases(result: Any, read: list[tuple[ParameterValue, Tensor, int]]) -> Any:
    """Return a result; what shares memory with a value that was read is part of that value."""
    if type(result) in (tuple, list):
        return type(result)(_aliases(part, read) for part in result)
    if not isinstance(result, Tensor) or isinstance(result, BitCenteredTensor):
        return result
    for x, value, _ in read:
        if result is value:
            return x
        if result.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() != 0:
            part = result.as_subclass(ParameterValue)
            part._whole = x._whole
            return part
    return result
