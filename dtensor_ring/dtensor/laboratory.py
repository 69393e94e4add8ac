"""The laboratory, which stands above: the one place below it that calls it, by functions.

It simulates what "auto" chooses from. Like an optional package it is imported on first use, so
who never asks for "auto" or a machine loads none of it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

if TYPE_CHECKING:
    from dtensor_ring.lab.machine import Machine
    from dtensor_ring.planning.mask import Mask

# A machine, the name of a preset, or the path of a file.
AnyMachine: TypeAlias = "Machine | str | PathLike[str]"


def is_machine(given: Any) -> TypeGuard[Machine]:
    """Return whether this is a `Machine`; none is before their module was imported."""
    module = sys.modules.get("dtensor_ring.lab.machine")
    return module is not None and isinstance(given, module.Machine)


def read_machine(given: AnyMachine) -> Machine:
    """Return the machine of a name or a file.

    Raises:
        ValueError: if there is none.
    """
    from dtensor_ring.lab.presets import as_machine

    return as_machine(given)


def written_machine(text: str, where: str) -> Machine:
    """Return the machine of a JSON text; `where` is what errors call it."""
    from dtensor_ring.lab.machine import Machine

    return Machine.from_json(text, where)


def preset_names() -> Collection[str]:
    """Return the names of the machines that need no file."""
    from dtensor_ring.lab.presets import PRESETS

    return PRESETS.keys()


def fastest_strategy(
    mask: Mask,
    seq_len: int,
    world_size: int,
    heads: tuple[int, int],
    head_dim: int,
    cu_seqlens: tuple[int, ...] | None,
    **options: Any,
) -> str:
    """Return the spec of the fastest strategy, by `choose` of the laboratory."""
    from dtensor_ring.lab.choose import choose

    return choose(mask, seq_len, world_size, heads, head_dim, cu_seqlens, **options).spec
