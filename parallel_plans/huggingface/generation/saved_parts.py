"""The parts of a saved cache: those of a sharded one by name, and the windows of layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

Pair = tuple[Tensor, Tensor]
# The name of the number of padding tokens before each row, in a state of rows that have some.
PADDING = "left_padding"


def of_part(state: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the entries of a state whose names begin with that of a part."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): x for key, x in state.items() if key.startswith(prefix)}


def windows_of(state: dict[str, Any], windows: Iterable[int]) -> list[Pair | None]:
    """Return what each window of a state holds; nothing if the cache had no tokens.

    Raises:
        ValueError: if the state is of a cache of other layers.
    """
    saved = of_part(state, "window")
    names = [(f"{x}.keys", f"{x}.values") for x in windows]
    expected = {x for pair in names for x in pair} if state.get("seq_len") else set()
    if {*saved} != expected or not {"seq_len", "batch"} <= {*state}:
        raise ValueError(
            "state must be the state_dict() of a ContextParallelCache of the same model, got "
            f"{', '.join(state) or 'nothing'}"
        )
    return [(saved[x], saved[y]) if expected else None for x, y in names]
