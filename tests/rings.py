"""Rings, and attentions over them, as the tests describe them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_ring import Balanced, Contiguous, Mask, sequence_runs
from dtensor_ring.compute.kernels import Problem, Scores
from dtensor_ring.ops.options import Batch, Call, Place, flatten
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.plan import Plan, plan
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import as_strategy
from dtensor_ring.quantised.block_scales import (
    Quantised,
    dequantise,
    quantise_keys,
    quantise_values,
)
from dtensor_ring.transport import quantised_rotation
from dtensor_ring.transport.quantised_rotation import BY_DTYPE
from dtensor_ring.transport.transport import DEFAULT_POLICY, QUANTISED, TransferPolicy
from tests.dense import Result, dense_attention, dropout_factors, visible
from tests.slices import shown

Rows = tuple[tuple[int, ...], ...]
"""Boundaries of documents: one row for the whole batch, or one for each row."""


@dataclass(frozen=True)
class Ring:
    """Whatever decides how tokens are sharded and what they see."""

    layout: Layout
    world_size: int
    seq_len: int
    mask: Mask
    documents: Rows | None = None
    key_seq_len: int | None = None
    key_documents: Rows | None = None
    strategy: str = "ring"
    slices: Slices | None = None
    """In place of mask, which is full then, and documents."""
    key_layout: Layout | None = None
    """If keys are sharded in another way than queries."""
    begin: int = 0
    """Position of the first query; there are whole tensors of them all."""

    @property
    def batch(self) -> int:
        rows = self.documents, self.key_documents, self.slices
        return max(2, *(len(x or ()) for x in rows))

    @property
    def seq_lens(self) -> tuple[int, int]:
        """Of the queries, and of the keys."""
        return self.seq_len, self.seq_len if self.key_seq_len is None else self.key_seq_len

    def plans(self) -> list[Plan]:
        documents, key_documents = (
            as_documents(rows, keep_empty=True) for rows in (self.documents, self.key_documents)
        )
        return [
            plan(
                *(self.layout, self.mask, rank, self.world_size, self.seq_len, documents),
                *(self.key_seq_len, key_documents, self.strategy, self.slices, self.key_layout),
            )
            for rank in range(self.world_size)
        ]

    @property
    def is_direct(self) -> bool:
        """Whether ranks send to others than the next one."""
        return any(
            transfer.peer != (plan.rank + 1) % self.world_size
            for plan in self.plans()
            for hop in plan.shards
            for transfer in hop.sends
        )

    def problem(self, device: str, dtype: torch.dtype, *dims_and_scoring: Any) -> Problem:
        """What a kernel is asked, with grouped heads; head dims first, then scale and softcap."""
        return Problem(
            *(device, dtype, *dims_and_scoring),
            windowed=self.mask.left is not None,
            grouped=True,
            packed=self.documents is not None,
        )

    def positions(self, rank: int, of_keys: bool = False) -> Tensor:
        seq_len, layout = self.seq_lens[of_keys], self.key_layout if of_keys else None
        layout, heads = layout or self.layout, as_strategy(self.strategy, self.world_size).heads
        # Where tokens are exchanged for heads, a rank has all of its group, and here all heads,
        # too.
        ranks = range(rank // heads * heads, (rank // heads + 1) * heads)
        held = [x for rank in ranks for x in layout.positions(rank, self.world_size, seq_len)]
        return torch.tensor(held if heads == 1 else sorted(held)).long()

    def cu_seqlens(self, of_keys: bool = False) -> Tensor | None:
        """One row is for the whole batch."""
        rows = self.key_documents if of_keys else self.documents
        return None if rows is None else torch.tensor(rows if len(rows) > 1 else rows[0]).int()

    def slice_table(self) -> Tensor | None:
        """As the op takes them."""
        return None if self.slices is None else torch.from_numpy(self.slices.numbers)

    def visible(self) -> Tensor:
        """`(B, S, T)`, from positions, document ids and slices alone."""
        if self.slices is not None:
            seen = [shown(table, self.seq_lens) > 0 for table in self.slices]
            return torch.tensor(np.stack(seen)).expand(self.batch, -1, -1)
        bounds = self.cu_seqlens(), self.cu_seqlens(of_keys=True)
        return visible(self.mask, self.seq_lens, self.batch, *bounds)[:, 0]


@dataclass(frozen=True)
class Case:
    """An attention over a ring, with the same global inputs on each rank."""

    ring: Ring
    dtype: torch.dtype = torch.float64
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (8, 8)
    batch: int = 2
    kernel: str | None = None
    sinks: tuple[float, ...] = ()
    softcap: float = 0.0
    scale: float = 0.3
    grad_lse: bool = False
    policy: TransferPolicy = DEFAULT_POLICY
    dropout_p: float = 0.0
    seed: int = 11
    extent: int = 0
    """Distances for which queries have a bias."""

    @property
    def trades(self) -> bool:
        """Whether it exchanges tokens for heads itself: then each rank has to get a head."""
        heads = as_strategy(self.ring.strategy, self.ring.world_size).heads
        return 1 < heads <= self.heads[0]

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def inputs(self) -> list[Tensor]:
        """Global query, key, value, and sinks if there are any."""
        (heads, kv_heads), (head_dim, value_dim) = self.heads, self.head_dims
        seq_len, key_seq_len = self.ring.seq_lens
        shapes = (
            (heads, seq_len, head_dim + self.extent),
            (kv_heads, key_seq_len, head_dim),
            (kv_heads, key_seq_len, value_dim),
        )
        generator = torch.Generator().manual_seed(1)
        tensors = [
            torch.randn(self.batch, *shape, generator=generator).to(self.dtype) for shape in shapes
        ]
        return tensors + ([torch.tensor(self.sinks, dtype=self.wide)] if self.sinks else [])

    def grads(self) -> list[Tensor]:
        """Global gradients of out and, if it is used, of lse."""
        shape = self.batch, self.heads[0], self.ring.seq_len
        generator = torch.Generator().manual_seed(2)
        grad_out = torch.randn(*shape, self.head_dims[1], generator=generator).to(self.dtype)
        grad_lse = torch.randn(shape, generator=generator).to(self.wide)
        for grad in (grad_out, grad_lse):  # of no queries but those that there are
            grad[:, :, : self.ring.begin] = 0
        return [grad_out, grad_lse] if self.grad_lse else [grad_out]

    def shards(self, rank: int) -> list[Tensor]:
        """A rank's inputs: token-major, as projections yield them, and not contiguous."""
        query, *keys = self.inputs()
        shards = [local(query, self.ring.positions(rank))]
        shards += [local(x, self.ring.positions(rank, of_keys=True)) for x in keys]
        return [x.requires_grad_() for x in shards]

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Any = None,
        group_name: str | None = None,
    ) -> Any:
        """`(out, lse)` of a rank's shards; over all ranks, or those of a group."""
        return ring_op(query, key, value, *flatten(self.call(sinks, group_name)))

    def call(self, sinks: Tensor | None = None, group_name: str | None = None) -> Call:
        """What the op takes after query, key and value; over all ranks, or those of a group."""
        ring = self.ring
        seq_lens = (None, None) if ring.key_layout else ring.seq_lens
        return Call(
            Batch(
                *(ring.cu_seqlens(), ring.cu_seqlens(of_keys=True), runs_of(ring.layout)),
                *(ring.slice_table(), runs_of(ring.key_layout)),
            ),
            self.scores(sinks),
            Place(
                ring.layout.spec,
                ring.strategy,
                *seq_lens,
                group_name or dist.group.WORLD.group_name,
                self.policy,
            ),
        )

    def scores(self, sinks: Tensor | None = None) -> Scores:
        """How a query scores a key, and what is dropped."""
        scores = Scores(self.ring.mask, self.scale, self.softcap, sinks, self.kernel)
        if not self.dropout_p:
            return scores
        return scores._replace(dropout_p=self.dropout_p, dropout_seed=torch.tensor(self.seed))

    def expected(self) -> tuple[Tensor, ...]:
        """Out, lse and the gradient of each input, whole and in float64, from dense attention."""
        if self.policy.kv_dtype in QUANTISED:
            return _expected(self)  # how shards are rounded depends on who holds what
        ring = replace(self.ring, layout=Contiguous(), world_size=1, key_layout=None)
        return _expected(replace(self, ring=ring, kernel=None))

    def dense(self) -> Result:
        query, key, value, *sinks = self.inputs()
        if self.policy.kv_dtype in QUANTISED:
            key = self._dequantised(key, quantise_keys)
            value = self._dequantised(value, quantise_values)
        return dense_attention(
            *(query, key, value, self.ring.mask),
            cu_seqlens=self.ring.cu_seqlens(),
            key_cu_seqlens=self.ring.cu_seqlens(of_keys=True),
            sinks=sinks[0] if sinks else None,
            scale=self.scale,
            softcap=self.softcap,
            seen=self._seen(),
            factors=self._factors(),
        )

    def _factors(self) -> Tensor | None:
        """Of the weights, under dropout."""
        if not self.dropout_p:
            return None
        shape = self.batch, self.heads[0], *self.ring.seq_lens
        return dropout_factors(self.dropout_p, self.seed, shape)

    def _dequantised(self, whole: Tensor, quantise: Callable[..., Quantised]) -> Tensor:
        """Keys or values as all ranks see them: each shard rounded by its owner."""
        result = torch.full_like(whole, torch.nan)
        # By the op alone, with tokens of a group, each of its ranks rounds all of them.
        ring = replace(self.ring, strategy="ring") if self.trades else self.ring
        for rank in range(ring.world_size):
            own = ring.positions(rank, of_keys=True)
            how = BY_DTYPE[self.policy.kv_dtype], quantised_rotation.BLOCK_SIZE
            rounded = quantise(local(whole, own), *how)
            result[:, :, own] = dequantise(rounded, self.dtype)
        return result

    def _seen(self) -> Tensor | None:
        """What slices show; masks and documents say it themselves."""
        given = self.ring.slices
        if given is None:
            return None
        return self.ring.visible()[: len(given)].expand(self.batch, -1, -1)


@lru_cache(maxsize=1)  # neighbouring cases differ in layout or kernel only
def _expected(case: Case) -> tuple[Tensor, ...]:
    dense = case.dense()
    return dense.out.detach(), dense.lse.detach(), *dense.backward(*case.grads())


def runs_of(layout: Layout | None) -> Tensor | None:
    """As the op takes those of a layout that belongs to a batch."""
    if isinstance(layout, RunTable):
        return torch.tensor(layout.numbers, dtype=torch.int32)
    return sequence_runs(layout) if isinstance(layout, Balanced) else None


def local(x: Tensor, positions: Tensor) -> Tensor:
    """The tokens at these positions, in a token-major tensor; sinks have no tokens."""
    return x.detach() if x.ndim == 1 else x.transpose(1, 2)[:, positions].transpose(1, 2)


@contextmanager
def fake_group(world_size: int, rank: int = 0) -> Iterator[None]:
    """Make this process a rank of a group that sends nothing, in a worker of the pool."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    yield
