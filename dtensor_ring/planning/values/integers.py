"""Integers as users give them: one row for the whole batch, or one for each batch row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np


class SupportsArray(Protocol):
    """An array, or a tensor on the CPU."""

    def __array__(self) -> np.ndarray:
        """The content as an array."""
        ...


Integers = SupportsArray | Sequence[int] | Sequence[Sequence[int]]
"""Integers in rows, in any form that `integer_rows` takes."""


def integer_rows(
    given: Any, name: str, noun: str, shape: str, ndims: tuple[int, ...] = (1, 2)
) -> list[np.ndarray]:
    """One array for each row; rows may be of different lengths.

    Args:
        given: a tensor, an array, a sequence, or a sequence of them.
        name: of the argument.
        noun: what it holds, in errors.
        shape: what it may have, in errors.
        ndims: numbers of dims that it may have.

    Raises:
        ValueError: if it is of another shape.
        TypeError: if it holds other than integers.

    >>> integer_rows([[0, 3], [0, 3, 8]], "ends", "boundaries", "(D+1,) or (B, D+1)")
    [array([0, 3]), array([0, 3, 8])]
    """
    if isinstance(given, Sequence) and given and _is_row(given[0]):
        # One by one: rows of different lengths make no array.
        of_row = tuple(ndim - 1 for ndim in ndims if ndim > 1)
        return [integer_array(row, name, noun, shape, of_row, given) for row in given]
    array = integer_array(given, name, noun, shape, ndims, given)
    return list(array) if array.ndim > 1 else [array]


def integer_array(
    part: Any, name: str, noun: str, shape: str, ndims: tuple[int, ...], given: Any
) -> np.ndarray:
    """An array of integers, of a number of dims; `given` is what errors quote.

    Raises:
        ValueError: if it is of another shape.
        TypeError: if it holds other than integers.
    """
    try:
        array = _as_array(part)
    except (TypeError, ValueError, RuntimeError) as error:  # of tensors without dense content
        raise TypeError(f"{name} cannot be read as {noun} ({error}), got {given!r}") from error
    if array.ndim not in ndims:
        raise ValueError(f"{name} must be {noun} {shape}, got {given!r}")
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(
            f"{name} must hold integers: {array.dtype} cannot be interpreted as an integer, "
            f"got {given!r}"
        )
    return array


def _is_row(value: Any) -> bool:
    return isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1


def _as_array(row: Any) -> np.ndarray:
    if hasattr(row, "cpu"):  # a tensor, on whatever device
        row = row.cpu()
    # array.array and its like convert through a list.
    if not hasattr(row, "__array__") and hasattr(row, "tolist"):
        row = row.tolist()
    return np.asarray(row)
