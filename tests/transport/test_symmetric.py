"""Copy engines as a transport: rings over files, the order on streams, and what is refused."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dtensor_ring import (
    Contiguous,
    Mask,
    RingError,
    SequenceAxis,
    Striped,
    TransferPolicy,
    Transport,
    ZigZag,
)
from dtensor_ring.transport import rotation, symmetric
from dtensor_ring.transport.symmetric import (
    NUM_SLOTS,
    CudaMemory,
    MovedHop,
    Outbox,
    SymmetricTransport,
)
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, transport_of
from tests.dense import dense_attention
from tests.file_memory import FileMemory
from tests.layouts import LAYOUTS
from tests.meshes import random_inputs
from tests.played import PlayedTransport, play
from tests.played_group import PlayedGroup
from tests.pool import Pool, on_ranks
from tests.rings import Case, Ring
from tests.test_played import Played, of_rank

CPU = torch.device("cpu")
MASKS = Mask.causal(), Mask.full(), Mask.sliding(9), Mask.local(3, 20)
DOCUMENTS = ((0, 5, 6, 20, 44),)
ROUTES = "around", "direct", "all_gather"
SIZES = 3, 4, 2, 3, 4
SYMMETRIC = TransferPolicy(transport="symmetric")


def rings() -> Iterator[Ring]:
    """Every layout with every mask, by all routes in turn; and what is not one ring."""
    for number, (layout, mask) in enumerate(product(LAYOUTS, MASKS)):
        size = SIZES[number % len(SIZES)]
        yield Ring(layout, size, 48, mask, strategy=ROUTES[number % len(ROUTES)])
    for route in ROUTES:
        yield Ring(ZigZag(), 4, 48, Mask.causal(), DOCUMENTS, strategy=route)
        yield Ring(Contiguous(), 4, 10, Mask.full(), strategy=route)  # of unequal shards
        yield Ring(ZigZag(), 4, 5, Mask.full(), strategy=route)  # of empty shards
    yield Ring(ZigZag(), 4, 48, Mask.causal(), strategy="ulysses:2")
    yield Ring(Striped(), 4, 48, Mask.sliding(9), strategy="ulysses:2+all_gather")


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_rings(tmp_path: Path, is_late: bool) -> None:
    for number, ring in list(enumerate(rings()))[is_late :: 1 + is_late]:
        check_ring(ring, tmp_path / f"{number}", is_late)


@pytest.mark.parametrize("chunk_bytes", [1000, 1 << 13])
@pytest.mark.parametrize("route", ROUTES)
def test_rings_of_large_messages(
    tmp_path: Path, route: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values go from where they lie, as two messages."""
    monkeypatch.setattr(rotation, "LARGE", 1)
    ring = Ring(ZigZag(), 3, 48, Mask.causal(), strategy=route)
    check_ring(ring, tmp_path / "late", True, chunk_bytes)


def check_ring(ring: Ring, folder: Path, is_late: bool, chunk_bytes: int = 1000) -> None:
    """Two rounds of a ring's forward and backward against dense attention."""
    folder.mkdir()
    case, played = Case(ring), Played("reference", "cpu", torch.float64)

    def run(rank: int, transport: Transport) -> list[tuple[Tensor, ...]]:
        # Twice: the second finds slots as the first has left them.
        return [of_rank(case, played, rank, cast(Any, transport)) for _ in range(2)]

    for rank, rounds in enumerate(play_files(ring.world_size, run, folder, is_late, chunk_bytes)):
        for actual in rounds:
            named = zip(("out", "lse", "q", "k", "v"), actual, case.expected(), strict=True)
            for what, x, whole in named:
                expected = whole[:, :, ring.positions(rank, of_keys=what in ("k", "v"))]
                error = (x - expected).masked_fill_(x == expected, 0).abs()
                assert x.shape == expected.shape
                assert not error.numel() or error.max() < 1e-9, (ring, rank, what)


def play_files(
    world_size: int,
    run: Callable[[int, Transport], Any],
    folder: Path,
    is_late: bool = False,
    chunk_bytes: int = 1000,
) -> list[Any]:
    """What `run(rank, transport)` returns on each rank, a thread."""

    def on_rank(rank: int, played: PlayedTransport) -> Any:
        memory = FileMemory(folder, rank, world_size, is_late)
        group = cast(Any, PlayedGroup(rank, world_size, played))
        transport = SymmetricTransport(group, memory, chunk_bytes)
        try:
            result = run(rank, transport)
        except BaseException:
            memory.fail()
            raise
        assert memory.num_bytes == (world_size - 1) * NUM_SLOTS * chunk_bytes
        assert not transport._in_flight, "all hops were waited for"
        return result

    return play(world_size, on_rank)


def test_messages_in_each_direction(tmp_path: Path) -> None:
    """Of several dtypes and sizes; the pairs differ in how many they exchange."""
    sizes = [0, 1, 125, 126, 1000]  # of 8 bytes: less than a chunk of 1000, one, more

    def run(rank: int, transport: Transport) -> None:
        transport.prepare(CPU)
        transport.prepare(CPU)  # again is nothing
        peers = [peer for peer in range(3) if peer != rank]
        given = [(p, torch.arange(n + rank) + p) for p in peers for n in sizes[: 5 - p - rank]]
        got = [(p, torch.zeros(n + p).long()) for p in peers for n in sizes[: 5 - p - rank]]
        works = transport.start([P2P(x, p) for p, x in got], [P2P(x, p) for p, x in given])
        assert len(works) == len(got) + len(given)
        for work in works:
            work.wait()
        for _, x in got:
            assert torch.equal(x, torch.arange(len(x)) + rank)
        assert not transport.start([], [])

    play_files(3, run, tmp_path)


def test_tensors_of_a_hop_stay_until_it_is_waited_for() -> None:
    waits: list[str] = []
    in_flight: set[MovedHop] = set()
    messages = [P2P(torch.zeros(1), 1)]
    hop = MovedHop(lambda: waits.append("waited"), messages, in_flight)
    assert hop in in_flight
    assert hop._messages is messages
    hop.wait()
    hop.wait()
    assert waits == ["waited"]
    assert not in_flight
    assert not hop._messages


@on_ranks(3)
def test_processes(tmp_path: Path) -> None:
    """The public calls over an axis, between processes."""
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    group = mesh.get_group()
    transport = SymmetricTransport(group, FileMemory(tmp_path, group.rank(), 3, is_late=True), 1000)
    axis = SequenceAxis(mesh, "zigzag", policy=None, transport=transport)
    again = SequenceAxis(mesh, "zigzag", transport=transport)
    assert again.policy == axis.policy
    inputs = random_inputs(seq_len=24)
    dense = dense_attention(*inputs[:3], Mask.causal())
    for strategy in ("around", "all_gather", "ulysses"):
        sharded = [axis.shard(x, 2).requires_grad_() for x in inputs[:3]]
        out = axis.attention(*sharded, strategy=strategy)
        out.backward(axis.shard(inputs[3], 2))
        torch.testing.assert_close(axis.unshard(out, 2).double(), dense.out, rtol=1e-5, atol=1e-5)
        for x, expected in zip(sharded, dense.backward(inputs[3]), strict=True):
            assert x.grad is not None
            whole = axis.unshard(x.grad, 2).double()
            torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
    ranks = axis.sum(torch.tensor(float(group.rank())))
    assert ranks.item() == 3
    assert transport_of(group) is transport


def test_a_fixed_order(pool: Pool, tmp_path: Path) -> None:
    """Sums in a fixed order have the bits that a process group gives them."""
    for found, wanted in zip(
        pool.run(3, _attend_in_order, tmp_path), pool.run(3, _attend_in_order), strict=True
    ):
        assert all(map(torch.equal, found, wanted))


def _attend_in_order(folder: Path | None = None) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("cp",))
    group, transport = mesh.get_group(), None
    if folder is not None:
        transport = SymmetricTransport(group, FileMemory(folder, group.rank(), 3, True), 1000)
    policy = TransferPolicy(order="fixed", block=8)
    axis = SequenceAxis(mesh, "whole_blocks:8", policy=policy, transport=transport)
    inputs, results = random_inputs(seq_len=44), []
    for strategy in ROUTES:
        sharded = [axis.shard(x, 2).requires_grad_() for x in inputs[:3]]
        out = axis.attention(*sharded, strategy=strategy)
        grads = torch.autograd.grad(out, sharded, axis.shard(inputs[3], 2))
        results += [x.detach().to_local() for x in (out, *grads)]
    assert isinstance(transport_of(group), SymmetricTransport) == (folder is not None)
    return results


@pytest.mark.gpu
@on_ranks(2)
def test_on_a_gpu() -> None:
    """Two processes share one GPU, whose memory each maps a second time."""
    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # read in the first rendezvous
    warnings.simplefilter("default")  # as in each test that needs a GPU
    group = dist.group.WORLD
    assert group is not None
    case = Case(Ring(ZigZag(), 2, 48, Mask.causal()), torch.float32)
    transport, played = SymmetricTransport(group), Played("reference", "cuda", torch.float32)
    dense = case.expected()  # by autograd
    with torch.no_grad():
        for _ in range(2):
            actual = of_rank(case, played, group.rank(), cast(Any, transport))
            mine = case.ring.positions(group.rank())
            for x, whole in zip(actual, dense, strict=True):
                expected = whole[:, :, mine]
                torch.testing.assert_close(x.cpu().double(), expected, rtol=1e-4, atol=1e-4)


@on_ranks(2)
def test_the_policy_chooses() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    axis = SequenceAxis(mesh, "zigzag", policy=SYMMETRIC)
    chosen = transport_of(mesh.get_group())
    assert isinstance(chosen, SymmetricTransport)
    SequenceAxis(mesh, "zigzag", policy=SYMMETRIC)
    SequenceAxis(mesh, "zigzag")
    assert transport_of(mesh.get_group()) is chosen
    inputs = [axis.shard(x, 2) for x in random_inputs()[:3]]
    with pytest.raises(ValueError, match=r"moves tensors on CUDA, and these are on cpu; leave"):
        axis.attention(*inputs)
    own = ProcessGroupTransport(mesh.get_group())
    with pytest.raises(ValueError, match=r"has the transport .*Symmetric.*, it cannot get"):
        SequenceAxis(mesh, "zigzag", transport=own)


@on_ranks(2)
def test_ranks_that_differ() -> None:
    """A rank whose policy is another one registers nothing: records are compared first."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    axis = SequenceAxis(mesh, "zigzag", policy=None if dist.get_rank() else SYMMETRIC)
    inputs = [axis.shard(x, 2) for x in random_inputs()[:3]]
    with pytest.raises(RingError, match=r"differ in policy: .*transport=.*symmetric"):
        axis.attention(*inputs)


@pytest.mark.parametrize("transport", ["group", "nccl", 1, False])
def test_unknown_transports(transport: Any) -> None:
    with pytest.raises(ValueError, match=r'transport must be None or "symmetric", got'):
        TransferPolicy(transport=transport)


@on_ranks(2)
def test_hosts_and_builds_that_are_refused() -> None:
    group, cuda = dist.group.WORLD, torch.device("cuda", 0)
    assert group is not None
    with pytest.MonkeyPatch.context() as patch:
        binding = SimpleNamespace(get_backend=lambda device: "NVSHMEM")
        patch.setattr(symmetric, "_binding", lambda: binding)
        with pytest.raises(ValueError, match=r'the backend NVSHMEM here, .* needs "CUDA"'):
            CudaMemory().check(cuda, group.group_name)
        binding.get_backend = lambda device: "CUDA"
        CudaMemory().check(cuda, group.group_name)
        patch.setattr(symmetric.socket, "gethostname", lambda: f"host{group.rank()}")
        with pytest.raises(ValueError, match=r"on one host, and these are on host0, host1; leave"):
            CudaMemory().check(cuda, group.group_name)


def test_a_build_without_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch._C._distributed_c10d._SymmetricMemory", raising=False)
    with pytest.raises(ValueError, match="is built without symmetric memory, which"):
        CudaMemory().check(torch.device("cuda", 0), "none")


class Streams:
    """Stands in for CUDA's streams and PyTorch's memory, and logs what is queued on which."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = "kernels"

    def made(self, device: torch.device, priority: int) -> SimpleNamespace:
        assert priority < 0, "copies go first"
        return SimpleNamespace(
            name="side",
            wait_stream=lambda other: self.log.append(f"side waits for {other.name}"),
            record_event=lambda: self.log.append("side: event") or "event",
        )

    def of(self, device: torch.device) -> SimpleNamespace:
        def wait_event(event: str) -> None:
            self.log.append(f"{self.current} waits for {event}")

        return SimpleNamespace(name=self.current, wait_event=wait_event)

    @contextmanager
    def entered(self, stream: SimpleNamespace) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    # What PyTorch's class of symmetric memory offers, and its handle.

    def empty_strided_p2p(self, *shape_and_kind: Any) -> Tensor:
        size, stride, dtype, device = shape_and_kind
        assert (stride, dtype, device.type) == ((1,), torch.uint8, "cpu")
        return torch.empty(size, dtype=dtype)

    def rendezvous(self, outbox: Tensor, group_name: str) -> Streams:
        self.log.append(f"rendezvous of {outbox.numel()} bytes in {group_name}")
        return self

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype, at: int) -> Tensor:
        return Logged.at(self, f"rank {rank} at {at}", torch.empty(sizes, dtype=dtype))

    def put_signal(self, peer: int, channel: int, timeout_ms: int) -> None:
        assert timeout_ms == 90_000
        self.log.append(f"{self.current}: put {channel} to {peer}")

    def wait_signal(self, peer: int, channel: int, timeout_ms: int) -> None:
        assert timeout_ms == 90_000
        self.log.append(f"{self.current}: wait for {channel} of {peer}")


class Logged(torch.Tensor):
    """A tensor whose copies are logged."""

    streams: Streams
    place: str

    @classmethod
    def at(cls, streams: Streams, place: str, x: Tensor) -> Logged:
        logged = x.as_subclass(cls)
        logged.streams, logged.place = streams, place
        return logged

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            of = args[0]
            if function is Tensor.copy_:
                streams = next(x for x in args if isinstance(x, Logged)).streams
                to, source = (getattr(x, "place", "tensor") for x in args)
                streams.log.append(f"{streams.current}: copy {source} to {to}")
                return of
            result = function(*args, **(kwargs or {}))
            if not isinstance(of, Logged) or not isinstance(result, Tensor):
                return result
            return cls.at(of.streams, of.place, result)


def test_the_order_on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies follow the kernels before the hop; the kernels after its wait follow the copies."""
    streams, cuda = Streams(), torch.cuda
    for name, fake in (
        ("Stream", streams.made),
        ("current_stream", streams.of),
        ("stream", streams.entered),
    ):
        monkeypatch.setattr(cuda, name, fake)
    monkeypatch.setattr(symmetric, "_binding", lambda: streams)
    options = SimpleNamespace(_timeout=timedelta(seconds=90))
    backend = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=options))
    monkeypatch.setattr(symmetric, "_resolve_process_group", lambda name: backend)
    monkeypatch.setattr(CudaMemory, "check", lambda *args: None)

    group = cast(Any, PlayedGroup(1, 3, cast(Any, None)))
    transport = SymmetricTransport(group, chunk_bytes=4)
    transport.prepare(CPU)
    frees = [f"side: put {2 + slot} to {peer}" for peer in (0, 2) for slot in range(2)]
    assert streams.log == [
        "rendezvous of 16 bytes in played 1",
        "side waits for kernels",
        *frees,
        "side: event",
    ]
    streams.log.clear()
    coming = [P2P(torch.zeros(n, dtype=torch.uint8), 0) for n in (4, 1)]
    leaving = [P2P(torch.zeros(9, dtype=torch.uint8), 2)]
    works = transport.start(coming, leaving)
    streams.log.append("kernels: tile")
    for work in works:
        work.wait()
    staged, pulled = [], []
    for slot in (0, 1, 0):
        copy = f"side: copy tensor to rank 1 at {8 + 4 * slot}"
        staged.append([f"side: wait for {2 + slot} of 2", copy, f"side: put {slot} to 2"])
    for slot in (0, 1):
        copy = f"side: copy rank 0 at {4 * slot} to tensor"
        pulled.append([f"side: wait for {slot} of 0", copy, f"side: put {2 + slot} to 0"])
    assert streams.log == [
        "side waits for kernels",
        *(*staged[0], *pulled[0], *staged[1], *pulled[1], *staged[2]),
        "side: event",
        "kernels: tile",
        "kernels waits for event",
    ]


def test_a_rank_that_fails(tmp_path: Path) -> None:
    """The others wait for its signals no longer than they must."""

    def run(rank: int, transport: Transport) -> None:
        transport.prepare(CPU)
        if rank:
            raise ValueError("no more")
        for work in transport.start([P2P(torch.zeros(1), 1)], []):
            work.wait()

    with pytest.raises(ValueError, match="no more"):
        play_files(2, run, tmp_path)


def test_slots_of_outboxes_do_not_overlap(tmp_path: Path) -> None:
    """Those of all readers fill the outbox, and readers and owners mean the same."""
    outboxes = [Outbox.__new__(Outbox) for _ in range(4)]
    for outbox in outboxes:
        outbox._chunk_bytes = 10
        outbox._memory = cast(Any, SimpleNamespace(get_buffer=lambda *place: place))
    for owner in range(4):
        slots = [x for r in range(4) if r != owner for x in outboxes[r]._slots(owner, r)]
        places = [cast(Any, place)[-1] for place in slots]
        assert places == list(range(0, 60, 10))
        assert all(cast(Any, place)[0] == owner for place in slots)
