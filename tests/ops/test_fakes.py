"""What the registered ops promise: schemas, fakes, flops, and gradients."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.flop_counter import FlopCounterMode

from dtensor_ring import Contiguous, Mask, Striped, ZigZag, ring_attention, shard_sequence
from dtensor_ring.compute.kernels import Scores
from dtensor_ring.ops.options import Batch, Call, Place, flatten
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from dtensor_ring.planning.run_table import RunTable
from dtensor_ring.planning.slices import Slices
from dtensor_ring.transport.transport import TransferPolicy
from tests.ops.test_compile import BLOCK
from tests.pool import Pool, on_ranks
from tests.rings import Case, Ring, fake_group, local

CAUSAL, FULL = Mask.causal(), Mask.full()
SINKS = (0.5, -1.0, 2.0, 0.0)
CHECKED = {
    "plain": Case(Ring(ZigZag(), 1, 8, CAUSAL), torch.float32),
    "turn": Case(
        Ring(RunTable([[(5, 3)]]), 1, 8, CAUSAL, key_layout=RunTable([[(0, 8)]]), begin=5),
        torch.float32,
    ),
    "slices": Case(Ring(ZigZag(), 1, 8, FULL, slices=BLOCK), torch.float32),
    "cross": Case(Ring(ZigZag(), 1, 8, FULL, ((0, 3, 7),), 5, ((0, 2, 5),)), torch.float32),
    "sinks and lse": Case(
        Ring(Striped(), 1, 8, FULL), torch.float32, sinks=SINKS, softcap=2.0, grad_lse=True
    ),
    "eight bits": Case(
        Ring(ZigZag(), 1, 8, CAUSAL), torch.float32, policy=TransferPolicy(kv_dtype="int8")
    ),
    # Nothing arrives from a fake group: documents that stay on their rank need nothing.
    "fake group": Case(Ring(Contiguous(), 4, 16, CAUSAL, ((0, 4, 8, 12, 16),)), torch.float32),
}


@pytest.mark.parametrize("case", CHECKED.values(), ids=list(CHECKED))
@on_ranks(1)
def test_opcheck(case: Case) -> None:
    rank = case.ring.world_size - 1
    group = fake_group(case.ring.world_size, rank) if rank else nullcontext()
    with group, warnings.catch_warnings():
        # opcheck looks at .grad of copies that are no leaves, whatever it is given.
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        _opcheck_both(case, rank)


def _opcheck_both(case: Case, rank: int) -> None:
    query, key, value, *sinks = case.shards(rank)
    options = flatten(case.call(*sinks))
    torch.library.opcheck(ring_op, (query, key, value, *options))
    with torch.no_grad():
        tensors = query, key, value, *ring_op(query, key, value, *options)
    grads = [local(x, case.ring.positions(rank)) for x in case.grads()]
    grad_out, grad_lse = grads if case.grad_lse else (*grads, None)
    arguments = [x.detach() if isinstance(x, Tensor) else x for x in (*tensors, *options)]
    torch.library.opcheck(ring_backward_op, (grad_out, grad_lse, *arguments))


BASE = Case(Ring(ZigZag(), 2, 8, CAUSAL), torch.float32)
PROMISED = {
    "grouped": BASE,
    "reference": replace(BASE, kernel="reference"),
    "bfloat16": replace(BASE, dtype=torch.bfloat16),
    "eight bits": replace(BASE, policy=TransferPolicy(kv_dtype="fp8")),
    "float64, value head dim": replace(BASE, dtype=torch.float64, head_dims=(8, 4)),
    "sinks and lse": replace(BASE, sinks=SINKS, grad_lse=True),
    "one head, batch of one": replace(BASE, heads=(1, 1), batch=1),
    "one token": replace(BASE, ring=Ring(ZigZag(), 2, 2, CAUSAL)),
    "an empty shard": replace(BASE, ring=Ring(ZigZag(), 2, 1, CAUSAL)),
    "cross": replace(BASE, ring=Ring(ZigZag(), 2, 8, FULL, key_seq_len=5)),
    "one tile": replace(BASE, ring=Ring(Contiguous(), 2, 8, CAUSAL, ((0, 4, 8),))),
}


@on_ranks(2)
def test_fake_kernels_promise_what_the_real_ones_return() -> None:
    for name, contiguous in product(PROMISED, (True, False)):
        promised, returned = _described(PROMISED[name], contiguous)
        assert promised == returned, f"{name}, contiguous: {contiguous}"


def _described(case: Case, contiguous: bool) -> tuple[list[Any], list[Any]]:
    """Dtype, sizes and strides of all results, of fake tensors and of real ones."""
    rank = dist.get_rank()
    query, key, value, *sinks = (
        x.detach().contiguous() if contiguous else x.detach() for x in case.shards(rank)
    )
    grad_out, *grad_lse = (local(x, case.ring.positions(rank)) for x in case.grads())
    grads, options = (grad_out, *(grad_lse or [None])), flatten(case.call(*sinks))
    described = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), nullcontext()):
        with mode:
            outputs = ring_op(query, key, value, *options)
            arguments = *grads, query, key, value, *outputs, *options
            results = *outputs, *ring_backward_op(*arguments)
        described.append([description(x) for x in results])
    return described[0], described[1]


def description(x: Tensor) -> tuple[Any, ...]:
    """A dim of size 1 or an empty tensor may have any strides."""
    strides = [
        stride if size > 1 and x.numel() else "any"
        for size, stride in zip(x.shape, x.stride(), strict=True)
    ]
    return str(x.dtype), tuple(x.shape), tuple(strides)


# Flops are counted by what is visible.

SLICES = Slices([(0, 9), (9, 16)], [(0, 9), (3, 9)], [(3, 0), (None, None)])

DOCUMENTS = ((0, 3, 11, 16),)
BY_ROW = ((0, 3, 16), (0, 9, 14))


@pytest.mark.parametrize(
    "ring",
    [
        Ring(ZigZag(), 4, 16, CAUSAL),
        Ring(Contiguous(), 4, 13, Mask(5, 1)),
        Ring(Striped(), 2, 16, CAUSAL, DOCUMENTS),
        Ring(ZigZag(), 4, 16, FULL, BY_ROW),
        Ring(ZigZag(), 4, 16, Mask.prefix_causal(2), BY_ROW),
        Ring(ZigZag(), 2, 16, FULL, DOCUMENTS, 9, ((0, 5, 5, 9),)),
        Ring(ZigZag(), 2, 16, FULL, slices=SLICES),
    ],
    ids=["causal", "band", "documents", "by row", "prefix", "cross", "slices"],
)
def test_flops_are_those_of_the_visible_pairs(pool: Pool, ring: Ring) -> None:
    flops = [pool.run(1, _flops, ring, rank)[0] for rank in range(ring.world_size)]
    pairs = 4 * int(ring.visible().sum())  # of two batch rows and four heads
    assert sum(forward for forward, _ in flops) == pairs * 2 * (8 + 6)
    assert sum(backward for _, backward in flops) == pairs * 2 * (3 * 8 + 2 * 6)


def _flops(ring: Ring, rank: int) -> tuple[int, int]:
    with fake_group(ring.world_size, rank):
        case = Case(ring, head_dims=(8, 6))
        shards = case.shards(rank)
        with FlopCounterMode(display=False) as forward:
            out, _ = case.attend(*shards)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()


@pytest.mark.parametrize("documents", [None, DOCUMENTS, BY_ROW])
@on_ranks(1)
def test_flops_of_dtensors_are_those_of_all_ranks(
    documents: tuple[tuple[int, ...], ...] | None,
) -> None:
    with fake_group(4, 1):
        mesh = init_device_mesh("cpu", (4,))
        whole = torch.randn(2, 4, 16, 8, requires_grad=True)
        x = shard_sequence(whole, mesh, 2, "zigzag")
        bounds = None if documents is None else torch.tensor(documents, dtype=torch.int32)
        bounds = bounds if bounds is None or len(bounds) > 1 else bounds[0]
        with FlopCounterMode(display=False) as forward:
            out = ring_attention(x, x, x, cu_seqlens=bounds)
        with FlopCounterMode(display=False) as backward:
            out.to_local().sum().backward()
        pairs = 4 * int(Ring(ZigZag(), 4, 16, CAUSAL, documents).visible().sum())
        assert forward.get_total_flops() == pairs * 2 * (8 + 8)
        assert backward.get_total_flops() == pairs * 2 * (3 * 8 + 2 * 8)


@pytest.mark.parametrize("is_dynamic", [False, True])
@pytest.mark.parametrize("is_packed", [False, True])
@on_ranks(1)
def test_compilers_count_an_even_share_without_boundaries(
    is_packed: bool, is_dynamic: bool
) -> None:
    real, bounds = torch.empty(2, 4, 4, 8), torch.empty(3, dtype=torch.int32)
    with fake_group(4, 1), FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x, fake_bounds = (mode.from_tensor(t, static_shapes=not is_dynamic) for t in (real, bounds))
        seq_len = 4 * x.shape[2]
        assert isinstance(seq_len, torch.SymInt) == is_dynamic
        group_name = torch.distributed.group.WORLD.group_name
        call = Call(
            Batch(fake_bounds if is_packed else None),
            Scores(Mask.causal(), 1.0),
            Place("contiguous", "ring", seq_len, seq_len, group_name),
        )
        with FlopCounterMode(display=False) as counter:
            ring_op(x, x, x, *flatten(call))
        pairs = 2 * 4 * (16 * 17 // 2) // 4
        assert counter.get_total_flops() == pairs * 2 * (8 + 8)


# Gradients against finite differences, and none of second order.


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "option", [{}, {"sinks": (0.5, -1.0)}, {"softcap": 1.5}], ids=["plain", "sinks", "softcap"]
)
@on_ranks()
def test_gradcheck(option: dict[str, Any]) -> None:
    """float64, through the reference kernel, of out and lse."""
    ring = Ring(ZigZag(), dist.get_world_size(), 5, CAUSAL)
    case = Case(ring, heads=(2, 1), head_dims=(2, 3), batch=1, kernel="reference", **option)
    inputs = [x.requires_grad_() for x in case.inputs()]
    assert torch.autograd.gradcheck(lambda *x: Everywhere.apply(case, *x), inputs)


@on_ranks(2)
def test_second_derivatives_are_refused() -> None:
    case = Case(Ring(ZigZag(), 2, 8, CAUSAL))
    inputs = [x.requires_grad_() for x in case.shards(dist.get_rank())]
    out, _ = case.attend(*inputs)
    grads = torch.autograd.grad(out.square().sum(), inputs, create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once"):
        grads[0].sum().backward()


@on_ranks(1)
def test_forward_mode_is_refused() -> None:
    """Its tangent would be lost."""
    case = Case(Ring(ZigZag(), 1, 8, CAUSAL))
    inputs = [x.detach() for x in case.inputs()]
    warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated")  # PyTorch's own, inside
    with forward_ad.dual_level():
        case.attend(*inputs)  # no tangent, no objection
        dual = forward_ad.make_dual(inputs[1], torch.ones_like(inputs[1]))
        with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
            case.attend(inputs[0], dual, inputs[2])


class Everywhere(torch.autograd.Function):
    """The ring as a function of global tensors, called in lockstep on all ranks."""

    @staticmethod
    def forward(ctx: Any, case: Case, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.positions = case.ring.positions(dist.get_rank())
        ctx.shards = [local(x, ctx.positions).requires_grad_() for x in inputs]
        ctx.seq_len = case.ring.seq_len
        with torch.enable_grad():
            ctx.outputs = case.attend(*ctx.shards)
        return tuple(Everywhere.whole(ctx, x.detach()) for x in ctx.outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shard_grads = [x[:, :, ctx.positions] for x in grads]
        shares = torch.autograd.grad(ctx.outputs, ctx.shards, shard_grads, retain_graph=True)
        return None, *(Everywhere.whole(ctx, x) for x in shares)

    @staticmethod
    def whole(ctx: Any, x: Tensor) -> Tensor:
        """Of all ranks: shards at their positions, or the sum for sinks."""
        result = x.clone() if x.ndim == 1 else x.new_zeros(*x.shape[:2], ctx.seq_len, *x.shape[3:])
        if x.ndim > 1:
            result[:, :, ctx.positions] = x
        dist.all_reduce(result)
        return result
