"""Decode calls, as the tests describe them, played by threads and written out in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from dtensor_ring import Mask
from dtensor_ring.compute.kernels import Scores, kernel_for
from dtensor_ring.decode.op import decode
from dtensor_ring.decode.plan import DecodeRequest
from dtensor_ring.decode.run import Combine
from dtensor_ring.ops.options import kernel_facts
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.mask import as_documents
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.planning.slices import Slices
from tests.dense import Result, dense_attention, visible
from tests.played import PlayedTransport, play
from tests.slices import shown

CAUSAL = Mask.causal()
Outputs = tuple[Tensor, Tensor]
"""`out` and `lse`."""


@dataclass(frozen=True)
class Decode:
    """A decode call, with the same global inputs on each rank.

    Attributes:
        runs: by rank, start and length of the runs of positions that it holds; or a layout.
        num_positions: S, of keys and values, some of which nobody may hold.
        starts: position of the first query, one or by batch row.
        merge: of the partials; with one rank `None` merges nothing.
    """

    runs: Layout | tuple[tuple[tuple[int, int], ...], ...]
    num_positions: int
    starts: tuple[int, ...]
    world_size: int = 1
    num_queries: int = 1
    mask: Mask = CAUSAL
    documents: tuple[tuple[int, ...], ...] | None = None
    slices: Slices | None = None
    dtype: torch.dtype = torch.float64
    heads: tuple[int, int] = (4, 2)
    head_dims: tuple[int, int] = (8, 8)
    batch: int = 2
    kernel: str | None = None
    sinks: tuple[float, ...] = ()
    softcap: float = 0.0
    scale: float = 0.3
    merge: str | None = "one_shot"
    seed: int = 1
    device: str = "cpu"

    @cached_property
    def layout(self) -> Layout:
        if isinstance(self.runs, Layout):
            return self.runs
        return RunTable(self.runs, "key_runs")

    @property
    def wide(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    @property
    def seq_len(self) -> int:
        """Positions of keys and of queries."""
        return max(self.num_positions, max(self.starts) + self.num_queries)

    def positions(self, rank: int) -> Tensor:
        layout = self.layout
        if isinstance(layout, RunTable):
            runs = layout.held(rank, self.world_size)
        else:
            runs = layout.runs(rank, self.world_size, self.num_positions)
        return torch.tensor([run.position(i) for run in runs for i in range(run.length)]).long()

    def inputs(self) -> list[Tensor]:
        """Global query, key and value."""
        shape = self.batch, *self.heads, *self.head_dims, self.num_queries, self.num_positions
        return [x.to(self.device) for x in _inputs(shape, self.dtype, self.seed)]

    def sink_tensor(self) -> Tensor | None:
        how = {"dtype": self.wide, "device": self.device}
        return torch.tensor(self.sinks, **how) if self.sinks else None

    def cu_seqlens(self) -> Tensor | None:
        rows = self.documents
        return None if rows is None else torch.tensor(rows if len(rows) > 1 else rows[0]).int()

    def scores(self) -> Scores:
        return Scores(self.mask, self.scale, self.softcap, self.sink_tensor(), self.kernel)

    def of_rank(self, rank: int, transport: PlayedTransport | None) -> Outputs:
        """What a rank computes."""
        query, key, value = self.inputs()
        here = self.positions(rank)
        kv = key[:, :, here], value[:, :, here]
        request = DecodeRequest(
            *(self.layout, self.mask, rank, self.world_size, self.num_positions),
            *(self.starts, self.num_queries, as_documents(self.documents), self.slices),
        )
        scores = self.scores()
        kernel = kernel_for(*kernel_facts(scores, query, key, value, True, self.slices))
        combine = None
        if transport is not None and self.merge is not None:
            combine = Combine(transport, rank, self.world_size, self.merge)
        return decode(query, kv, request.step(kv[0].shape[2]), kernel, scores, combine)

    def played(self) -> list[Outputs]:
        """What each rank computes."""
        return play(self.world_size, self.of_rank)

    def seen(self) -> Tensor:
        """`(B, M, S)`: which query sees which position that some rank holds."""
        shape = (self.seq_len, self.seq_len)
        if self.slices is not None:
            rows = [torch.tensor(shown(table, shape) > 0) for table in self.slices]
            seen = torch.stack(rows).expand(self.batch, -1, -1)
        else:
            seen = visible(self.mask, shape, self.batch, self.cu_seqlens())[:, 0]
        starts = torch.tensor(self.starts).expand(self.batch).unsqueeze(1)
        rows = starts + torch.arange(self.num_queries)
        seen = seen.gather(1, rows.unsqueeze(2).expand(-1, -1, self.seq_len))
        held = torch.zeros(self.seq_len, dtype=torch.bool)
        for rank in range(self.world_size):
            held[self.positions(rank)] = True
        return (seen & held)[..., : self.num_positions]

    def dense(self) -> Result:
        return dense_attention(
            *(*self.inputs(), self.mask),
            **{"sinks": self.sink_tensor(), "scale": self.scale, "softcap": self.softcap},
            seen=self.seen().to(self.device),
        )


@lru_cache(maxsize=8)  # all ranks have the same
def _inputs(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> tuple[Tensor, ...]:
    batch, heads, kv_heads, head_dim, value_dim, num_queries, num_positions = shape
    shapes = (
        (heads, num_queries, head_dim),
        (kv_heads, num_positions, head_dim),
        (kv_heads, num_positions, value_dim),
    )
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, *x, generator=generator).to(dtype) for x in shapes)


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def check(case: Decode, by_rank: list[Outputs] | None = None) -> None:
    """Compare the ranks with one another, bit by bit, and with dense attention."""
    by_rank = case.played() if by_rank is None else by_rank
    dense: Any = case.dense()
    for rank, results in enumerate(by_rank):
        for what, actual, first, whole in zip(
            ("out", "lse"), results, by_rank[0], (dense.out, dense.lse), strict=True
        ):
            assert actual.dtype == (case.dtype if what == "out" else case.wide)
            assert actual.shape == whole.shape, (case, rank, what)
            assert torch.equal(actual, first), (case, rank, what)
        difference = (results[0].double() - dense.out).abs()
        lse = (results[1].double() - dense.lse).abs().masked_fill(results[1] == dense.lse, 0.0)
        errors = [x.nan_to_num(torch.inf).max().item() for x in (difference, lse) if x.numel()]
        size = 1 + dense.out.abs().max().item() if dense.out.numel() else 1.0
        assert all(error <= TOLERANCES[case.dtype] * size for error in errors), (case, rank, errors)
