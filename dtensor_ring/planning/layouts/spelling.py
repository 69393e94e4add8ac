"""Layouts by their spelling, as users and the ops name them."""

from __future__ import annotations

from functools import lru_cache

from dtensor_ring.planning.layouts.layout import BlockCyclic, Contiguous, Layout, Striped, ZigZag
from dtensor_ring.planning.layouts.run_table import PerBatch

LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout for layout in (Contiguous, Striped, ZigZag, BlockCyclic)
}
"""The layouts that a name and integers spell."""


def as_layout(layout: Layout | str) -> Layout:
    """The layout itself, or the one of that spelling.

    Args:
        layout: a layout, or its `spec`: `"zigzag"`, `"block_cyclic:128"`; `"balanced"` stands for
            the layouts that belong to a batch.

    Raises:
        ValueError: if no layout is spelled so.
        TypeError: if `layout` is neither a layout nor a string.

    >>> as_layout("block_cyclic:128"), as_layout(ZigZag()).spec
    (BlockCyclic(block=128), 'zigzag')
    """
    if isinstance(layout, str):
        # A bare name needs no cache, which a compiler that traces this would warn of.
        kind = LAYOUTS.get(layout)
        return _spelled(layout) if kind is None or kind.parameters else kind()
    if not isinstance(layout, Layout):
        raise TypeError(f"a layout is a Layout or its name, got {type(layout).__name__}")
    # A layout of another class is not in the table, so its spelling would not lead back to it.
    if not layout.per_batch and type(layout) is not LAYOUTS.get(layout.name):
        raise ValueError(f"unknown layout {layout!r}; known layouts: {', '.join(_spellings())}")
    return layout


@lru_cache(maxsize=256)  # the ops spell their layout in every call
def _spelled(spelling: str) -> Layout:
    """The layout of that spelling."""
    # Per-batch layouts are no class with parameters: their runs come with the batch.
    if spelling == PerBatch.name:
        return PerBatch()
    name, _, parameters = spelling.partition(":")
    if name not in LAYOUTS:
        raise ValueError(f"unknown layout {spelling!r}; known layouts: {', '.join(_spellings())}")
    return _parsed(LAYOUTS[name], spelling, parameters)


def _parsed(kind: type[Layout], spelling: str, parameters: str) -> Layout:
    """The layout with these parameters, which commas separate."""
    values = parameters.split(",") if ":" in spelling else []
    try:
        if len(values) != len(kind.parameters):
            raise ValueError(f"takes {len(kind.parameters)} parameters, got {len(values)}")
        return kind(*map(int, values))
    except ValueError as error:
        raise ValueError(
            f"the layout {spelling!r} has wrong parameters ({error}); "
            f"known layouts: {', '.join(_spellings())}"
        ) from None


def layout_names() -> list[str]:
    """The names of the layouts that take no parameters, for errors that say which there are."""
    return [name for name, kind in LAYOUTS.items() if not kind.parameters]


def _spellings() -> list[str]:
    """The spelling of each known layout, with the names of its parameters."""
    named = {name: ",".join(f"<{x}>" for x in kind.parameters) for name, kind in LAYOUTS.items()}
    return [f"{name}:{parameters}" if parameters else name for name, parameters in named.items()]
