"""The public function: ring attention on DTensors, or on local shards and a mesh."""

from __future__ import annotations

from math import inf
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring.annotation import axis_group, sequence_layout
from dtensor_ring.dtensor import ring_op
from dtensor_ring.layout import Contiguous
from dtensor_ring.mask import Mask
from dtensor_ring.op import default_scale

CAUSAL = Mask.causal()


def ring_attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    mask: Mask = CAUSAL,
    cu_seqlens: Tensor | None = None,
    sinks: Any = None,
    scale: float | None = None,
    softcap: float = 0.0,
    kernel: str | None = None,
    mesh: DeviceMesh | None = None,
    return_lse: bool = False,
) -> Any:
    """Attention over a sequence that is sharded over the ranks of a ring.

    Exact softmax attention (Liu et al., 2023, arXiv 2310.01889): keys and values travel around
    the ring while each rank works on those it holds, and partial results are merged in float32.

    Args:
        query: `(B, N, S, H)`, either DTensors or local shards `(B, N, L, H)` with `mesh`. As a
            DTensor it is `Shard(2)` over exactly one mesh axis, the ring; over other axes it may
            be `Shard(0)` (batch), `Shard(1)` (heads) or `Replicate`.
        key: `(B, Nkv, S, H)`, placed as the query; `Nkv` divides `N` (grouped-query attention),
            and nothing is repeated.
        value: `(B, Nkv, S, Hv)`, placed as the query.
        mask: how far back and ahead a query sees, in tokens; causal by default.
        cu_seqlens: boundaries of packed documents in global positions, int32 on the CPU, shape
            `(D+1,)` or `(B, D+1)`. A query sees its own document only; tokens behind the last
            boundary see nothing, and their output is 0.
        sinks: `(N,)`, one logit per query head which takes part in the softmax without a value.
            A plain tensor gets this rank's share of the gradient, a DTensor a `Partial` one.
        scale: factor of the scores, `H ** -0.5` by default.
        softcap: scores become `softcap * tanh(score / softcap)`; 0 is none.
        kernel: name of the block kernel; by default the first of `available_kernels()` that can.
        mesh: the 1-D mesh of the ring, for local shards of equal length. Its layout is that of
            `set_sequence_layout`, contiguous without.
        return_lse: also return the log-sum-exp of the scores, natural log, `(B, N, S)`, float32
            (float64 for float64), -inf for a row that sees nothing.

    Returns:
        `out` `(B, N, S, Hv)`, placed as the query, or `(out, lse)`.

    Raises:
        TypeError: if DTensors and tensors are mixed, or the mask is no `Mask`.
        ValueError: if the shapes, placements, boundaries or kernel do not allow it.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> q, k, v = (shard_sequence(torch.randn(1, 2, 8, 4), mesh, 2) for _ in range(3))
        >>> ring_attention(q, k, v, mask=Mask.sliding(3)).shape
        torch.Size([1, 2, 8, 4])
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor or a DTensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} must be (B, N, L, H), got shape {tuple(x.shape)}")
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a dtensor_ring.Mask, such as Mask.causal(), got {mask!r}")
    if not 0 <= softcap < inf:
        raise ValueError(f"softcap must be 0 (none) or positive and finite, got {softcap}")
    if scale is not None and not -inf < scale < inf:
        raise ValueError(f"scale must be finite, got {scale}")
    layout, group_name, seq_len = _ring(query, mesh)
    out, lse = ring_op(
        *(query, key, value, cu_seqlens, sinks, seq_len, layout, mask.left, mask.right),
        *(default_scale(query.shape[-1]) if scale is None else scale, softcap, kernel, group_name),
    )
    return (out, lse) if return_lse else out


def _ring(query: Any, mesh: DeviceMesh | None) -> tuple[str, str, int]:
    """Layout, group and global length; for DTensors their placements say, where they arrive."""
    if isinstance(query, DTensor):
        if mesh is not None:
            raise ValueError("mesh is for local tensors: DTensors carry theirs; leave it out")
        return "", "", 0
    if mesh is None:
        raise ValueError(
            "ring_attention on plain tensors needs mesh=, the 1-D mesh that they are shards over; "
            "or pass DTensors, see shard_sequence"
        )
    layout = sequence_layout(mesh) or Contiguous()
    return layout.name, axis_group(mesh).group_name, query.shape[2] * mesh.size()
