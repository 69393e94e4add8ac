"""What the ops promise: schemas, fakes, one node in a graph, DTensors, agreement, bytes, memory."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.fx import GraphModule

from dtensor_ring import (
    Balanced,
    Mask,
    RingError,
    SequenceAxis,
    decode_select_keys,
    select_keys,
    selected_attention,
    sequence_runs,
    unshard_sequence,
)
from dtensor_ring.ops.options import flatten
from dtensor_ring.selected import listed_attention, moved_keys, run
from dtensor_ring.selected.op import select_op, selected_backward_op, selected_op
from dtensor_ring.selected.plan import key_positions, request_bytes
from dtensor_ring.transport import transport
from dtensor_ring.transport.transport import P2P, BufferPool, ProcessGroupTransport
from tests.ops.test_fakes import description
from tests.pool import Pool, on_ranks
from tests.rings import Case, Ring, fake_group
from tests.selected.indexers import dense
from tests.test_memory import Counted
from tests.traced_bytes import Peak, Slope, peak_of, slope_of

SEQ_LEN, K = 16, 4
CAUSAL = Mask.causal()
KEYS = "index_key", "latents"


def inputs(seq_len: int = SEQ_LEN, seed: int = 5) -> dict[str, Tensor]:
    """Global tensors of an indexer and of an attention with latents."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "index_query": (2, seq_len, 3, 4),
        "index_key": (2, seq_len, 4),
        "weights": (2, seq_len, 3),
        "query": (2, 4, seq_len, 6),
        "latents": (2, 1, seq_len, 6),
    }
    return {x: torch.randn(*shape, generator=generator) for x, shape in shapes.items()}


def sequence_dim(name: str) -> int:
    return 2 if name in ("query", "latents") else 1


def attend(x: dict[str, Tensor], **where: Any) -> tuple[Tensor, Tensor]:
    """Positions, and outputs."""
    selected = select_keys(x["index_query"], x["index_key"], x["weights"], K, **where)
    where.pop("cu_seqlens", None)
    return selected, selected_attention(x["query"], x["latents"], 5, selected, **where)


def on_one_process(seq_len: int = SEQ_LEN) -> tuple[Tensor, Tensor]:
    """The same by a sort that keeps the order of equal scores, and by dense attention."""
    x = inputs(seq_len)
    products = torch.einsum("bshd,btd->bsht", x["index_query"], x["index_key"]).relu()
    scores = torch.einsum("bsh,bsht->bst", x["weights"], products)
    hidden = torch.ones(seq_len, seq_len, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -torch.inf)
    values, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    best = order[..., :K].masked_fill(values[..., :K] == -torch.inf, seq_len).sort(-1).values
    selected = best.masked_fill(best == seq_len, -1).int()
    latents = x["latents"]
    out, _ = dense(x["query"], latents, latents[..., :5], selected.unsqueeze(1), 6**-0.5)
    return selected, out


@on_ranks(1)
def test_opcheck() -> None:
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    case, x = Case(Ring(Balanced(CAUSAL, 8, 1), 1, 8, CAUSAL), torch.float32), inputs(8)
    options = flatten(case.call())
    index = x["index_query"].transpose(1, 2), x["index_key"].unsqueeze(1)
    for weights, block_size in ((x["weights"].transpose(1, 2), 1), (None, 2)):
        torch.library.opcheck(select_op, (*index, weights, 3, block_size, 0, 1, *options))
    pools = index[0], index[1][:, :, :2]
    torch.library.opcheck(select_op, (*pools, None, 3, 1, 0, 4, *options))
    query, rows = x["query"].requires_grad_(), x["latents"].requires_grad_()
    selected = torch.arange(8).int().view(1, 1, 8, 1).expand(2, 1, 8, 1).contiguous()
    listed = selected, 0, 5, "selected", 1
    torch.library.opcheck(selected_op, (query, rows, *listed, *options))
    query, rows = query.detach(), rows.detach()
    out, lse = selected_op(query, rows, *listed, *options)
    arguments = torch.ones_like(out), lse, query, rows, *listed, out, lse, *options
    torch.library.opcheck(selected_backward_op, arguments)


@pytest.mark.parametrize("is_token_major", [True, False])
@on_ranks(2)
def test_fakes_promise_what_is_returned(is_token_major: bool) -> None:
    ring = Ring(Balanced(CAUSAL, SEQ_LEN, 2), 2, SEQ_LEN, CAUSAL)
    mine, x = ring.positions(dist.get_rank()), inputs()
    options = flatten(Case(ring).call())
    query, rows = (x[name][:, :, mine].contiguous() for name in ("query", "latents"))
    if is_token_major:
        query = query.transpose(1, 2).contiguous().transpose(1, 2)
    index = x["index_query"][:, mine].transpose(1, 2), x["index_key"][:, mine].unsqueeze(1)
    weights = x["weights"][:, mine].transpose(1, 2)
    described = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad()):
        with mode:
            selected = select_op(*index, weights, K, 1, 0, 1, *options)
            listed = selected, 1, 5, "selected", 1
            out, lse = selected_op(query, rows, *listed, *options)
            inputs_back = torch.ones_like(out), None, query, rows, *listed, out, lse
            grads = selected_backward_op(*inputs_back, *options)
        described.append([description(each) for each in (selected, out, lse, *grads)])
    promised, returned = described
    assert promised == returned


@on_ranks(2)
def test_compiled_calls_are_one_node_each() -> None:
    graphs: list[list[str]] = []

    def capture(module: GraphModule, _: Any) -> Any:
        names = [getattr(node.target, "_opname", "") for node in module.graph.nodes]
        graphs.append([name for name in names if name.startswith("select")])
        return make_boxed_func(module.forward)

    mesh = init_device_mesh("cpu", (2,))
    mine = SequenceAxis(mesh, "zigzag").positions(SEQ_LEN)
    x = {name: y.index_select(sequence_dim(name), mine) for name, y in inputs().items()}
    backend = aot_autograd(fw_compiler=capture, bw_compiler=capture)
    outputs = []
    for function in (attend, torch.compile(attend, fullgraph=True, backend=backend)):
        leaves = {name: y.clone().requires_grad_() for name, y in x.items()}
        selected, out = function(leaves, mesh=mesh)
        out.square().sum().backward()
        outputs.append([selected, out.detach(), leaves["query"].grad, leaves["latents"].grad])
        assert leaves["index_key"].grad is None
    differs = max(float((a - b).abs().max()) for a, b in zip(*outputs, strict=True))
    assert graphs[0] == ["select_keys", "selected_attention"]
    assert graphs[1] == ["selected_attention_backward"]
    assert differs == 0.0


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@on_ranks(2)
def test_dtensors_and_shards_equal_one_process(layout: str) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    axis, x = SequenceAxis(mesh["cp"], layout), inputs()
    mine, (positions, out) = axis.positions(SEQ_LEN), on_one_process()
    local = {name: y.index_select(sequence_dim(name), mine) for name, y in x.items()}
    placed = {name: axis.shard(y, sequence_dim(name)) for name, y in x.items()}
    grads = []
    for given, where in ((local, {"mesh": mesh["cp"]}), (placed, {})):
        leaves = {name: y.detach().requires_grad_() for name, y in given.items()}
        found, actual = attend(leaves, **where)
        actual.square().sum().backward()
        grads.append([leaves[name].grad for name in ("query", "latents")])
        if isinstance(actual, DTensor):
            assert actual.shape == (2, 4, SEQ_LEN, 5)
            assert found.shape == (2, SEQ_LEN, K)
            whole = unshard_sequence(actual, 2)
            torch.testing.assert_close(whole.double(), out, atol=1e-5, rtol=0)
            actual, found = actual.to_local(), found.to_local()
        assert torch.equal(found, positions[:, mine])
        torch.testing.assert_close(actual.double(), out[:, :, mine], atol=1e-5, rtol=0)
    for one, other in zip(*grads, strict=True):
        assert torch.equal(one, other.to_local())


@on_ranks(2)
def test_runs_of_a_batch() -> None:
    mesh = init_device_mesh("cpu", (2,))
    layout = Balanced(CAUSAL, SEQ_LEN, 2, block=3)
    SequenceAxis(mesh, "balanced")
    mine = torch.tensor(layout.positions(dist.get_rank(), 2, SEQ_LEN))
    x = {name: y.index_select(sequence_dim(name), mine) for name, y in inputs().items()}
    found, out = attend(x, mesh=mesh, runs=sequence_runs(layout), seq_len=SEQ_LEN)
    positions, expected = on_one_process()
    assert torch.equal(found, positions[:, mine])
    torch.testing.assert_close(out.double(), expected[:, :, mine], atol=1e-5, rtol=0)


@on_ranks(2)
def test_a_turn_of_ranks_with_different_numbers_of_keys() -> None:
    """The last 8 tokens, all on one rank; a list is nearly as long as the keys of a rank."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    SequenceAxis(mesh, "zigzag")
    key_runs = torch.tensor([[[0, 4]], [[4, 12]]], dtype=torch.int32)
    runs = torch.tensor([[[8, 0]], [[8, 8]]], dtype=torch.int32)
    held, new = torch.arange(0, 4) if rank == 0 else torch.arange(4, 16), torch.arange(8, 16)
    x, (positions, expected) = inputs(), on_one_process()
    of_keys = {name: x[name].index_select(sequence_dim(name), held) for name in KEYS}
    mine = new[:0] if rank == 0 else new
    given = of_keys | {
        name: y.index_select(sequence_dim(name), mine) for name, y in x.items() if name not in KEYS
    }
    found, out = attend(given, mesh=mesh, runs=runs, key_runs=key_runs)
    assert torch.equal(found, positions[:, mine])
    torch.testing.assert_close(out.double(), expected[:, :, mine], atol=1e-5, rtol=0)


DIFFERENCES: dict[str, dict[str, Any]] = {
    "choice": {"k": 2},
    "scale": {"scale": 2.0},
    "mask": {"mask": Mask.full()},
    "index keys": {"index_key": torch.zeros(2, SEQ_LEN, 4, dtype=torch.bfloat16)},
}


@pytest.mark.parametrize("what", DIFFERENCES)
@on_ranks(2)
def test_ranks_that_differ_are_reported(what: str) -> None:
    mesh, x = init_device_mesh("cpu", (2,)), inputs()
    given = {name: x[name] for name in ("index_query", "index_key", "weights")} | {"k": 3}
    given |= DIFFERENCES[what] if dist.get_rank() else {}
    with pytest.raises(RingError, match=f"differ in {what}"):
        select_keys(**given, mesh=mesh)


WRONG = {
    "weights must hold one number": {"weights": torch.ones(2, SEQ_LEN, 2)},
    "or a narrower one": {"index_key": torch.ones(2, SEQ_LEN, 4, dtype=torch.float64)},
    "k must be": {"k": 0},
    "needs blocks": {"local_blocks": 1},
    "route must be one of": {"route": "selected"},
    "needs mesh=, the 1-D mesh": {"mesh": None},
}
WRONG_LISTS = {
    "must be int32": {"selected": torch.zeros(2, SEQ_LEN, 2)},
    "groups that divide": {"selected": torch.zeros(2, 3, SEQ_LEN, 2).int()},
    "keys end at 16": {"selected": torch.full((2, SEQ_LEN, 2), 16).int()},
    "value must be": {"value": 7},
    "route must be one of": {"route": "ring"},
}


@on_ranks(1)
def test_bad_calls() -> None:
    mesh, x = init_device_mesh("cpu", (1,)), inputs()
    index = {name: x[name] for name in ("index_query", "index_key", "weights")}
    for text, wrong in WRONG.items():
        with pytest.raises(ValueError, match=text):
            select_keys(**{**index, "k": 2, "mesh": mesh} | wrong)
    latents: dict[str, Any] = {"query": x["query"], "key": x["latents"], "value": 5}
    right = torch.zeros(2, SEQ_LEN, 1).int()
    for text, wrong in WRONG_LISTS.items():
        with pytest.raises(ValueError, match=text):
            selected_attention(**{**latents, "selected": right, "mesh": mesh} | wrong)
    latents["query"].requires_grad_()
    out = selected_attention(**latents, selected=right, mesh=mesh)
    (grad,) = torch.autograd.grad(out.square().sum(), latents["query"], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once, not twice"):
        grad.sum().backward()


@on_ranks(2)
def test_narrow_keys_are_widened_where_they_arrive() -> None:
    """The keys of a model in 16 bits, whose indexer has its queries in float32."""
    mesh, rank, x = init_device_mesh("cpu", (2,)), dist.get_rank(), inputs(2 * SEQ_LEN)
    SequenceAxis(mesh, "contiguous")
    own = slice(rank * SEQ_LEN, (rank + 1) * SEQ_LEN)
    query, weights = x["index_query"], x["weights"]
    narrow = x["index_key"][:, own].bfloat16()
    runs = torch.tensor([[[0, SEQ_LEN]], [[SEQ_LEN, SEQ_LEN]]], dtype=torch.int32)
    last = query[:, -2:], weights[:, -2:]
    found = [
        (
            select_keys(query[:, own], keys, weights[:, own], K, mesh=mesh),
            decode_select_keys(last[0], keys, last[1], K, key_runs=runs, mesh=mesh),
        )
        for keys in (narrow, narrow.float())
    ]
    for of_narrow, of_wide in zip(*found, strict=True):
        assert torch.equal(of_narrow, of_wide)


@pytest.mark.parametrize("route", ["selected", "all"])
@on_ranks(4)
def test_bytes_are_those_of_the_plan(route: str) -> None:
    mesh, rank = init_device_mesh("cpu", (4,)), dist.get_rank()
    axis, x, received = SequenceAxis(mesh, "zigzag"), inputs(64), []
    mine = axis.positions(64)
    x = {name: y.index_select(sequence_dim(name), mine) for name, y in x.items()}
    start = ProcessGroupTransport.start

    def counting(this: Any, receives: list[P2P], sends: list[P2P]) -> Any:
        received.append(sum(message.flat.nbytes for message in receives))
        return start(this, receives, sends)

    with patch.object(ProcessGroupTransport, "start", counting):
        selected = select_keys(x["index_query"], x["index_key"], x["weights"], K, mesh=mesh)
        index, received[:] = sum(received), []
        # Few keys: those of the first tokens only, so that the other ranks are asked for little.
        selected = selected.clamp(max=9)
        leaves = [x[name].requires_grad_() for name in ("query", "latents")]
        how = {"mesh": mesh, "route": route}
        out = selected_attention(*leaves, 5, selected[..., :1].contiguous(), **how)
        out.sum().backward()
    positions = key_positions(axis.layout, 4, 64)
    wanted, given = _counts(selected[..., :1], positions, route)
    of_key = 2 * 6 * 4
    asked = 3 * request_bytes(positions.num_local(rank))
    keys, gradients = (of_key * (sum(x) - x[rank]) for x in (wanted, given))
    planned_index = Ring(axis.layout, 4, 64, CAUSAL).plans()[rank].num_received * 2 * 4 * 4
    forward = [asked] * (route == "selected") + [keys]
    assert [index, *received] == [planned_index, *forward, *forward, gradients]


def _counts(selected: Tensor, positions: Any, route: str) -> tuple[list[int], list[int]]:
    """How many keys this rank needs of each, and gives to each."""
    everyone = [torch.empty_like(selected) for _ in range(4)]
    dist.all_gather(everyone, selected)
    rank = dist.get_rank()
    sets = [set(part.flatten().tolist()) for part in everyone]
    owned = [set(positions.of(peer).tolist()) for peer in range(4)]
    if route == "all":
        sets = [set(range(64))] * 4
    return [len(sets[rank] & x) for x in owned], [len(x & owned[rank]) for x in sets]


def test_memory_grows_with_the_shard(pool: Pool) -> None:
    """Beside index keys and selected latents of others, which are counted apart."""
    ((first, second, third),) = {tuple(x) for x in pool.run(2, _peaks)[:1]}
    assert abs((third - second) - 2 * (second - first)) <= 0.1 * (third - second)


def _peaks() -> list[int]:
    """Bytes at most, of 128, 256 and 512 tokens of two ranks; chunks are of one size."""
    mesh = init_device_mesh("cpu", (2,))
    SequenceAxis(mesh, "zigzag")
    peaks = []
    with patch.object(run, "SCORES", 1 << 12), patch.object(listed_attention, "CHUNK", 1 << 10):
        for seq_len in (128, 256, 512):
            x = {
                name: y.narrow(sequence_dim(name), 0, seq_len // 2)
                for name, y in inputs(seq_len).items()
            }
            leaves = {name: y.detach().requires_grad_() for name, y in x.items()}
            with Counted(1 << 30) as counted:
                _, out = attend(leaves, mesh=mesh)
                out.sum().backward()
            peaks.append(counted.peak)
    return peaks


SHARE = Slope(tensors=8, objects=16)
"""Bytes for each token of all ranks: its place among a rank's keys, and positions of all keys, once
for all layers. Index key and latent of a real model take 1,408 in bfloat16."""


@pytest.mark.parametrize("what", [pytest.param("select", marks=pytest.mark.repeats), "attend"])
def test_memory_beside_the_keys_of_others(pool: Pool, what: str) -> None:
    """It grows little with the ranks: index keys come by turns, and only what is chosen comes."""
    (slope,) = pool.run(1, _slope, what)
    assert slope.tensors <= (0 if what == "select" else SHARE.tensors)
    assert slope.objects <= SHARE.objects


def _slope(what: str) -> Slope:
    def peak(num_tokens: int, world_size: int) -> Peak:
        messages = patch.multiple(transport, BUFFERS=BufferPool())
        with messages, fake_group(world_size, rank=world_size // 2):
            mesh = init_device_mesh("cpu", (world_size,))
            SequenceAxis(mesh, "zigzag")
            x = inputs(num_tokens)
            chosen = torch.zeros(2, num_tokens, 1, dtype=torch.int32)
            return peak_of(lambda: run_one(x, chosen, mesh))

    def run_one(x: dict[str, Tensor], chosen: Tensor, mesh: Any) -> None:
        if what == "select":
            select_keys(x["index_query"], x["index_key"], x["weights"], K, mesh=mesh)
            return
        leaves = [x[name].detach().requires_grad_() for name in ("query", "latents")]
        selected_attention(*leaves, 5, chosen, mesh=mesh).sum().backward()

    def nobody(bits: Tensor, length: int) -> Tensor:
        return bits.new_zeros(length, dtype=torch.bool)

    small = patch.object(listed_attention, "CHUNK", 1 << 10), patch.object(run, "SCORES", 1 << 14)
    # Of requests that nobody sends, none may be read.
    with small[0], small[1], patch.object(moved_keys, "_from_bits", nobody):
        return slope_of(peak, (384, 768), (8, 16))
