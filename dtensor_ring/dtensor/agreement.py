"""Whether all ranks of a ring do the same: otherwise it would hang, or be wrong."""

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
from dtensor_ring.ops.autocast import autocast_dtype
from dtensor_ring.ops.boundaries import INTEGERS
from dtensor_ring.ops.options import Batch
from dtensor_ring.planning.layout import shard_length

MAX_QUOTED = 200
"""Characters of a description that an error quotes."""


def validate_call(call: dict[str, Any], mesh: DeviceMesh | None) -> None:
    """Compare a call of `ring_attention`, its arguments by name, with those of the other ranks.

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
    # A sequence over several axes is an error, which the ranks of all of them must raise alike.
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
    """Which DTensors hold more or fewer tokens here than their length says."""
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
    """Compare the arguments of a call of `ring_attention`, by name, over the ranks of a group.

    Of query, key, value and sinks only what they are is compared, of other tensors the content.

    Raises:
        ValueError: on every rank, if some ranks pass something else; says who passes what.
    """
    # Where runs say the lengths of the shards, they differ by rank.
    has_lengths = call.get("key_runs") is None
    here = {name: _describe(name, x, has_lengths) for name, x in call.items()}
    here |= {"gradients": _wants_gradients(call), "autocast": _autocast(call["query"])}
    check_agreement(group, here, "make the same call")


def check_agreement(group: ProcessGroup, here: dict[str, str], what: str) -> None:
    """Compare descriptions, by name, over the ranks of a group, which must do what that says.

    Raises:
        ValueError: on every rank, if they differ; says which ranks of the world have which.
        RingError: on every rank, if some make another call, or one ended.
    """
    with _meeting(group, "a comparison", {}):
        pass  # a rank that is in another call, where a collective would hang, is told so
    ranks = dist.get_process_group_ranks(group)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, here, group)
    differing = []
    # Names in the order of the call; a rank may lack some that others have.
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
    if x.layout is not torch.strided or x.is_nested:  # refused later; there may be no shape to read
        return f"{x.layout} {x.dtype}"
    shape = tuple(x.shape)
    if x.ndim == 4 and not has_length:
        shape = *shape[:SEQUENCE], "L", *shape[SEQUENCE + 1 :]
    kind = f"{str(x.dtype).removeprefix('torch.')} {shape} {x.device.type}"
    if isinstance(x, DTensor):
        return f"{kind} {tuple(x.placements)}"
    # Boundaries decide the plan, so their content must agree; comparing all tensors would cost.
    is_readable = x.device.type != "meta" and x.dtype in INTEGERS
    has_content = is_readable and name in Batch._fields
    return f"{kind} {x.tolist()}" if has_content else kind


def _wants_gradients(call: dict[str, Any]) -> str:
    tensors = [x for x in call.values() if isinstance(x, Tensor)]
    return str(torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def _autocast(query: Any) -> str:
    """The dtype that the op casts to, if it does."""
    device_type = query.device.type if isinstance(query, Tensor) else "cpu"
    return str(autocast_dtype(device_type) or "off")


@contextmanager
def meeting(group: ProcessGroup, direction: str, here: dict[str, str]) -> Iterator[None]:
    """A context at whose end the ranks of a group meet, and compare descriptions.

    A rank that is in an attention then, or ends this with an error, is found as if it were a call
    of the ring: nobody waits for a rank that does something else. A group without words (NCCL's
    alone) only compares the descriptions: there the others wait for such a rank until the time
    limit of the group.

    Raises:
        RingError: on every rank, if ranks differ, or some raise.
        ValueError: on every rank, if ranks of a group without words differ.
    """
    with _meeting(group, direction, here):
        yield
    if group.size() > 1 and not session_of(group).has_words:
        check_agreement(group, here, f"agree on {direction}")


def _meeting(
    group: ProcessGroup, direction: str, here: dict[str, str]
) -> AbstractContextManager[Any]:
    """Words at the end of a context, if the group has any."""
    if group.size() == 1 or not session_of(group).has_words:
        return nullcontext()
    word = Word({"direction": direction} | here)
    # Words to all, not to the next one only: each rank shall know.
    return agreed_transport(group, word, direction, torch.device("cpu"), first_bytes=0)


def _begin(texts: list[str]) -> int:
    """Where to begin to quote them: at the beginning, unless they differ only far after it."""
    columns = enumerate(zip(*texts, strict=False))
    num_alike = next((i for i, column in columns if len(set(column)) > 1), 0)
    # Descriptions may be long: quote some of the common part, then the difference.
    return max(0, num_alike - MAX_QUOTED // 4) if num_alike > MAX_QUOTED // 2 else 0


def _part(text: str, begin: int) -> str:
    end = begin + MAX_QUOTED
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"
