"""Checks that all ranks of a ring make the same call; otherwise it would hang or be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.agreement.checked_transport import agreed_transport
from dtensor_ring.agreement.record import Word
from dtensor_ring.agreement.session import session_of
from dtensor_ring.compute.kernels import available_kernels
from dtensor_ring.dtensor.annotation import annotation_of, axis_group, group_of
from dtensor_ring.dtensor.placement import SEQUENCE
from dtensor_ring.ops.boundaries import INTEGERS
from dtensor_ring.ops.nodes import autocast_dtype
from dtensor_ring.ops.options import Batch
from dtensor_ring.planning.layout import shard_length

# The largest number of characters of a description that an error quotes.
MAX_QUOTED = 200


def validate_call(call: dict[str, Any], mesh: DeviceMesh | None) -> None:
    """Compare the arguments of `ring_attention`, by name, with those of the other ranks.

    Raises:
        ValueError: on every rank, if they differ; or here, if the call is being compiled.
    """
    if torch.compiler.is_compiling():
        raise ValueError("validate=True compares ranks in eager calls only; compile without it")
    query = call["query"]
    if isinstance(query, DTensor):
        axes = [axis for axis, where in enumerate(query.placements) if where == Shard(SEQUENCE)]
        groups = [group_of(query.device_mesh, axis) for axis in axes]
    else:
        groups = [axis_group(mesh)] if mesh is not None else []
    kernels = [name for name, missing in available_kernels().items() if missing is None]
    # A sequence over several axes is an error, which the ranks of all these axes must raise.
    for group in groups:
        axis = annotation_of(group)
        how = axis.config_or_default
        here = {
            "layout": axis.layout and axis.layout.spec,
            "strategy": how.strategy if call.get("strategy") is None else call["strategy"],
        }
        here |= {"policy": how.policy, "kernel of the axis": how.kernel, "kernels": kernels}
        here |= {"shards of another length": _odd_shards(call, group)}
        check_call(group, call | here)


def _odd_shards(call: dict[str, Any], group: ProcessGroup) -> list[str]:
    """List the DTensors whose local length does not follow from their global length."""
    given = {name: call[name] for name in ("query", "key", "value")}
    rank, size = group.rank(), group.size()
    return [
        f"{name} {x._local_tensor.shape[SEQUENCE]}"
        for name, x in given.items()
        if isinstance(x, DTensor)
        and x.ndim == 4
        and x._local_tensor.shape[SEQUENCE] != shard_length(rank, size, x.shape[SEQUENCE])
    ]


def check_call(group: ProcessGroup, call: dict[str, Any]) -> None:
    """Compare the arguments of `ring_attention`, by name, over the ranks of a group.

    Query, key, value and sinks are compared by their properties, other tensors by their content.

    Raises:
        ValueError: on every rank, if ranks pass different arguments; says which rank passes what.
    """
    # With `key_runs`, the lengths of shards may differ by rank.
    has_lengths = call.get("key_runs") is None
    here = {name: _describe(name, x, has_lengths) for name, x in call.items()}
    here |= {"gradients": _wants_gradients(call), "autocast": _autocast(call["query"])}
    check_agreement(group, here, "make the same call")


def check_agreement(group: ProcessGroup, here: dict[str, str], what: str) -> None:
    """Compare descriptions, by name, over the ranks of a group; `what` names the call in errors.

    Raises:
        ValueError: on every rank, if they differ; says which global ranks have which.
        RingError: on every rank, if some ranks make another call, or a rank ended.
    """
    with _meeting(group, "a comparison", {}):
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


def _describe(name: str, x: Any, has_length: bool) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    if x.layout is not torch.strided or x.is_nested:  # refused later; it may have no shape
        return f"{x.layout} {x.dtype}"
    shape = tuple(x.shape)
    if x.ndim == 4 and not has_length:
        shape = *shape[:SEQUENCE], "L", *shape[SEQUENCE + 1 :]
    kind = f"{str(x.dtype).removeprefix('torch.')} {shape} {x.device.type}"
    if isinstance(x, DTensor):
        return f"{kind} {tuple(x.placements)}"
    # Integers are boundaries, which decide the plan. Comparing other content would cost too much.
    is_readable = x.device.type != "meta" and x.dtype in INTEGERS
    has_content = is_readable and name in Batch._fields
    return f"{kind} {x.tolist()}" if has_content else kind


def _wants_gradients(call: dict[str, Any]) -> str:
    tensors = [x for x in call.values() if isinstance(x, Tensor)]
    return str(torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def _autocast(query: Any) -> str:
    """Describe the dtype that autocast casts to, if it is on."""
    device_type = query.device.type if isinstance(query, Tensor) else "cpu"
    return str(autocast_dtype(device_type) or "off")


@contextmanager
def meeting(group: ProcessGroup, direction: str, here: dict[str, str]) -> Iterator[None]:
    """Return a context at whose end the ranks of a group compare descriptions.

    The comparison is checked like a call of the ring: if a rank is in an attention instead, or
    leaves the context with an error, no rank waits for it. A group without call records (pure NCCL)
    only compares the descriptions, and ranks wait until the time limit of the group.

    Raises:
        RingError: on every rank, if ranks differ, or some raise.
        ValueError: on every rank, if ranks of a group without call records differ.
    """
    with _meeting(group, direction, here):
        yield
    if group.size() > 1 and not session_of(group).has_words:
        check_agreement(group, here, f"agree on {direction}")


def _meeting(
    group: ProcessGroup, direction: str, here: dict[str, str]
) -> AbstractContextManager[Any]:
    """Return a context that compares call records at its end, if the group has them."""
    if group.size() == 1 or not session_of(group).has_words:
        return nullcontext()
    word = Word({"direction": direction} | here)
    # Send to all ranks, not only to the next, so that every rank detects a mismatch.
    return agreed_transport(group, word, direction, torch.device("cpu"), first_bytes=0)


def _begin(texts: list[str]) -> int:
    """Return where a quote begins: at 0, unless the texts differ only far behind it."""
    columns = enumerate(zip(*texts, strict=False))
    num_alike = next((i for i, column in columns if len(set(column)) > 1), 0)
    # Long descriptions: quote the end of the common part, then the difference.
    return max(0, num_alike - MAX_QUOTED // 4) if num_alike > MAX_QUOTED // 2 else 0


def _part(text: str, begin: int) -> str:
    end = begin + MAX_QUOTED
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"
