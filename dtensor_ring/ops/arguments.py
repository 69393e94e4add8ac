"""Converts the options of an op to the flat arguments of its schema, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from operator import attrgetter, itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

import torch

T = TypeVar("T")

_SCHEMA_TYPES = {
    "Tensor | None": "Tensor?",
    "int | None": "int?",
    "Length | None": "SymInt?",
    "str | None": "str?",
    "int": "int",
    "tuple[int, ...]": "int[]",
    "bool": "bool",
    "float": "float",
    "torch.dtype": "ScalarType",
    "torch.dtype | None": "ScalarType?",
}


class Leaf(NamedTuple):
    """One argument of the schema."""

    name: str
    path: str
    schema_type: str

    def of(self, call: Any) -> Any:
        """Return the value of this argument in a call."""
        value = call
        for name in self.path.split("."):
            value = getattr(value, name)
        return value


class Arguments(Generic[T]):
    """Maps a nested value of options to the flat arguments of an op.

    Args:
        owner: type of the value.
        nested: types of all values within it: named tuples, or classes that check their fields.

    Attributes:
        leaves: the arguments, in the order of `flatten`.
        schema: the arguments as a schema string, in the same order.
    """

    def __init__(self, owner: Callable[..., T], *nested: Any) -> None:
        self._nested = {kind.__name__: kind for kind in nested}
        self.leaves = tuple(self._leaves(owner))
        self.schema = ", ".join(f"{leaf.schema_type} {leaf.name}" for leaf in self.leaves)

        self._build = self._builder(owner)
        self._get = attrgetter(*(leaf.path for leaf in self.leaves))

    def flatten(self, call: T) -> tuple[Any, ...]:
        """Return the arguments of the op after its tensors."""
        if torch.compiler.is_compiling():  # a compiler follows Python only
            return tuple(leaf.of(call) for leaf in self.leaves)
        return self._get(call)

    def unflatten(self, arguments: tuple[Any, ...]) -> T:
        """Return the value from which `flatten` made these arguments."""
        return self._build(arguments)

    def _leaves(self, owner: Any, path: str = "") -> Iterator[Leaf]:
        for name, kind in _members(owner):
            if kind in self._nested:
                yield from self._leaves(self._nested[kind], f"{path}{name}.")
            else:
                yield Leaf(name, path + name, _SCHEMA_TYPES[kind])

    def _builder(self, owner: Any, start: int = 0) -> Callable[[tuple[Any, ...]], Any]:
        """Return a function that builds an `owner` from the leaves that begin at `start`."""
        # Checking costs, and layers pass the same values in every call: build each value once.
        make = owner if issubclass(owner, tuple) else lru_cache(maxsize=256)(owner)
        kinds = [kind for _, kind in _members(owner)]
        if not any(kind in self._nested for kind in kinds):
            end = start + len(kinds)
            return lambda leaves: make(*leaves[start:end])
        parts: list[Callable[[tuple[Any, ...]], Any]] = []
        for kind in kinds:
            nested = self._nested.get(kind)
            parts.append(self._builder(nested, start) if nested else itemgetter(start))
            start += len(list(self._leaves(nested))) if nested else 1
        return lambda leaves: make(*[part(leaves) for part in parts])


def _members(owner: Any) -> list[tuple[str, str]]:
    """Return the name and the annotated type of each field."""
    return [(name, _spelled(kind)) for name, kind in owner.__annotations__.items()]


def _spelled(kind: Any) -> str:
    """Return an annotation as the file spells it; `NamedTuple` wraps it in a `ForwardRef`."""
    return getattr(kind, "__forward_arg__", kind)
