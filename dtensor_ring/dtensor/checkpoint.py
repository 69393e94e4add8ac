"""Saves a sharded sequence by runs of tokens, so that any number of ranks and layout can read it.

`torch.distributed.checkpoint` asks a tensor for its pieces: DTensor has one, at the offset of rank
order. A sharded sequence has one for each run, at the position of its first token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_ring.dtensor.annotation import tokens_of
from dtensor_ring.dtensor.sequence_order import own_rank, sequence_dim
from dtensor_ring.planning.layout import Run, joined


def write_items(x: DTensor, fqn: str) -> list[Any]:
    """Return the items that this rank writes."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    properties = TensorProperties.create_from_tensor(x.to_local())
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunk.offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=x.size()),
        )
        for chunk in chunks(x)
    ]


def chunks(x: DTensor) -> list[Any]:
    """Return offset and size of each piece of this rank."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    dim, found = sequence_dim(x), []
    # Each run is a piece at its true positions: what is written has the order of the sequence.
    for run, _ in _runs(x):
        offsets, sizes = [0] * x.ndim, list(x.shape)
        offsets[dim], sizes[dim] = run.start, run.length
        found.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
    return found


def piece(x: DTensor, index: Any) -> Tensor:
    """Return the local tokens of a piece, as a view into which its content can be read."""
    dim = sequence_dim(x)
    for run, column in _runs(x):
        if index.offset is not None and index.offset[dim] == run.start:
            return x._local_tensor.detach().narrow(dim, column, run.length)
    raise ValueError(f"no piece of {index.fqn} begins at {index.offset} on this rank")


def _runs(x: DTensor) -> Iterator[tuple[Run, int]]:
    """Return runs of neighbouring tokens, and the local column at which each begins."""
    tokens = tokens_of(x.device_mesh)
    assert tokens is not None, "a sharded sequence is on a token mesh"
    runs = tokens.layout.runs(own_rank(x), x.device_mesh.size(), x.shape[sequence_dim(x)])
    column = 0
    for run in runs if all(run.stride == 1 for run in runs) else _single(runs):
        yield run, column
        column += run.length


def _single(runs: tuple[Run, ...]) -> tuple[Run, ...]:
    """Return a run for each token."""
    return joined([Run(run.position(i), 1) for run in runs for i in range(run.length)])
