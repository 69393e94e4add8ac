"""Caches as one process has them: all tokens in the order of their positions, on every rank.

What is saved is whole, so any number of ranks can load it, in any layout. One layer at a time is
gathered, and goes to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.compute.memory import positions_of
from dtensor_ring.decode.plan import CacheTable
from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.dtensor.call_check import check_agreement
from dtensor_ring.dtensor.gather import gather_rows
from dtensor_ring.planning.layout import Layout

SEQUENCE = 2  # the dim of the tokens
SAME_STATE = "load the same state, all of them the one that was saved"
NO_PICKLE = (
    "a ShardedCache cannot be pickled, as by torch.save(cache): a file would have the tokens of "
    "one rank. Save cache.state_dict(), which has all tokens on every rank, and give it to "
    "load_state_dict of a cache on any number of ranks"
)
KINDS = ("keys", "values")
Pair = tuple[Tensor, Tensor]


def saved(seq_len: int, pairs: Iterable[Pair]) -> dict[str, Any]:
    """Return the state of a cache, see `ShardedCache.state_dict`; `pairs` are of its layers."""
    state: dict[str, Any] = {"seq_len": seq_len}
    for number, pair in enumerate(pairs):
        state |= {_name(number, kind): x.cpu() for kind, x in zip(KINDS, pair, strict=True)}
    return state


def pairs_of(state: dict[str, Any], num_layers: int, mesh: DeviceMesh) -> list[Pair]:
    """Return whole keys and values of each layer of a state; nothing if it has no tokens.

    Raises:
        ValueError: on every rank, if their states differ, or it has another number of layers.
    """
    check_same_state(state, mesh)
    seq_len, tensors = state.get("seq_len"), {**state}
    tensors.pop("seq_len", None)
    layers = range(num_layers if seq_len else 0)
    pairs = [tuple(tensors.pop(_name(x, kind), None) for kind in KINDS) for x in layers]
    is_of_layers = all(isinstance(x, Tensor) and x.ndim == 4 for pair in pairs for x in pair)
    if type(seq_len) is not int or not is_of_layers or tensors:
        raise ValueError(
            f"state must be the state_dict() of a cache of {num_layers} layers, got "
            f"{', '.join(state) or 'nothing'}"
        )
    found = {x.shape[SEQUENCE] for pair in pairs for x in pair}
    if found - {seq_len}:
        raise ValueError(f"state must have {seq_len} tokens in each tensor, got {sorted(found)}")
    return pairs


def shard_of(pair: Pair, layout: Layout, mesh: DeviceMesh, length: int) -> list[Tensor]:
    """Return this rank's columns of whole tensors that are padded to `length` tokens."""
    own = positions_of(layout.runs(mesh.get_local_rank(), mesh.size(), length))
    # Positions after the last token are padding, which a crop takes out again.
    own = own.clamp(max=pair[0].shape[SEQUENCE] - 1)
    return [x.index_select(SEQUENCE, own.to(x.device)).to(mesh.device_type) for x in pair]


def check_same_state(state: dict[str, Any], mesh: DeviceMesh) -> None:
    """Compare a state over the ranks of a mesh.

    Raises:
        ValueError: on every rank, if they differ.
        TypeError: if it is no dict.
    """
    if not isinstance(state, dict):
        raise TypeError(f"state must be the dict of state_dict(), got {type(state).__name__}")
    check_agreement(axis_group(mesh), {x: _described(y) for x, y in state.items()}, SAME_STATE)


def gather_columns(x: Tensor, table: CacheTable, mesh: DeviceMesh) -> Tensor:
    """Gather this rank's columns `(B, N, C, H)` to all `(B, N, S, H)`, in order of positions."""
    batch, heads, _, head_dim = x.shape
    shape = table.seq_len, batch, heads, head_dim
    if not batch * heads * head_dim:  # an index has no values
        return x.new_empty(shape).movedim(0, SEQUENCE)
    found = gather_rows(x.movedim(SEQUENCE, 0).flatten(1), table.num_local, mesh)
    ranks = range(table.world_size)
    places = torch.cat([torch.from_numpy(table.positions(rank)) for rank in ranks])
    whole = torch.empty_like(found).index_copy_(0, places.to(found.device), found)
    return whole.view(shape).movedim(0, SEQUENCE).contiguous()


def _name(number: int, kind: str) -> str:
    return f"layers.{number}.{kind}"


def _described(x: Any) -> str:
    if not isinstance(x, Tensor):
        return repr(x)
    content = x.detach().cpu().contiguous().flatten().view(torch.uint8)
    checksum = crc32(content.numpy().data)
    return f"{x.dtype} {tuple(x.shape)} of checksum {checksum:08x}"
