"""The public function: ring attention on DTensors, or on local shards and a mesh."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring.agreement import check_call
from dtensor_ring.annotation import axis_group, axis_layout, group_layout
from dtensor_ring.dtensor import SEQUENCE
from dtensor_ring.kernels import available_kernels
from dtensor_ring.layout import shard_length
from dtensor_ring.mask import Mask
from dtensor_ring.op import Options, default_scale, ring_op

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
    key_cu_seqlens: Tensor | None = None,
    runs: Tensor | None = None,
    grad_dtype: torch.dtype | None = None,
    validate: bool = False,
) -> Any:
    """Attention over a sequence that is sharded over the ranks of a ring.

    Exact softmax attention (Liu et al., 2023, arXiv 2310.01889): keys and values travel around
    the ring while each rank works on those it holds, and partial results are merged in float32.

    Args:
        query: `(B, N, S, H)`, either DTensors or local shards `(B, N, L, H)` with `mesh`. As a
            DTensor it is `Shard(2)` over exactly one mesh axis, the ring; over other axes it may
            be `Shard(0)` (batch), `Shard(1)` (heads) or `Replicate`.
        key: `(B, Nkv, S, H)`, placed as the query; `Nkv` divides `N` (grouped-query attention),
            and nothing is repeated. Another length than the query's makes it cross attention.
        value: `(B, Nkv, S, Hv)`, placed as the query.
        mask: which keys a query sees; causal by default.
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
            (float64 for float64), -inf for a row that sees nothing. Only the kernel `reference` has
            its gradient: where it is not wanted, but leaves a compiled function or a reentrant
            checkpoint, which would give it one of zeros, return `lse.detach()`.
        key_cu_seqlens: boundaries of the keys' and values' documents, for cross attention: the
            queries of document number d see the keys of number d. Keys may be as many as they
            like, and the mask must be full.
        runs: which tokens each rank holds, where that depends on the batch, see `sequence_runs`;
            int32 on the CPU, `(W, R, 2)`, ascending in each row. By default the layout of the mesh
            says.
        grad_dtype: dtype in which sums of key and value gradients travel from rank to rank, float32
            (float64 for float64) by default. `torch.bfloat16` halves their bytes and rounds them at
            each hop; docs/numerics.md has the errors. float16 overflows beyond 65,504.
        validate: first compare this call with those of the other ranks, and raise on every rank
            if they differ, where a ring would hang or be wrong. Costs a few small messages; for
            eager calls. What makes no ring, a query without a sharded sequence or a mesh of more
            axes, is refused where it is, and the other ranks wait for it.

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
    if validate:
        _validate(dict(locals()))
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a tensor or a DTensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} must be (B, N, L, H), got shape {tuple(x.shape)}")
    if not isinstance(mask, Mask):
        raise TypeError(f"mask must be a dtensor_ring.Mask, such as Mask.causal(), got {mask!r}")
    _check_host_tensors({"cu_seqlens": cu_seqlens, "key_cu_seqlens": key_cu_seqlens, "runs": runs})
    if softcap is None or not 0 <= softcap < inf:
        raise ValueError(f"softcap must be 0 (none) or positive and finite, got {softcap}")
    if scale is not None and not -inf < scale < inf:
        raise ValueError(f"scale must be finite, got {scale}")
    options = Options(
        cu_seqlens=cu_seqlens,
        key_cu_seqlens=key_cu_seqlens,
        runs=runs,
        sinks=sinks,
        scale=default_scale(query.shape[-1]) if scale is None else scale,
        softcap=softcap,
        kernel=kernel,
        grad_dtype=grad_dtype,
    )
    out, lse = ring_op(query, key, value, *_placed(options.under(mask), query, key, mesh))
    return (out, lse) if return_lse else out


def _check_host_tensors(given: dict[str, Any]) -> None:
    for name, x in given.items():
        if x is not None and (not isinstance(x, Tensor) or isinstance(x, DTensor)):
            make = (
                "sequence_runs(layout)" if name == "runs" else "torch.tensor(x, dtype=torch.int32)"
            )
            raise TypeError(f"{name} must be a plain tensor, as {make}, got {type(x).__name__}")


def _validate(call: dict[str, Any]) -> None:
    """Compare a call of `ring_attention`, by its arguments, with those of the other ranks."""
    if torch.compiler.is_compiling():
        raise ValueError("validate=True compares ranks in eager calls only; compile without it")
    query, mesh = call["query"], call.pop("mesh")
    if isinstance(query, DTensor):
        axes = [axis for axis, where in enumerate(query.placements) if where == Shard(SEQUENCE)]
        groups = [query.device_mesh.get_group(axis) for axis in axes]
    else:
        groups = [axis_group(mesh)] if mesh is not None else []
    for group in groups:
        layout = group_layout(group)
        runs_here = [name for name, missing in available_kernels().items() if missing is None]
        here = {"layout": layout and layout.name, "kernels": runs_here}
        check_call(group, call | here | {"shards of another length": _odd_shards(call, group)})


def _odd_shards(call: dict[str, Any], group: ProcessGroup) -> list[str]:
    """Which DTensors hold more or fewer tokens here than their length says."""
    given = {name: call[name] for name in ("query", "key", "value")}
    rank, size = group.rank(), group.size()
    return [
        f"{name} {x._local_tensor.shape[SEQUENCE]}"
        for name, x in given.items()
        if isinstance(x, DTensor)
        and x.ndim == 4
        and x._local_tensor.shape[SEQUENCE] != shard_length(rank, size, x.shape[SEQUENCE])
    ]


def _placed(options: Options, query: Any, key: Any, mesh: DeviceMesh | None) -> Options:
    """With layout, group and global lengths; of DTensors the placements say those, on arrival."""
    if isinstance(query, DTensor):
        if mesh is not None:
            raise ValueError("mesh is for local tensors: DTensors carry theirs; leave it out")
        return options
    if isinstance(options.sinks, DTensor):
        raise TypeError(
            "sinks beside plain query, key and value must be plain, too, got a DTensor; pass "
            "sinks.to_local()"
        )
    if mesh is None:
        raise ValueError(
            "ring_attention on plain tensors needs mesh=, the 1-D mesh that they are shards over; "
            "or pass DTensors, see shard_sequence"
        )
    group = axis_group(mesh)
    return options._replace(
        seq_len=query.shape[2] * group.size(),
        key_seq_len=key.shape[2] * group.size(),
        layout=axis_layout(group, options.runs is not None),
        group_name=group.group_name,
    )
