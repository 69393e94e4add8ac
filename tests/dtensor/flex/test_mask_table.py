"""What is read of a block mask is kept while its content is the same."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dtensor_ring import Mask, SequenceAxis
from dtensor_ring.dtensor.flex import flex_attention
from tests.dense import dense_attention
from tests.dtensor.flex.flex_calls import attend, quiet
from tests.dtensor.flex.flex_masks import DOCUMENTS, LENGTH
from tests.meshes import SEQUENCE, assert_same, random_inputs
from tests.pool import on_ranks


@on_ranks(1)
def test_a_block_mask_is_read_once() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (1,)), "zigzag")
    documents, asked = DOCUMENTS.clone(), []
    *inputs, _ = random_inputs(2, LENGTH)
    placed = [axis.shard(x, 2) for x in inputs]

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return documents[q] == documents[k]

    # One partial block for each block of queries, so that only the function decides.
    mask = create_block_mask(
        lambda b, h, q, k: (q < 0) | (q >= 0), None, None, LENGTH, LENGTH, device="cpu"
    )
    ours = BlockMask.from_kv_blocks(
        *(torch.ones_like(mask.kv_num_blocks), torch.zeros_like(mask.kv_indices)),
        **{"BLOCK_SIZE": 128, "mask_mod": mask_mod, "seq_lengths": (LENGTH, LENGTH)},
    )
    read = flex_attention.slices_of_blocks
    flex_attention.slices_of_blocks = lambda blocks: asked.append(1) or read(blocks)
    try:
        with quiet(), torch.no_grad():
            for change in (None, None, 25, None):
                if change is not None:
                    # As a collective writes, which raises no version.
                    documents.numpy()[change:] = 7
                out, _ = attend(*placed, ours)
                seen = (documents[:, None] == documents).expand(2, -1, -1)
                dense = dense_attention(*inputs, Mask.full(), seen=seen, scale=0.3)
                assert_same(out, dense.out, (SEQUENCE,))
    finally:
        flex_attention.slices_of_blocks = read
    assert len(asked) == 2
