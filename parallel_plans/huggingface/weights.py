"""Whether all ranks have the same weights, and the same batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from dtensor_ring.extension import check_agreement
from parallel_plans.huggingface.batch import SAME_BATCH, described

WORD = 8
"""Bytes that are summed as one integer."""


class Agreement:
    """Compares the ranks of an axis in few of the forwards of a model.

    With gradients in forwards 1, 2, 4, 8, ...: the second one sees that nobody averaged the
    gradients of the first, a later one that of several that were accumulated. Without gradients
    weights stay, and the first is enough. A collective in each forward would cost.
    """

    def __init__(self) -> None:
        self._num_agreed: Counter[bool] = Counter()  # forwards with gradients, and without

    def check(self, model: nn.Module, batch: dict[str, Any], group: ProcessGroup) -> None:
        """In a forward of the model with this batch.

        Raises:
            ValueError: on every rank, if their weights or batches differ.
        """
        trains = torch.is_grad_enabled()
        count = self._num_agreed[trains] + 1
        # Powers of two have one bit.
        if count.bit_count() == 1 if trains else count == 1:
            here = described(batch) | {"weights": checksum(model, group)}
            check_agreement(group, here, SAME_BATCH)
        self._num_agreed[trains] = count


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
