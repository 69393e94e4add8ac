"""Tokens go into the order of a layout and of another one, and come back."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_ring import (
    Balanced,
    Mask,
    SequenceAxis,
    Slices,
    Striped,
    exchange,
    next_token_labels,
    relayout,
    sequence_layout,
    sequence_runs,
    sequence_slices,
    shard_sequence,
    unshard_sequence,
)
from dtensor_ring.dtensor.annotation import annotation_of
from dtensor_ring.extension import Padded, from_local_tokens, output_mesh
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.run_table import as_layout
from tests.pool import on_ranks
from tests.refusals import Refused, check_refused

LAYOUTS = ("contiguous", "striped", "zigzag")

CAUSAL = Mask.causal()
HELD: list[tuple[int, int, str | Balanced]] = [
    *((1, 3, name) for name in LAYOUTS),
    *((2, 5, name) for name in ("contiguous", "zigzag")),
    *((3, 12, name) for name in LAYOUTS),
    *((4, 5, name) for name in ("contiguous", "zigzag")),  # the last rank holds nothing
    (4, 8, "striped"),
    (1, 3, Balanced(CAUSAL, 3, 1, block=2)),
    (2, 16, Balanced(CAUSAL, 16, 2, (0, 12, 16), block=2)),
    (3, 12, Balanced(CAUSAL, 12, 3, (0, 8, 12), block=1)),
    (4, 9, Balanced(CAUSAL, 9, 4, (0, 7, 9), block=1)),  # nor here
]
"""Ranks, a length, and the layout."""


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@on_ranks()
def test_round_trips() -> None:
    size = dist.get_world_size()
    for layout, seq_len in [(layout, length) for ranks, length, layout in HELD if ranks == size]:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("cp",))
        annotation_of(mesh.get_group()).config = None  # that of the layout before
        _check_round_trip(mesh, layout, seq_len)


def _check_round_trip(mesh: DeviceMesh, layout: Balanced | str, seq_len: int) -> None:
    mine = torch.tensor(as_layout(layout).positions(dist.get_rank(), mesh.size(), seq_len)).long()
    again = of_batch(layout)
    for dim in (0, 1, 2, -1, -2):
        shape = [2, 3, 4]
        shape[dim] = seq_len
        for whole in (torch.randn(shape), torch.arange(math.prod(shape)).view(shape)):
            sharded = shard_sequence(whole, mesh, dim, layout)
            assert sequence_layout(mesh).name == getattr(layout, "name", layout)
            assert sharded.placements == (Shard(dim % 3),)
            assert (sharded.shape, sharded.dtype) == (whole.shape, whole.dtype)
            assert torch.equal(sharded.to_local(), whole.index_select(dim, mine))
            assert torch.equal(unshard_sequence(sharded, dim, again), whole)
            sharded = shard_sequence(whole, mesh, dim, again)
            assert torch.equal(unshard_sequence(sharded, dim, again), whole)


def of_batch(layout: Balanced | str) -> Balanced | None:
    """What has to be said again, on a mesh that is annotated."""
    return layout if isinstance(layout, Balanced) else None


@pytest.mark.parametrize("layout", [*LAYOUTS, Balanced(CAUSAL, 8, 4, (0, 6, 8), block=1)])
@on_ranks(4)
def test_gradients(layout: Balanced | str) -> None:
    mesh, again = init_device_mesh("cpu", (4,)), of_batch(layout)
    weight = torch.randn(2, 8, 3)
    whole = torch.randn(2, 8, 3, requires_grad=True)
    sharded = shard_sequence(whole, mesh, 1, layout)
    sharded.retain_grad()
    # Ranks weight their losses differently: what comes back is the sum of all.
    (unshard_sequence(sharded, 1, again) * weight * (1 + dist.get_rank())).sum().backward()
    torch.testing.assert_close(unshard_sequence(sharded.grad, 1, again), 10 * weight)
    # Each rank has the gradient of its own tokens, and zeros.
    mine = sequence_layout(mesh).positions(dist.get_rank(), 4, 8)
    expected = torch.zeros_like(weight)
    expected[:, mine] = 10 * weight[:, mine]
    torch.testing.assert_close(whole.grad, expected)


@on_ranks(2)
def test_two_batches_on_one_mesh() -> None:
    mesh, whole = init_device_mesh("cpu", (2,)), torch.randn(16)
    layouts = [Balanced(CAUSAL, 16, 2, (0, end, 16), block=2) for end in (10, 12)]
    first, second = (shard_sequence(whole, mesh, 0, layout) for layout in layouts)
    assert not torch.equal(first.to_local(), second.to_local())
    assert sequence_layout(mesh) == layouts[1]
    for sharded, layout in zip((first, second), layouts, strict=True):
        assert torch.equal(unshard_sequence(sharded, 0, layout), whole)


@on_ranks(4)
def test_refusals_of_a_batch() -> None:
    mesh, whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp")), torch.arange(16)
    layout, longer = (Balanced(CAUSAL, seq_len, 2, block=2) for seq_len in (16, 18))
    zigzag = shard_sequence(whole, mesh["dp"], 0, "zigzag")
    sharded = shard_sequence(whole, mesh["cp"], 0, layout)
    for message, function, *args in (
        ("batch: pass the Balanced layout of this one", shard_sequence, whole, mesh["cp"], 0),
        ("sharded with the layout balanced, .*: leave", unshard_sequence, sharded, 0, longer),
        ("18 tokens .* shard 16", shard_sequence, whole, mesh["cp"], 0, longer),
        ("with the layout zigzag, .*: leave the layout out", unshard_sequence, zigzag, 0, layout),
        ("balanced layout belongs to one batch", shard_sequence, whole, mesh["cp"], 0, "balanced"),
    ):
        with pytest.raises(ValueError, match=message):
            function(*args)


@on_ranks(2)
def test_unaligned_default_is_contiguous() -> None:
    mesh = init_device_mesh("cpu", (2,))
    sharded = shard_sequence(torch.arange(6), mesh, 0)
    assert sequence_layout(mesh) is None
    assert torch.equal(sharded.to_local(), torch.arange(6).chunk(2)[dist.get_rank()])
    assert torch.equal(unshard_sequence(sharded, 0), torch.arange(6))


@on_ranks(2)
def test_all_lengths_compile_twice() -> None:
    """From the second length on it is a symbol of the graph."""
    mesh, counter = init_device_mesh("cpu", (2,)), CompileCounter()
    SequenceAxis(mesh, "zigzag")
    shard = torch.compile(shard_sequence, fullgraph=True, backend=counter)
    for whole in map(torch.arange, (16, 24, 22, 40)):
        held = shard_sequence(whole, mesh, 0)
        assert torch.equal(shard(whole, mesh, 0).to_local(), held.to_local())
    assert counter.frame_count <= 2


@on_ranks(4)
def test_unshard_on_more_axes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    SequenceAxis(mesh["cp"], "zigzag")
    whole = torch.randn(4, 9, 2)
    local = shard_sequence(whole, mesh["cp"], 1).to_local()
    rows = local.chunk(2)[mesh["dp"].get_local_rank()]
    for other, mine in ((Shard(0), rows), (Replicate(), local)):
        sharded = placed(mine, mesh, (other, Shard(1)), whole)
        assert torch.equal(unshard_sequence(sharded, 1), whole)
        assert torch.equal(unshard_sequence(sharded, -2), whole)
    both = placed(whole[:, :2], mesh, (Shard(1), Shard(1)), whole[:, :8])
    with pytest.raises(
        ValueError, match=r"dim 1 of dtensor must be sharded over one mesh axis, got \("
    ):
        unshard_sequence(both, 1)


def placed(local: Tensor, mesh: Any, placements: Any, whole: Tensor) -> DTensor:
    return DTensor.from_local(
        local.contiguous(),
        mesh,
        placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.contiguous().stride(),
    )


@on_ranks(4)
def test_refusals() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    tokens: Any = torch.arange(9)
    with pytest.raises(ValueError, match="of the 2 ranks of the ring, got 9; pad it to 10"):
        shard_sequence(tokens, mesh["dp"], 0, "striped")
    SequenceAxis(cp := mesh["cp"], "zigzag")
    sharded: Any = shard_sequence(torch.arange(8).view(2, 4), cp, 1)
    line = init_device_mesh("cpu", (4,))
    of_line: Any = shard_sequence(tokens, line, 0)
    absent = DeviceMesh("cpu", [(dist.get_rank() + 1) % 4], _init_backend=False)
    refused: Refused = {
        ValueError: {
            "unknown layout 'spiral'": lambda: shard_sequence(tokens, cp, 0, "spiral"),
            "runs over one axis": lambda: shard_sequence(tokens, mesh, 0),
            "dim 0 of dtensor must be sharded over one mesh axis": lambda: unshard_sequence(
                sharded, 0
            ),
            "must be a dense, strided tensor, got a torch.spa": lambda: shard_sequence(
                tokens.to_sparse(), cp, 0
            ),
            "contiguous, it cannot become zigzag: .* annotate": lambda: SequenceAxis(
                line, "zigzag"
            ),
            "is not part of": lambda: shard_sequence(tokens, absent, 0),
        },
        IndexError: {
            "dim must be from -1 to 0 for a tensor of .*, got 1": lambda: shard_sequence(
                tokens, cp, 1
            ),
            "dim must be from -2 to 1 for a dtensor of .*, got 2": lambda: unshard_sequence(
                sharded, 2
            ),
        },
        TypeError: {
            "must be a DTensor, as shard_sequence returns, ": lambda: unshard_sequence(tokens, 0),
            "only a Balanced layout .* got 'zigzag'; of any": lambda: sequence_runs("zigzag"),
            "only a Balanced layout .*; of any other": lambda: unshard_sequence(
                sharded, 1, "zigzag"
            ),
            "must be a plain tensor that every rank holds whole": lambda: shard_sequence(
                of_line, line, 0
            ),
            "be a plain tensor that every rank holds whole": lambda: shard_sequence(
                [0, 1], line, 0
            ),
        },
    }
    check_refused(refused)
    for wrong in (None, "1", 1.0, True):
        for call in (lambda x: shard_sequence(tokens, cp, x), partial(unshard_sequence, sharded)):
            with pytest.raises(TypeError, match=f"dim must be an int, got {wrong!r}"):
                call(wrong)
    for dtype in (torch.uint16, torch.float8_e4m3fn):
        narrow = shard_sequence(tokens.to(dtype), cp, 0)
        assert torch.equal(unshard_sequence(narrow, 0).int(), tokens.int()), "bytes are moved"


def test_slices_as_a_tensor() -> None:
    slices = Slices.batched([Slices.prefix([0, 5], 2), Slices.block_causal([5])])
    for given, shape in (
        (slices, (2, 2, 6)),
        (Slices.tree([-1], [5]), (1, 6)),
        (Slices([], [], []), (0, 6)),
    ):
        exact = sequence_slices(given)
        assert (exact.shape, exact.dtype, exact.device.type) == (shape, torch.int32, "cpu")
        for num_slices in (shape[-2], 7):
            padded = sequence_slices(given, num_slices)
            assert padded.shape == (*shape[:-2], num_slices, 6)
            assert Slices.of_numbers(padded.numpy()) == given
        exact += 1
        assert not exact.numel() or not torch.equal(exact, sequence_slices(given)), "a copy"
    assert Slices(*sequence_slices(slices).split(2, -1)) == slices
    with pytest.raises(ValueError, match="num_slices must be from 2 to 65,536, got 1"):
        sequence_slices(slices, 1)
    with pytest.raises(TypeError, match=r"num_slices must be an int, got 2\.0"):
        sequence_slices(slices, 2.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"slices must be dtensor_ring.Slices, got \[\]"):
        sequence_slices([])  # type: ignore[arg-type]


# `relayout` and `exchange`, as users call them.

BALANCED = Balanced(Mask.causal(), 24, 4, (0, 5, 24), block=2)
TURNS: list[tuple[Any, Any]] = [
    (None, "contiguous"),
    (None, "striped"),
    ("contiguous", "zigzag"),
    (Striped(), "block_cyclic:2"),
    (None, BALANCED),
    (BALANCED, "contiguous"),
    (BALANCED, Balanced(Mask.full(), 24, 4, (0, 11, 24), block=2)),
]
"""The layout that tokens are in, and the one that they come in; the axis is zigzag."""


@on_ranks(4)
def test_tokens_come_in_the_other_order() -> None:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    SequenceAxis(mesh, "zigzag")
    whole = torch.arange(24 * 6.0).view(2, 24, 3)
    for layout, to in TURNS:
        before, after = whole[:, _positions(layout)], whole[:, _positions(to)]
        for dim, view in ((1, lambda x: x), (-1, lambda x: x.mT), (0, lambda x: x[0, :, 0])):
            local = view(before).detach().requires_grad_()
            result = relayout(local, mesh, dim, to, layout=layout)
            assert torch.equal(result, view(after))
            # The gradient of a token comes back to where the token was.
            (grad,) = torch.autograd.grad(result.square().sum(), local)
            assert torch.equal(grad, 2 * local)
    _dtensors(mesh, whole)
    compiled = torch.compile(relayout, backend="aot_eager", fullgraph=True)
    local = whole[:, _positions(None)]
    assert torch.equal(compiled(local, mesh, 1), whole[:, _positions("contiguous")])
    tokens = torch.arange(19)[as_layout("zigzag").positions(dist.get_rank(), 4, 19)]
    in_order = relayout(tokens, mesh, 0, seq_len=19)
    assert in_order.tolist() == as_layout("contiguous").positions(dist.get_rank(), 4, 19)
    assert relayout(tokens, mesh, 0, "zigzag", seq_len=19) is tokens


def _positions(layout: Any) -> list[int]:
    found: Layout = as_layout("zigzag" if layout is None else layout)
    return found.positions(dist.get_rank(), 4, 24)


def _dtensors(mesh: Any, whole: Tensor) -> None:
    """Lengths that do not divide, and a mesh of two axes."""
    sharded = shard_sequence(whole[:, :19], mesh, 1).requires_grad_()
    in_order = relayout(sharded, mesh, 1)
    assert in_order.placements == (Shard(1),)
    assert torch.equal(in_order.full_tensor(), whole[:, :19])
    in_order.square().sum().backward()
    assert torch.equal(sharded.grad.to_local(), 2 * sharded.to_local())
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    SequenceAxis(both["cp"], "zigzag")
    order = [x for rank in range(2) for x in as_layout("zigzag").positions(rank, 2, 24)]
    local = whole.chunk(2)[both.get_local_rank(0)][:, order].chunk(2, 1)[both.get_local_rank(1)]
    two = DTensor.from_local(local, both, [Shard(0), Shard(1)])
    assert torch.equal(relayout(two, both["cp"], 1).full_tensor(), whole)


@on_ranks(4)
def test_exchange() -> None:
    mesh, rank = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",)), dist.get_rank()
    SequenceAxis(mesh, "zigzag")
    whole = [torch.randn(2, heads, 24, 3) for heads in (8, 2)]
    dist.broadcast(whole[0], 0), dist.broadcast(whole[1], 0)
    query, key = (x[:, :, _positions(None)] for x in whole)
    for attend in (exchange, torch.compile(exchange, backend="aot_eager", fullgraph=True)):
        all_query, all_key = attend([query, key], mesh)
        assert torch.equal(all_query, whole[0][:, 2 * rank : 2 * rank + 2])
        assert torch.equal(all_key, whole[1][:, rank // 2 : rank // 2 + 1])
        (back,) = attend([all_query], mesh, to="tokens", num_key_heads=2)
        assert torch.equal(back, query)
    # Two groups, and heads that do not divide: 3 of 5 on the second rank of a group.
    odd = query[:, :5].detach().requires_grad_()
    (exchanged,) = exchange([odd], mesh, heads=2)
    assert exchanged.shape == (2, (2, 3)[rank % 2], 12, 3)
    (back,) = exchange([exchanged], mesh, to="tokens", heads=2, num_heads=[5])
    assert torch.equal(back, odd)
    (grad,) = torch.autograd.grad(back.square().sum(), odd)
    assert torch.equal(grad, 2 * odd)


WRONG: dict[str, tuple[type[Exception], str, Any]] = {
    "copies": (ValueError, "copied to several ranks cannot come back", lambda x, mesh: exchange(
        [x[:, :1].repeat(1, 4, 1, 1), x[:, :1]], mesh, to="tokens",
        num_heads=[4, 1], num_key_heads=1)),
    "too few heads": (ValueError, "each has to get a head", lambda x, mesh: exchange(
        [x, x[:, :1]], mesh)),
    "groups": (ValueError, r"divides the 4 of the axis, got 3", lambda x, mesh: exchange(
        [x.repeat(1, 3, 1, 1)], mesh, heads=3)),
    "a DTensor": (TypeError, r"local shards, got a DTensor; use .to_local\(\)",
        lambda x, mesh: exchange([DTensor.from_local(x, mesh, [Shard(2)])], mesh)),
    "no list": (TypeError, "must be a list of tensors", lambda x, mesh: exchange(x, mesh)),
    "where to": (ValueError, '"heads" or "tokens", got \'x\'', lambda x, mesh: exchange(
        [x], mesh, to="x")),
    "layout": (ValueError, "to must be a layout: unknown layout 'spiral'", lambda x, mesh: relayout(
        x, mesh, 2, "spiral")),
    "length": (ValueError, "length that is a multiple of the 4 ranks", lambda x, mesh: relayout(
        x, mesh, 2, "striped", seq_len=15)),
    "lengths": (ValueError, r"tokens \(seq_len 12\), got a tensor", lambda x, mesh: relayout(
        x, mesh, 2, "striped", seq_len=12)),
    "a batch's": (ValueError, "must be the Balanced layout of this one", lambda x, mesh: relayout(
        x, mesh, 2, "balanced")),
    "another batch's": (ValueError, "shard the 16 tokens over 4 ranks", lambda x, mesh: relayout(
        x, mesh, 2, BALANCED)),
    "dim": (IndexError, "dim must be from -4 to 3", lambda x, mesh: relayout(x, mesh, 4)),
    "placements": (ValueError, r"must be Shard\(1\) over the axis", lambda x, mesh: relayout(
        DTensor.from_local(x, mesh, [Shard(2)]), mesh, 1)),
}  # fmt: skip


@on_ranks(4)
def test_bad_input() -> None:
    """Rank 0 alone calls: nothing is sent before it is refused."""
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    x = torch.zeros(1, 2, 4, 3)
    for error, match, call in WRONG.values():
        with pytest.raises(error, match=match):
            call(x, mesh)


# Padded sequences: what an operation makes of them, and in which order.

SEQ_LEN = 13


def padded(x: torch.Tensor, layout: str) -> Any:
    """A sequence, as a plan shards one whose length the ranks do not divide."""
    axis = SequenceAxis(init_device_mesh("cpu", (2,), mesh_dim_names=("cp",)), layout)
    order = Padded(axis.layout)
    own = order.positions(axis.mesh.get_local_rank(), 2, SEQ_LEN)
    return from_local_tokens(x[:, own], output_mesh(axis, order), 1, SEQ_LEN)


@on_ranks(2)
def test_scatter() -> None:
    """Into zeros, as backward does, and never across two orders."""
    whole = torch.arange(2 * SEQ_LEN * 4.0).view(2, SEQ_LEN, 4).sin()
    index = whole.argmax(-1, keepdim=True)
    striped, contiguous = padded(whole, "striped"), padded(whole, "contiguous")
    scattered = striped.scatter(-1, striped.argmax(-1, keepdim=True), 2.0)
    torch.testing.assert_close(scattered.full_tensor(), whole.scatter(-1, index, 2.0))
    for given in (
        (striped, contiguous.argmax(-1, keepdim=True), 2.0),
        (striped, striped.argmax(-1, keepdim=True), contiguous),
    ):
        with pytest.raises(ValueError, match=r"two orders .* padded striped order"):
            torch.scatter(given[0], -1, *given[1:])


# Labels are the next tokens of the same document.

NONE = -100
TOKENS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 1, 2, 0]])


@pytest.mark.parametrize(
    ("tokens", "cu_seqlens", "expected"),
    [
        (TOKENS[0], None, [4, 5, 6, 7, NONE]),
        (TOKENS, None, [[4, 5, 6, 7, NONE], [9, 1, 2, 0, NONE]]),
        (TOKENS[0], [0, 2, 5], [4, NONE, 6, 7, NONE]),
        (TOKENS[0], [0, 2, 2, 5, 5], [4, NONE, 6, 7, NONE]),
        (TOKENS, [0, 1, 5], [[NONE, 5, 6, 7, NONE], [NONE, 1, 2, 0, NONE]]),
        (TOKENS, [[0, 1, 5], [0, 4, 4]], [[NONE, 5, 6, 7, NONE], [9, 1, 2, NONE, NONE]]),
    ],
)
def test_next_tokens(tokens: Tensor, cu_seqlens: Any, expected: Any) -> None:
    given = None if cu_seqlens is None else torch.tensor(cu_seqlens, dtype=torch.int32)
    labels = next_token_labels(tokens, given)
    assert labels.tolist() == expected
    assert labels.dtype == tokens.dtype
    others = next_token_labels(tokens, given, ignore_index=-1)
    assert torch.equal(others, labels.masked_fill(labels == NONE, -1))


@pytest.mark.parametrize(
    ("tokens", "cu_seqlens", "error", "match"),
    [
        ([1, 2], None, TypeError, "tokens must be a tensor of integers, got list"),
        (TOKENS.float(), None, TypeError, "tokens must be .*, got torch.float32"),
        (TOKENS, [0, 5], TypeError, "cu_seqlens must be a tensor of integers, got list"),
        (TOKENS[None], None, ValueError, r"\(B, S\) or \(S,\), got \(1, 2, 5\)"),
        (TOKENS, torch.tensor([[0, 5]]), ValueError, r"cu_seqlens must be .* got \(1, 2\)"),
        (TOKENS, torch.tensor([0, 6]), ValueError, "a sequence of 5 tokens, got 0 to 6"),
    ],
)
def test_refused_labels(tokens: Any, cu_seqlens: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        next_token_labels(tokens, cu_seqlens)
