"""Checks what files say: types and ranges are those of the fields of a dataclass.

A field says its range beside its type, as in `Annotated[int, Range(1, 4096)]`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from math import inf
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints


class Range(NamedTuple):
    """The numbers that a field takes: finite ones from `least` to `most`.

    >>> print(Range(1), Range(1, 4096))
    1 or more from 1 to 4,096
    """

    least: float
    most: float = inf

    def __str__(self) -> str:
        if self.most == inf:
            return f"{self.least:,} or more"
        return f"from {self.least:,} to {self.most:,}"

    def has(self, number: float) -> bool:
        """Return whether a number is one of them; nan is not."""
        return self.least <= number <= self.most and abs(number) < inf


def check_ranges(one: Any, where: str) -> None:
    """Check the numbers of a dataclass, as it is made; `where` is what errors call it.

    Raises:
        ValueError: if one is out of the range of its field.
    """
    for name, hint in hints_of(type(one)).items():
        value, args = getattr(one, name), get_args(hint)
        numbers = {name: (hint, value)}
        if get_origin(hint) is Mapping:
            numbers = {f"{name} {key}": (args[1], x) for key, x in value.items()}
        for what, (kind, number) in numbers.items():
            if get_origin(kind) is Annotated and not (allowed := get_args(kind)[1]).has(number):
                raise ValueError(f"{what} of {where} must be {allowed}, got {number}")


def hints_of(kind: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, with their ranges."""
    return get_type_hints(kind, include_extras=True)


def checked(expected: Any, content: Any, where: str) -> Any:
    """Convert JSON to a type; what is a dataclass must have all of its fields, and no others.

    Args:
        expected: a dataclass, or the type of a field.
        content: what the JSON has.
        where: what errors call it.

    Raises:
        ValueError: if something is of another type, or out of range, or missing, or too much.

    >>> checked(Mapping[str, Annotated[float, Range(0)]], {"float32": 1}, "gemm")
    {'float32': 1.0}
    """
    if is_dataclass(expected):
        return _checked_fields(expected, content, where)
    allowed = None
    if get_origin(expected) is Annotated:
        expected, allowed = get_args(expected)
    origin, args = get_origin(expected), get_args(expected)
    named = {tuple: list, Mapping: dict, float: (int, float)}
    kind = named.get(origin or expected, expected)
    is_bool = isinstance(content, bool)  # which is an int, too
    fits = expected is Any or (isinstance(content, kind) and is_bool == (expected is bool))
    if not fits or (allowed and not allowed.has(content)):
        of = "" if allowed is None else f" of {allowed}" if allowed.most == inf else f" {allowed}"
        raise ValueError(f"{where} must be {_named(expected)}{of}, got {content!r:.60}")
    found: Any = content
    if origin is tuple:
        return tuple(checked(args[0], x, f"an entry of {where}") for x in found)
    if origin is Mapping:
        return {key: checked(args[1], x, f"{key} of {where}") for key, x in found.items()}
    return float(found) if expected is float else found


def _named(expected: Any) -> str:
    """Return what a type is, in words."""
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    lists = {tuple: "a list", Mapping: "a mapping"}
    return names.get(expected) or lists.get(get_origin(expected)) or str(expected)


def _checked_fields(expected: Any, content: Any, where: str) -> Any:
    names = [x.name for x in fields(expected)]
    if not isinstance(content, dict) or set(content) != set(names):
        has = set(content) if isinstance(content, dict) else set()
        wrong = f"it lacks {', '.join(sorted(set(names) - has)) or 'none'}"
        wrong += f" and has {', '.join(sorted(has - set(names))) or 'none'} too many"
        raise ValueError(f"{where} must have the fields of {expected.__name__}: {wrong}")
    hints = hints_of(expected)
    found = {name: checked(hints[name], content[name], f"{name} of {where}") for name in names}
    try:
        return expected(**found)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def read_json(path: Path, where: str) -> Any:
    """Return what a file of JSON has.

    Raises:
        ValueError: if it cannot be read or is not JSON.
    """
    try:
        return parsed_json(path.read_text(), where)
    except OSError as error:
        raise ValueError(f"{where} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from None


def parsed_json(text: str, where: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: if the text is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
