"""Attentions of the same queries on all ranks of an axis, as one that all ranks have."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.inference.decode import decode_attention
from dtensor_ring.planning.tile import FULL


def merge_partials(
    out: Tensor,
    lse: Tensor,
    *,
    mesh: DeviceMesh | None,
    sinks: Tensor | None = None,
    merge: str | None = None,
    agree: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge the partial results of all ranks, in their order, by one round of messages.

    A partial is what one key would give, whose score is its lse and whose value is its out. So what
    merges the partials is the attention of a query of ones to a key of each rank.

    Args:
        out: this rank's `(B, N, M, Hv)`, float32 or wider.
        lse: its log-sum-exp `(B, N, M)`, in the same dtype.
        mesh: the 1-D mesh of the axis; `None` if there is one rank.
        sinks: `(N,)`, see `decode_attention`; so are the others.
        merge: how.
        agree: integers that must be the same on all ranks.

    Returns:
        The merged `(out, lse)`: the same bits on every rank.

    Raises:
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.
    """
    rows, num_ranks = (len(out), out.shape[2]), 1 if mesh is None else mesh.size()
    score, value = _by_row(lse.unsqueeze(3)), _by_row(out)
    merged, lse = decode_attention(
        *(torch.ones_like(score), score, value),
        mask=FULL,
        key_runs=torch.tensor([[[number, 1]] for number in range(num_ranks)], device="cpu"),
        sinks=sinks,
        scale=1.0,
        mesh=mesh,
        return_lse=True,
        merge=merge,
        agree=agree,
    )
    merged, lse = (x.squeeze(2).unflatten(0, rows).transpose(1, 2) for x in (merged, lse))
    return merged, lse


def _by_row(x: Tensor) -> Tensor:
    """`(B, N, M, H)` to `(B * M, N, 1, H)`: each row is a query of its own."""
    return x.transpose(1, 2).flatten(0, 1).unsqueeze(2)
