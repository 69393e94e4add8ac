"""Checks that all ranks of a ring make the same call; otherwise it would hang or be wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.agreement.checked_transport import checked_transport
from dtensor_ring.agreement.group_state import group_state_of
from dtensor_ring.agreement.record import CallRecord
from dtensor_ring.all_to_all.ulysses import as_autocast
from dtensor_ring.compute.kernels import available_kernels
from dtensor_ring.dtensor.annotation import axis_group, group_of
from dtensor_ring.dtensor.arguments import check_options
from dtensor_ring.dtensor.dispatch import local_call, ring_of_call
from dtensor_ring.dtensor.placement import SEQUENCE, local_of, placements_text
from dtensor_ring.ops.checks import check_inputs
from dtensor_ring.ops.options import Call
from dtensor_ring.ops.record import attention_facts
from dtensor_ring.ops.ring_op import ring_record
from dtensor_ring.planning.strategy import Strategy

SAME_CALL = "make the same call"

# The largest number of characters of a description that an error quotes.
MAX_QUOTED = 200


def validated(
    build: Callable[[], Call], query: Any, key: Any, value: Any, mesh: DeviceMesh | None
) -> Call:
    """Build the call of `ring_attention`, and compare its record with those of the other ranks.

    Raises:
        ValueError: on every rank, if records differ, or only some ranks raise; or here, if the call
            is being compiled.
    """
    if torch.compiler.is_compiling():
        raise ValueError("validate=True compares ranks in eager calls only; compile without it")
    if isinstance(query, DTensor):
        axes = [axis for axis, where in enumerate(query.placements) if where == Shard(SEQUENCE)]
        groups = [group_of(query.device_mesh, axis) for axis in axes]
    else:
        groups = [axis_group(mesh)] if mesh is not None else []
    try:
        call = build()
        record = _record(call, query, key, value)
    except Exception as error:
        # A sequence over several axes is an error, which the ranks of all these axes must raise.
        for group in groups:
            check_agreement(group, {"error": f"{type(error).__name__}: {error}"}, SAME_CALL)
        raise
    for group in groups:
        check_agreement(group, {"error": "none"}, SAME_CALL)
        check_agreement(group, record, SAME_CALL)
    return call


def _record(call: Call, query: Any, key: Any, value: Any) -> dict[str, str]:
    """Describe a call as its op does, and what a rank without call records would not notice.

    Raises:
        ValueError: what the op would raise on this rank before it sends anything.
    """
    check_options(query, call)
    inputs, placements = (query, key, value, call.scores.sinks), "none"
    if isinstance(query, DTensor):
        ring = ring_of_call(query, key, value, call)
        call, placements = local_call(call, query, key, ring), placements_text(ring.placements)
        query, key, value = (local_of(x, ring) for x in (query, key, value))
    query, key, value = as_autocast(query, key, value)
    check_inputs(query, key, value, call.scores.sinks)
    request = call.request(len(query))
    # Shards have these lengths before an all-to-all, too.
    request._replace(strategy=Strategy()).plan(query, key)
    call.select(query, value, request.slices)
    facts = attention_facts("forward", query, value, call.scores, (query.shape[1], value.shape[1]))
    kernels = [name for name, missing in available_kernels().items() if missing is None]
    needs = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    more = {"placements": placements, "gradients": str(needs), "kernels": str(kernels)}
    return ring_record(facts, call.place.policy, *request).fields | more


def check_agreement(group: ProcessGroup, here: dict[str, str], what: str) -> None:
    """Compare descriptions, by name, over the ranks of a group; `what` names the call in errors.

    Raises:
        ValueError: on every rank, if they differ; says which global ranks have which.
        RingError: on every rank, if some ranks make another call, or a rank ended.
    """
    with _checked_barrier(group, "a comparison", {}):
        pass  # raises if a rank is in another call, where the collective below would hang
    ranks = dist.get_process_group_ranks(group)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, here, group)
    differing = []
    # Names keep the order of the call; a rank may lack names that others have.
    for name in dict.fromkeys(name for theirs in everyone for name in theirs):
        ranks_by_text: dict[str, list[int]] = {}
        for rank, theirs in zip(ranks, everyone, strict=True):
            ranks_by_text.setdefault(theirs.get(name, "none"), []).append(rank)
        if len(ranks_by_text) > 1:
            begin = _begin(list(ranks_by_text))
            sides = (f"{_part(text, begin)} on {ranks}" for text, ranks in ranks_by_text.items())
            differing.append(f"{name}: " + ", ".join(sides))
    if differing:
        listed = "; ".join(differing)
        raise ValueError(f"the ranks of a ring must {what}, they differ in {listed}")


@contextmanager
def checked_barrier(group: ProcessGroup, direction: str, here: dict[str, str]) -> Iterator[None]:
    """Return a context at whose end the ranks of a group compare descriptions.

    The comparison is checked like a call of the ring: if a rank is in an attention instead, or
    leaves the context with an error, no rank waits for it. A group without call records (pure NCCL)
    only compares the descriptions, and ranks wait until the time limit of the group.

    Raises:
        RingError: on every rank, if ranks differ, or some raise.
        ValueError: on every rank, if ranks of a group without call records differ.
    """
    with _checked_barrier(group, direction, here):
        yield
    if group.size() > 1 and not group_state_of(group).sends_records:
        check_agreement(group, here, f"agree on {direction}")


def _checked_barrier(
    group: ProcessGroup, direction: str, here: dict[str, str]
) -> AbstractContextManager[Any]:
    """Return a context that compares call records at its end, if the group has them."""
    if group.size() == 1 or not group_state_of(group).sends_records:
        return nullcontext()
    record = CallRecord({"direction": direction} | here)
    # Send to all ranks, not only to the next, so that every rank detects a mismatch.
    return checked_transport(group, record, direction, torch.device("cpu"), first_bytes=0)


def _begin(texts: list[str]) -> int:
    """Return where a quote begins: at 0, unless the texts differ only far behind it."""
    columns = enumerate(zip(*texts, strict=False))
    num_alike = next((i for i, column in columns if len(set(column)) > 1), 0)
    # Long descriptions: quote the end of the common part, then the difference.
    return max(0, num_alike - MAX_QUOTED // 4) if num_alike > MAX_QUOTED // 2 else 0


def _part(text: str, begin: int) -> str:
    end = begin + MAX_QUOTED
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"
