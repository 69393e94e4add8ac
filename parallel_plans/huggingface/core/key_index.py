"""How queries choose keys: by an index, whose keys may be pools of tokens.

Pools begin with a document, and an op counts them from the first token of a sequence. So each
document has its own call, in which its queries choose among its keys. Rows with the same documents
share calls, and a document that fills its row needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.extension import Layout, pools_before, whole_pools


@dataclass(frozen=True, eq=False)
class KeyPools:
    """Pools of tokens that an index has for keys, counted from the start of the row.

    Attributes:
        size: tokens of a pool.
        key_of: returns the keys of pools, `(B, P, D)`, of the rows of their tokens,
            `(B, P, size, R)`, and of what `for_next` returned of the pools before them.
        for_next: returns what the key of the next pool takes of the rows of a pool; `None` if
            pools do not overlap.
    """

    size: int
    key_of: Callable[..., Tensor]
    for_next: Callable[[Tensor], Tensor] | None = None

    def keys(self, rows: Tensor, mesh: DeviceMesh | None, **where: Any) -> Tensor:
        """Return the keys of the pools whose last token this rank has, `(B, P, D)`.

        Args:
            rows: the rows of its tokens, `(B, C, R)`.
            mesh: the axis; `None` if this rank has all tokens.
            where: which tokens ranks have, see `whole_pools`.
        """
        if mesh is None:
            number = rows.shape[1] // self.size
            tokens = rows[:, : number * self.size].unflatten(1, (number, self.size))
        else:
            tokens = whole_pools(rows, mesh, self.size, **where)
        if self.for_next is None:
            return self.key_of(tokens)
        before = self.for_next(tokens)
        if mesh is None:
            # Pool number i reads what pool i - 1 hands on; the first one masks what comes around.
            return self.key_of(tokens, before.roll(1, 1))
        return self.key_of(tokens, pools_before(before, mesh, self.size, **where))

    def index_keys(self, rows: Tensor, mesh: DeviceMesh | None, **where: Any) -> Tensor:
        """Return `keys` of an index, whose products are in float32."""
        keys = self.keys(rows, mesh, **where)
        # Narrower keys travel as they are.
        return keys.float() if keys.dtype is torch.float64 else keys


@dataclass(frozen=True, eq=False)
class KeyIndex:
    """An index by which queries choose keys: the best by a sum over heads of rectified products.

    Without weights each head chooses its own, by plain products. Keys may be chosen by blocks.

    This is not a tuple: fully_shard moves the tensors in a layer's tuples to the device.

    Attributes:
        query: queries of this rank, `(B, L, heads, D)`.
        keys: keys of this rank, `(B, C, D)`; with pools, what their keys are made of.
        weights: weights of the heads, `(B, L, heads)`, or `None`.
        k: how many keys, blocks or pools each query chooses.
        scale: the factor of the products.
        block_size: how many keys are chosen as one, by the best of them.
        local_blocks: how many blocks up to that of a query it always chooses.
        pools: how keys are made of several tokens; `None` if each token has one.
    """

    query: Tensor
    keys: Tensor
    weights: Tensor | None
    k: int
    scale: float
    block_size: int = 1
    local_blocks: int = 0
    pools: KeyPools | None = None

    def scores(self) -> Tensor:
        """Return the scores of all pools of one rank for all its queries, `(B, L, P)`."""
        assert self.pools is not None and self.weights is not None
        keys = self.pools.index_keys(self.keys, None).to(self.query.dtype)
        # The lightning indexer of DeepSeek-V3.2: sum over heads h of w_h * relu(scale * q_h . k).
        products = self.scale * torch.einsum("blhd,bpd->blhp", self.query, keys)
        return (products.relu() * self.weights.unsqueeze(-1)).sum(2)

    def part(self, rows: Tensor, queries: slice, keys: slice) -> KeyIndex:
        """Return the index of some rows of the batch, and of some columns of them."""
        some = {"query": self.query[rows, queries], "keys": self.keys[rows, keys]}
        weights = None if self.weights is None else self.weights[rows, queries]
        return replace(self, weights=weights, **some)

    def of(self, num_keys: int) -> dict[str, Any]:
        """Return how queries choose among so many keys, as arguments of a selection."""
        if self.pools is not None:
            size = self.pools.size
            # A document shorter than a pool has none, and a selection takes at least one.
            k = max(1, min(self.k, num_keys // size))
            return {"k": k, "scale": self.scale, "pool_size": size}
        blocks = {"block_size": self.block_size, "local_blocks": self.local_blocks}
        return {"k": min(self.k, -(-num_keys // self.block_size)), "scale": self.scale} | blocks


class RowDocument(NamedTuple):
    """A document that several rows have at the same place.

    Attributes:
        rows: numbers of the rows, `(R,)`, int64.
        begin: the position of its first token.
        end: the position after its last one.
    """

    rows: Tensor
    begin: int
    end: int


def documents_of_rows(bounds: Tensor, num_rows: int) -> Iterator[RowDocument]:
    """Yield the documents of a batch, in the same order on all ranks.

    Args:
        bounds: boundaries, `(D+1,)` for all rows, or `(B, D+1)`; tokens before the first one and
            after the last one are in none.
        num_rows: B.

    >>> [x[1:] for x in documents_of_rows(torch.tensor([0, 3, 8, 8]), 1)]
    [(0, 3), (3, 8)]
    """
    # Rows that are cut alike take one message for each document.
    by_bounds: dict[tuple[int, ...], list[int]] = {}
    for number, row in enumerate(bounds.expand(num_rows, -1).tolist()):
        by_bounds.setdefault(tuple(row), []).append(number)
    for row, numbers in by_bounds.items():
        for begin, end in pairwise(row):
            if begin < end:
                yield RowDocument(torch.tensor(numbers), begin, end)


def runs_of(layout: Layout, num_ranks: int, seq_len: int) -> Tensor:
    """Return start and length of the runs of each rank, int32 `(W, R, 2)`, padded with empty ones.

    >>> from dtensor_ring import ZigZag
    >>> runs_of(ZigZag(), 2, 8).tolist()
    [[[0, 2], [6, 2]], [[2, 2], [4, 2]]]
    """
    rows = [
        [
            run
            for x in layout.runs(rank, num_ranks, seq_len)
            # Tensors of runs hold starts and lengths only, so a strided run is listed token by
            # token.
            for run in (
                [(x.start, x.length)]
                if x.stride == 1
                else [(at, 1) for at in range(x.start, x.last + 1, x.stride)]
            )
        ]
        for rank in range(num_ranks)
    ]
    most = max(map(len, rows))
    return torch.tensor([row + [(0, 0)] * (most - len(row)) for row in rows], dtype=torch.int32)


def runs_in(runs: Tensor, begin: int, end: int) -> Tensor:
    """Return the parts of runs `(W, R, 2)` from `begin` on and before `end`, counted from there.

    >>> runs_in(torch.tensor([[[0, 4], [6, 3]]]), 2, 8).tolist()
    [[[0, 2], [4, 2]]]
    """
    first = runs[..., 0].clamp(min=begin)
    lengths = (runs.sum(-1).clamp(max=end) - first).clamp(min=0)
    # An empty run stays at 0.
    return torch.stack([(first - begin) * (lengths > 0), lengths], -1)


def columns_in(runs: Tensor, begin: int, end: int) -> slice:
    """Return which columns of a rank with runs `(R, 2)` are from `begin` on and before `end`.

    >>> columns_in(torch.tensor([[0, 4], [6, 3]]), 2, 8)
    slice(2, 6, None)
    """
    before, until = (int(runs_in(runs, 0, x)[..., 1].sum()) for x in (begin, end))
    return slice(before, until)


def joined_choices(
    parts: list[tuple[RowDocument, slice, Tensor]], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Return the keys that the queries of a rank choose, int32 `(B, L, K)`, -1 for none.

    Args:
        parts: documents, which queries of this rank are theirs, and what these choose, counted from
            the first token of the document, `(R, L', K')`.
        shape: rows, and queries of this rank.
        device: where the result is.
    """
    width = max((x.shape[-1] for _, _, x in parts), default=1)
    joined = torch.full((*shape, width), -1, dtype=torch.int32, device=device)
    for (rows, begin, _), queries, chosen in parts:
        # Choices count from the document's first token, but -1 stays none.
        places = torch.where(chosen < 0, chosen, chosen + begin)
        joined[rows.to(device), queries, : chosen.shape[-1]] = places
    return joined
