"""The exchange op, its gradients, a compiler's view of it, and keys in eight bits."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from itertools import chain, product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring import BlockCyclic, Contiguous, Mask, RingError, Striped, TransferPolicy, ZigZag
from dtensor_ring.all_to_all.op import AllToAllArgs, BatchRuns, all_to_all_op, flatten_all_to_all
from dtensor_ring.all_to_all.plan import all_to_all_plan, head_shard_of
from dtensor_ring.all_to_all.ulysses import ulysses_attention
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.plan import KeyOwners
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.quantised.block_scales import dequantise
from dtensor_ring.transport import quantised_rotation
from dtensor_ring.transport.quantised_rotation import (
    QuantisedPacket,
    ScaleBlocks,
    packet_size,
    quantised_pair,
)
from tests.columns import indices_of
from tests.played_group import PlayedGroup, play_group
from tests.pool import Pool, on_ranks
from tests.rings import Case as Attention
from tests.rings import Ring, runs_of

TABLE = RunTable([[(0, 1), (18, 2)], [(1, 7)], [(8, 10)], []])
"""Of a batch: ranks have different lengths, and one nothing."""


@dataclass(frozen=True)
class Case:
    layout: Layout
    to: Layout
    heads: int
    world_size: int
    seq_len: int
    num_heads: tuple[int, ...] = (8, 4, 4)
    num_key_heads: int = 4
    dtypes: tuple[torch.dtype, ...] = (torch.float64,) * 3
    batch: int = 2

    def tensors(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        dims = 3, 3, 2, 5
        return [
            torch.randn(self.batch, count, self.seq_len, dim, generator=generator).to(dtype)
            for count, dim, dtype in zip(self.num_heads, dims, self.dtypes, strict=False)
        ]

    def args(self, group_name: str, **options: object) -> AllToAllArgs:
        args = AllToAllArgs(
            BatchRuns(runs_of(self.layout), runs_of(self.to)),
            *(self.layout.spec, self.to.spec, self.heads, self.num_heads, self.num_key_heads),
            *(self.seq_len, None, group_name, Mask.full()),
        )
        return args._replace(**options)  # type: ignore[arg-type]

    def before(self, rank: int) -> list[Tensor]:
        positions = self.layout.positions(rank, self.world_size, self.seq_len)
        # As projections yield them.
        return [x.transpose(1, 2)[:, positions].transpose(1, 2) for x in self.tensors()]

    def after(self, rank: int) -> list[Tensor]:
        first = rank // self.heads * self.heads
        ranks = range(first, first + self.heads)
        batch_runs = (self.to.positions(x, self.world_size, self.seq_len) for x in ranks)
        positions = sorted(p for part in batch_runs for p in part)
        shard = head_shard_of(rank % self.heads, self.heads, self.num_key_heads)
        spans = [shard.span(count, self.num_key_heads) for count in self.num_heads]
        return [
            x[:, slice(*span), positions] for x, span in zip(self.tensors(), spans, strict=True)
        ]

    def copies(self, number: int) -> Tensor:
        """By head of a tensor, how many ranks of a group have it."""
        members = (head_shard_of(m, self.heads, self.num_key_heads) for m in range(self.heads))
        counts = torch.zeros(self.num_heads[number])
        for shard in members:
            counts[slice(*shard.span(self.num_heads[number], self.num_key_heads))] += 1
        return counts.view(1, -1, 1, 1)


CASES = {
    **{
        f"{layout.spec} to {to.spec}, {heads} of {world_size}": Case(
            layout, to, heads, world_size, 24
        )
        for i, (layout, to) in enumerate(
            product((ZigZag(), Striped(), Contiguous(), BlockCyclic(2)), repeat=2)
        )
        for world_size, heads in ((2, 2), (2, 1), (4, 2), (3, 3))[(i + i // 4) % 2 :: 2]
        if heads > 1 or layout != to
    },
    "six ranks": Case(ZigZag(), ZigZag(), 3, 6, 24, (9, 9, 9), 9),
    "uneven heads": Case(ZigZag(), ZigZag(), 4, 4, 24, (28, 7, 7), 7),
    "28 heads on 8": Case(ZigZag(), ZigZag(), 8, 8, 32, (28, 4, 4)),
    "one key head": Case(ZigZag(), ZigZag(), 6, 6, 24, (6, 1, 1), 1),
    "two key heads on three": Case(Striped(), Striped(), 3, 3, 24, (6, 2, 2), 2),
    "uneven tokens": Case(ZigZag(), Contiguous(), 2, 4, 19),
    "empty ranks": Case(Contiguous(), ZigZag(), 4, 4, 5),
    "no token": Case(ZigZag(), ZigZag(), 2, 2, 0),
    "empty batch": Case(ZigZag(), ZigZag(), 2, 2, 24, batch=0),
    "runs": Case(TABLE, TABLE, 2, 4, 20),
    "runs to a layout": Case(TABLE, ZigZag(), 1, 4, 20),
    "a layout to runs": Case(Striped(), TABLE, 4, 4, 20),
    "dtypes": Case(
        *(ZigZag(), ZigZag(), 4, 4, 24, (8, 8, 2, 2), 2),
        (torch.bfloat16, torch.float64, torch.int64, torch.uint8),
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_tokens_and_heads_go_where_they_belong_and_gradients_come_back(case: Case) -> None:
    check_exchange(case)


def check_exchange(case: Case) -> None:
    def run(group: PlayedGroup) -> None:
        inputs, expected = case.before(group.rank()), case.after(group.rank())
        for x in inputs:
            x.requires_grad_(x.is_floating_point())
        results = all_to_all_op(inputs, *flatten_all_to_all(case.args(group.group_name)))
        for found, wanted in zip(results, expected, strict=True):
            assert found.dtype == wanted.dtype
            assert torch.equal(found, wanted)
        # Whatever is linear: its transpose brings every copy of a token back, and sums them.
        used = [(i, x) for i, x in enumerate(results) if x.requires_grad]
        grads = torch.autograd.grad(
            [x for _, x in used], [inputs[i] for i, _ in used], [x.detach() for _, x in used]
        )
        for (i, _), grad in zip(used, grads, strict=True):
            assert torch.equal(grad, (inputs[i] * case.copies(i)).to(grad.dtype).detach())

    play_group(case.world_size, run)


def test_gradients_are_those_of_the_results_that_are_used() -> None:
    """A tensor without gradient sends nothing back; a second derivative goes the same ways."""
    case = CASES["runs"]

    def run(group: PlayedGroup) -> None:
        inputs = [x.requires_grad_() for x in case.before(group.rank())]
        _, used, _ = all_to_all_op(inputs, *flatten_all_to_all(case.args(group.group_name)))
        (grad,) = torch.autograd.grad(used.pow(3).sum(), inputs[1], create_graph=True)
        assert torch.allclose(grad, 3 * inputs[1] ** 2)
        (grad,) = torch.autograd.grad(grad.sum(), inputs[1])
        assert torch.allclose(grad, 6 * inputs[1])

    play_group(case.world_size, run)


@pytest.mark.parametrize("name", ["28 heads on 8", "uneven tokens", "empty ranks", "dtypes"])
def test_fake_kernels_promise_what_the_real_ones_return(name: str) -> None:
    """Shapes, strides and dtypes, there and back."""
    case = CASES[name]

    def run(group: PlayedGroup) -> None:
        with torch.no_grad():
            there = flatten_all_to_all(case.args(group.group_name))
            back = flatten_all_to_all(case.args(group.group_name, is_back=True))
            inputs = case.before(group.rank())
            real = all_to_all_op(inputs, *there)
            returned = all_to_all_op(real, *back)
            with FakeTensorMode() as mode:
                inputs, made = ([mode.from_tensor(x) for x in side] for side in (inputs, real))
                fake = all_to_all_op(inputs, *there), all_to_all_op(made, *back)
        for one, other in zip((*real, *returned), chain(*fake), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            assert one.stride() == other.stride()

    play_group(case.world_size, run)


@on_ranks(1)
def test_opcheck() -> None:
    with warnings.catch_warnings():
        # opcheck looks at .grad of copies that are no leaves, whatever it is given.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        case = Case(RunTable([[(0, 24)]]), ZigZag(), 1, 1, 24)
        inputs = [x.requires_grad_() for x in case.before(0)]
        for kv_dtype in (None, torch.int8):
            args = case.args(dist.group.WORLD.group_name, kv_dtype=kv_dtype)
            torch.library.opcheck(all_to_all_op, (inputs, *flatten_all_to_all(args)))


WRONG = {
    "no tensor": ([], {}, r"one or more \(B, N, L, H\), got none"),
    "three dims": ([(4, 6, 2)], {}, r"one or more \(B, N, L, H\), got \(4, 6, 2\)"),
    "two lengths": ([(2, 4, 6, 2), (2, 4, 5, 2)], {}, "one batch size and one length"),
    "two batches": ([(2, 4, 6, 2), (1, 4, 6, 2)], {}, "one batch size and one length"),
    "other lengths": ([(2, 4, 5, 2)], {}, r"rank 0 of 2 must have 4 heads .*of 6 tokens"),
    "other heads": ([(2, 3, 6, 2)], {}, "must have 4 heads"),
    "heads": ([(2, 5, 6, 2)], {"num_heads": (5,)}, "must be a multiple"),
    "ranks": ([(2, 4, 6, 2)], {"heads": 3}, r"these do: \[1, 2\]"),
    "a layout": ([(2, 4, 6, 2)], {"to": "spiral"}, "unknown layout 'spiral'; known layouts"),
    "runs": (
        [(2, 4, 6, 2)],
        {"batch_runs": BatchRuns(torch.zeros(3, 2).int())},
        r"shape \(W, R, 2\)",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_before_anything_is_sent(name: str) -> None:
    """Nobody posts the other side of a message."""
    shapes, options, match = WRONG[name]
    case = Case(ZigZag(), ZigZag(), 2, 2, 12, (4,), 2)

    def run(group: PlayedGroup) -> None:
        if not group.rank():
            args = case.args(group.group_name, **options)
            with pytest.raises(ValueError, match=match):
                all_to_all_op([torch.zeros(shape) for shape in shapes], *flatten_all_to_all(args))

    play_group(2, run)


DIFFERENCES = {
    "head dims": {"dims": (3, 2)},
    "heads": {"num_heads": (8, 4)},
    "layout after": {"to": "contiguous"},
    "ranks that share the heads": {"heads": 1},
    "kv_dtype": {"kv_dtype": torch.int8},
}


def test_ranks_that_differ_are_reported(pool: Pool) -> None:
    for name in DIFFERENCES:
        for reported in pool.run(2, _differing, name):
            assert f"differ in {name}: " in reported


def _differing(name: str) -> str:
    """What this rank is told."""
    case, rank = Case(ZigZag(), ZigZag(), 2, 2, 12, (8, 2), 2), dist.get_rank()
    options = dict(DIFFERENCES[name]) if rank else {}
    dims = options.pop("dims", (3, 3))
    args = case.args(dist.group.WORLD.group_name, **options)
    tensors = [torch.zeros(2, n, 6, dim) for n, dim in zip(args.num_heads, dims, strict=True)]
    with pytest.raises(RingError) as reported:
        all_to_all_op(tensors, *flatten_all_to_all(args))
    return str(reported.value)


@on_ranks(2)
def test_backward_calls_have_the_order_of_all_ranks() -> None:
    """Two exchanges of one shape: the gradient of one would be taken for that of the other."""
    case, rank = Case(ZigZag(), ZigZag(), 2, 2, 12), dist.get_rank()
    inputs = [x.requires_grad_() for x in case.before(rank)]
    options = flatten_all_to_all(case.args(dist.group.WORLD.group_name))
    calls = [all_to_all_op(inputs, *options)[0].sum() for _ in range(2)]
    with pytest.raises(RingError, match="differ in backward of call number: "):
        calls[rank].backward()


# All-to-alls whose keys and values travel in eight bits: who gets which bits, and what is sent.

ROUNDED = {
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
@pytest.mark.parametrize("name", ROUNDED)
def test_everybody_gets_what_the_owners_rounded(name: str, dtype: torch.dtype) -> None:
    """To the bit, also as it travels on; gradients pass straight through."""
    case = ROUNDED[name]

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
def test_fake_kernels_of_rounded_keys(name: str) -> None:
    case = ROUNDED[name]

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


@pytest.mark.parametrize("name", ROUNDED)
def test_owners_are_those_of_the_exchange(name: str) -> None:
    """Columns by owner, and the blocks in the order in which they arrive."""
    case, owners = ROUNDED[name], owners_of(ROUNDED[name])
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
