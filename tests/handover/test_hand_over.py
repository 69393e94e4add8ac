"""Sharded caches that change hands, the bytes that are sent, and errors: no rank waits in vain."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

from dtensor_ring import HandOver, RingError, ShardedCache, hand_over
from dtensor_ring.extension import checked_barrier
from dtensor_ring.handover.call import end_calls, group_beside, handing_over
from dtensor_ring.handover.plan import head_span
from dtensor_ring.transport.transport import ProcessGroupTransport
from tests.decode.caches import LAYERS, tokens
from tests.pool import Pool, on_ranks

PAIRS = [
    ((0,), (1,)),
    ((0, 1), (2, 3)),
    ((0, 1, 2), (3,)),
    ((3,), (0, 1, 2)),
    ((0, 1, 2, 3), (1, 2)),
    ((1, 2), (0, 1, 2, 3)),
    ((0, 1), (0, 1)),
]
"""Ranks that give, and ranks that get: others, the same, and some of both."""
FORMATS = [("zigzag", "block_cyclic:3", None), ("whole_blocks:64", "whole_blocks:64", "int8")]
FORMATS += [("contiguous", "zigzag", None), ("whole_blocks:128", "whole_blocks:64", "fp8")]


def cache_on(ranks: Sequence[int], *how: Any) -> ShardedCache | None:
    """A cache on these ranks of the world, `None` on others; all ranks must call it."""
    mesh = DeviceMesh("cpu", [*ranks])
    return None if mesh.get_coordinate() is None else ShardedCache(mesh, len(LAYERS), *how)


def appended(cache: ShardedCache | None, num_tokens: int, seed: int) -> list[list[Tensor]]:
    """Append tokens to a cache, and return what each layer appends, whole."""
    torch.manual_seed(seed)
    wholes = [[*tokens(layer, 2, num_tokens)] for layer in LAYERS]
    if cache is None:
        return wholes
    begin, size = cache.seq_len, cache.mesh.size()
    cache.begin(cache.layout.dealt_length(num_tokens, size), dealt=True)
    given = cache.positions[cache.positions >= begin] - begin
    for layer, pair in zip(cache, wholes, strict=True):
        layer.append(*(x[:, :, given.clamp(max=num_tokens - 1)] for x in pair))
    cache.crop(begin + num_tokens)
    return wholes


@contextmanager
def sent_bytes() -> Iterator[list[int]]:
    """The bytes of each message that this rank sends by a transport."""
    start, found = ProcessGroupTransport.start, list[int]()

    def counted(self: Any, receives: Any, sends: Any) -> Any:
        found.extend(x.flat.nbytes for x in sends)
        return start(self, receives, sends)

    with mock.patch.object(ProcessGroupTransport, "start", counted):
        yield found


def raw(cache: ShardedCache) -> list[Tensor]:
    """What is kept, as it is kept."""
    found: list[Tensor] = []
    for layer in cache:
        for memory in layer._memory:
            if hasattr(memory, "buffer"):
                found.append(memory.buffer)
            else:
                q = memory.tokens.closed
                found += [q.data.view(torch.uint8), q.scales, memory.tokens.open]
                found += [] if q.means is None else [q.means]
    return found


def check_moves(pairs: list[Any], formats: list[Any]) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for number, (one, other) in enumerate(pairs):
        layout, to, kv_dtype = formats[number % len(formats)]
        source = cache_on(one, layout, 64 if kv_dtype else 4, kv_dtype)
        target = cache_on(other, to, 64 if kv_dtype else 4, kv_dtype)
        num_tokens = 64 * 5 + 17 if kv_dtype else 29
        wholes = appended(source, num_tokens, number)
        if kv_dtype and source is not None:  # what the source rounded is to stay so
            wholes = [list(source.whole(i)) for i in range(len(LAYERS))]
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, wholes)
        wholes = told[one[0]]
        with sent_bytes() as sent:
            hand_over(source, target, mesh)
        check_bytes(source, target, sum(sent))
        check_held(target, wholes, num_tokens)


def check_held(target: ShardedCache | None, wholes: Any, num_tokens: int) -> None:
    if target is None:
        return
    assert (target.seq_len, target.batch) == (num_tokens, 2)
    for number, pair in enumerate(wholes):
        assert all(map(torch.equal, target.whole(number), pair))
    # It grows, and is cropped, like any other.
    target.begin(3, dealt=False)
    for layer, shape in zip(target, LAYERS, strict=True):
        layer.append(*tokens(shape, 2, 3))
    for layer, pair in zip(target, wholes, strict=True):
        own = target.positions
        own = own[own < num_tokens]
        assert torch.equal(layer.keys[:, :, : len(own)], pair[0][:, :, own])
    target.crop(2)
    assert target.seq_len == 2


def check_bytes(source: Any, target: Any, sent: int) -> None:
    """What changes its rank is sent once, and nothing else."""
    rank, told = dist.get_rank(), [None] * dist.get_world_size()
    bytes_of = 0 if source is None else sum(x.nbytes for x in raw(source))
    held = [[] if x is None else x.positions.tolist() for x in (source, target)]
    dist.all_gather_object(told, (bytes_of, sent, *held))
    total, moved = (sum(x[i] for x in told) for i in (0, 1))
    before, after = ({x: r for r, row in enumerate(told) for x in row[i]} for i in (2, 3))
    assert before.keys() == after.keys()
    leaving = [x for x, at in before.items() if after[x] != at]
    if len(leaving) == len(before):
        assert moved == total
    elif source is not None and source.kv_dtype is None:
        assert sent * len(before) == total * sum(before[x] == rank for x in leaving)
    assert moved <= total


def test_hand_over(pool: Pool) -> None:
    pool.run(4, check_moves, PAIRS, FORMATS)


@on_ranks(4)
def test_tensor_parallel_heads() -> None:
    """Tensor-parallel ranks get the columns of their heads; heads that are fewer are copied."""
    mesh = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    source, target = cache_on((0, 1, 2)), ShardedCache(grid["cp"], len(LAYERS))
    wholes = appended(source, 29, 0)
    hand_over(source, target, mesh, heads=grid["tp"])
    part = grid["tp"].get_local_rank()
    for layer, pair in zip(target, wholes, strict=True):
        for x, found in zip(pair, (layer.keys, layer.values), strict=True):
            begin, end = head_span(part, 2, x.shape[1])
            assert torch.equal(found, x[:, begin:end, target.positions])


@on_ranks(3)
def test_layers_are_sent_one_by_one() -> None:
    """Layers are sent while later ones are computed; padding does not move."""
    mesh, source, target = init_device_mesh("cpu", (3,)), cache_on((0, 1)), cache_on((2,))
    torch.manual_seed(0)
    pairs = [tuple(torch.randn(2, 2, 10, 8) for _ in range(2)) for _ in LAYERS]
    if source is not None:
        source.begin(10, dealt=True)
    with (
        sent_bytes() as sent,
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as trace,
        HandOver(source, target, mesh, like=pairs[0], seq_len=9) as moving,
    ):
        for layer, pair in zip(source or (), pairs, strict=False):
            with record_function(f"layer {layer.number}"):
                layer.append(*(x[:, :, source.positions] for x in pair))
            moving.send(layer.number)
    events = sorted(trace.events(), key=lambda x: x.time_range.start)
    order = [
        x.name.replace("ring hand over, ", "")
        for x in events
        if x.name.startswith("layer") or ("hand over" in x.name and "pack" not in x.name)
    ]
    rank = dist.get_rank()
    sends = f", source {rank}: send"
    if source is not None:
        assert order == [
            *(f"{x} {i}{y}" for i in range(3) for x, y in (("layer", ""), ("step", sends))),
            *(f"step {i}, source {rank}: wait" for i in range(3)),
        ]
        num_cols = sum(source.positions < 9)
        assert sent == [num_cols * 2 * 2 * 2 * 8 * 4] * 3
        assert moving.num_sent == sum(sent)
    if target is not None:
        for number, pair in enumerate(pairs):
            assert all(map(torch.equal, target.whole(number), (x[:, :, :9] for x in pair)))


@on_ranks(3)
def test_what_does_not_fit() -> None:
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    source = cache_on((0, 1))
    target, rounded, filled = (cache_on((2,), *x) for x in ((), (None, 64, "int8"), ()))
    fewer = None if target is None else ShardedCache(target.mesh, 2)
    appended(source, 9, 0)
    appended(filled, 2, 0)
    for given, match in (
        ((None, target), "no rank has a source"),
        ((source, None), "no rank has a target"),
        ((source, rounded), "the same kv_dtype, the source has None and the target int8"),
        ((source, fewer), "the same layers, the source has 3 and the target 2"),
        ((source, filled), "the target must be empty, it has"),
        ((source if rank else None, target), r"all ranks of the source, .* missing are \[0\]"),
    ):
        with pytest.raises(ValueError, match=match):
            hand_over(*given, mesh)
    with pytest.raises(
        ValueError, match="layer 0 of the source has no keys" if rank < 2 else "differ"
    ):
        hand_over(cache_on((0, 1)), target, mesh)
    if rank == 1 and source is not None:
        source.crop(8)
    with pytest.raises(ValueError, match="all ranks of the source must have the same cache"):
        hand_over(source, target, mesh)


@on_ranks(3)
def test_a_rank_raises() -> None:
    """A rank raises before its second layer: all ranks know at once, and none waits."""
    mesh, rank = init_device_mesh("cpu", (3,)), dist.get_rank()
    source, target = cache_on((0, 1)), cache_on((2,))
    appended(source, 9, 0)
    begin = time.monotonic()

    def move() -> None:
        with HandOver(source, target, mesh) as moving:
            if rank == 1:
                moving.send(0)
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError if rank == 1 else RingError):
        move()
    assert time.monotonic() - begin < 30, "a deadline against hangs"
    assert target is None or not target.seq_len


CPU = torch.device("cpu")


def waits(group: Any) -> None:
    """For a message that rank 0 does not send."""
    with handing_over(group, {}, CPU) as posts:
        posts.hear(0, torch.zeros(1))
        dist.barrier()


def leaves(group: Any, error: BaseException) -> None:
    with handing_over(group, {}, CPU):
        dist.barrier()  # rank 1 waits now
        raise error


@pytest.mark.parametrize("error", [RingError, ValueError, KeyboardInterrupt])
@on_ranks(2)
def test_an_error_ends_a_hand_over(error: type[BaseException]) -> None:
    group, begin = group_beside(init_device_mesh("cpu", (2,)).get_group()), time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(error, match="of another group") as caught:
            leaves(group, error("of another group"))
        assert caught.value.__cause__ is None
    else:
        with pytest.raises(RingError, match=f"{error.__name__}: of another group"):
            waits(group)
    assert time.monotonic() - begin < 30, "a deadline against hangs"


def hears_and_raises(group: Any) -> None:
    with handing_over(group, {}, CPU) as posts:
        posts.hear(1 - dist.get_rank(), torch.zeros(1))
        raise ValueError("on all")


@on_ranks(2)
def test_all_ranks_raise() -> None:
    """At the same point, but what they wait for was never sent."""
    group, begin = init_device_mesh("cpu", (2,)).get_group(), time.monotonic()
    with pytest.raises(ValueError, match="on all"):
        hears_and_raises(group)
    assert time.monotonic() - begin < 30, "a deadline against hangs"


@on_ranks(2)
def test_calls_of_another_group_end() -> None:
    group, begin = init_device_mesh("cpu", (2,)).get_group(), time.monotonic()
    if dist.get_rank() == 0:
        end_calls(group, ValueError("elsewhere"))
        end_calls(group, ValueError("again"))  # it is shut down already
    else:
        told = "ValueError: elsewhere|they differ in direction"  # whichever comes first
        with pytest.raises(RingError, match=told), checked_barrier(group, "a comparison", {}):
            pass
    assert time.monotonic() - begin < 30, "a deadline against hangs"


@on_ranks(2)
def test_a_group_beside_another() -> None:
    """Messages of a group and of the one beside it are apart, and each compares its own calls."""
    group = init_device_mesh("cpu", (2,)).get_group()
    beside, rank, heard = group_beside(group), dist.get_rank(), torch.zeros(2)
    assert group_beside(group) is beside is not group
    with handing_over(beside, {"step": 1}, CPU) as posts:
        with checked_barrier(group, "within", {}):
            pass
        if rank:
            posts.hear(0, heard)
        else:
            posts.tell([1], torch.tensor([3.0, 4.0]))
    assert heard.tolist() == [3 * rank, 4 * rank]
    with (
        pytest.raises(RingError, match=r"they differ in step: . on rank"),
        handing_over(beside, {"step": rank}, CPU),
    ):
        pass
