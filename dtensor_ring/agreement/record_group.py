"""The gloo group of an axis whose own group has NCCL: call records go by it.

Note [Record group]: NCCL moves tensors of GPUs only, and ignores tags. So the ranks of such a group
make a second one of gloo, over the store of the first. It is not registered with
`torch.distributed`: it has no name that could differ between ranks, and `destroy_process_group`
does not know it. It lives as long as the `GroupState`. All ranks make it, or none: a rank that
cannot says so in the store before any rank connects.
"""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

# The time limit to connect once all ranks are there, in seconds.
CONNECT_TIMEOUT = 30.0

# A rank that cannot take part adds this number instead of 1.
_FAILED = 1 << 20

_LOG = logging.getLogger("dtensor_ring")


def has_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether the group sends CPU tensors by gloo; groups of NCCL alone do not."""
    return "gloo" in _backends(group, "cpu")


def has_late_messages(group: dist.ProcessGroup) -> bool:
    """Return whether the group has a backend like NCCL: no tags, and the host does not wait."""
    return bool(_backends(group) - {"gloo", "fake"})


def _backends(group: dist.ProcessGroup, device_type: str | None = None) -> set[str]:
    """Return the names of the backends that a group has, for all devices or for one type."""
    found = set()
    for device in group._device_types:
        try:
            if device_type in (None, device.type):
                found.add(group._get_backend(device).name())
        except RuntimeError:  # none for this device
            continue
    return found


def time_limit_of(group: dist.ProcessGroup) -> timedelta:
    """Return how long the group waits for a message."""
    for device in group._device_types:
        try:
            return group._get_backend(device).options._timeout
        except (RuntimeError, AttributeError):  # no backend, or one without options
            continue
    return dist.constants.default_pg_timeout


def make_record_group(
    group: dist.ProcessGroup, store: Any, epoch: int
) -> dist.ProcessGroupGloo | None:
    """Make a gloo group of the ranks of a group. All of them call this at the same point.

    Args:
        group: the group; this needs its ranks and its time limit only.
        store: the store of the group.
        epoch: of the group, see `epoch_of`.

    Returns:
        The group, or `None` on all ranks if one of them fails. Then one line is logged.
    """
    limit = time_limit_of(group)
    prefix = f"dtensor_ring/{epoch}/records"
    try:
        # Where gloo finds no network, this raises before the others wait for this rank.
        dist.ProcessGroupGloo.create_default_device()
        problem = ""
    except (RuntimeError, AttributeError) as error:
        problem = str(error)
    # All ranks come here, but one may load or compile something first.
    patience = max(limit.total_seconds(), CONNECT_TIMEOUT)
    if not _all_are_well(group, store, f"{prefix}/there", not problem, patience):
        return _not_compared(group, problem or "another rank has no gloo, or does not answer")
    made, connect = None, timedelta(seconds=CONNECT_TIMEOUT)
    try:
        made = dist.ProcessGroupGloo(
            dist.PrefixStore(prefix, store), group.rank(), group.size(), connect
        )
    except RuntimeError as error:
        problem = str(error)
    if not _all_are_well(group, store, f"{prefix}/made", made is not None, 2 * CONNECT_TIMEOUT):
        return _not_compared(group, problem or "another rank could not connect")
    assert made is not None, "this rank counts as well"
    made._set_default_timeout(limit)
    return made


def _all_are_well(
    group: dist.ProcessGroup, store: Any, key: str, is_well: bool, seconds: float
) -> bool:
    """Return whether all ranks come here within so many seconds, and all of them are well."""
    end = time.monotonic() + seconds
    try:
        total = store.add(key, 1 if is_well else _FAILED)
        # A rank that fails need not be waited for by the others.
        while total < group.size() and time.monotonic() < end:
            time.sleep(0.005)
            total = store.add(key, 0)
    except RuntimeError:  # the store or its host is gone
        return False
    return total == group.size()


def _not_compared(group: dist.ProcessGroup, problem: str) -> None:
    ranks = dist.get_process_group_ranks(group)
    _LOG.warning(
        "the calls of ranks %s are not compared, and a rank that fails does not tell the others: "
        "no gloo group of them could be made (%s). Gloo needs a TCP connection between all of "
        "them; GLOO_SOCKET_IFNAME names the network interface",
        ranks,
        problem.splitlines()[0],
    )
