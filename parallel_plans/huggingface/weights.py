"""Whether all ranks have the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

WORD = 8
"""Bytes that are summed as one integer."""


def checksum(model: nn.Module, group: ProcessGroup) -> str:
    """A number that is equal on two ranks of a group if their weights are.

    It is made of the sum of the bits of each, as integers, which no rounding and no order changes.
    All are read once, as in a forward of one token. Weights that are sharded over these ranks are
    left out.
    """
    sums = [_sum(x) for x in _comparable(model, group)]
    if not sums:
        return "none to compare"
    # One transfer, however many there are.
    numbers = torch.stack([x.to(sums[0].device) for x in sums]).tolist()
    return f"checksum {crc32(repr(numbers).encode()):08x}"


def _comparable(model: nn.Module, group: ProcessGroup) -> Iterator[Tensor]:
    """What this rank has of the weights that each rank of the group should have alike."""
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for x in model.parameters():
        if isinstance(x, DTensor):
            if others & set(x.device_mesh.mesh.flatten().tolist()):
                continue
            x = x.to_local()
        # A subclass, as of quantization, need not have its values as bits.
        if type(x) in (Tensor, nn.Parameter) and not x.is_meta and not x.is_quantized:
            yield x.detach()


def _sum(x: Tensor) -> Tensor:
    """The sum of the bits of a tensor, eight bytes at a time; overflow is no error."""
    flat = x.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    end = flat.numel() // WORD * WORD
    # Integers of one size: sums of others would convert them all, at once.
    return flat[:end].view(torch.int64).sum() + flat[end:].sum()
