"""Sums in a fixed order: attention and a small Llama with the same bits on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dtensor_ring import (
    InBlocks,
    Mask,
    SequenceAxis,
    TransferPolicy,
    decode_selected_attention,
    ring_attention,
    shard_sequence,
    sum_over_sequence,
    unshard_sequence,
)
from tests.pool import Pool, on_ranks

SEQ_LEN, WIDTH, HEADS, KEY_HEADS, VOCAB = 64, 64, 4, 2, 96
STEPS, LAYERS, BLOCK = 8, 2, 16
FIXED = TransferPolicy(order="fixed", block=BLOCK)
LAYOUT = f"whole_blocks:{BLOCK}"


class Projections(nn.Module):
    """Query, key and value of normed tokens, `(B, L, N + 2 Nkv, H)`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.weight = nn.Linear(WIDTH, (HEADS + 2 * KEY_HEADS) * WIDTH // HEADS, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = self.weight(self.norm(x)).unflatten(-1, (-1, WIDTH // HEADS))
        rotated, value = heads.split([HEADS + KEY_HEADS, KEY_HEADS], dim=2)
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([turned, value], dim=2)


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor, attended: Tensor) -> Tensor:
        return x + self.weight(attended)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Head(nn.Module):
    """The loss of each token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH, eps=1e-5)
        self.weight = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.weight(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(
            labels.shape
        )


class Llama(nn.Module):
    def __init__(self, axis: SequenceAxis) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.axis = axis
        self.embedding = InBlocks(nn.Embedding(VOCAB, WIDTH), axis)
        parts = [[Projections(), Output(), FeedForward()] for _ in range(LAYERS)]
        self.layers = nn.ModuleList(
            nn.ModuleList(InBlocks(part, axis) for part in layer) for layer in parts
        )
        self.head = InBlocks(Head(), axis)
        # A table of all positions: cosines are rounded by their place in a tensor, too.
        angles = torch.arange(SEQ_LEN).unsqueeze(1) * 10000.0 ** -torch.linspace(0, 1, 8)
        self.table = torch.stack([angles.cos(), angles.sin()])[:, None, :, None]

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The losses of this rank's tokens."""
        own = self.axis.positions(SEQ_LEN)
        cos, sin = self.table[:, :, own].expand(-1, len(tokens), -1, -1, -1)
        x = self.embedding(tokens[:, own])
        for projections, output, feed_forward in self.layers:
            heads = projections(x, cos, sin).transpose(1, 2)
            query, key, value = heads.split([HEADS, KEY_HEADS, KEY_HEADS], dim=1)
            attended = self.axis.attention(query, key, value).transpose(1, 2).flatten(2)
            x = feed_forward(output(x, attended))
        return self.head(x, labels[:, own])


def train(steps: range, saved: str | None = None, save: str | None = None) -> list[Tensor]:
    """The losses of some steps, and the parameters after them, which may be saved and loaded."""
    torch.set_num_threads(1)
    size = torch.distributed.get_world_size()
    axis = SequenceAxis(init_device_mesh("cpu", (size,)), LAYOUT, policy=FIXED)
    model = Llama(axis)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if saved is not None:
        state: Any = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    for step in steps:
        tokens = torch.randint(
            VOCAB, (2, SEQ_LEN + 1), generator=torch.Generator().manual_seed(step)
        )
        of_tokens = model(tokens[:, :-1], tokens[:, 1:])
        # Not of the sum over ranks: each rank has the gradients of its tokens, and `InBlocks` sums.
        optimizer.zero_grad()
        (of_tokens / of_tokens.new_tensor(2.0 * SEQ_LEN)).sum().backward()
        optimizer.step()
        losses.append(axis.sum(of_tokens.detach(), dim=1).sum() / (2 * SEQ_LEN))
    if save is not None and torch.distributed.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, save)
    return [torch.stack(losses), *(x.detach() for x in model.parameters())]


def test_a_llama_trains_to_the_same_bits(pool: Pool) -> None:
    results = [of_rank for size in (1, 2, 4) for of_rank in pool.run(size, train, range(STEPS))]
    for found in results[1:]:
        for x, wanted in zip(found, results[0], strict=True):
            assert torch.equal(x, wanted)
    losses = results[0][0]
    assert losses[-1] < losses[0]


def test_saved_on_four_ranks_and_resumed_on_two(pool: Pool, tmp_path: Path) -> None:
    never_stopped = pool.run(4, train, range(6))[0]
    file = str(tmp_path / "saved.pt")
    before = pool.run(4, train, range(3), None, file)[0]
    after = pool.run(2, train, range(3, 6), file)
    for of_rank in after:
        assert torch.equal(torch.cat([before[0], of_rank[0]]), never_stopped[0])
        for x, wanted in zip(of_rank[1:], never_stopped[1:], strict=True):
            assert torch.equal(x, wanted)


@on_ranks(2)
def test_gradients_are_those_of_all_tokens() -> None:
    size = torch.distributed.get_world_size()
    axis = SequenceAxis(init_device_mesh("cpu", (size,)), LAYOUT, policy=FIXED)
    torch.manual_seed(0)
    layer, x = InBlocks(nn.Linear(6, 5), axis), torch.randn(2, SEQ_LEN, 6)
    layer(x[:, axis.positions(SEQ_LEN)]).square().sum().backward()
    plain = layer.module
    grads = [p.grad for p in plain.parameters()]
    wanted = torch.autograd.grad(plain(x).square().sum(), [*plain.parameters()])
    for grad, dense in zip(grads, wanted, strict=True):
        torch.testing.assert_close(grad, dense, rtol=1e-5, atol=1e-4)


def _by_fsdp() -> Tensor:
    """The gradient of a weight over all tokens, whose sum over ranks is that of FSDP2."""
    torch.set_num_threads(1)
    size, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    torch.manual_seed(0)
    layer, x = nn.Linear(WIDTH, WIDTH, bias=False), torch.randn(2, 16 * SEQ_LEN, WIDTH)
    fully_shard(layer, mesh=init_device_mesh("cpu", (size,)))
    layer(x.chunk(size, dim=1)[rank]).square().sum().backward()
    grad: Any = layer.weight.grad
    return grad.full_tensor() * size  # it is the mean over ranks: a power of two is exact


def test_fsdp_leaves_differences_in_the_last_bits(pool: Pool) -> None:
    two, four = (pool.run(size, _by_fsdp)[0] for size in (2, 4))
    assert (two != four).float().mean() > 0.5
    assert (two - four).abs().max() < 1e-5 * two.abs().max()


def _refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    layer = InBlocks(nn.Linear(6, 5), SequenceAxis(mesh, LAYOUT, policy=FIXED))
    with pytest.raises(ValueError, match="a block for each rank"):
        layer(torch.randn(2, 16, 6), seq_len=16)
    with pytest.raises(ValueError, match="this rank has 32 of 64 tokens"):
        layer(torch.randn(2, 30, 6), seq_len=64)


def _refused_of_zigzag() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag", policy=FIXED)
    with pytest.raises(ValueError, match="whole_blocks:16"):
        InBlocks(nn.Linear(6, 5), axis)(torch.randn(2, 30, 6))


def _refused_without_an_order() -> None:
    axis = SequenceAxis(init_device_mesh("cpu", (2,)), "zigzag")
    with pytest.raises(ValueError, match="InBlocks needs an axis with"):
        InBlocks(nn.Linear(6, 5), axis)
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module"):
        InBlocks(torch.relu, axis)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="axis must be a SequenceAxis"):
        InBlocks(nn.Linear(6, 5), axis.mesh)  # type: ignore[arg-type]


@pytest.mark.parametrize("case", [_refused, _refused_of_zigzag, _refused_without_an_order])
def test_what_it_refuses(pool: Pool, case: Any) -> None:
    pool.run(2, case)


# Attention of an axis whose sums have a fixed order, over processes.

FIXED_ORDER = TransferPolicy(order="fixed", block=16)
AXIS_LEN = 56
HOWS = [
    ("zigzag", "ring"),
    ("contiguous", "all_gather"),
    ("striped", "ulysses"),
    ("whole_blocks:16", "ring"),
]


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, heads, AXIS_LEN, 32) for heads in (8, 4, 4, 8)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _attend(layout: str, strategy: str, compiled: bool = False) -> list[Tensor]:
    """Out and gradients, whole, of DTensors."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    axis = SequenceAxis(mesh, layout, strategy=strategy, policy=FIXED_ORDER)
    axis.prepare(AXIS_LEN, mask=Mask.sliding(20))
    *inputs, grad = _inputs()
    sharded = [axis.shard(x, 2).requires_grad_() for x in inputs]
    attend = torch.compile(ring_attention, backend="aot_eager") if compiled else ring_attention
    out = attend(*sharded, mask=Mask.sliding(20), **({} if compiled else {"validate": True}))
    grads = torch.autograd.grad(out, sharded, axis.shard(grad, 2))
    return [unshard_sequence(x.detach(), 2) for x in (out, *grads)]


def test_dtensors_of_any_layout_have_the_same_bits(pool: Pool) -> None:
    (alone,) = pool.run(1, _attend, "contiguous", "ring")
    for layout, strategy in HOWS:
        for of_rank in pool.run(4, _attend, layout, strategy):
            for x, wanted in zip(of_rank, alone, strict=True):
                assert torch.equal(x, wanted), (layout, strategy)


@pytest.mark.parametrize("layout", ["zigzag", "whole_blocks:16"])
def test_so_have_compiled_ones(pool: Pool, layout: str) -> None:
    (alone,) = pool.run(1, _attend, "contiguous", "ring")
    for of_rank in pool.run(2, _attend, layout, "ring", True):
        for x, wanted in zip(of_rank, alone, strict=True):
            assert torch.equal(x, wanted)


def _summed() -> Tensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    axis = SequenceAxis(mesh, "zigzag")
    whole = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    local = whole[:, axis.positions(1000)].requires_grad_()
    total = sum_over_sequence(local, mesh, dim=1)
    torch.testing.assert_close(total, whole.sum(1), rtol=1e-5, atol=1e-4)
    (grad,) = torch.autograd.grad(total.sum(), local)
    assert torch.equal(grad, torch.full_like(grad, float(dist.get_world_size())))
    return total.detach()


def test_sums_of_tokens_have_the_same_bits(pool: Pool) -> None:
    totals = [x for size in (1, 2, 4) for x in pool.run(size, _summed)]
    assert all(torch.equal(x, totals[0]) for x in totals)


def _decode_selected(mesh: Any, query: Tensor, key: Tensor) -> None:
    selected = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    decode_selected_attention(query[:, :, :1], key, key, selected, mesh=mesh)


def _copied_heads(mesh: Any, query: Tensor, key: Tensor) -> None:
    ring_attention(query, key[:, :1], key[:, :1], mesh=mesh, strategy="ulysses")


def _continued(mesh: Any, query: Tensor, key: Tensor) -> None:
    runs = torch.tensor([[[0, 32]], [[32, 32]]])
    ring_attention(query, key, key, mesh=mesh, runs=runs, key_runs=runs)


REFUSED = [
    (_decode_selected, "decode_selected_attention has no sums in a fixed order"),
    (_copied_heads, "needs a key head for each of the 2 ranks"),
    (_continued, "key_runs are for queries that continue one"),
]


@on_ranks(2)
def test_what_is_not_served_is_refused_on_every_rank() -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    SequenceAxis(mesh, "contiguous", policy=FIXED_ORDER)
    query, key = torch.randn(1, 4, 32, 32), torch.randn(1, 2, 32, 32)
    for call, sentence in REFUSED:
        with pytest.raises(ValueError, match=sentence):
            call(mesh, query, key)
    sharded = [shard_sequence(torch.randn(1, 2, 64, 8), mesh, 2) for _ in range(3)]
    ring_attention(*sharded)  # the ranks still agree


def test_policies_that_round_are_refused() -> None:
    for how in ({"kv_dtype": "int8"}, {"grad_dtype": torch.bfloat16}):
        with pytest.raises(ValueError, match="sends keys and values as they are"):
            TransferPolicy(order="fixed", **how)
    with pytest.raises(ValueError, match='order must be None or "fixed"'):
        TransferPolicy(order="sorted")
    with pytest.raises(ValueError, match="block=8 is for order"):
        TransferPolicy(block=8)


@on_ranks(3)
def test_gradients_of_uneven_whole_blocks() -> None:
    """Ranks hold 24, 24 and 16 of 64 tokens, where DTensor would cut them into 22, 22 and 20."""
    axis = SequenceAxis(init_device_mesh("cpu", (3,)), "whole_blocks:8")
    whole = [torch.randn(1, 2, 64, 8, dtype=torch.float64) for _ in range(4)]
    *inputs, grad_out = (axis.shard(x, 2).detach().requires_grad_() for x in whole)
    ring_attention(*inputs).backward(grad_out.detach())
    dense = [x.requires_grad_() for x in whole[:3]]
    F.scaled_dot_product_attention(*dense, is_causal=True).backward(whole[3])
    for x, y in zip(inputs, dense, strict=True):
        torch.testing.assert_close(unshard_sequence(x.grad, 2), y.grad)
