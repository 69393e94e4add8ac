"""Whether all ranks of a ring do the same: else it would hang, or be wrong."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

LONGEST = 200
"""Characters of a description that an error quotes."""


def check_call(group: ProcessGroup, call: dict[str, Any]) -> None:
    """Compare the arguments of a call of `ring_attention`, by name, over the ranks of a group.

    Of query, key, value and sinks only what they are is compared, of other tensors the content.

    Raises:
        ValueError: on every rank, if some ranks pass something else; says who passes what.
    """
    mine = {name: _describe(name, x) for name, x in call.items()}
    mine |= {"gradients": _wants_gradients(call), "autocast": _autocast(call["query"])}
    check_agreement(group, mine, "make the same call")


def check_agreement(group: ProcessGroup, mine: dict[str, str], what: str) -> None:
    """Compare descriptions, by name, over the ranks of a group, which must do what that says.

    Raises:
        ValueError: on every rank, if they differ; says which ranks of the world have which.
    """
    ranks = dist.get_process_group_ranks(group)
    everyone: list[Any] = [None] * group.size()
    dist.all_gather_object(everyone, mine, group)
    differing = []
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


def _describe(name: str, x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    kind = f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)} {x.device.type}"
    if isinstance(x, DTensor):
        return f"{kind} {tuple(x.placements)}"
    has_content = name in ("cu_seqlens", "key_cu_seqlens", "runs") and x.device.type == "cpu"
    return f"{kind} {x.tolist()}" if has_content else kind


def _wants_gradients(call: dict[str, Any]) -> str:
    tensors = [x for x in call.values() if isinstance(x, Tensor)]
    return str(torch.is_grad_enabled() and any(x.requires_grad for x in tensors))


def _autocast(query: Any) -> str:
    """The dtype that the op casts to, if it does."""
    device_type = query.device.type if isinstance(query, Tensor) else "cpu"
    is_on = torch.is_autocast_enabled(device_type)
    return str(torch.get_autocast_dtype(device_type)) if is_on else "off"


def _begin(texts: list[str]) -> int:
    """Where to begin to quote them: at the beginning, unless they differ far behind it."""
    columns = enumerate(zip(*texts, strict=False))
    num_alike = next((i for i, column in columns if len(set(column)) > 1), 0)
    return max(0, num_alike - LONGEST // 4) if num_alike > LONGEST // 2 else 0


def _part(text: str, begin: int) -> str:
    end = begin + LONGEST
    return f"{'...' if begin else ''}{text[begin:end]}{'...' if end < len(text) else ''}"
