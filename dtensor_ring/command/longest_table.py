"""`estimate --longest` prints the longest sequence that a device has memory for."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from dtensor_ring.command.simulate import ReadConfig
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.simulate.training.longest import SPARE, longest_sequences

# The machine without --machine: the one whose numbers most people know.
DEFAULT = "h100"


def longest(
    read: ReadConfig,
    model: str,
    mesh: Mapping[str, int],
    machine: str | None,
    memory: float | None,
    layout: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Print the longest sequence by setting, and return the exit status.

    Args:
        read: reads the config.
        model: names it.
        mesh: ranks by axis.
        machine: the name of a preset, or a file.
        memory: GiB of a device; `None` for what the machine has.
        layout: how tokens are sharded.
        as_json: whether to print JSON.
        options: other arguments of `longest_sequences`.
    """
    try:
        device = as_machine(machine or DEFAULT)
        allowed = None if memory is None else int(memory * 2**30 * (1 - SPARE))
        how = options | {"layout": layout or "zigzag", "memory": allowed}
        found = longest_sequences(read(model), mesh, device, **how)
    except (ImportError, OSError, TypeError, ValueError) as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return 2
    print(json.dumps(found.as_json()) if as_json else found)
    return 0
