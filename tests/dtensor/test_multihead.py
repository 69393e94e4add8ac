"""`nn.MultiheadAttention` under ContextParallel, by itself and in layers, against stock ones."""

from __future__ import annotations

import io
import pickle
import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import ContextParallel, sequence_layout, shard_sequence, unshard_sequence
from dtensor_ring.planning.run_table import as_layout
from tests.pool import Pool, on_ranks

WIDTH, HEADS, LENGTH, OTHER_LENGTH = 16, 4, 12, 8
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH, dtype=torch.float64)
HOW: dict[str, Any] = {"dropout": 0.0, "dtype": torch.float64}
LAYER: dict[str, Any] = HOW | {"dim_feedforward": 24, "batch_first": True}


def encoder_layer(**how: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, HEADS, **(LAYER | how))


# A module, which parts attend, and a call with the tokens of a sequence and of another one.
MODULES: dict[str, tuple[Callable[[], nn.Module], list[str], Callable[..., Any]]] = {
    "attention, causal": (
        lambda: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **HOW),
        [""],
        lambda m, x, y: m(x, x, x, None, False, CAUSAL, is_causal=True)[0],
    ),
    "cross attention": (
        lambda: nn.MultiheadAttention(WIDTH, HEADS, bias=False, kdim=WIDTH, vdim=8, **HOW),
        [""],
        lambda m, x, y: m(
            *(z.transpose(0, 1) for z in (x, y, y[..., :8])), need_weights=False
        )[0].transpose(0, 1),
    ),
    "encoder layer": (encoder_layer, ["self_attn"], lambda m, x, y: m(x)),
    "causal encoder": (
        lambda: nn.TransformerEncoder(encoder_layer(norm_first=True), 2, None, False),
        ["layers.*.self_attn"],
        lambda m, x, y: m(x, CAUSAL, is_causal=True),
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, HEADS, **LAYER), 2),
        ["layers.*.self_attn", "layers.*.multihead_attn"],
        lambda m, x, y: m(x, y, CAUSAL, tgt_is_causal=True),
    ),
}  # fmt: skip

COMPILED = "attention, causal", "causal encoder", "decoder"


@pytest.mark.parametrize("name", MODULES)
@on_ranks(2)
def test_module(name: str) -> None:
    """In training, and in inference, where layers have a fast path; saved, copied and compiled."""
    make, parts, call = MODULES[name]
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    stock = make()
    sharded = parallelize_module(
        deepcopy(stock), mesh, {part: ContextParallel("zigzag") for part in parts}
    )
    assert [*sharded.state_dict()] == [*stock.state_dict()]
    whole = [torch.randn(2, n, WIDTH, dtype=torch.float64) for n in (LENGTH, OTHER_LENGTH)]
    mine = [as_layout("zigzag").positions(dist.get_rank(), 2, x.shape[1]) for x in whole]
    local = [x[:, at] for x, at in zip(whole, mine, strict=True)]

    def same(actual: Tensor, expected: Tensor, at: list[int] = mine[0]) -> None:
        torch.testing.assert_close(actual, expected[:, at], atol=1e-12, rtol=1e-10)

    leaves = [[x.clone().requires_grad_() for x in tensors] for tensors in (local, whole)]
    grad = torch.randn_like(whole[0])
    out, expected = call(sharded, *leaves[0]), call(stock, *leaves[1])
    same(out, expected)
    out.backward(grad[:, mine[0]])
    expected.backward(grad)
    for ours, theirs, at in zip(*leaves, mine, strict=True):
        if theirs.grad is not None:
            same(ours.grad, theirs.grad, at)
    for ours, theirs in zip(sharded.parameters(), stock.parameters(), strict=True):
        dist.all_reduce(ours.grad)
        torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-12, rtol=1e-10)

    for module in (sharded, deepcopy(sharded), pickle.loads(pickle.dumps(sharded))):
        with torch.no_grad():
            same(call(module.eval(), *local), call(stock.eval(), *whole))
    if name not in COMPILED:
        return
    with torch.no_grad():
        compiled = torch.compile(sharded, fullgraph=True, backend="aot_eager")
        same(call(compiled, *local), call(stock, *whole))


@on_ranks(2)
def test_uneven_shards() -> None:
    make, _, call = MODULES["attention, causal"]
    stock = make()
    style = ContextParallel("zigzag", seq_len=LENGTH - 1)
    sharded = parallelize_module(deepcopy(stock), init_device_mesh("cpu", (2,)), style)
    whole = torch.arange(2.0 * WIDTH * (LENGTH - 1), dtype=torch.float64).sin().view(2, -1, WIDTH)
    mine = as_layout("zigzag").positions(dist.get_rank(), 2, LENGTH - 1)
    mask = CAUSAL[1:, 1:]
    expected = stock(whole, whole, whole, None, False, mask, is_causal=True)[0]
    torch.testing.assert_close(call(sharded, whole[:, mine], None), expected[:, mine])


def test_dropout_is_the_same_on_any_number_of_ranks(pool: Pool) -> None:
    one, two = (pool.run(size, _dropped)[0] for size in (1, 2))
    torch.testing.assert_close(one, two, atol=1e-12, rtol=1e-10)
    assert not torch.equal(one[0], one[1])
    torch.testing.assert_close(one[2], one[3], atol=0, rtol=0)


def _dropped() -> Tensor:
    """Two outputs in training, and two in evaluation."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **(HOW | {"dropout": 0.3}))
    sharded = parallelize_module(module, mesh, ContextParallel("zigzag"))
    x = shard_sequence(torch.randn(2, LENGTH, WIDTH, dtype=torch.float64), mesh, 1)
    outputs = []
    for is_training in (True, True, False, False):
        local = x.to_local()
        out, _ = sharded.train(is_training)(local, local, local, need_weights=False)
        outputs.append(unshard_sequence(DTensor.from_local(out, x.device_mesh, [Shard(1)]), 1))
    return torch.stack(outputs).detach()


# How the module is made and called, and the words of the error.
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"need_weights": True}, "need_weights=True over a sharded sequence: call it with need_"),
    ({}, {"key_padding_mask": torch.zeros(2, 6, dtype=torch.bool)}, "key_padding_mask .*cu_seqlen"),
    ({}, {"attn_mask": CAUSAL}, "attn_mask without is_causal .*: pass is_causal=True if"),
]


@on_ranks(2)
def test_refused() -> None:
    mesh = init_device_mesh("cpu", (2,))
    x = torch.randn(2, 6, WIDTH)

    def attention(**how: Any) -> nn.Module:
        module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **how)
        return parallelize_module(module, mesh, ContextParallel())

    for made, called, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            attention(**made)(x, x, x, **({"need_weights": False} | called))
    with pytest.raises(ValueError, match=r"must be \(B, L, E\)"):
        attention()(x[0], x[0], x[0], need_weights=False)
    for how in ({"add_bias_kv": True}, {"add_zero_attn": True}):
        with pytest.raises(ValueError, match="add_bias_kv or add_zero_attn"):
            attention(**how)
    with pytest.raises(ValueError, match=r"ShardedMultiheadAttention, which extends it; apply it"):
        parallelize_module(attention(), mesh, ContextParallel())
    plan = ContextParallel(inputs=("query",))
    with pytest.raises(ValueError, match="has inputs of its own; leave inputs out"):
        parallelize_module(nn.MultiheadAttention(WIDTH, HEADS), mesh, plan)
    with pytest.raises(ValueError, match=r"attends by \['self_attn'\], nn.MultiheadAttention in"):
        parallelize_module(encoder_layer(), mesh, ContextParallel(inputs=("src",)))
    # A mask of padding takes another way through an encoder, by nested tensors.
    layer = encoder_layer(dtype=torch.float32)
    encoder = parallelize_module(
        nn.TransformerEncoder(layer, 1), mesh, {"layers.0.self_attn": ContextParallel()}
    )
    padding = torch.tensor([[False] * 6, [False] * 5 + [True]])
    warnings.filterwarnings("ignore", "The PyTorch API of nested tensors is in prototype stage")
    with torch.no_grad(), pytest.raises(ValueError, match="cannot serve key_padding_mask"):
        encoder.eval()(x, src_key_padding_mask=padding)


def test_loaded_where_nobody_configured_the_axis(pool: Pool) -> None:
    """By other processes, of another world."""
    (saved, _) = pool.run(2, _save)
    pool.run(2, _load, saved)


def _save() -> bytes:
    mesh = init_device_mesh("cpu", (2,))
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **HOW)
    kept = io.BytesIO()
    torch.save(parallelize_module(module, mesh, ContextParallel("striped")), kept)
    return kept.getvalue()


def _load(saved: bytes) -> None:
    module = torch.load(io.BytesIO(saved), weights_only=False)
    assert sequence_layout(module.axis.mesh).name == "striped"
    stock = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **HOW)
    stock.load_state_dict(module.state_dict())
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    local = x[:, dist.get_rank() :: 2]
    (out, _), (expected, _) = (
        m(z, z, z, need_weights=False) for m, z in ((module, local), (stock, x))
    )
    torch.testing.assert_close(out, expected[:, dist.get_rank() :: 2], atol=1e-12, rtol=1e-10)
