"""Reading pickled NumPy arrays without letting the pickle run anything.

Nothing that a pickle names is ever imported or called. The few names that NumPy arrays need stand
for the small classes below, which only take down what they are given; arrays are then made of raw
bytes, of a dtype of numbers. Each class has a ``__setstate__``, so that a pickle cannot change the
class itself.
"""

from __future__ import annotations

import pickle
import re
from pathlib import Path
from typing import Any

import numpy

from halp.data.dataset import DataError
from halp.messages import quoted, reason_of


def load_pickle(file: Path) -> Any:
    """Read a pickle of plain containers, strings, numbers and NumPy arrays.

    Pickles of Python 2 are read too; their strings come as bytes. Arrays come as `StoredArray`
    and NumPy's numbers as `StoredNumber`.

    Raises:
        DataError: it names anything else, which is then not executed; it holds Python objects in
            an array; it is damaged or cannot be read.
    """
    try:
        with file.open("rb") as stream:
            return _PlainUnpickler(stream, encoding="bytes").load()
    except _Forbidden as forbidden:
        raise DataError(f"{file} is refused, and nothing in it was executed: {forbidden}") from None
    except Exception as error:  # damage surfaces as any error whatever
        reason = reason_of(error)
        raise DataError(f"{file} is damaged or no pickle: replace it ({reason})") from error


class _Forbidden(Exception):
    """The pickle asks for something that data does not need."""


class StoredType:
    """Stands for ``numpy.dtype``: the code of a type and its byte order."""

    def __init__(self, code: bytes | str, *flags: object) -> None:
        self._code = _text(code)
        self._order = "|"
        if self._code.startswith("O"):
            raise _Forbidden("it holds an array of Python objects, not of numbers")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._order = _text(state[1])

    def dtype(self) -> numpy.dtype[Any]:
        """Return the type; numbers only."""
        if not re.fullmatch(r"b1|[iu][1248]|f[248]", self._code):
            raise ValueError(f"the dtype {quoted(self._code)} is none of numbers")
        return numpy.dtype(self._order + self._code)


class StoredArray:
    """Stands for what makes a ``numpy.ndarray``, in both forms that NumPy pickles it."""

    def __init__(self, *arguments: object) -> None:
        self._raw: Any = b""
        self._type: Any = None
        self._shape: Any = ()
        self._fortran: Any = False

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, self._shape, self._type, self._fortran, self._raw = state

    def array(self) -> numpy.ndarray:
        """Return the array, a read-only view of the file's bytes.

        Raises:
            ValueError, TypeError, AttributeError: the parts do not make an array of numbers.
        """
        flat = numpy.frombuffer(self._raw, self._type.dtype())
        return flat.reshape(self._shape, order="F" if self._fortran else "C")


class _BufferArray(StoredArray):
    """Stands for the function behind arrays of pickle protocol 5."""

    def __init__(self, raw: Any, type: Any, shape: Any, order: Any = "C", *axes: object) -> None:
        self._raw, self._type, self._shape = raw, type, shape
        self._fortran = _text(order) == "F"


class StoredNumber:
    """Stands for a NumPy scalar."""

    def __init__(self, type: Any, raw: Any) -> None:
        self._type, self._raw = type, raw

    def __setstate__(self, state: object) -> None:
        raise _Forbidden("it gives a number a state")

    def number(self) -> Any:
        """Return the number as Python's own."""
        (number,) = numpy.frombuffer(self._raw, self._type.dtype()).tolist()
        return number


class _ArrayClass:
    """Stands for the class ``numpy.ndarray``, which pickles name but need not call."""

    def __init__(self, *arguments: object) -> None:
        raise _Forbidden("it calls numpy.ndarray itself")

    def __setstate__(self, state: object) -> None:
        raise _Forbidden("it gives numpy.ndarray a state")


class _Encoded(bytes):
    """Stands for ``_codecs.encode``, by which Python 3 writes bytes in protocols 0 to 2."""

    def __new__(cls, text: str, encoding: bytes | str = "latin1") -> _Encoded:
        if _text(encoding) not in ("latin1", "latin-1"):
            raise _Forbidden(f"it encodes bytes as {quoted(_text(encoding))}, not as latin1")
        return super().__new__(cls, text, "latin1")

    def __setstate__(self, state: object) -> None:
        raise _Forbidden("it gives bytes a state")


def _text(value: bytes | str) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


_STAND_INS: dict[tuple[str, str], type] = {
    ("numpy", "dtype"): StoredType,
    ("numpy", "ndarray"): _ArrayClass,
    ("_codecs", "encode"): _Encoded,
} | {
    (f"numpy.{core}.{module}", name): stand_in
    for core in ("core", "_core")
    for module, name, stand_in in (
        ("multiarray", "_reconstruct", StoredArray),
        ("multiarray", "scalar", StoredNumber),
        ("numeric", "_frombuffer", _BufferArray),
    )
}


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the stand-in of a name, whatever else is asked for being refused."""
        stand_in = _STAND_INS.get((module, name))
        if stand_in is None:
            wanted = f"{module}.{name}"
            raise _Forbidden(
                f"it asks for {quoted(wanted)}, but only NumPy arrays, numbers, strings and plain "
                "containers are accepted"
            )
        return stand_in
