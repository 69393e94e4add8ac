"""What users call to decode: the best keys among sharded, cached keys, and attention to them."""

from __future__ import annotations

from typing import Any, Literal, overload

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_ring.decode.api import placed
from dtensor_ring.decode.call import DecodeBatch, DecodeCall, flatten_decode
from dtensor_ring.dtensor import call_check
from dtensor_ring.ops.checks import called_by_user
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.tile import FULL
from dtensor_ring.selected.api import check_pools_seen
from dtensor_ring.selected.decode_ops import decode_select_op, decode_selected_op
from dtensor_ring.selected.plan import MAX_SELECTED, checked_choice


def decode_select_keys(
    index_query: Tensor,
    index_key: Tensor,
    weights: Tensor | None,
    k: int,
    *,
    scale: float = 1.0,
    mask: Mask | None = None,
    cu_seqlens: Tensor | None = None,
    slices: Slices | Tensor | None = None,
    key_runs: Tensor | None = None,
    query_starts: Tensor | None = None,
    block_size: int = 1,
    local_blocks: int = 0,
    pool_size: int = 1,
    mesh: DeviceMesh | None = None,
    agree: Tensor | None = None,
) -> Tensor:
    """Find the k best keys of 1 to 64 new tokens among index keys that are sharded over ranks.

    Scores and ties are as in `select_keys`. Each rank takes the top k of its local keys, and sends
    their scores and positions in one message to each other rank. All ranks merge the same lists, so
    all of them get the same result. Keys are not sent.

    Args:
        index_query: `(B, M, Hi, Di)`, the same on every rank.
        index_key: this rank's columns `(B, C, Di)`; C may be 0, and may differ between ranks. Its
            dtype may be narrower than that of the queries.
        weights: `(B, M, Hi)`; with `None` each index head selects its own keys.
        k: the number of keys, or of blocks, of a query.
        scale: a factor of the products, before the relu.
        mask: which keys a query sees, by position; causal by default, full with `slices`.
        cu_seqlens: boundaries of documents in positions.
        slices: what queries see, in place of mask and boundaries.
        key_runs: the positions of each rank's columns, see `decode_attention`.
        query_starts: the position of the first of the M tokens, `(1,)` or `(B,)`; by default the
            queries are at the last M positions. With blocks, one number for all rows.
        block_size: the number of positions that compete as one, see `select_keys`.
        local_blocks: how many blocks up to that of a query are always among its k.
        pool_size: the number of tokens of an index key, see `select_keys`. `key_runs` are those of
            the tokens; `query_starts` is one number for all rows.
        mesh: the 1-D mesh of the axis; `None` if this rank holds all keys.
        agree: integers that must be the same on all ranks, such as token ids.

    Returns:
        Positions, int32, `(B, M, k * block_size)`, or without weights `(B, Hi, M, k * block_size)`:
        ascending, then -1. Of pools there are up to `k * pool_size + pool_size - 1`.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if shapes, runs, boundaries or numbers do not fit.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> query, key = torch.ones(1, 1, 2, 8), torch.ones(1, 99, 8)
        >>> decode_select_keys(query, key, torch.ones(1, 1, 2), 3, mesh=mesh).tolist()
        [[[0, 1, 2]]]
    """
    _check_plain("index_query", index_query, 4, "(B, M, Hi, Di)")
    _check_plain("index_key", index_key, 3, "(B, C, Di)")
    query, key = index_query.transpose(1, 2), index_key.unsqueeze(1)
    if weights is not None:
        _check_plain("weights", weights, 3, "(B, M, Hi)")
        weights = weights.transpose(1, 2)
    mask = call_check.mask_of(mask, slices)
    given = call_check.batch_of(cu_seqlens, None, None, slices)
    batch = DecodeBatch(given.cu_seqlens, given.slices, key_runs, query_starts, agree)
    choice = checked_choice(k, block_size, local_blocks, pool_size)
    check_pools_seen(pool_size, mask, batch)
    if pool_size > 1 and key_runs is None:
        raise ValueError(f"pool_size={pool_size} needs key_runs, the positions of the tokens")
    scores = call_check.scores_of(query, mask, scale, 0.0, None, None)
    place, _ = placed(query, mesh, key_runs is not None, None, "decode_select_keys")
    call = DecodeCall(batch, scores, place)
    call_check.check_options(query, call)
    arguments = query, key, weights, *choice, *flatten_decode(call)
    found = called_by_user(decode_select_op, *arguments)
    return found if weights is None else found.squeeze(1)


@overload
def decode_selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | int,
    selected: Tensor,
    *,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    key_runs: Tensor | None = ...,
    pool_size: int = ...,
    return_lse: Literal[False] = ...,
    mesh: DeviceMesh | None = ...,
    agree: Tensor | None = ...,
) -> Tensor: ...
@overload
def decode_selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | int,
    selected: Tensor,
    *,
    scale: float | None = ...,
    sinks: Tensor | None = ...,
    key_runs: Tensor | None = ...,
    pool_size: int = ...,
    return_lse: Literal[True],
    mesh: DeviceMesh | None = ...,
    agree: Tensor | None = ...,
) -> tuple[Tensor, Tensor]: ...
def decode_selected_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor | int,
    selected: Tensor,
    *,
    scale: float | None = None,
    sinks: Tensor | None = None,
    key_runs: Tensor | None = None,
    pool_size: int = 1,
    return_lse: bool = False,
    mesh: DeviceMesh | None = None,
    agree: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of 1 to 64 new tokens to the cached keys that they selected.

    Each rank attends to the selected keys that it holds, and one round of messages merges the
    partial results, as in `decode_attention`. Keys stay where they are. There is no mask, and no
    gradient.

    Args:
        query: `(B, N, M, H)`, the same on every rank.
        key: this rank's columns `(B, Nkv, C, H)`; C may be 0.
        value: `(B, Nkv, C, Hv)`, or the number Hv: then values are the first numbers of keys.
        selected: int32 positions `(B, M, K)`, or `(B, G, M, K)` for groups of key heads, the same
            on every rank; -1 for none.
        scale: a factor of the scores, `H ** -0.5` by default.
        sinks: `(N,)`, one logit for each query head, which takes part without a value.
        key_runs: the positions of each rank's columns, see `decode_attention`.
        pool_size: the number of tokens of a key: keys are then pools, and `selected` has their
            numbers, see `select_keys`; `key_runs` are those of the tokens.
        return_lse: also return the log-sum-exp of the scores, `(B, N, M)`, float32 or wider.
        mesh: the 1-D mesh of the axis; `None` if this rank holds all keys.
        agree: integers that must be the same on all ranks, such as token ids.

    Returns:
        `(B, N, M, Hv)`: the same bits on every rank; 0 for a query without keys. Or it and lse.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if shapes, runs or positions do not fit.
        NotImplementedError: if an input needs a gradient while gradients are enabled.
        RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> query, latents = torch.randn(1, 4, 1, 8), torch.randn(1, 1, 99, 8)
        >>> selected = torch.tensor([[[3, 50, 98]]]).int()
        >>> decode_selected_attention(query, latents, 6, selected, mesh=mesh).shape
        torch.Size([1, 4, 1, 6])
    """
    _check_plain("query", query, 4, "(B, N, M, H)")
    _check_plain("key", key, 4, "(B, Nkv, C, H)")
    if isinstance(value, Tensor):
        _check_plain("value", value, 4, "(B, Nkv, C, Hv)")
        values, value_dim = value, value.shape[3]
    else:
        values, value_dim = None, as_count("value", value, 1, key.shape[3])
    if not isinstance(selected, Tensor) or selected.ndim not in (3, 4):
        raise TypeError("selected must be a tensor of positions, (B, M, K) or (B, G, M, K)")
    selected = selected.unsqueeze(1) if selected.ndim == 3 else selected
    batch = DecodeBatch(key_runs=key_runs, agree=agree)
    scores = call_check.scores_of(query, FULL, scale, 0.0, sinks, None)
    place, _ = placed(query, mesh, key_runs is not None, None, "decode_selected_attention")
    call = DecodeCall(batch, scores, place)
    call_check.check_options(query, call)
    pool_size = as_count("pool_size", pool_size, 1, MAX_SELECTED)
    out, lse = called_by_user(
        decode_selected_op,
        query,
        key,
        values,
        selected,
        value_dim,
        pool_size,
        *flatten_decode(call),
    )
    return (out, lse) if return_lse else out


def _check_plain(name: str, x: Any, ndim: int, form: str) -> None:
    """Refuse what is not a plain tensor of these dims."""
    if isinstance(x, DTensor):
        raise TypeError(f"{name} must be a plain tensor, got DTensor; use .to_local()")
    call_check.check_dims(name, x, ndim, form)
