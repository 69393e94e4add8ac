"""All ranks of a mesh (dp, cp) as one axis, which packed documents of every length share."""

from __future__ import annotations

import warnings
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import Balanced, Mask, SequenceAxis, sequence_layout, sequence_runs
from parallel_plans.huggingface import context_parallel_plan
from tests.dense import largest
from tests.families import VOCABULARY, small_model
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


def step(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the batch, and all gradients."""
    loss = model(**packed_batch(), use_cache=False).loss  # a cache would join the documents
    loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters()}
    return loss.detach(), grads


def flattened() -> DeviceMesh:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    SequenceAxis(mesh["cp"], "zigzag")  # another axis, which has nothing to do with it
    everyone = mesh["dp", "cp"]._flatten("dp_cp")
    assert sequence_layout(everyone) is None
    return everyone


@on_ranks(4)
def test_loss_and_gradients_are_those_of_one_process() -> None:
    """From one process without a plan: of the loss, and of the gradients by parameter."""
    # The sharded logits are a view of the local ones, which FSDP2 says not to write to.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    expected_loss, expected = step(small_model("Llama").train())
    everyone, model = flattened(), small_model("Llama").train()
    parallelize_module(model, everyone, context_parallel_plan(model, "balanced"))
    for module in (*model.model.layers, model):
        fully_shard(module, mesh=everyone)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no means
    loss, grads = step(model)
    assert grads.keys() == expected.keys()
    found = {"loss": largest([(loss - expected_loss).abs().item()])}
    for name, grad in grads.items():
        found[name] = ((grad.full_tensor() - expected[name]).norm() / expected[name].norm()).item()
    assert max(found.values()) < 1e-5, found


@on_ranks(4)
def test_attention_is_that_of_one_process() -> None:
    """The output of an attention over the axis, and of one process."""
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
    found, expected = axis.unshard(sharded, 2, LAYOUT), expected
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
