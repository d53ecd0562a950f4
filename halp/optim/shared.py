"""Attributes that a solver shares with whatever copies its attributes."""

from typing import Any, Generic, TypeVar, overload

T = TypeVar("T")


class Shared(Generic[T]):
    """An attribute whose value lies in one dictionary of the solver, ``_shared``.

    An optimizer wrapper such as Lightning's copies the attributes of the optimizer that it wraps,
    and leaves steps to it. What both of them may set must be one thing: a position in the cycle
    that is counted in one of them and read in the other.
    """

    def __init__(self, default: T) -> None:
        self._default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, solver: None, owner: type) -> "Shared[T]": ...
    @overload
    def __get__(self, solver: object, owner: type) -> T: ...
    def __get__(self, solver: object, owner: type) -> Any:
        if solver is None:
            return self
        return vars(solver).get("_shared", {}).get(self._name, self._default)

    def __set__(self, solver: object, value: T) -> None:
        vars(solver).setdefault("_shared", {})[self._name] = value
