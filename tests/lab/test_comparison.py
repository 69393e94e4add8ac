"""What strategies cost by the table is what a transport counts, to the byte."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dtensor_ring import Mask, compare_strategies
from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.all_to_all.rounded_keys import run_rounded
from dtensor_ring.all_to_all.run import TensorShape, messages_of, run_all_to_all
from dtensor_ring.compute.kernels import Saved, Scores
from dtensor_ring.compute.kernels.kernel import Launch
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.trace import Label
from dtensor_ring.lab import comparison
from dtensor_ring.lab.comparison import StrategyCost
from dtensor_ring.lab.recorded import Cost, Recorder, by_field
from dtensor_ring.lab.simulated_attention import simulate_attention
from dtensor_ring.planning.plan import KeyOwners
from dtensor_ring.planning.route import ROUTES
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.planning.strategy import as_strategy
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport import quantised_rotation, rotation
from dtensor_ring.transport.transport import P2P, TransferPolicy, Work, eight_bits_of, for_rounded
from tests.lab.machines import round_machine
from tests.played import PlayedTransport, play
from tests.rings import Case, Ring, Rows, local

SEQ_LEN, HEADS, HEAD_DIM, BATCH = 48, (6, 2), 4, 2
DOCUMENTS = ((0, 5, 9, 21, 30, 46),)
SEEN: dict[str, tuple[Mask, Rows | None]] = {
    "causal": (Mask.causal(), None),
    "window": (Mask.sliding(5), None),
    "documents": (Mask.causal(), DOCUMENTS),
    "both ways": (Mask.full(), None),
}
MACHINE = round_machine()
STRATEGIES = {4: [*ROUTES, "ulysses:2", "ulysses:4"]}
STRATEGIES |= {6: ["ulysses:2+all_gather", "ulysses:3", "ulysses"]}


class Counting(PlayedTransport):
    """Counts what leaves and comes, and the buffers in use."""

    def count_from_here(self) -> None:
        self._counted = Recorder()

    @property
    def cost(self) -> Cost:
        return self._counted.cost

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        self._counted.start(receives, sends)
        return super().start(receives, sends)

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        return self._counted.allocate(num_bytes, device)

    def free(self, buffer: Tensor) -> None:
        self._counted.free(buffer)


class Launched(Reference):
    """Counts launches."""

    def __init__(self) -> None:
        self.num_launches = 0

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        self.num_launches += 1
        return super().forward(q, k, v, launch, scores)


@dataclass
class Counted:
    forward: Cost
    backward: Cost
    launches: int
    work: int


def attention(case: Case, layout: str, rank: int, transport: PlayedTransport) -> Counted:
    """One attention of a rank: exchange, ring, exchange, in both directions."""
    ring, kernel = case.ring, Launched()
    transport.__class__ = Counting
    assert isinstance(transport, Counting)
    size, strategy = ring.world_size, as_strategy(ring.strategy, ring.world_size)
    sharded = as_layout(layout)
    exchange = all_to_all_plan(sharded, sharded, strategy.heads, rank, size, SEQ_LEN)

    owners = KeyOwners(sharded, strategy.heads, size, SEQ_LEN)
    rounded = eight_bits_of(case.policy) if strategy.heads > 1 else None

    def trade(tensors: list[Tensor], num_heads: list[int], is_back: bool = False) -> list[Tensor]:
        if strategy.heads == 1:
            return tensors
        if len(tensors) == 3 and rounded is not None and not is_back:
            counts = tuple(num_heads), HEADS[1]
            label = Label("exchange", 0, rank)
            return run_rounded(tensors, rounded, exchange, owners, counts, transport, label)
        shapes = tuple(map(TensorShape.of, tensors))
        plan = messages_of(exchange, tuple(num_heads), HEADS[1], shapes, is_back)
        return run_all_to_all(tensors, plan, transport, Label("exchange", 0, rank))

    positions = torch.tensor(sharded.positions(rank, size, SEQ_LEN))
    whole = *case.inputs(), *case.grads()
    # Token-major, as projections give them: large ones are sent in place.
    shards = [local(x, positions).transpose(1, 2).contiguous().transpose(1, 2) for x in whole]
    plan, scores = ring.plans()[rank], Scores(ring.mask, 0.5, 0.0, None, None)
    heads = [HEADS[0], HEADS[1], HEADS[1]]
    costs, kept = [], 0
    transport.count_from_here()
    query, *shard = trade(shards[:3], heads)
    pair, packed = (shard[0], shard[1]), shard[2:]
    policy = case.policy if packed or rounded is None else for_rounded(case.policy)
    how = kernel, scores, transport, policy, *packed
    out, lse = ring_forward(query, pair, plan, *how)
    trade([out], heads[:1], is_back=True)
    for tensors in (query, *pair, out, *packed), (*(query, *pair, out) * 2, *packed):
        kept = sum(x.nbytes for x in tensors) if strategy.heads > 1 else 0
        costs.append(replace(transport.cost, held=transport.cost.held + kept))
        if len(costs) == 1:
            transport.count_from_here()
            (grad,) = trade(shards[3:4], heads[:1])
            saved = Saved(grad, out, lse)
            grads = ring_backward(saved, query, pair, plan, *how)
            trade(list(grads), heads, is_back=True)
    work = query.shape[1] * sum(tile.area for step in plan.steps for tile in step.tiles)
    return Counted(costs[0], costs[1], kernel.num_launches, work)


EVERY = pytest.mark.parametrize(
    ("world_size", "strategy"), [(size, x) for size, names in STRATEGIES.items() for x in names]
)


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that packets begin and end within blocks."""
    monkeypatch.setattr(quantised_rotation, "BLOCK_SIZE", 5)


@pytest.mark.pairs
@pytest.mark.parametrize("layout", ["contiguous", "striped", "zigzag"])
@pytest.mark.parametrize("seen", SEEN)
@EVERY
def test_costs_are_those_counted(world_size: int, strategy: str, seen: str, layout: str) -> None:
    row, counted = compared(world_size, strategy, seen, layout)
    for found, most in both_ways(row, counted):
        assert found == most
    assert row.launches == max(x.launches for x in counted)
    work = [x.work for x in counted]
    assert row.balance == pytest.approx(max(work) * world_size / sum(work))


@pytest.mark.parametrize("seen", ["causal", "documents"])
@EVERY
def test_large_messages_are_counted(
    world_size: int, strategy: str, seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole shards are large, parts of them are not all; what lies well needs no buffer."""
    monkeypatch.setattr(rotation, "LARGE", 6 * 128)
    for found, most in both_ways(*compared(world_size, strategy, seen, "zigzag")):
        assert found == most


def both_ways(row: StrategyCost, counted: list[Counted]) -> list[tuple[Cost, Cost]]:
    """Forward and backward: what the table has, and the largest numbers counted."""
    pairs = (
        (row.forward, [x.forward for x in counted]),
        (row.backward, [x.backward for x in counted]),
    )
    return [(found, by_field(max, costs)) for found, costs in pairs]


def compared(
    world_size: int, strategy: str, seen: str, layout: str
) -> tuple[StrategyCost, list[Counted]]:
    """The row of the table, and what each rank counted."""
    mask, documents = SEEN[seen]
    ring = Ring(as_layout(layout), world_size, SEQ_LEN, mask, documents, strategy=strategy)
    dtypes = {"window": torch.bfloat16, "documents": "int8", "both ways": "fp8"}
    policy = TransferPolicy(dtypes.get(seen))
    dims = HEAD_DIM, HEAD_DIM
    case = Case(ring, torch.float32, HEADS, dims, batch=BATCH, policy=policy)
    counted = play(world_size, lambda rank, at: attention(case, layout, rank, at))
    (row,) = compare_strategies(
        *(mask, SEQ_LEN, world_size, HEADS, HEAD_DIM, documents),
        layout=layout,
        batch=BATCH,
        dtype=torch.float32,
        policy=policy,
        strategies=[strategy],
    ).rows
    return row, counted


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses:2", "ulysses"])
def test_memory_is_a_reason(strategy: str) -> None:
    """Of what is held forward and backward, the larger one decides, to the byte."""

    def cost(max_held: int | None) -> StrategyCost:
        asked = Mask.causal(), 64, 4, (4, 2), 8
        return compare_strategies(*asked, strategies=[strategy], max_held=max_held).rows[0]

    without = cost(None)
    most = max(without.forward.held, without.backward.held)
    assert cost(most) == without
    refused = cost(most - 1)
    assert replace(refused, why_not=None) == without
    assert refused.why_not is not None
    assert re.match("the busiest rank would hold .* MB backward, more than .*", refused.why_not)


def test_no_all_to_all_is_planned_without_ulysses() -> None:
    with patch.object(comparison, "all_to_all_plan", side_effect=AssertionError):
        found = compare_strategies(Mask.causal(), 64, 4, strategies=tuple(ROUTES))
    assert all(row.forward.sent for row in found.rows)


def test_what_cannot_be() -> None:
    found = compare_strategies(Mask.causal(), 64, 4, heads=(2, 1), strategies=("ring", "ulysses"))
    assert found.rows[0].why_not is None
    assert str(found).splitlines()[-1].startswith("ulysses:4  2 query heads cannot be sharded over")
    with pytest.raises(ValueError, match="do not divide the 4 of the axis"):
        compare_strategies(Mask.causal(), 64, 4, strategies=("ulysses:3",))


def test_seconds_of_a_machine_are_in_the_table() -> None:
    asked: Any = Mask.causal(), 48, 4, (6, 2), 4
    names = "ring", "all_gather", "ulysses:2", "ulysses"
    found = compare_strategies(*asked, strategies=names, machine=MACHINE)
    for row in found.rows[:3]:
        times = simulate_attention(*asked, strategy=row.strategy, machine=MACHINE)
        assert (row.seconds, row.exposed) == (times.seconds, times.exposed)
        assert times.num_bytes == (row.forward.sent, row.backward.sent)
    lines = str(found).splitlines()
    assert lines[0].split()[-1] == "milliseconds"
    assert lines[1].split()[-4:] == ["forward", "exposed", "backward", "exposed"]
    times = found.rows[0].seconds, found.rows[0].exposed
    shown = [f"{1e3 * x:.3f}" for both in zip(*times, strict=True) for x in both]
    assert lines[2].split()[-4:] == shown
    few = compare_strategies(*asked[:3], (2, 2), 4, strategies=("ulysses",), machine=MACHINE)
    assert few.rows[0].seconds is None
    assert "cannot be sharded" in str(few)
    assert "milliseconds" not in str(compare_strategies(*asked, strategies=names))
