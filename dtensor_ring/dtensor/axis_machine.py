"""The machine by which "auto" chooses for an axis: the axis's own, or a data sheet."""

from __future__ import annotations

import logging

import torch
import torch.distributed as dist

from dtensor_ring.dtensor.annotation import Annotation
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.simulate.presets import PRESETS

# The data sheet for devices that have none here, such as CPUs.
DEFAULT_MACHINE: str = "h100"

_LOG = logging.getLogger("dtensor_ring")


def machine_of(here: Annotation, device: str) -> Machine:
    """Return the machine of an axis; without one, the data sheet of its device, which is logged.

    Args:
        here: the record of the axis.
        device: type of the device, such as "cuda".
    """
    config = here.config
    if config is not None and config.machine is not None:
        return config.machine
    found = here.machines.get("")
    if found is None:
        found = here.machines[""] = data_sheet_of(device)
        if dist.get_rank() == here.ranks[0]:
            _LOG.warning(
                'strategy "auto" goes by the data sheet of %s; measure this machine by python -m '
                "dtensor_ring calibrate machine.json, and pass machine=",
                found.name,
            )
    return found


def data_sheet_of(device: str) -> Machine:
    """Return the preset for a type of device, by the name that PyTorch has for it.

    >>> data_sheet_of("cpu").name
    'h100'
    """
    name = device_name(device).lower()
    return as_machine(next((x for x in PRESETS if x in name), DEFAULT_MACHINE))


def device_name(device: str) -> str:
    """Return the name that PyTorch has for the current device of a type, "" for CPUs."""
    if device in ("cpu", "meta"):
        return ""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return "" if named is None else named()
