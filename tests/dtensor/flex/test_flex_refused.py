"""What `flex_attention` over a sharded sequence refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.attention import flex_attention as flex_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from dtensor_ring import SequenceAxis
from tests.dtensor.flex.flex_calls import quiet
from tests.dtensor.flex.flex_masks import DOCUMENTS, LENGTH, causal
from tests.meshes import random_inputs
from tests.pool import on_ranks


@on_ranks(2)
def test_what_is_refused() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag")
    *inputs, _ = random_inputs(2, LENGTH)
    placed: list[Any] = [axis.shard(x, 2) for x in inputs]
    other = [DTensor.from_local(x, axis.mesh, [Shard(1)]) for x in inputs]
    sizes = LENGTH, LENGTH
    sparse = create_block_mask(
        lambda b, h, q, k: (q // 2 + k // 2) % 2 == 0, None, None, *sizes, device="cpu"
    )
    by_head = create_block_mask(lambda b, h, q, k: q - k >= h, None, 4, *sizes, device="cpu")
    three_rows = create_block_mask(causal, 3, None, *sizes, device="cpu")
    replicated = DTensor.from_local(DOCUMENTS, axis.mesh, [Replicate()])
    of_dtensor = BlockMask.from_kv_blocks(
        *(sparse.kv_num_blocks, sparse.kv_indices),
        **{"mask_mod": lambda b, h, q, k: replicated[q] == replicated[k], "seq_lengths": sizes},
    )
    op: Any = torch.ops.higher_order.flex_attention
    short = create_block_mask(causal, None, None, 40, 40, device="cpu")
    of_op = flex_module._identity, short.as_tuple(), 1.0
    gqa = {"enable_gqa": True}
    calls: list[tuple[Callable[[], Any], str]] = [
        (
            lambda: flex_attention(*placed, score_mod=lambda s, b, h, q, k: s * 2, **gqa),
            "score_mod cannot be served over a sharded sequence",
        ),
        (
            lambda: flex_attention(*placed, block_mask=sparse, **gqa),
            "at most 74 are possible with 42 queries: it is no union of a few bands",
        ),
        (
            lambda: flex_attention(*placed, block_mask=three_rows, **gqa),
            "block_mask must be one for all batch rows or have 2, as the query has, got 3",
        ),
        (
            lambda: flex_attention(*placed, block_mask=of_dtensor, **gqa),
            "must capture plain tensors, which each rank has whole, got a DTensor",
        ),
        (lambda: flex_attention(*placed, block_mask=by_head, **gqa), "was made for 4 heads"),
        (lambda: op(*placed, *of_op, {"OUTPUT_MAX": True}), "max_scores cannot be served"),
        (lambda: op(*placed, *of_op, {}), "of the whole sequence, 42 queries and 42 keys, got"),
    ]
    with quiet(), torch.no_grad():
        for call, message in calls:
            with pytest.raises(ValueError, match=message):
                call()
        # Nobody served it before, so Dynamo has the error.
        with pytest.raises(RuntimeError, match=r"in Shard\(2\) over an axis that has a layout"):
            flex_attention(*other, **gqa)
    # Only a compiler gets a plain index of a DTensor.
    made = DTensor(placed[0]._local_tensor, placed[0]._spec, requires_grad=False)
    assert isinstance(made.new_empty([]), DTensor)
