"""All-to-alls whose keys and values travel in eight bits: who gets which bits, and what is sent."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring import BlockCyclic, Contiguous, Mask, Striped, TransferPolicy, ZigZag
from dtensor_ring.all_to_all.op import all_to_all_op, flatten_all_to_all
from dtensor_ring.all_to_all.plan import all_to_all_plan, head_shard_of
from dtensor_ring.all_to_all.ulysses import ulysses_attention
from dtensor_ring.planning.plan import KeyOwners
from dtensor_ring.quantised.block_scales import dequantise
from dtensor_ring.transport import quantised_rotation
from dtensor_ring.transport.quantised_rotation import (
    QuantisedPacket,
    ScaleBlocks,
    packet_size,
    quantised_pair,
)
from tests.all_to_all.test_op import TABLE, Case
from tests.columns import indices_of
from tests.played_group import PlayedGroup, play_group
from tests.rings import Case as Attention
from tests.rings import Ring

CASES = {
    "zigzag, 2 of 2": Case(ZigZag(), ZigZag(), 2, 2, 24),
    "striped, 2 of 4": Case(Striped(), Striped(), 2, 4, 44),
    "block cyclic, 3 of 6": Case(BlockCyclic(2), BlockCyclic(2), 3, 6, 50, (9, 3, 3), 3),
    "runs, 2 of 4": Case(TABLE, TABLE, 2, 4, 20),
    "empty ranks": Case(Contiguous(), Contiguous(), 4, 4, 5),
    "copies of a head": Case(ZigZag(), ZigZag(), 4, 4, 24, (4, 1, 1), 1),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a shard has several blocks, and the last one few tokens."""
    monkeypatch.setattr(quantised_rotation, "BLOCK_SIZE", 5)


def owners_of(case: Case) -> KeyOwners:
    return KeyOwners(case.to, case.heads, case.world_size, case.seq_len)


def rounded_after(case: Case, rank: int, dtype: torch.dtype) -> list[Tensor]:
    """Key and value after the exchange, rounded by their owners one by one."""
    first = rank // case.heads * case.heads
    shard = head_shard_of(rank % case.heads, case.heads, case.num_key_heads)
    found = [x.clone() for x in case.after(rank)[1:]]
    for owner, columns in enumerate(owners_of(case).columns(rank), first):
        _, key, value = case.before(owner)
        for x, q in zip(found, quantised_pair((key, value), dtype), strict=True):
            span = slice(*shard.span(case.num_key_heads, case.num_key_heads))
            x[:, :, columns] = dequantise(q, x.dtype)[:, span]
    return found


@DTYPES
@pytest.mark.parametrize("name", CASES)
def test_everybody_gets_what_the_owners_rounded(name: str, dtype: torch.dtype) -> None:
    """To the bit, also as it travels on; gradients pass straight through."""
    case = CASES[name]

    def run(group: PlayedGroup) -> None:
        inputs, rank = [x.requires_grad_() for x in case.before(group.rank())], group.rank()
        args = case.args(group.group_name, kv_dtype=dtype)
        results = all_to_all_op(inputs, *flatten_all_to_all(args))
        (query, *pair), travelling = results[:3], results[3:]
        assert torch.equal(query, case.after(rank)[0])
        expected = rounded_after(case, rank, dtype)
        for found, wanted in zip(pair, expected, strict=True):
            assert torch.equal(found, wanted)
        assert len(travelling) == (case.heads < case.world_size)
        for bytes_of_both in travelling:
            blocks = ScaleBlocks(5, owners_of(case))
            whole = pair[0].detach(), pair[1].detach()
            packet = QuantisedPacket.lying_in(bytes_of_both, rank, whole, dtype, blocks)
            for found, wanted in zip(packet.dequantised(torch.float64), expected, strict=True):
                assert torch.equal(found, wanted)
        grads = torch.autograd.grad(results[:3], inputs, [x.detach() for x in results[:3]])
        # The reverse exchange of the results, whose copies of a head are summed.
        back = case.args(group.group_name, is_back=True, num_tokens=inputs[0].shape[2])
        returned = all_to_all_op([x.detach() for x in results[:3]], *flatten_all_to_all(back))
        for found, wanted in zip(grads, returned, strict=True):
            assert torch.equal(found, wanted)

    play_group(case.world_size, run)


@pytest.mark.parametrize("name", ["zigzag, 2 of 2", "striped, 2 of 4", "block cyclic, 3 of 6"])
def test_fake_kernels_promise_what_the_real_ones_return(name: str) -> None:
    case = CASES[name]

    def run(group: PlayedGroup) -> None:
        options = flatten_all_to_all(case.args(group.group_name, kv_dtype=torch.int8))
        with torch.no_grad():
            real = all_to_all_op(case.before(group.rank()), *options)
            with FakeTensorMode() as mode:
                inputs = [mode.from_tensor(x) for x in case.before(group.rank())]
                fake = all_to_all_op(inputs, *options)
        for one, other in zip(real, fake, strict=True):
            assert (one.shape, one.dtype, one.stride()) == (
                other.shape,
                other.dtype,
                other.stride(),
            )

    play_group(case.world_size, run)


@pytest.mark.parametrize("name", CASES)
def test_owners_are_those_of_the_exchange(name: str) -> None:
    """Columns by owner, and the blocks in the order in which they arrive."""
    case, owners = CASES[name], owners_of(CASES[name])
    for rank in range(case.world_size):
        plan = all_to_all_plan(case.to, case.to, case.heads, rank, case.world_size, case.seq_len)
        columns = [x.tolist() for x in owners.columns(rank)]
        arrived = [indices_of(x.cols) for x in plan.receives]
        assert [x for x in columns if x] == arrived
        table, end = owners.block_table(rank, 5), 0
        for of_owner in columns:
            assert table[of_owner].tolist() == [end + i // 5 for i in range(len(of_owner))]
            end += -(-len(of_owner) // 5)


@pytest.mark.parametrize("strategy", ["ulysses", "ulysses:2"])
def test_bytes_of_the_messages(strategy: str) -> None:
    """Queries and outputs go as they are, keys and values in half of the bytes; in one message."""
    ring = Ring(ZigZag(), 4, 1024, Mask.full(), strategy=strategy)
    case = Attention(ring, torch.bfloat16, (8, 4), (64, 64), policy=TransferPolicy(kv_dtype="int8"))
    before = replace(case, ring=replace(ring, strategy="ring"))

    def run(group: PlayedGroup) -> list[int]:
        sent, start = list[int](), group.transport.start

        def counted(receives: list, sends: list) -> object:
            sent.extend(x.flat.nbytes for x in sends)
            return start(receives, sends)

        with torch.no_grad(), patch.object(group.transport, "start", counted):
            shards = before.shards(group.rank())
            ulysses_attention(*shards, case.call(group_name=group.group_name), with_lse=False)
        return sent

    with patch.object(quantised_rotation, "BLOCK_SIZE", 64):
        heads = 4 if strategy == "ulysses" else 2
        tokens = 2 * 256 * 64 * 2 // heads  # bytes of a head of a shard, by rank that gets heads
        packet = packet_size(torch.int8, 2, 4 // heads, (64, 64))
        assert packet.of_shard(256) <= 0.53 * 8 * tokens
        there = [8 * tokens + packet.of_shard(256)] * (heads - 1)
        ring_of_groups = [packet.of(512, 8)] * (4 // heads - 1)
        for sent in play_group(4, run):
            assert sent == [*there, *ring_of_groups, *[8 * tokens] * (heads - 1)]
