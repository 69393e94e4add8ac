"""Bytes of layers with pools: index keys, chosen keys and values, and halos, and no byte more."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import SequenceAxis, Slices
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.tile import FULL
from dtensor_ring.selected.plan import pool_numbers
from parallel_plans.huggingface.core import layer_inputs
from parallel_plans.huggingface.core.documents import DocumentBounds
from parallel_plans.huggingface.core.key_index import KeyIndex, KeyPools
from parallel_plans.huggingface.core.layer_inputs import ShardedInputs
from parallel_plans.huggingface.selecting.compressed import PooledKeys
from tests.lab.counted import counted
from tests.pool import on_ranks
from tests.rings import Ring

SIZE, ROW, DIM, INDEX_DIM, BATCH, NUMBER = 3, 12, 6, 4, 2, 4
"""Tokens of a pool, and numbers: of a token's row, a key, an index key; rows; bytes of a number."""
KINDS = "chosen pools", "all pools", "tokens of pools"


def key_of(dim: int, tokens: Tensor, before: Tensor | None = None) -> Tensor:
    made = tokens[..., :dim].sum(2)
    return made if before is None else made + before[..., :dim].sum(2)


def halves(tokens: Tensor) -> Tensor:
    """What the next pool takes: of a row, the first half."""
    return tokens[..., : ROW // 2]


class Owned:
    """What one rank receives, by where tokens and pools are."""

    def __init__(self, spec: str, seq_len: int) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.layout, self.seq_len = as_layout(spec), seq_len
        ranks = range(self.world_size)
        self.held = [set(self.layout.positions(x, self.world_size, seq_len)) for x in ranks]
        ends = [min(n + SIZE, seq_len) - 1 for n in range(0, seq_len, SIZE)]
        owners = [next(x for x in ranks if end in self.held[x]) for end in ends]
        in_pools = [{t for t in range(seq_len) if owners[t // SIZE] == x} for x in ranks]
        number = seq_len // SIZE  # whole pools
        self.pools = [{n for n in range(number) if owners[n] == x} for x in ranks]
        shifted = [{(n - 1) % number for n in x} for x in self.pools]
        self.halo = self._both(in_pools, self.held)
        self.before = self._both(shifted, self.pools)

    def _both(self, needs: list[set[int]], have: list[set[int]]) -> tuple[int, int]:
        """How many this rank needs of others, and others of it."""
        here, others = self.rank, [x for x in range(self.world_size) if x != self.rank]
        return len(needs[here] - have[here]), sum(len(needs[x] & have[here]) for x in others)

    def made(self, width: int, overlap: bool) -> tuple[int, int]:
        """Of pools of rows of this width, forward and backward."""
        tokens = [BATCH * width * x for x in self.halo]
        earlier = [BATCH * SIZE * (ROW // 2) * x * overlap for x in self.before]
        return tokens[0] + earlier[0], tokens[1] + earlier[1]

    def index_keys(self) -> int:
        return BATCH * INDEX_DIM * (self.seq_len // SIZE - len(self.pools[self.rank]))

    def chosen(self, listed: Tensor, have: list[set[int]], width: int) -> tuple[int, int]:
        """Numbers of keys that come, and of gradients; they follow the same requests."""
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, set(listed.flatten().tolist()) - {-1})
        come, go = self._both(everyone, have)
        return BATCH * width * come, BATCH * width * go

    def requests(self, have: list[set[int]]) -> int:
        """Bytes: a bit for each of the own keys, from each other rank."""
        return (self.world_size - 1) * -(-len(have[self.rank]) // 8)

    def all_pools(self) -> tuple[int, int]:
        """Keys and values that the ring brings, and sums of their gradients."""
        pools = pool_numbers(self.layout, self.world_size, self.seq_len, SIZE)
        how: Any = {"slices": Slices.pools(self.seq_len, SIZE), "key_layout": pools}
        ring = Ring(self.layout, self.world_size, self.seq_len, FULL, None, pools.end, **how)
        plan = ring.plans()[self.rank]
        sums = sum(len(x.cols) for hop in plan.sums for x in hop.receives)
        return 2 * BATCH * DIM * plan.num_received, 2 * BATCH * DIM * sums


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("world_size", "spec", "seq_len"),
    [(2, "zigzag", 44), (4, "contiguous", 44), (3, "striped", 45)],
)
@on_ranks()
def test_bytes_are_counted(kind: str, spec: str, seq_len: int) -> None:
    world_size = dist.get_world_size()
    axis = SequenceAxis(init_device_mesh("cpu", (world_size,)), spec)
    mine, generator = axis.positions(seq_len), torch.Generator().manual_seed(0)
    shapes = (BATCH, 2, seq_len, DIM), (BATCH, seq_len, ROW), (BATCH, seq_len, 3, INDEX_DIM)
    query, rows, index_query = (torch.randn(*x, generator=generator) for x in shapes)
    query, rows = (x.requires_grad_() for x in (query[:, :, mine], rows[:, mine]))
    index_query, weights = index_query[:, mine], torch.ones(BATCH, len(mine), 3)
    inputs, listed = ShardedInputs(axis, seq_len, DocumentBounds()), []
    pools = KeyPools(SIZE, partial(key_of, INDEX_DIM))
    index = KeyIndex(index_query, rows.detach(), weights, 1, 1.0, pools=pools)
    plain = layer_inputs.selected_attention

    def noting(*given: Any, **how: Any) -> Any:
        listed.append(given[3])
        return plain(*given, **how)

    def forward() -> Tensor:
        if kind == "tokens of pools":
            keys = rows[..., :DIM].unsqueeze(1)
            return inputs.attend_selected(query, keys, DIM, inputs.select(index)).sum()
        seen = PooledKeys(
            rows,
            KeyPools(SIZE, partial(key_of, DIM), halves if kind == "chosen pools" else None),
            index if kind == "chosen pools" else None,
        )
        found = seen.attend(query, inputs, None)
        assert found is not None
        return found[0].sum()

    with patch.object(layer_inputs, "selected_attention", noting):
        loss, there = counted(forward)
    back = counted(loss.backward)[1]
    found = there.received, back.received
    assert found == _expected(kind, Owned(spec, seq_len), *listed)
    sums = torch.tensor(found)
    dist.all_reduce(sums)
    assert sums.all()


def _expected(kind: str, owned: Owned, listed: Tensor | None = None) -> tuple[int, int]:
    """Bytes forward and backward."""
    if listed is None:
        keys, sums = owned.all_pools()
        halo, back = owned.made(ROW, overlap=False)
        return NUMBER * (keys + halo), NUMBER * (keys + sums + back)
    have = owned.held if kind == "tokens of pools" else owned.pools
    keys, gradients = owned.chosen(listed, have, DIM)
    index = owned.made(ROW, overlap=False)[0] + owned.index_keys()
    halo, back = (0, 0) if kind == "tokens of pools" else owned.made(ROW, overlap=True)
    asked = owned.requests(have)
    return asked + NUMBER * (index + halo + keys), asked + NUMBER * (keys + gradients + back)
