"""Decode calls that are bound and shared, their messages, and ranks that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_ring import Mask, RingError, SequenceAxis, decode_attention, ring_attention
from dtensor_ring.agreement.call_record import MAX_PAYLOAD
from dtensor_ring.compute.kernels import KERNELS, Scores
from dtensor_ring.decode import call as calls
from dtensor_ring.decode.call import (
    BoundDecode,
    DecodeBatch,
    DecodeCall,
    DecodePlace,
    bound_decode,
    flatten_decode,
)
from dtensor_ring.decode.run import MERGES, Combine
from dtensor_ring.decode.shared import SharedDecode
from dtensor_ring.extension import name_layer, within_layer
from dtensor_ring.ops import checks
from dtensor_ring.transport.transport import P2P, ProcessGroupTransport, Transport, Work
from tests.decode.test_decode_op import options_of
from tests.decoding import Decode, Outputs, check
from tests.pool import Pool, on_ranks
from tests.rings import fake_group

RUNS = (((0, 3), (9, 2)), ((3, 6), (11, 5)), ())
SMALL = Decode(RUNS, 16, (15,), 3)
LARGE = Decode(RUNS, 16, (15,), 3, batch=600, heads=(16, 4), dtype=torch.float32)


class Counted:
    """How many messages a rank sends: with a record, and without."""

    def __init__(self) -> None:
        self.record_works = self.others = 0
        self.memories: set[int] = set()
        self._patches: list[Any] = []

    def __enter__(self) -> Counted:
        send_record, start = ProcessGroupTransport.send_record, ProcessGroupTransport.start

        def with_record(this: Any, message: Any) -> Any:
            self.record_works += 1
            self.memories.add(message.flat.data_ptr())
            return send_record(this, message)

        def without(this: Any, receives: Any, sends: Any) -> Any:
            self.others += len(sends)
            return start(this, receives, sends)

        self._patches = [
            patch.object(ProcessGroupTransport, "send_record", with_record),
            patch.object(ProcessGroupTransport, "start", without),
        ]
        for each in self._patches:
            each.start()
        return self

    def __exit__(self, *error: object) -> None:
        for each in self._patches:
            each.stop()


@pytest.mark.parametrize(
    ("case", "record_works", "others", "joined"),
    [
        (SMALL, 2, 0, 1),  # one message to each of the two other ranks, joined once
        (LARGE, 1, 2, 1),
        (Decode(RUNS, 16, (15,), 3, merge="two_shot"), 2, 2, 2),
        (Decode(RUNS, 16, (15,), 3, batch=0), 2, 0, 1),
    ],
    ids=["small", "large", "two shots", "empty batch"],
)
def test_messages(pool: Pool, case: Decode, record_works: int, others: int, joined: int) -> None:
    for outputs, sent in pool.run(3, _count, case):
        check(case, [outputs])
        assert sent == [(record_works, others, joined)] * 3


def _count(case: Decode) -> tuple[Outputs, list[tuple[int, int, int]]]:
    mesh, sent = init_device_mesh("cpu", (3,)), []
    for _ in range(3):
        with Counted() as counted:
            outputs = attend(mesh, case)
        sent.append((counted.record_works, counted.others, len(counted.memories)))
    return outputs, sent


@on_ranks(2)
def test_no_message_without_a_mesh() -> None:
    """Nobody compares such a call, so nobody walks over frames to find its line."""
    init_device_mesh("cpu", (2,))
    with Counted() as counted, patch.object(checks, "line_of") as line_of:
        decode_attention(*torch.randn(3, 1, 2, 1, 8))
    assert (counted.record_works, counted.others, line_of.call_count) == (0, 0, 0)


def attend(mesh: DeviceMesh, case: Decode, **odd: Any) -> Outputs:
    query, key, value = case.inputs()
    here = case.positions(dist.get_rank())
    options = options_of(case) | odd
    return decode_attention(
        query, key[:, :, here], value[:, :, here], mesh=mesh, return_lse=True, **options
    )


def _ring(mesh: DeviceMesh) -> Any:
    return ring_attention(*torch.randn(3, 1, 2, 4, 8), mesh=mesh)


def error_of(call: Callable[[], Any]) -> str:
    with pytest.raises(RingError) as caught:
        call()
    return str(caught.value)


class Failing(Exception):
    """What a kernel raises."""


@pytest.mark.parametrize("who", ["one", "all"])
@on_ranks(3)
def test_a_kernel_raises(who: str) -> None:
    """If all ranks do, the group stays in order; if one does, the others are told."""
    mesh, is_odd = init_device_mesh("cpu", (3,)), dist.get_rank() == 1
    attend(mesh, SMALL, kernel="reference")

    def fail(*_: Any) -> Any:
        raise Failing("no memory")

    if who == "all" or is_odd:
        # The last rank has no keys, so that it launches no kernel.
        kernel = patch.object(KERNELS["reference"], "forward", fail)
        place = patch("dtensor_ring.decode.op.decode", fail)
        with kernel, place, pytest.raises(Failing):
            attend(mesh, SMALL, kernel="reference")
    if who == "all":
        check(SMALL, [attend(mesh, SMALL, kernel="reference")])
        return
    text = error_of(lambda: attend(mesh, SMALL, kernel="reference"))
    if is_odd:
        assert "takes no more calls since rank 1 raised, in decode" in text
    else:
        assert "rank 1 raised, in decode, step 0: Failing: no memory" in text


@on_ranks(3)
def test_columns_of_one_rank_do_not_fit() -> None:
    mesh, reported = init_device_mesh("cpu", (3,)), "key must hold the 11 tokens"
    if dist.get_rank() != 1:
        text = error_of(lambda: attend(mesh, SMALL))
        assert f"rank 1 raised, in decode, step 0: ValueError: {reported}" in text
        return
    with pytest.raises(ValueError, match=reported):
        decode_attention(*SMALL.inputs(), mesh=mesh, **options_of(SMALL))


class Own(ProcessGroupTransport):
    """A transport of a user's."""

    num_started = 0

    def start(self, receives: Any, sends: Any) -> Any:
        self.num_started += 1
        return super().start(receives, sends)


@on_ranks(3)
def test_transports_of_users_move_the_partials() -> None:
    mesh = init_device_mesh("cpu", (3,))
    transport = Own(mesh.get_group())
    SequenceAxis(mesh, transport=transport)
    check(SMALL, [attend(mesh, SMALL)])
    assert transport.num_started == 1


@on_ranks(3)
def test_rings_and_decoding_in_turns() -> None:
    """A message of one kind may be shorter than the room for the other."""
    mesh = init_device_mesh("cpu", (3,))
    for _ in range(3):
        _ring(mesh)
        check(SMALL, [attend(mesh, SMALL)])


def test_the_largest_message_that_a_record_carries(pool: Pool) -> None:
    rows = MAX_PAYLOAD // (9 * 8)
    for num_rows, record_works in ((rows, 2), (rows + 1, 1)):
        case = Decode(RUNS, 16, (15,), 3, batch=num_rows, heads=(1, 1), merge="one_shot")
        for outputs, sent in pool.run(3, _count, case):
            check(case, [outputs])
            assert [record_works for record_works, _, _ in sent] == [record_works] * 3


# Layers that share a bound call return what separate calls return, and ranks compare each layer.

SHARED_RUNS = torch.tensor([[[0, 5]], [[5, 4]]])
TOKENS = torch.tensor([[7]])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"mask": Mask.sliding(3)},
    "scale": {"scale": 0.7},
    "sinks": {"sinks": torch.tensor([0.1, 0.2, 0.3, 0.4])},
    "documents": {"cu_seqlens": torch.tensor([0, 3, 9])},
    "without lse": {"needs_lse": False},
    "two shots without lse": {"merge": "two_shot", "needs_lse": False},
}


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


def layer(seed: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """The query of a layer, and the keys and values of this rank."""
    torch.manual_seed(seed)
    query, key, value = (torch.randn(2, n, s, 8, dtype=dtype) for n, s in ((4, 1), (2, 9), (2, 9)))
    (begin, length), *_ = SHARED_RUNS[dist.get_rank()].tolist()
    return query, key.narrow(2, begin, length), value.narrow(2, begin, length)


@on_ranks(2)
def test_layers_attend_as_by_calls_of_their_own() -> None:
    mesh = mesh_of()
    with torch.no_grad():
        for name, options in OPTIONS.items():
            alone = {x: y for x, y in options.items() if x != "needs_lse"}
            for dtype in (torch.float32, torch.bfloat16):
                shared = SharedDecode(SHARED_RUNS, mesh, agree=TOKENS)
                for number in range(3):
                    inputs = layer(number, dtype)
                    expected = decode_attention(
                        *inputs,
                        **alone,
                        key_runs=SHARED_RUNS,
                        agree=TOKENS,
                        mesh=mesh,
                        return_lse=True,
                    )
                    out, lse = shared(*inputs, **options)
                    assert out.dtype == dtype
                    assert torch.equal(out, expected[0]), name
                    assert lse is None or torch.equal(lse, expected[1]), name
                    assert lse is not None or "needs_lse" in options
                assert len(shared._bound) == 1, name


@on_ranks(2)
def test_layers_may_have_documents_of_their_own() -> None:
    """One call after the other is compared, and tensors among its options are no numbers."""
    mesh = mesh_of()
    shared, same = SharedDecode(SHARED_RUNS, mesh), torch.tensor([0, 3, 9])
    with torch.no_grad():
        for documents in (same, same, torch.tensor([0, 5, 9]), torch.tensor([0, 2, 4, 9])):
            inputs = layer(0)
            expected = decode_attention(
                *inputs, cu_seqlens=documents, key_runs=SHARED_RUNS, mesh=mesh
            )
            assert torch.equal(shared(*inputs, cu_seqlens=documents)[0], expected)
    assert len(shared._bound) == 3


@on_ranks(2)
def test_a_rank_may_be_profiled() -> None:
    """It calls the op by the dispatcher, and the other rank its bound call."""
    shared = SharedDecode(SHARED_RUNS, mesh_of())
    outs = []
    with torch.no_grad():
        for number in range(3):
            with profiler.profile(enabled=dist.get_rank() == 1):
                outs.append(shared(*layer(number), needs_lse=False)[0])
    found = torch.stack(outs)
    theirs = [torch.empty_like(found) for _ in range(2)]
    dist.all_gather(theirs, found)
    assert torch.equal(*theirs)


@on_ranks(2)
def test_ranks_agree_on_a_row_whose_scores_are_all_infinite() -> None:
    """One rank has all keys, and sees them as one launch; the other has none."""
    runs, has_keys = torch.tensor([[[0, 5]], [[0, 0]]]), dist.get_rank() == 0
    shared, query = SharedDecode(runs, mesh_of()), torch.ones(1, 4, 1, 8)
    keys = torch.full((1, 2, 5 if has_keys else 0, 8), -torch.inf)
    with torch.no_grad():
        for _ in range(2):  # the options are known
            out, _ = shared(query, keys, torch.ones_like(keys), needs_lse=False)
    assert torch.equal(out, torch.zeros_like(query))


class Seen(TorchDispatchMode):
    """Notes which ops it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(op.name())
        return op(*args, **(kwargs or {}))


@on_ranks(1)
def test_a_mode_that_begins_after_the_first_layer_sees_the_others() -> None:
    shared, seen = SharedDecode(SHARED_RUNS[:1], mesh_of()), Seen()
    with torch.no_grad():
        shared(*layer(3))  # its options are known then
        first, _ = shared(*layer(0))
        assert shared._bound
        with torch.autocast("cpu", torch.bfloat16):
            cast, _ = shared(*layer(1))
        with seen:
            shared(*layer(2))
        last, _ = shared(*layer(0))
    assert (first.dtype, cast.dtype) == (torch.float32, torch.bfloat16)
    assert "dtensor_ring::decode_attention" in seen.names
    assert torch.equal(first, last)


class Fresh(Transport):
    """Allocates as a GPU does, whose memory no pool keeps."""

    def __init__(self) -> None:
        self.made: list[ref[Tensor]] = []

    def allocate(self, num_bytes: int, device: torch.device) -> Tensor:
        buffer = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.made.append(ref(buffer))
        return buffer

    def free(self, buffer: Tensor) -> None:
        pass

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        return []


def test_layers_hold_one_buffer() -> None:
    transport, out = Fresh(), torch.randn(1, 2, 1, 8)
    combine = Combine(transport, 0, 1, "one_shot")
    for _ in range(5):
        combine.begin()
        merged = combine.output(out, torch.zeros(1, 2, 1), torch.float32)
        assert torch.equal(merged, out)
    assert len(transport.made) == 5
    assert sum(buffer() is not None for buffer in transport.made) == 1


@on_ranks(2)
def test_results_stay_after_the_next_call() -> None:
    """A single row of a buffer is contiguous, so a copy that is made for strides would be none."""
    mesh, last = mesh_of(), torch.tensor([1], dtype=torch.int32)
    for merge in MERGES:
        how: dict[str, Any] = {"merge": merge, "mesh": mesh, "query_starts": last}
        key, value = torch.ones(1, 1, 1, 4), torch.full((1, 1, 1, 4), float(dist.get_rank()))
        found = decode_attention(key, key, value, return_lse=True, **how)
        kept = [x.clone() for x in found]
        decode_attention(2 * key, key, value + 5, **how)
        assert all(map(torch.equal, found, kept)), merge


@on_ranks(2)
@pytest.mark.parametrize("what", ["layer", "scale", "tokens given as agree"])
def test_a_layer_that_differs_is_refused(what: str) -> None:
    rank, module = dist.get_rank(), nn.Module()
    agree = TOKENS + rank if what == "tokens given as agree" else TOKENS
    mesh = mesh_of()
    with torch.no_grad():
        for number in range(2):  # the options are known
            SharedDecode(SHARED_RUNS, mesh, agree=TOKENS)(*layer(number))
        shared = SharedDecode(SHARED_RUNS, mesh, agree=agree)
        if what != "tokens given as agree":
            shared(*layer(2))
        name_layer(module, f"layers.{rank if what == 'layer' else 3}")
        how: dict[str, Any] = {"scale": 0.5 + rank} if what == "scale" else {}
        with pytest.raises(RingError, match=what), within_layer(module):
            shared(*layer(3), **how)


@on_ranks(2)
def test_gradients_are_refused() -> None:
    shared = SharedDecode(SHARED_RUNS, mesh_of())
    query, key, value = layer(0)
    with pytest.raises(NotImplementedError, match="no gradient"):
        shared(query.requires_grad_(), key, value)


# Bound decode calls: one for calls that are equal in all that they depend on.

QUERY, KEYS = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 4, 4)
BOUND_RUNS = torch.tensor([[[0, 4]], [[4, 4]]])


def _bound(
    key_runs: Tensor = BOUND_RUNS, query: Tensor = QUERY, agree: Tensor | None = None, **scores: Any
) -> BoundDecode:
    group: Any = dist.group.WORLD
    batch = DecodeBatch(key_runs=key_runs, agree=agree)
    place = DecodePlace(group_name=group.group_name)
    call = DecodeCall(batch, Scores(Mask.causal(), 1.0, **scores), place)
    return bound_decode(flatten_decode(call), query, KEYS.to(query.dtype), KEYS.to(query.dtype))


@on_ranks(1)
def test_equal_calls_are_one() -> None:
    with fake_group(2):
        first = _bound()
        assert first is _bound() is _bound(BOUND_RUNS.clone())
        assert first.call.batch == DecodeBatch()  # it holds no tensor of its caller
        others = [
            _bound(BOUND_RUNS.int()),
            _bound(softcap=2.0),
            _bound(query=QUERY.double()),
            _bound(query=torch.zeros(1, 4, 1, 4)),
            _bound(agree=torch.tensor([1])),
            _bound(agree=torch.tensor([2])),
        ]
        assert len({id(x) for x in (first, *others)}) == 7
        assert len({x.round.record for x in (first, *others[1:]) if x.round}) == 6
        with_sinks = _bound(sinks=torch.zeros(2))
        assert with_sinks is _bound(sinks=torch.ones(2))  # each layer has its own
        assert with_sinks not in (first, _bound(sinks=torch.zeros(2).double()))
        assert with_sinks.call.scores.sinks is None
    with fake_group(2, rank=1):  # a group of the same name
        assert _bound().request.rank == 1


@on_ranks(1)
def test_integers_are_read_again() -> None:
    """The runs of the next token are written to the same memory."""
    with fake_group(2):
        runs = BOUND_RUNS.clone()
        assert _bound(runs).request.seq_len == 8
        runs[0, 0, 0], runs[1, 0, 0] = 4, 8
        assert _bound(runs).request.seq_len == 12
        runs[1, 0, 0] = 6
        with pytest.raises(ValueError, match="each position once"):
            _bound(runs)


@on_ranks(1)
def test_calls_take_bounded_memory() -> None:
    with fake_group(2):
        for length in range(1, 2000):
            _bound(agree=torch.tensor([length]))
        assert 0 < calls._BOUND.num_bytes <= calls._BOUND.max_bytes
        assert len(calls._BOUND) < 2000
