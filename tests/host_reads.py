"""Finds where the host reads the device, or copies to it: neither works in a CUDA graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

READS = {
    *(aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select),
    *(aten.unique_consecutive, aten._unique2, aten.unique_dim, aten.repeat_interleave),
    *(aten.bincount, aten._assert_async),
}
"""Ops whose result, or its shape, the host takes from the content of a tensor."""

BY_INDEX = {aten.index, aten.index_put, aten.index_put_}
"""Those that count the places of an index that is a mask."""


class HostReads(TorchDispatchMode):
    """Raises where an op of CUDA tensors makes the host wait, or moves a tensor to or from it.

    With fake tensors no GPU is needed, and all that runs is seen.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_gpu = [x for x in given if x.device.type == "cuda"]
        name, kwargs = func.overloadpacket, kwargs or {}
        # `output_size` says how many there are.
        is_told = name is aten.repeat_interleave and kwargs.get("output_size") is not None
        index = [x for x in tree_leaves(args[1:2]) if isinstance(x, Tensor)]
        by_mask = name in BY_INDEX and any(x.dtype == torch.bool for x in index)
        if on_gpu and (by_mask or (name in READS and not is_told)):
            raise AssertionError(f"the host reads the device: {func}")
        result = func(*args, **kwargs)
        made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
        # A launch gets the number of a zero-dim CPU tensor as an argument.
        places = {x.device.type for x in [*given, *made] if x.dim() or x.device.type != "cpu"}
        if not func.is_view and {"cpu", "cuda"} <= places:
            raise AssertionError(f"{func} copies between the host and the device")
        return result
