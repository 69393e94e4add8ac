"""Indexers over rings, and what they select, pair by pair in plain loops."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.plan import checked_slices
from dtensor_ring.planning.run_table import shard_table
from dtensor_ring.selected.plan import key_positions
from dtensor_ring.selected.run import IndexQueries, KeyChoice, ring_select, tokens_of_blocks
from tests.played import PlayedTransport, play
from tests.rings import Ring


@dataclass(frozen=True)
class Indexer:
    """Whole numbers, whose sums are exact in any order; small ones, so that many are equal."""

    ring: Ring
    k: int
    num_heads: int = 2
    with_weights: bool = True
    block_size: int = 1
    local_blocks: int = 0
    dtype: torch.dtype = torch.float64
    seed: int = 0
    scale: float = 0.5

    @property
    def choice(self) -> KeyChoice:
        return KeyChoice(self.k, self.scale, self.block_size, self.local_blocks)

    def inputs(self) -> tuple[Tensor, Tensor, Tensor | None]:
        """Global query `(B, Hi, S, 3)`, key `(B, 1, T, 3)`, and weights `(B, Hi, S)`."""
        generator, (seq_len, key_len) = torch.Generator().manual_seed(self.seed), self.ring.seq_lens
        batch, heads = self.ring.batch, self.num_heads

        def whole(*shape: int) -> Tensor:
            return torch.randint(-2, 3, shape, generator=generator).to(self.dtype)

        query, key = whole(batch, heads, seq_len, 3), whole(batch, 1, key_len, 3)
        return query, key, whole(batch, heads, seq_len) if self.with_weights else None

    def scores(self) -> Tensor:
        """`(B, G, S, T)`, -inf where a query does not see a key."""
        query, key, weights = self.inputs()
        products = self.scale * (query.double() @ key.double().mT)
        if weights is not None:
            products = (products.clamp(min=0) * weights.double().unsqueeze(-1)).sum(1, keepdim=True)
        return products.masked_fill(~self.ring.visible().unsqueeze(1), -torch.inf)

    def expected(self) -> Tensor:
        """Of every query, in loops."""
        scores = self.scores()
        width = self.k * self.block_size
        found = torch.full((*scores.shape[:3], width), -1, dtype=torch.int32)
        for number, row in enumerate(scores.flatten(0, 2)):
            at = number % scores.shape[2]
            listed = self._of_row(row.tolist(), at)
            found.view(-1, width)[number, : len(listed)] = torch.tensor(listed, dtype=torch.int32)
        return found

    def _of_row(self, row: list[float], at: int) -> list[int]:
        size = self.block_size
        seen = [i for i, score in enumerate(row) if score > -torch.inf]
        blocks: dict[int, float] = {}
        for i in seen:
            blocks[i // size] = max(row[i], blocks.get(i // size, -torch.inf))
        for number in blocks:
            if 0 <= at // size - number < self.local_blocks:
                blocks[number] = torch.inf
        chosen = sorted(blocks, key=lambda number: (-blocks[number], number))[: self.k]
        return [i for i in seen if i // size in chosen]

    def found(self) -> Tensor:
        """The same by a ring whose ranks are threads."""
        ring = self.ring
        parts = play(ring.world_size, self.of_rank)
        groups = 1 if self.with_weights else self.num_heads
        whole = torch.full(
            (ring.batch, groups, ring.seq_len, self.k * self.block_size), -2, dtype=torch.int32
        )
        for rank, part in enumerate(parts):
            whole[:, :, ring.positions(rank)] = part
        return whole[:, :, ring.begin :]

    def of_rank(self, rank: int, transport: PlayedTransport) -> Tensor:
        ring = self.ring
        rows, columns = ring.positions(rank), ring.positions(rank, of_keys=True)
        query, key, weights = self.inputs()
        own = IndexQueries(
            query[:, :, rows], None if weights is None else weights[:, :, rows], rows.int()
        )
        positions = key_positions(ring.key_layout or ring.layout, ring.world_size, ring.seq_lens[1])
        plan = ring.plans()[rank]
        found = ring_select(own, key[:, :, columns], plan, self.choice, positions, transport)
        if self.block_size == 1:
            return found
        documents = as_documents(ring.documents, keep_empty=True)
        asked = ring.mask, ring.world_size, ring.seq_lens, documents, None, ring.slices
        runs = shard_table(ring.layout, ring.world_size, ring.seq_len).shards[rank]
        return tokens_of_blocks(found, self.block_size, rows.int(), runs, checked_slices(*asked))


def dense(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selected: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`(out, lse)` in float64, by a mask over all keys.

    Args:
        query: `(B, N, S, H)`.
        key: `(B, Nkv, T, H)`.
        value: `(B, Nkv, T, Hv)`.
        selected: `(B, G, S, K)`.
        scale: factor of the scores.
        sinks: `(N,)`.
    """
    (batch, num_heads, seq_len, _), num_keys = query.shape, key.shape[2]
    query, key, value = (x.double() for x in (query, key, value))
    key, value = (x.repeat_interleave(num_heads // x.shape[1], 1) for x in (key, value))
    groups = selected.shape[1]
    is_in = torch.zeros(batch, groups, seq_len, num_keys + 1, dtype=torch.bool)
    is_in.scatter_(-1, selected.long() % (num_keys + 1), True)
    is_in = is_in[..., :num_keys].repeat_interleave(num_heads // groups, 1)
    scores = (query @ key.mT * scale).masked_fill(~is_in, -torch.inf)
    extra = query.new_full((num_heads,), -torch.inf) if sinks is None else sinks.double()
    with_sinks = torch.cat((scores, extra.view(1, -1, 1, 1).expand(batch, -1, seq_len, 1)), -1)
    lse = with_sinks.logsumexp(-1)
    base = lse.masked_fill(lse == -torch.inf, 0.0)
    weights = (scores - base.unsqueeze(-1)).exp()
    return weights @ value, lse
