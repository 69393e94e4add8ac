"""Find the documents of a batch, and order its tokens by a layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring import Balanced, Mask, sequence_runs
from dtensor_ring.extension import Layout, as_layout, layout_order
from parallel_plans.cu_seqlens import boundaries

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


def reorder(
    batch: dict[str, Any], labels: Tensor, layout: str, world_size: int
) -> tuple[dict[str, Any], Tensor, Documents]:
    """Return a whole batch in the order of a layout; equal slices of it are the ranks' shards.

    Args:
        batch: `input` and `positions`, both `(B, S)`; positions are 0 where a document starts.
        labels: labels of the tokens, `(B, S)`.
        layout: spec of the layout; the balanced one is made for the documents of this batch.
        world_size: ranks of the ring.

    Raises:
        ValueError: if the batch holds anything else, or the layout cannot shard it.
    """
    if batch.keys() != TENSORS_OF_BATCH:
        raise ValueError(
            f"a ring shards {sorted(TENSORS_OF_BATCH)} and labels, but the batch holds "
            f"{sorted(batch)}: use a data loader of text"
        )
    # Before the tokens are reordered: boundaries are in global positions.
    cu_seqlens = boundaries(batch["positions"] == 0)
    chosen, runs = as_layout(layout), None
    if chosen.per_batch:
        chosen = _balanced(cu_seqlens, labels.shape[1], world_size)
        runs = sequence_runs(chosen)
    order = layout_order(chosen, world_size, labels.shape[1]).to(labels.device)
    batch = {name: x.index_select(1, order) for name, x in batch.items()}
    return batch, labels.index_select(1, order), Documents(cu_seqlens, runs)


def _balanced(cu_seqlens: Tensor, seq_len: int, world_size: int) -> Balanced:
    """Return the layout that balances causal attention within documents."""
    return Balanced(Mask.causal(), seq_len, world_size, cu_seqlens)


def gather_documents(positions: Tensor, layout: Layout, group: dist.ProcessGroup) -> Documents:
    """Return the documents of a batch from this rank's slice of the positions, `(B, L)`.

    Raises:
        ValueError: on every rank, if the positions show that tokens are not in the order of the
            layout. They cannot show it if whole documents fill the runs of the layout.
    """
    local = positions.contiguous()
    slices = [torch.empty_like(local) for _ in range(group.size())]
    # A rank cannot know from its own positions where documents end on others.
    dist.all_gather(slices, local, group)
    ordered = torch.cat(slices, 1).cpu()
    # torchtitan's own trainers have no layout per batch.
    if not layout.per_batch:
        order = layout_order(layout, group.size(), ordered.shape[1])
        whole = ordered.index_select(1, order.argsort())
        follows = (whole[:, 1:] == 0) | (whole[:, 1:] == whole[:, :-1] + 1)
        if follows.all():
            return Documents(boundaries(whole == 0))
    raise ValueError(
        f"the tokens of this batch were not sharded {layout.spec}: torchtitan's own trainers shard "
        "as --parallelism.context_parallel_load_balancer says, in two of our layouts, and that "
        "must fit ring_attention's, see docs/torchtitan.md; for any layout, start from a config of "
        "parallel_plans.torchtitan, or use its RingTrainer"
    )
