"""One hand-over as a call that all ranks of a group make: they compare it before data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from dtensor_ring.agreement.call_record import CallRecord, RingError
from dtensor_ring.agreement.checked_transport import checked_transport
from dtensor_ring.agreement.group_state import group_state_of
from dtensor_ring.agreement.late_records import time_limit_of
from dtensor_ring.handover.run import RING, Posts
from dtensor_ring.ops.checks import CALLER
from dtensor_ring.transport.transport import transport_of


class HandOverEnded(BaseException):
    """Carries an error out of a hand-over.

    Ranks post different messages, so no error leaves all of them at the same point. This one is no
    `Exception`: the group is shut down at once, and no rank waits for the others.
    """


# Groups beside others. An entry ends with the group that it stands beside.
_BESIDE: WeakKeyDictionary[ProcessGroup, ProcessGroup] = WeakKeyDictionary()


def group_beside(group: ProcessGroup) -> ProcessGroup:
    """Return another group of the same ranks, whose messages go beside those of the group.

    It is made once. All ranks of the group call this.

    >>> group = init_device_mesh("cpu", (1,)).get_group()
    >>> group_beside(group) is group, group_beside(group) is group_beside(group)
    (False, True)
    """
    beside = _BESIDE.get(group)
    if beside is None:
        # Only the ranks of the group call this, so others must not be waited for.
        ranks, limit = dist.get_process_group_ranks(group), time_limit_of(group)
        made = dist.new_group(
            ranks, limit, dist.get_backend_config(group), use_local_synchronization=True
        )
        assert isinstance(made, ProcessGroup)
        beside = _BESIDE.setdefault(group, made)
    return beside


def end_calls(group: ProcessGroup, error: BaseException) -> None:
    """Shut a group down after an error elsewhere, so that no rank waits for this one in its calls.

    >>> end_calls(init_device_mesh("cpu", (1,)).get_group(), ValueError("of another group"))
    """
    if group.size() == 1:
        return
    record = CallRecord({"direction": RING, "error": "elsewhere"})
    cpu = torch.device("cpu")
    with suppress(RingError, HandOverEnded), checked_transport(group, record, RING, cpu):
        raise HandOverEnded(f"{type(error).__name__}: {error}")


@contextmanager
def handing_over(
    group: ProcessGroup, facts: dict[str, Any], device: torch.device
) -> Iterator[Posts]:
    """Return a context in which messages of a hand-over are posted; its end waits for all.

    Other groups may be used within it. An error of one of them, or of anything else, ends the
    hand-over on all ranks.

    Args:
        group: the group of all ranks that give or get something.
        facts: what must be equal on all ranks.
        device: where the tensors of messages are.

    Raises:
        RingError: on every rank, if facts differ, or a rank ended, raised, or did not answer in
            time.
    """
    if group.size() == 1:  # nobody to agree with
        posts = Posts(transport_of(group), 0, device)
        yield posts
        posts.finish()
        return
    record = CallRecord({"direction": RING, **{name: str(x) for name, x in facts.items()}})
    try:
        with checked_transport(group, record, RING, device, call_site=CALLER.site) as transport:
            posts = Posts(transport, group.rank(), device)
            try:
                yield posts
                posts.finish()
            except BaseException as error:
                posts.abandon()
                # It shut this group down, so its ranks know of it, as of no other error.
                if isinstance(error, RingError) and group_state_of(group).cause is not None:
                    raise
                raise HandOverEnded(f"{type(error).__name__}: {error}") from error
    except HandOverEnded as ended:
        assert ended.__cause__ is not None
        # The caller sees its own error, not what carried it through the call.
        raise ended.__cause__ from None


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank's tensors."""
    return torch.empty(0, device=mesh.device_type).device
