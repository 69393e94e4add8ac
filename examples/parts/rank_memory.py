"""What a rank's tensors take while a model runs: the bytes that are alive at most."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AliveTensors(TorchDispatchMode):
    """Counts the bytes of all tensors that operators returned and that something still holds.

    A ring attention is one operator: its messages and partial results are not seen, but its output
    is. The resident memory of the process has both.

    Attributes:
        peak: the largest number of bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = StorageWeakRef(x.untyped_storage())
                self._alive[storage.cdata] = storage, x.untyped_storage().nbytes()
        self._alive = {key: x for key, x in self._alive.items() if not x[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._alive.values()))
        return result


def of_all_ranks(num_bytes: int) -> list[int]:
    """This number on each rank, in their order."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, num_bytes)
    return found
