"""Layers that share a bound decode call attend as by calls of their own, and ranks compare each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_ring import Mask, RingError, decode_attention
from dtensor_ring.decode.run import Combine
from dtensor_ring.decode.shared import SharedDecode
from dtensor_ring.extension import name_layer, within_layer
from dtensor_ring.transport.transport import P2P, Transport, Work
from tests.pool import on_ranks

RUNS = torch.tensor([[[0, 5]], [[5, 4]]])
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
    (begin, length), *_ = RUNS[dist.get_rank()].tolist()
    return query, key.narrow(2, begin, length), value.narrow(2, begin, length)


@on_ranks(2)
def test_layers_attend_as_by_calls_of_their_own() -> None:
    mesh = mesh_of()
    with torch.no_grad():
        for name, options in OPTIONS.items():
            alone = {x: y for x, y in options.items() if x != "needs_lse"}
            for dtype in (torch.float32, torch.bfloat16):
                shared = SharedDecode(RUNS, mesh, agree=TOKENS)
                for number in range(3):
                    inputs = layer(number, dtype)
                    expected = decode_attention(
                        *inputs, **alone, key_runs=RUNS, agree=TOKENS, mesh=mesh, return_lse=True
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
    shared, same = SharedDecode(RUNS, mesh), torch.tensor([0, 3, 9])
    with torch.no_grad():
        for documents in (same, same, torch.tensor([0, 5, 9]), torch.tensor([0, 2, 4, 9])):
            inputs = layer(0)
            expected = decode_attention(*inputs, cu_seqlens=documents, key_runs=RUNS, mesh=mesh)
            assert torch.equal(shared(*inputs, cu_seqlens=documents)[0], expected)
    assert len(shared._bound) == 3


@on_ranks(2)
def test_a_rank_may_be_profiled() -> None:
    """It calls the op by the dispatcher, and the other rank its bound call."""
    shared = SharedDecode(RUNS, mesh_of())
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
    shared, seen = SharedDecode(RUNS[:1], mesh_of()), Seen()
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
@pytest.mark.parametrize("what", ["layer", "scale", "tokens given as agree"])
def test_a_layer_that_differs_is_refused(what: str) -> None:
    rank, module = dist.get_rank(), nn.Module()
    agree = TOKENS + rank if what == "tokens given as agree" else TOKENS
    mesh = mesh_of()
    with torch.no_grad():
        for number in range(2):  # the options are known
            SharedDecode(RUNS, mesh, agree=TOKENS)(*layer(number))
        shared = SharedDecode(RUNS, mesh, agree=agree)
        if what != "tokens given as agree":
            shared(*layer(2))
        name_layer(module, f"layers.{rank if what == 'layer' else 3}")
        how: dict[str, Any] = {"scale": 0.5 + rank} if what == "scale" else {}
        with pytest.raises(RingError, match=what), within_layer(module):
            shared(*layer(3), **how)


@on_ranks(2)
def test_gradients_are_refused() -> None:
    shared = SharedDecode(RUNS, mesh_of())
    query, key, value = layer(0)
    with pytest.raises(NotImplementedError, match="no gradient"):
        shared(query.requires_grad_(), key, value)
