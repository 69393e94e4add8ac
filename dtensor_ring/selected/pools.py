"""Pools of tokens over a sharded sequence: each `size` tokens make one, as keys of an index do."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.dtensor.exchange import relayout
from dtensor_ring.ops.boundaries import run_table
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.selected.plan import pool_numbers, pool_table, shifted_pools


def pool_tokens(
    tensor: Tensor,
    mesh: DeviceMesh,
    size: int,
    *,
    layout: Layout | str,
    gates: Tensor | None = None,
    seq_len: int | None = None,
) -> Tensor:
    """Return the means of each `size` tokens of a sharded sequence, where the last of them is.

    Pools are those of the sequence: pool n has the tokens from position `n * size` on. Tokens after
    the last whole pool belong to none. Only tokens whose pool ends on another rank travel, so a
    rank with one run of the sequence receives fewer than `size`. Differentiable: backward sends
    their gradients back. Sums are in float32 or wider, and the same on any number of ranks.

    Args:
        tensor: this rank's tokens, `(B, L, D)`, in the order of the layout.
        mesh: the 1-D mesh of the axis.
        size: tokens of a pool.
        layout: the layout of the tokens: a layout, its spec, or the `Balanced` layout of the batch.
        gates: scores of the tokens, `(B, L, D)` or `(B, L, 1)`, whose softmax over a pool weighs
            its tokens; without them all weigh alike.
        seq_len: the global length, if ranks hold different numbers of tokens.

    Returns:
        `(B, P, D)`, in the order of positions. P differs between ranks, and may be 0.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if the shapes do not fit, or the layout cannot shard the length.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> pool_tokens(torch.arange(5.0).view(1, 5, 1), mesh, 2, layout="zigzag").flatten()
        tensor([0.5000, 2.5000])
    """
    check_pooled(tensor, gates)
    both = tensor if gates is None else torch.cat((tensor, gates), -1)
    whole = whole_pools(both, mesh, size, layout=layout, seq_len=seq_len)
    # Means of 16-bit tokens are summed in 32 bits.
    whole = whole.to(torch.promote_types(whole.dtype, torch.float32))
    if gates is None:
        return whole.mean(2).to(tensor.dtype)
    tokens, scores = whole.tensor_split([tensor.shape[2]], -1)
    return (tokens * scores.softmax(2)).sum(2).to(tensor.dtype)


def whole_pools(
    tensor: Tensor,
    mesh: DeviceMesh,
    size: int,
    *,
    layout: Layout | str | None = None,
    runs: Tensor | None = None,
    seq_len: int | None = None,
) -> Tensor:
    """Return the tokens of each pool of a sharded sequence, where the last of them is.

    For means that `pool_tokens` does not make; the pools and what travels are the same.

    Args:
        tensor: this rank's tokens, `(B, L, D)`, in the order of the layout.
        mesh: the 1-D mesh of the axis.
        size: tokens of a pool.
        layout: the layout of the tokens, see `pool_tokens`.
        runs: in place of a layout, start and length of the runs of each rank, int32 `(W, R, 2)`;
            they also say the global length.
        seq_len: the global length, if ranks hold different numbers of tokens.

    Returns:
        `(B, P, size, D)`, in the order of positions. P differs between ranks, and may be 0.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if the shapes do not fit, or the layout cannot shard the length.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> whole_pools(torch.arange(5.0).view(1, 5, 1), mesh, 2, layout="zigzag").squeeze(-1)
        tensor([[[0., 1.],
                 [2., 3.]]])
    """
    size, num_ranks = as_count("size", size, 1), axis_group(mesh).size()
    check_pooled(tensor, None)
    order, length = _order(
        layout, runs, tensor.shape[1] * num_ranks if seq_len is None else seq_len
    )
    # Eight tokens in zigzag order, and pools of three, which stand where their last tokens are:
    #     before    rank 0: 0 1 6 7    rank 1: 2 3 4 5
    #     after     rank 0: 6 7        rank 1: 0 1 2 3 4 5
    to = pool_table(order, num_ranks, length, size)
    tokens = relayout(tensor, mesh, 1, to, layout=order, seq_len=length)
    # Tokens after the last whole pool are the last of their rank.
    return tokens[:, : tokens.shape[1] // size * size].unflatten(1, (-1, size))


def pools_before(
    pools: Tensor,
    mesh: DeviceMesh,
    size: int,
    *,
    layout: Layout | str | None = None,
    runs: Tensor | None = None,
    seq_len: int | None = None,
) -> Tensor:
    """Return, for each pool of this rank, what the pool before it has.

    Windows that overlap by a pool need it. Only pools whose next one is on another rank travel: of
    a run of the sequence one. Differentiable.

    Args:
        pools: numbers of this rank's pools, `(B, P, ...)`, as `whole_pools` orders them.
        mesh: the 1-D mesh of the axis.
        size: tokens of a pool.
        layout: the layout of the tokens, see `whole_pools`.
        runs: in place of a layout, see `whole_pools`.
        seq_len: the number of tokens of all ranks; not with `runs`.

    Returns:
        A tensor like `pools`. The first pool of the sequence gets what the last one has.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if the shapes do not fit, or the layout cannot shard the length.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> pools_before(torch.arange(3.0).view(1, 3), mesh, 2, layout="zigzag", seq_len=6)
        tensor([[2., 0., 1.]])
    """
    order, length = _order(layout, runs, seq_len)
    num_ranks, rank = axis_group(mesh).size(), mesh.get_local_rank()
    now, to = (x(order, num_ranks, length, size) for x in (pool_numbers, shifted_pools))
    if not now.end:
        return pools
    found = relayout(pools, mesh, 1, to, layout=now, seq_len=now.end)
    # The last pool comes last, and stands before the first one of the sequence.
    start, count = now.numbers[rank, 0].tolist()
    return found.roll(1, 1) if start == 0 and count else found


def pool_runs(
    num_ranks: int,
    size: int,
    *,
    layout: Layout | str | None = None,
    runs: Tensor | None = None,
    seq_len: int | None = None,
) -> Tensor:
    """Return the numbers of the pools of each rank, as `key_runs` of an attention to all pools.

    With `Slices.pools`, which say what a token sees of them, no list of pools is stored.

    Args:
        num_ranks: the number of ranks.
        size: tokens of a pool.
        layout: the layout of the tokens, see `whole_pools`.
        runs: in place of a layout, see `whole_pools`.
        seq_len: the number of tokens of all ranks; not with `runs`.

    Returns:
        Start and length of runs, int32 `(W, R, 2)`.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if the layout cannot shard the length.

    Example:
        >>> pool_runs(2, 4, layout="contiguous", seq_len=14).tolist()
        [[[0, 1]], [[1, 2]]]
    """
    size, num_ranks = as_count("size", size, 1), as_count("num_ranks", num_ranks, 1)
    order, length = _order(layout, runs, seq_len)
    return torch.from_numpy(pool_numbers(order, num_ranks, length, size).numbers.astype(np.int32))


def _order(
    layout: Layout | str | None, runs: Tensor | None, seq_len: int | None
) -> tuple[Layout, int]:
    """Return the layout of tokens and their number.

    Raises:
        ValueError: if there are a layout and runs, or neither; or no length.
    """
    if (layout is None) == (runs is None):
        raise ValueError("give the layout of the tokens, or the runs of each rank")
    if layout is None:
        assert runs is not None
        order = run_table(runs)
        return order, order.end
    if seq_len is None:
        raise ValueError("seq_len must say the number of tokens of all ranks")
    return as_layout(layout), as_count("seq_len", seq_len)


def check_pooled(tensor: Tensor, gates: Tensor | None) -> None:
    """Refuse what is no shard `(B, L, D)`, and gates that do not fit it.

    Raises:
        TypeError: if one is no plain tensor.
        ValueError: if the shapes or dtypes do not fit.
    """
    for name, x in {"tensor": tensor, "gates": gates}.items():
        if name == "gates" and x is None:
            continue
        if not isinstance(x, Tensor) or type(x) not in (Tensor, torch.nn.Parameter):
            raise TypeError(f"{name} must be a plain local shard, got {type(x).__name__}")
        if x.ndim != 3 or not x.is_floating_point():
            raise ValueError(f"{name} must be floating, (B, L, D), got {x.dtype} {tuple(x.shape)}")
    if gates is not None and (
        gates.shape[:2] != tensor.shape[:2]
        or gates.shape[2] not in (1, tensor.shape[2])
        or gates.dtype != tensor.dtype
    ):
        raise ValueError(
            f"gates must be (B, L, D) or (B, L, 1) in the dtype of tensor, {tuple(tensor.shape)} "
            f"{tensor.dtype}, got {tuple(gates.shape)} {gates.dtype}"
        )
