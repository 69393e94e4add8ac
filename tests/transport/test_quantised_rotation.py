"""Keys and values in eight bits: all ranks see the owner's, rounded; results are those of them."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from dtensor_ring import BlockCyclic, Contiguous, Mask, Striped, ZigZag, compare_strategies
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.route import Transfer
from dtensor_ring.quantised.block_scales import dequantise, quantise_keys, quantise_values
from dtensor_ring.transport import quantised_rotation
from dtensor_ring.transport.quantised_rotation import (
    BLOCK_SIZE,
    BY_DTYPE,
    QuantisedPacket,
    QuantisedRotation,
    packet_size,
)
from dtensor_ring.transport.transport import TransferPolicy
from tests.columns import indices_of
from tests.played import PlayedTransport, play
from tests.rings import Case, Ring
from tests.test_fuzz import Setting, check_rank, played_results

CAUSAL, FULL, WINDOW = Mask.causal(), Mask.full(), Mask.sliding(37)
DOCUMENTS = ((0, 90, 91, 260, 300),)
DTYPES = list(BY_DTYPE)

RINGS = {
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


@pytest.mark.parametrize("name", RINGS)
def test_results_are_those_of_the_dequantised(name: str) -> None:
    """In float64, so that nothing but the rounding to eight bits is seen."""
    number = list(RINGS).index(name)
    case = Case(
        RINGS[name],
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
    ring = RINGS[name]
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
