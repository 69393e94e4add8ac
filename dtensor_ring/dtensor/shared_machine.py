"""Gives the ranks of an axis one machine: the first rank reads its file and sends it to all."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from dtensor_ring.dtensor.annotation import annotation_of, axis_group, check_machine
from dtensor_ring.dtensor.axis_machine import device_name, machine_of
from dtensor_ring.dtensor.call_check import checked_barrier
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.machine_files import as_machine
from dtensor_ring.simulate.presets import PRESETS

# A machine, the name of a preset, or the path of a file.
AnyMachine = Machine | str | PathLike[str]


def shared_machine(
    group: ProcessGroup, given: AnyMachine | None, device: str = "cpu"
) -> Machine | None:
    """Return the machine that all ranks of a group get for their axis.

    The first rank reads a file and sends it to the others, once for each axis and name. Other ranks
    need not have the file.

    Args:
        group: the group of the axis.
        given: a machine, the name of a preset, or the path of a file of rank 0.
        device: type of the devices of the axis.

    Raises:
        TypeError: if it is something else.
        ValueError: on all ranks, if the first one cannot read the file, or its GPU is another
            device than the one that was measured.
        RingError: if a rank does something else meanwhile.
    """
    check_machine(given)
    if given is None or isinstance(given, Machine):
        return given
    name = str(given)
    if name.lower() in PRESETS:
        return as_machine(name)
    here = annotation_of(group)
    if name not in here.machines:
        here.machines[name] = _received(group, name, device)
    return here.machines[name]


def machine_on(mesh: DeviceMesh, given: AnyMachine | None = None) -> Machine:
    """Return the machine by which "auto" chooses over a 1-D mesh, before it is annotated.

    All ranks call it alike, see `SequenceAxis`.

    Args:
        mesh: a 1-D mesh.
        given: the machine that `SequenceAxis` will get, a name or a path; `None` for the data
            sheet of the device.

    Raises:
        TypeError: if it is something else.
        ValueError: on all ranks, if the first one cannot read the file.
    """
    group, device = axis_group(mesh), mesh.device_type
    return shared_machine(group, given, device) or machine_of(annotation_of(group), device)


def _received(group: ProcessGroup, path: str, device: str) -> Machine:
    """Return the machine of a file that the first rank reads."""
    if group.size() == 1 or dist.get_backend(group) == "fake":  # nobody to send or to get it
        return _read(path, device)
    with checked_barrier(group, "reading the file of a machine", {}):
        pass  # raises if a rank is in another call, where the collective below would hang
    box: list[Any] = [_text(path, device) if group.rank() == 0 else None]
    dist.broadcast_object_list(box, group=group, group_src=0)
    text, error = box[0]
    if error:
        reader = dist.get_process_group_ranks(group)[0]
        raise ValueError(f"rank {reader}, which reads the machine for its axis: {error}")
    return Machine.from_json(text, path)


def _read(path: str, device: str) -> Machine:
    """Return the machine of a file; on CPUs any, as for dry runs."""
    found, name = as_machine(path), device_name(device)
    if name:
        found.check_device(name)
    return found


def _text(path: str, device: str) -> tuple[str, str]:
    """Return a machine as text, and an empty error; or an error."""
    try:
        return _read(path, device).to_json(), ""
    except ValueError as error:
        return "", str(error)
