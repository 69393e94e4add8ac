"""The command `estimate`: of one step, or the longest sequence."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from dtensor_ring.dtensor.choice import DEFAULT_MACHINE
from dtensor_ring.dtensor.meta_model import LoadModel
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.report import refused
from dtensor_ring.lab.training.estimate import estimate
from dtensor_ring.lab.training.longest import longest_sequences, usable
from dtensor_ring.lab.training.simulate import ReadConfig

# Options that say what a step does to take less memory, or what else is estimated of it.
SETTINGS = "checkpoint", "offload", "unsharded", "cache_dtype"


NO_TENSOR_PARALLELISM = (
    "tensor parallelism is not estimated, as the plan of a model decides what it divides: leave tp "
    "out, a rank has less with it than is then estimated; or use simulate"
)


def estimate_or_longest(load: LoadModel, read: ReadConfig, **options: Any) -> int:
    """Run `estimate`, or `estimate --longest`, which tries the settings of the other one out."""
    settings = {name: options.pop(name) for name in SETTINGS}
    is_longest, memory = options.pop("longest"), options.pop("memory")
    given = [f"--{name.replace('_', '-')}" for name, value in settings.items() if value]
    if is_longest and given:
        why = f"--longest tries settings out by itself, so leave {', '.join(given)} out"
    elif options["mesh"].get("tp", 1) > 1:
        why = NO_TENSOR_PARALLELISM
    elif options["seq_len"] is None and not is_longest:
        why = "estimate needs --seq-len, the tokens of a sequence, or --longest, which finds it"
    elif is_longest:
        dtype = str(options.pop("dtype"))
        return longest(read, memory=memory, dtype=dtype, **options)
    else:
        is_sharded = not settings.pop("unsharded")
        settings["checkpoint"] = settings["checkpoint"] or "none"
        settings["offload"] = settings["offload"] or ()
        return estimate(load, memory=memory, is_sharded=is_sharded, **options, **settings)
    print(why, file=sys.stderr)
    return 2


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
        device = as_machine(machine or DEFAULT_MACHINE)
        allowed = None if memory is None else usable(int(memory * 2**30))
        how = options | {"layout": layout or "zigzag", "memory": allowed}
        found = longest_sequences(read(model), mesh, device, **how)
    except (ImportError, OSError, TypeError, ValueError) as error:
        return refused(error)
    print(json.dumps(found.as_json()) if as_json else found)
    return 0
