"""All ranks of a mesh (dp, cp) as one axis, which packed documents of every length share."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring import Balanced, Mask, SequenceAxis, sequence_layout, sequence_runs
from tests.dense import largest
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import gradient_errors, shard_weights, under_plan
from tests.pool import on_ranks

# A long one, which needs all ranks, and short ones, which stay whole.
LENGTHS = torch.tensor([5, 70, 1, 9, 12, 8, 6, 9, 8])
ENDS = torch.cat([torch.tensor([0]), LENGTHS.cumsum(0)])
NUM_TOKENS = int(ENDS[-1])
LAYOUT = Balanced(Mask.causal(), NUM_TOKENS, 4, ENDS)


def test_short_documents_stay_whole_and_long_ones_do_not() -> None:
    held = [set(LAYOUT.positions(rank, 4, NUM_TOKENS)) for rank in range(4)]
    documents = [set(range(*ends)) for ends in pairwise(ENDS.tolist())]
    num_ranks = [sum(bool(x & document) for x in held) for document in documents]
    assert num_ranks == [2, 4, 1, 1, 1, 1, 1, 1, 3], "shards of equal length cut a few"


def packed_batch() -> dict[str, Tensor]:
    """One row. Positions begin again with each document, whose first token has no label."""
    tokens = torch.randint(VOCABULARY, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    labels[0, ENDS[:-1]] = -100
    positions = torch.arange(NUM_TOKENS) - ENDS[:-1].repeat_interleave(LENGTHS)
    return {"input_ids": tokens, "labels": labels, "position_ids": positions[None]}


def flattened() -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    SequenceAxis(mesh["cp"], "zigzag")  # another axis, which has nothing to do with it
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    assert sequence_layout(everyone) is None
    return everyone


@on_ranks(4)
def test_loss_and_gradients_are_those_of_one_process() -> None:
    everyone = flattened()
    model, stock = (small_model("Llama").train() for _ in range(2))
    under_plan(model, "balanced", mesh=everyone)
    shard_weights(model, model.model.layers, everyone)
    # A cache would join the documents.
    losses = [x(**packed_batch(), use_cache=False).loss for x in (model, stock)]
    for loss in losses:
        loss.backward()
    assert (losses[0] - losses[1]).abs() < 1e-5
    assert largest(gradient_errors(model, stock, floor=0)) < 1e-5


@on_ranks(4)
def test_attention_is_that_of_one_process() -> None:
    everyone = flattened()
    axis = SequenceAxis(everyone, "balanced")
    torch.manual_seed(0)
    whole = torch.randn(3, 1, 2, NUM_TOKENS, 8)
    mine = [axis.shard(x, 2, LAYOUT).to_local() for x in whole]
    out = axis.attention(*mine, cu_seqlens=ENDS, runs=sequence_runs(LAYOUT))
    sharded = DTensor.from_local(out, everyone, [Shard(2)], run_check=False)
    document = torch.repeat_interleave(LENGTHS)
    seen = (document[:, None] == document) & torch.ones(len(document), len(document)).tril().bool()
    expected = torch.nn.functional.scaled_dot_product_attention(*whole, attn_mask=seen)
    found = axis.unshard(sharded, 2, LAYOUT)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
