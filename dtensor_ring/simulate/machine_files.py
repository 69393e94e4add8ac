"""Finds a machine by its name or its file."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.presets import PRESETS


def as_machine(given: Machine | str | PathLike[str]) -> Machine:
    """Return a machine: one of the presets by its name, such as "h100", or that of a file.

    Args:
        given: a machine, the name of a preset, or the path of a file that
            `python -m dtensor_ring calibrate` wrote.

    Raises:
        TypeError: if it is something else.
        ValueError: if there is no such preset or file, or the file cannot be read as a machine.
    """
    if isinstance(given, Machine):
        return given
    if not isinstance(given, str | PathLike):
        raise TypeError(f"machine must be a name, such as 'h100', or a file, got {given!r}")
    name = str(given).lower()
    if name in PRESETS:
        return PRESETS[name]
    try:
        text = Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"machine {str(given)!r} is neither a file that can be read ({error}) nor one of "
            f"{', '.join(PRESETS)}"
        ) from None
    return Machine.from_json(text, f"machine file {str(given)!r}")
