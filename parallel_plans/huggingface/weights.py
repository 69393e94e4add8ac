"""Checks that all ranks have the same weights and the same batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring.extension import axis_group, check_agreement
from parallel_plans.huggingface.batch import SAME_BATCH, described

# Bytes that are summed as one integer.
WORD = 8


class Agreement:
    """Compares the ranks of an axis in a few forwards of a model.

    Forwards with gradients are checked at numbers 1, 2, 4, 8, ...: the second check finds that
    gradients of the first were not averaged, later ones find it after accumulation. Without
    gradients weights do not change, so the first check is enough. A collective in each forward
    would be slow.
    """

    def __init__(self) -> None:
        self._num_agreed: Counter[bool] = Counter()  # forwards with gradients, and without

    def check(self, model: nn.Module, batch: dict[str, Any], mesh: DeviceMesh) -> None:
        """Compare weights and batch with the other ranks, if this forward is one to check.

        Raises:
            ValueError: on every rank, if their weights or batches differ.
        """
        trains = torch.is_grad_enabled()
        count = self._num_agreed[trains] + 1
        # Powers of two have one bit.
        if count.bit_count() == 1 if trains else count == 1:
            group = axis_group(mesh)
            here = described(batch) | {"weights": checksum(model, group)}
            check_agreement(group, here, SAME_BATCH)
        self._num_agreed[trains] = count


def checksum(model: nn.Module, group: ProcessGroup) -> str:
    """Return a checksum that is equal on two ranks of a group if their weights are equal.

    It combines the sum of the bits of each weight. The bits are summed as integers, so rounding and
    order have no effect. Each weight is read once, as in a forward of one token. Weights that are
    sharded over these ranks are left out.
    """
    sums = [_sum(x) for x in _comparable(model, group)]
    if not sums:
        return "none to compare"
    # Copy all sums to the host in one transfer.
    numbers = torch.stack([x.to(sums[0].device) for x in sums]).tolist()
    return f"checksum {crc32(repr(numbers).encode()):08x}"


def _comparable(model: nn.Module, group: ProcessGroup) -> Iterator[Tensor]:
    """Yield this rank's weights that should be equal on each rank of the group."""
    others = set(dist.get_process_group_ranks(group)) - {dist.get_rank()}
    for x in model.parameters():
        if isinstance(x, DTensor):
            if others & set(x.device_mesh.mesh.flatten().tolist()):
                continue
            x = x.to_local()
        # A tensor subclass, such as a quantized one, may not store its values as plain bits.
        if type(x) in (Tensor, nn.Parameter) and not x.is_meta and not x.is_quantized:
            yield x.detach()


def _sum(x: Tensor) -> Tensor:
    """Return the sum of the bits of a tensor, eight bytes at a time; it may overflow."""
    flat = x.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % WORD:
        flat = flat.clone()
    end = flat.numel() // WORD * WORD
    # A sum of smaller integers would first convert the whole tensor to int64.
    return flat[:end].view(torch.int64).sum() + flat[end:].sum()
