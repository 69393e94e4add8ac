"""Messages: what travels is what the plan says, whole or in eight bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtensor_ring import BlockCyclic, Contiguous, Mask, Striped, ZigZag, compare_strategies
from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import Plan, Step
from dtensor_ring.planning.route import Hop, Transfer
from dtensor_ring.quantised.block_scales import dequantise, quantise_keys, quantise_values
from dtensor_ring.transport import quantised_rotation, rotation
from dtensor_ring.transport.quantised_rotation import (
    BLOCK_SIZE,
    BY_DTYPE,
    QuantisedPacket,
    QuantisedRotation,
    packet_size,
)
from dtensor_ring.transport.rotation import ShardRotation
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, TransferPolicy, Work
from tests.columns import indices_of
from tests.played import PlayedTransport, play
from tests.pool import Pool, on_ranks
from tests.rings import Case, Ring
from tests.test_fuzz import Setting, check_rank, played_results

CAUSAL, FULL = Mask.causal(), Mask.full()
LIKE = torch.empty(2, 1, 0, 3), torch.empty(2, 1, 0, 2)
PER_COLUMN = 2 * (3 + 2)  # numbers of both tensors


class Message(NamedTuple):
    """A send or a receive, as this rank posted it."""

    what: str
    peer: int
    numel: int
    dtype: torch.dtype


def posted(what: str, message: P2P) -> Message:
    return Message(what, message.peer, message.flat.numel(), message.flat.dtype)


@contextmanager
def recorded() -> Iterator[list[list[Message]]]:
    """The messages of each hop that has any."""
    hops: list[list[Message]] = []
    start = ProcessGroupTransport.start

    def record(
        self: ProcessGroupTransport, receives: list[P2P], sends: list[P2P]
    ) -> Sequence[Work]:
        hop = [posted("irecv", x) for x in receives] + [posted("isend", x) for x in sends]
        hops.extend([hop] if hop else [])
        return start(self, receives, sends)

    with patch.object(ProcessGroupTransport, "start", record):
        yield hops


def messages_of(planned: Sequence[Hop], per_column: int, dtype: torch.dtype) -> list[list[Message]]:
    """What a rank has to receive and to send at each hop that has messages, by its plan."""
    hops = [
        [
            Message(what, transfer.peer, len(transfer.cols) * per_column, dtype)
            for what, transfers in (("irecv", hop.receives), ("isend", hop.sends))
            for transfer in transfers
        ]
        for hop in planned
    ]
    return [hop for hop in hops if hop]


RINGS = {
    "zigzag": Ring(ZigZag(), 4, 16, CAUSAL),
    "striped, three": Ring(Striped(), 3, 12, FULL),
    "contiguous": Ring(Contiguous(), 4, 16, CAUSAL),
    "uneven": Ring(Contiguous(), 4, 10, FULL),
    "empty shards": Ring(ZigZag(), 4, 5, FULL),
    "window": Ring(Contiguous(), 4, 16, Mask.sliding(2)),
    "window ahead": Ring(Contiguous(), 3, 12, Mask(0, 1)),
    "two ranks": Ring(ZigZag(), 2, 8, CAUSAL),
    "one rank": Ring(ZigZag(), 1, 8, CAUSAL),
    "documents": Ring(Contiguous(), 4, 16, CAUSAL, ((0, 4, 8, 9, 12, 16),)),
    "direct": Ring(ZigZag(), 4, 48, Mask.sliding(3)),
    "direct, a whole shard at each hop": Ring(Contiguous(), 4, 16, Mask.local(1, 4)),
    "direct, documents": Ring(ZigZag(), 4, 64, CAUSAL, ((0, 11, 19, 27, 34, 43, 53, 60),)),
    "two ranges": Ring(ZigZag(), 2, 32, Mask.local(2, 3)),
    "direct, many ranges": Ring(BlockCyclic(3), 4, 144, Mask.local(1, 1)),
    "many ranges": Ring(BlockCyclic(3), 4, 144, Mask.local(1, 1), strategy="around"),
    "striped, many ranges": Ring(Striped(), 3, 120, Mask.sliding(2), (tuple(range(0, 121, 5)),)),
    "packets that shrink": Ring(
        ZigZag(), 4, 64, CAUSAL, ((0, 20, 64), (0, 30, 64)), strategy="around"
    ),
    "rows of documents": Ring(ZigZag(), 4, 16, CAUSAL, ((0, 2, 16), (0, 14, 15))),
}


@pytest.mark.parametrize("ring", RINGS.values(), ids=list(RINGS))
def test_rotation(pool: Pool, ring: Ring) -> None:
    answers = pool.run(ring.world_size, _rotate, ring)
    for rank, (hops, held, num_buffers) in enumerate(answers):
        plan = ring.plans()[rank]
        assert hops == messages_of(plan.shards, PER_COLUMN, torch.float32), f"rank {rank}"
        assert num_buffers <= 2 + (ring.is_direct or shrinks(plan))
        whole, *others = plan.steps
        steps = [whole, *(step if step.cols else whole for step in others)]
        for step, positions in zip(steps, held, strict=True):
            expected = ring.positions(step.source)[indices_of(step.cols)].tolist()
            assert positions == expected, f"in step {step.number} of rank {rank}"


@pytest.mark.parametrize("name", ["zigzag", "direct", "uneven"])
def test_large_messages_of_processes(pool: Pool, name: str) -> None:
    ring = RINGS[name]
    for rank, moved in enumerate(pool.run(ring.world_size, _rotate_apart, ring)):
        for step, positions in moved:
            if step.cols:
                assert positions == ring.positions(step.source)[indices_of(step.cols)].tolist()
        assert len(moved) == len(ring.plans()[rank].steps)


def _rotate_apart(ring: Ring) -> list[tuple[Step, list[float]]]:
    """Each step with the positions of its keys, where key and value go apart."""
    plan = ring.plans()[dist.get_rank()]
    pair, moved = shard_of(ring, plan.rank), []
    with (
        patch.object(rotation, "LARGE", 1),
        ShardRotation(ProcessGroupTransport(dist.group.WORLD), plan, pair) as shards,
    ):
        for step in plan.steps:
            label = Label("forward", step.number, step.source)
            moved.append((step, _positions(shards.begin_step(step, label))))
            shards.end_step(step, label)
    return moved


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("ring", RINGS.values(), ids=list(RINGS))
def test_what_is_large_goes_from_where_it_lies(
    ring: Ring, is_dense: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rotation, "LARGE", 1)
    play(ring.world_size, lambda rank, transport: _rotate_large(ring, is_dense, rank, transport))


class Recording(PlayedTransport):
    """Knows what it was to move at each hop."""

    def record(self) -> None:
        self.hops: list[tuple[list[P2P], list[P2P]]] = []

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        self.hops.append((receives, sends))
        return super().start(receives, sends)


def _rotate_large(ring: Ring, is_dense: bool, rank: int, transport: PlayedTransport) -> None:
    transport.__class__ = Recording
    assert isinstance(transport, Recording)
    transport.record()
    plan = ring.plans()[rank]
    pair = shard_of(ring, rank)
    wide = (torch.cat([x, x], 3)[..., : x.shape[3]] for x in pair)
    key, value = (x[:1] for x in pair) if is_dense else wide
    own = {x.untyped_storage().data_ptr() for x in (key, value)}
    with ShardRotation(transport, plan, (key, value)) as shards:
        for step in plan.steps:
            label = Label("forward", step.number, step.source)
            held = _positions(shards.begin_step(step, label))
            whole = step if step.cols else plan.steps[0]
            seen = ring.positions(whole.source)[indices_of(whole.cols)].tolist()
            assert held == seen, f"in step {step.number}"
            shards.end_step(step, label)
    planned = [hop for hop in plan.shards if hop.sends or hop.receives]
    moved = [sides for sides in transport.hops if any(sides)]
    for hop, (receives, sends) in zip(planned, moved, strict=True):
        expected = [
            [(x.peer, x.source) for x in side for _ in range(1 + (x.source == sender(x)))]
            for side, sender in ((hop.receives, lambda x: x.peer), (hop.sends, lambda x: rank))
        ]
        assert [[(x.peer, x.source) for x in side] for side in (receives, sends)] == expected
        in_place = {x.source for x in sends if x.flat.untyped_storage().data_ptr() in own}
        one_piece = {x.source for x in hop.sends if x.source == rank and len(x.cols.spans) == 1}
        assert in_place == (one_piece if is_dense else set())


def shrinks(plan: Plan) -> bool:
    """Whether a packet that came goes on as a part of it."""
    came = {x.source: x.cols for hop in plan.shards for x in hop.receives}
    sent = [x for hop in plan.shards for x in hop.sends if x.source != plan.rank]
    return any(came[x.source] != x.cols for x in sent)


def _rotate(ring: Ring) -> tuple[list[list[Message]], list[list[float]], int]:
    """Messages, the positions of the keys of each step, and how many buffers were used."""
    plan = ring.plans()[dist.get_rank()]
    transport = Counting(dist.group.WORLD)
    held = []
    with recorded() as hops, ShardRotation(transport, plan, shard_of(ring, plan.rank)) as shards:
        for step in plan.steps:
            label = Label("forward", step.number, step.source)
            kv = shards.begin_step(step, label)
            held.append(_positions(kv))
            shards.end_step(step, label)
            assert _positions(kv) == held[-1], "what is computed on stays"
    assert transport.allocated == transport.freed, "all buffers were given back"
    return hops, held, len(transport.allocated)


def shard_of(ring: Ring, rank: int) -> Pair:
    """Keys and values that say which positions they are of."""
    mine = ring.positions(rank).float().view(1, 1, -1, 1)
    key, value = (mine.expand(2, 1, -1, x.shape[3]).clone() for x in LIKE)
    return key, value


class Counting(ProcessGroupTransport):
    """Knows the addresses of its buffers."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.allocated: set[int] = set()
        self.freed: set[int] = set()
        self.works: Sequence[Work] = ()

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.allocated.add(buffer.data_ptr())
        return buffer

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        self.works = super().start(receives, sends)
        return self.works

    def free(self, buffer: Tensor) -> None:
        assert buffer.data_ptr() not in self.freed, "once"
        self.freed.add(buffer.data_ptr())


@on_ranks(2)
def test_buffers_go_back_when_a_kernel_raises() -> None:
    """Those that messages may still write to do not; the next ring finds its messages."""
    last, first = Counting(dist.group.WORLD), Counting(dist.group.WORLD)
    with pytest.raises(RuntimeError, match="a kernel"):
        _raise_in(1, last)
    assert last.allocated
    assert last.allocated == last.freed, "nothing was in flight any more"
    with pytest.raises(RuntimeError, match="a kernel"):
        _raise_in(0, first)
    for work in first.works:
        work.wait()
    assert first.allocated
    assert not first.freed, "messages were in flight"


def _raise_in(number: int, transport: Counting) -> None:
    ring = Ring(ZigZag(), 2, 8, FULL)
    plan = ring.plans()[dist.get_rank()]
    with ShardRotation(transport, plan, shard_of(ring, plan.rank)) as shards:
        for step in plan.steps:
            label = Label("forward", step.number, step.source)
            shards.begin_step(step, label)
            if step.number == number:
                raise RuntimeError("a kernel")
            shards.end_step(step, label)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float64])
@on_ranks(3)
def test_keys_and_values_travel_in_a_dtype(kv_dtype: torch.dtype) -> None:
    ring = Ring(Contiguous(), 3, 12, FULL)
    plan = ring.plans()[dist.get_rank()]
    key, value = shard_of(ring, plan.rank)
    shard, transport = (key + 2**-12, value + 2**-12), ProcessGroupTransport(dist.group.WORLD)
    with recorded() as hops, ShardRotation(transport, plan, shard, kv_dtype) as shards:
        for step in plan.steps:
            label = Label("forward", step.number, step.source)
            kv = shards.begin_step(step, label)
            whole = ring.positions(step.source).float() + 2**-12
            expected = whole.to(kv_dtype).float() if step.number else whole
            assert kv[0].dtype == torch.float32
            assert _positions(kv) == expected.tolist()
            shards.end_step(step, label)
    assert {message.dtype for hop in hops for message in hop} == {kv_dtype}


def _positions(pair: Pair) -> list[float]:
    columns = torch.cat([x.permute(2, 0, 1, 3).flatten(1) for x in pair], 1)
    assert (columns == columns[:, :1]).all(), f"shards are mixed up:\n{columns}"
    return columns[:, 0].tolist()


# Keys and values in eight bits: all ranks see the owner's, rounded; results are those of them.

WINDOW = Mask.sliding(37)
DOCUMENTS = ((0, 90, 91, 260, 300),)
DTYPES = list(BY_DTYPE)

ROUNDED_RINGS = {
    "one rank": Ring(ZigZag(), 1, 150, CAUSAL),
    "around": Ring(ZigZag(), 3, 300, CAUSAL, strategy="around"),
    "direct, window": Ring(Striped(), 4, 332, WINDOW, strategy="direct"),
    "ring, documents": Ring(ZigZag(), 2, 300, CAUSAL, DOCUMENTS),
    "gathered, documents": Ring(Contiguous(), 3, 300, CAUSAL, DOCUMENTS, strategy="all_gather"),
    "cross": Ring(Contiguous(), 2, 60, FULL, key_seq_len=300),
    "heads": Ring(ZigZag(), 2, 300, CAUSAL, strategy="ulysses"),
    "heads, cross": Ring(Contiguous(), 2, 60, FULL, key_seq_len=300, strategy="ulysses"),
    "empty ranks": Ring(Contiguous(), 4, 5, FULL, strategy="ulysses"),
    "two levels": Ring(Striped(), 4, 332, WINDOW, strategy="ulysses:2"),
    "two levels, gathered": Ring(
        BlockCyclic(7), 4, 331, CAUSAL, DOCUMENTS, strategy="ulysses:2+all_gather"
    ),
    "two levels, cross": Ring(ZigZag(), 4, 60, FULL, key_seq_len=301, strategy="ulysses:2"),
}


@pytest.mark.parametrize("name", ROUNDED_RINGS)
def test_results_are_those_of_the_dequantised(name: str) -> None:
    """In float64, so that nothing but the rounding to eight bits is seen."""
    number = list(ROUNDED_RINGS).index(name)
    case = Case(
        ROUNDED_RINGS[name],
        policy=TransferPolicy(kv_dtype=DTYPES[number % 2]),
        sinks=(0.5, -1.0, 2.0, 0.0) if number % 3 else (),
        softcap=1.5 if number % 4 == 2 else 0.0,
        grad_lse=number % 2 == 0,
    )
    setting = Setting(case.ring.world_size, case.ring.world_size)
    results = played_results(case, setting)
    for rank, of_rank in enumerate(results):
        check_rank(case, of_rank, setting, rank)
    plain = replace(case, policy=TransferPolicy())
    difference = (case.expected()[0] - plain.expected()[0]).abs().max()
    assert 1e-4 < difference < 0.2, "keys and values were rounded"


@pytest.mark.parametrize("name", ["around", "direct, window", "gathered, documents"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_ranks_see_the_same_bits(name: str, dtype: torch.dtype) -> None:
    """Whatever columns come, and with whatever blocks they come."""
    ring = ROUNDED_RINGS[name]
    generator = torch.Generator().manual_seed(3)
    lengths = [len(ring.positions(rank)) for rank in range(ring.world_size)]
    shards = [
        tuple(torch.randn(2, 2, length, dim, generator=generator).bfloat16() for dim in (8, 4))
        for length in lengths
    ]
    how = BY_DTYPE[dtype], 5
    rounded = [
        tuple(
            dequantise(quantise(x, *how), torch.bfloat16)
            for quantise, x in zip((quantise_keys, quantise_values), shard, strict=True)
        )
        for shard in shards
    ]

    def run(rank: int, transport: PlayedTransport) -> int:
        plan, seen = ring.plans()[rank], 0
        key, value = shards[rank]
        with QuantisedRotation(transport, plan, (key, value), dtype) as rotation:
            for step in plan.steps:
                label = Label("forward", step.number, step.source)
                pair = rotation.begin_step(step, label)
                if step.cols or not step.number:  # else nothing is seen
                    for x, whole in zip(pair, rounded[step.source], strict=True):
                        assert x.dtype == torch.bfloat16
                        at = indices_of(step.cols) if step.number else slice(None)
                        assert torch.equal(x, whole[:, :, at])
                    seen += len(step.cols)
                rotation.end_step(step, label)
        return seen

    with patch.object(quantised_rotation, "BLOCK_SIZE", 5):
        assert min(play(ring.world_size, run)) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_packet_is_one_message_of_the_bytes_counted(dtype: torch.dtype) -> None:
    pair = torch.randn(2, 3, 200, 8), torch.randn(2, 3, 200, 4)
    whole = QuantisedPacket.of(0, pair, dtype)
    for spans in ((), ((0, 200),), ((0, 1), (70, 100)), ((63, 65), (127, 129), (199, 200))):
        cols = Cols(spans)
        size = packet_size(dtype, 2, 3, (8, 4))(Transfer(0, cols, 1))
        packet = whole.empty_in(torch.zeros(size + 7, dtype=torch.uint8), 0, cols)
        packet.take(whole)
        (message,) = packet.messages(is_apart=True)
        assert (message.dtype, message.nbytes) == (torch.uint8, size)
        found, all_of_it = (x.dequantised(torch.float32) for x in (packet, whole))
        for x, y in zip(found, all_of_it, strict=True):
            assert torch.equal(x, y[:, :, indices_of(cols)])


def test_about_half_of_the_bytes() -> None:
    """At most 0.53 of those of bfloat16: whole packets, those of documents, and all-to-alls.

    Queries and outputs of 32 heads do not change: 24 of 32 are sent to others, or 16.
    """
    queries = 2 * 2 * 2048 * 128
    others = {"ring": 0, "ulysses": 24 * queries, "ulysses:2": 16 * queries}
    for strategy, of_queries in others.items():
        for cu_seqlens in (None, [0, 1000, 5000, 8192]):
            sent = [
                x.forward.sent - of_queries
                for kv_dtype in (None, "int8", "fp8")
                for x in compare_strategies(
                    *(CAUSAL, 8192, 4, (32, 8), 128, cu_seqlens),
                    policy=TransferPolicy(kv_dtype=kv_dtype),
                    strategies=[strategy],
                ).rows
            ]
            assert sent[1] == sent[2]
            assert 0.5 < sent[1] / sent[0] <= 0.53
    assert BLOCK_SIZE == 64


def test_a_device_without_the_format() -> None:
    """The error says what serves; here it is a dtype that no device converts to."""
    found = quantised_rotation._why_no_numbers(torch.bits8, torch.device("cpu"))
    assert found is not None
    assert "not implemented" in found
    pair = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    message = r'on cpu cannot travel as torch\.float8_e4m3fn: none; use .*kv_dtype="int8"'
    with (
        patch.object(quantised_rotation, "_why_no_numbers", return_value="none"),
        pytest.raises(ValueError, match=message),
    ):
        QuantisedPacket.of(0, pair, torch.float8_e4m3fn)
