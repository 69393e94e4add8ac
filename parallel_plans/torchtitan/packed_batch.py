"""Find the documents of a batch, and which of its tokens a rank has by a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import Balanced, Mask, sequence_runs
from dtensor_ring.extension import Layout, as_layout, check_agreement, positions_of
from parallel_plans.cu_seqlens import boundaries, filled_boundaries
from parallel_plans.sequence_order import SequenceOrder

# Names of a batch's tensors besides its labels; all are `(B, S)`.
TENSORS_OF_BATCH = {"input", "positions"}

CUDA_GRAPHS = (
    "a CUDA graph would replay the documents of one batch for all others: give "
    "--training.disable_cuda_graphs"
)


@dataclass(frozen=True)
class Documents:
    """What attention needs to know of a batch; models pass it as `attention_masks`.

    It is not a tuple: fully_shard moves the tensors in a model's tuples to the device, but
    boundaries are read on the CPU.

    Attributes:
        cu_seqlens: boundaries of the packed documents, int32 on the CPU, `(S+1,)` or `(B, S+1)`.
        runs: which tokens each rank holds, `(W, R, 2)`, if the layout is made for each batch.
    """

    cu_seqlens: Tensor
    runs: Tensor | None = None


@dataclass(frozen=True)
class OwnTokens:
    """Which tokens of a batch a rank has; nothing else of the batch is kept.

    Attributes:
        documents: what attention needs to know of the batch.
        indices: places in a row of this rank's tokens, in its order, `(L,)`.
    """

    documents: Documents
    indices: Tensor

    def of(self, x: Tensor) -> Tensor:
        """Return this rank's part of a tensor `(B, S)`, in new memory."""
        return x.index_select(1, self.indices.to(x.device))


def own_tokens(batch: dict[str, Any], layout: str, rank: int, world_size: int) -> OwnTokens:
    """Return which tokens of a whole batch a rank has, and its documents.

    Args:
        batch: `input` and `positions`, both `(B, S)`; positions are 0 where a document starts.
        layout: spec of the layout; the balanced one is made for the documents of this batch.
        rank: this rank.
        world_size: ranks of the ring.

    Raises:
        ValueError: if the batch holds anything else, or the layout cannot shard it.
    """
    if batch.keys() != TENSORS_OF_BATCH:
        raise ValueError(
            f"a ring shards {sorted(TENSORS_OF_BATCH)} and labels, but the batch holds "
            f"{sorted(batch)}: use a data loader of text"
        )
    seq_len = batch["input"].shape[1]
    # Boundaries are in global positions, and all of them on each rank.
    cu_seqlens = boundaries(batch["positions"] == 0)
    chosen, runs = as_layout(layout), None
    if chosen.per_batch:
        chosen = _balanced(cu_seqlens, seq_len, world_size)
        runs = sequence_runs(chosen)
    indices = positions_of(chosen.runs(rank, world_size, seq_len))
    return OwnTokens(Documents(cu_seqlens, runs), indices)


def _balanced(cu_seqlens: Tensor, seq_len: int, world_size: int) -> Balanced:
    """Return the layout that balances causal attention within documents."""
    return Balanced(Mask.causal(), seq_len, world_size, cu_seqlens)


def gather_documents(positions: Tensor, layout: Layout, mesh: DeviceMesh) -> Documents:
    """Return the documents of a batch from this rank's slice of the positions, `(B, L)`.

    Raises:
        ValueError: on every rank, if the positions show that tokens are not in the order of the
            layout. They cannot show it if whole documents fill the runs of the layout.
    """
    # torchtitan's own trainers have no layout per batch.
    if not layout.per_batch:
        seq_len = positions.shape[1] * mesh.size()
        order = SequenceOrder(mesh, layout, seq_len)
        own = order.contiguous(positions.contiguous())
        before = order.of_neighbour(own[:, -1:], -1)
        follows = (
            own == torch.cat([own[:, :1] - 1 if before is None else before, own[:, :-1]], 1) + 1
        )
        starts = (own == 0).nonzero() + torch.tensor([0, order.begin], device=own.device)
        told = bool(((own == 0) | follows).all()), starts.cpu()
        # A rank cannot know from its own positions where documents end on others.
        every = check_agreement(mesh.get_group(), {}, "share a batch", told=told)
        if all(is_in_order for is_in_order, _ in every):
            found = torch.cat([x for _, x in every])
            found = found[found[:, 0].argsort(stable=True)]
            return Documents(filled_boundaries(found, len(positions), seq_len))
    raise ValueError(
        f"the tokens of this batch were not sharded {layout.spec}: torchtitan's own trainers shard "
        "as --parallelism.context_parallel_load_balancer says, in two of our layouts, and that "
        "must fit ring_attention's, see docs/torchtitan.md; for any layout, start from a config of "
        "parallel_plans.torchtitan, or use its RingTrainer"
    )
