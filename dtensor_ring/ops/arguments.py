"""Options of an op as its flat arguments: the schema, and the way there and back."""

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
        """Its value in a call."""
        value = call
        for name in self.path.split("."):
            value = getattr(value, name)
        return value


class Arguments(Generic[T]):
    """The fields of a value, and of the values in it, as the flat arguments of an op.

    Args:
        owner: type of the value.
        nested: types of the values in it, and in those: named tuples, or values of checked fields.
    """

    def __init__(self, owner: Callable[..., T], *nested: Any) -> None:
        self._nested = {kind.__name__: kind for kind in nested}
        self.leaves = tuple(self._leaves(owner))
        self.schema = ", ".join(f"{leaf.schema_type} {leaf.name}" for leaf in self.leaves)
        """The options in a schema string, in the order of `flatten`."""
        self._build = self._builder(owner)
        self._get = attrgetter(*(leaf.path for leaf in self.leaves))

    def flatten(self, call: T) -> tuple[Any, ...]:
        """The arguments of the op after its tensors."""
        if torch.compiler.is_compiling():  # a compiler follows Python only
            return tuple(leaf.of(call) for leaf in self.leaves)
        return self._get(call)

    def unflatten(self, arguments: tuple[Any, ...]) -> T:
        """The value that `flatten` made the arguments of."""
        return self._build(arguments)

    def _leaves(self, owner: Any, path: str = "") -> Iterator[Leaf]:
        for name, kind in _members(owner):
            if kind in self._nested:
                yield from self._leaves(self._nested[kind], f"{path}{name}.")
            else:
                yield Leaf(name, path + name, _SCHEMA_TYPES[kind])

    def _builder(self, owner: Any, start: int = 0) -> Callable[[tuple[Any, ...]], Any]:
        """A function that builds a value of a type from the leaves, its own from `start` on."""
        # Values that check themselves are made once: layers pass the same ones in every call.
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
    """Name and annotated type of each field."""
    return [(name, _spelled(kind)) for name, kind in owner.__annotations__.items()]


def _spelled(kind: Any) -> str:
    """An annotation as its file spells it, which a `NamedTuple` wraps."""
    return getattr(kind, "__forward_arg__", kind)
