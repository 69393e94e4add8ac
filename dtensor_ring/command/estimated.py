"""The command `estimate`: of one step, or the longest sequence."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from dtensor_ring.dtensor.choice import DEFAULT_MACHINE
from dtensor_ring.dtensor.meta_model import LoadModel
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training.estimate import estimate
from dtensor_ring.lab.training.longest import longest_sequences, usable
from dtensor_ring.lab.training.simulate import ReadConfig

# Options that say what a step does to take less memory, or what else is estimated of it.
SETTINGS = "checkpoint", "offload", "unsharded", "cache_dtype"


NO_TENSOR_PARALLELISM = (
    "tensor parallelism is not estimated, as the plan of a model decides what it divides: leave tp "
    "out, a rank has less with it than is then estimated; or use simulate"
)


def estimate_or_longest(
    load: LoadModel, read: ReadConfig, longest: bool, memory: float | None, **options: Any
) -> int:
    """Run `estimate`, or `estimate --longest`, which tries the settings of the other one out.

    Args:
        load: makes the model that `estimate` runs.
        read: reads the config whose longest sequence is looked for.
        longest: whether it is.
        memory: GiB of a device; `None` for what the machine has.
        options: others of the command.

    Returns:
        The exit status.

    Raises:
        ValueError: if options contradict each other, or `longest_sequences` raises it.
    """
    settings = {name: options.pop(name) for name in SETTINGS}
    given = [f"--{name.replace('_', '-')}" for name, value in settings.items() if value]
    if longest and given:
        raise ValueError(f"--longest tries settings out by itself, so leave {', '.join(given)} out")
    if options["mesh"].get("tp", 1) > 1:
        raise ValueError(NO_TENSOR_PARALLELISM)
    if longest:
        return _longest(read, memory=memory, **options)
    if options["seq_len"] is None:
        raise ValueError(
            "estimate needs --seq-len, the tokens of a sequence, or --longest, which finds it"
        )
    is_sharded = not settings.pop("unsharded")
    settings["checkpoint"] = settings["checkpoint"] or "none"
    settings["offload"] = settings["offload"] or ()
    return estimate(load, memory=memory, is_sharded=is_sharded, **options, **settings)


def _longest(
    read: ReadConfig,
    model: str,
    mesh: Mapping[str, int],
    machine: str | None,
    memory: float | None,
    layout: str | None,
    dtype: torch.dtype,
    as_json: bool,
    **options: Any,
) -> int:
    """Print the longest sequence by setting; `options` are others of `longest_sequences`."""
    device = as_machine(machine or DEFAULT_MACHINE)
    options |= {"layout": layout or "zigzag", "dtype": str(dtype)}
    options["memory"] = None if memory is None else usable(int(memory * 2**30))
    found = longest_sequences(read(model), mesh, device, **options)
    print(json.dumps(found.as_json()) if as_json else found)
    return 0
