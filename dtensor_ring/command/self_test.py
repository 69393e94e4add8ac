"""Small rings over the ranks of the launcher, next to attention on one rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.command.finding import Finding
from dtensor_ring.command.overlap import overlap
from dtensor_ring.command.ranks import Ranks, connected
from dtensor_ring.dtensor.attention import ring_attention
from dtensor_ring.dtensor.axis import SequenceAxis
from dtensor_ring.dtensor.sequence import shard_sequence, unshard_sequence
from dtensor_ring.planning.masks.mask import Mask

HEADS, TOKENS, HEAD_DIM = 8, 256, 64
"""Of a rank."""


def self_test(kernel: str | None = None, layout: str = "zigzag") -> list[Finding]:
    """Rings over all ranks, forward and backward, and how long one takes.

    It makes the default process group, and ends it.

    Args:
        kernel: name of a kernel; `None` for the first that can.
        layout: how tokens are dealt.
    """
    masks = {"causal": Mask.causal(), "window": Mask.sliding(TOKENS // 3)}
    try:
        with connected() as ranks:
            SequenceAxis(ranks.mesh, layout, kernel=kernel)
            rings = [_ring(ranks, name, mask) for name, mask in masks.items()]
            is_right = not any(ring.is_bad for ring in rings)
            timed = [overlap(ranks, kernel, layout)] if is_right and ranks.mesh.size() > 1 else []
            return [_of_group(ranks), *rings, *timed]
    except (RuntimeError, ValueError) as error:  # a ring that fails is a finding above
        advice = "see whether all ranks were started, and reach the first one"
        return [Finding("process group", str(error), advice, is_bad=True)]


def _of_group(ranks: Ranks) -> Finding:
    size, threads = ranks.mesh.size(), torch.get_num_threads()
    found = f"{size} on {ranks.device.type}, {threads} threads each"
    alone = "one rank sends nothing: --nproc-per-node 2 tests messages"
    return Finding("ranks", found, alone if size == 1 else "")


def _ring(ranks: Ranks, name: str, mask: Mask) -> Finding:
    """Compare a ring with attention on one rank."""
    what = f"ring, {name}"
    largest = 1e-4 if ranks.dtype == torch.float32 else 5e-2  # where entries are about 1
    try:
        error = _largest_error(ranks, mask)
    except (RuntimeError, ValueError) as problem:  # an error of the ring is a RuntimeError
        advice = "docs/failures.md lists what ranks say of one another"
        return Finding(what, f"{type(problem).__name__}: {problem}", advice, is_bad=True)
    found = f"off by {error:.0e}, forward and backward; up to {largest:.0e} is rounding"
    return Finding(what, found, is_bad=not error <= largest)


def _largest_error(ranks: Ranks, mask: Mask) -> float:
    """Of the output and the gradients, anywhere in the sequence."""
    mesh, device, dtype = ranks
    *inputs, grad_out = _tensors(mesh, device, dtype)
    whole = [x.clone().requires_grad_() for x in inputs]
    expected = F.scaled_dot_product_attention(*whole, attn_mask=_seen(mask, inputs[0]))
    wanted = expected, *torch.autograd.grad(expected, whole, grad_out)
    shards = [shard_sequence(x, mesh, dim=2).detach().requires_grad_() for x in inputs]
    out = ring_attention(*shards, mask=mask)
    found = out, *torch.autograd.grad(out, shards, shard_sequence(grad_out, mesh, dim=2))
    pairs = zip(found, wanted, strict=True)
    return max(_distance(sharded.detach(), x.detach()) for sharded, x in pairs)


def _tensors(mesh: DeviceMesh, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Query, key, value and gradient of the output, whole and the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, HEADS, TOKENS * mesh.size(), HEAD_DIM
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(4)]


def _seen(mask: Mask, query: Tensor) -> Tensor:
    """Which keys a query sees."""
    whole = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device)
    return whole.tril() if mask.left is None else whole.tril().triu(-mask.left)


def _distance(sharded: Any, whole: Tensor) -> float:
    return float((unshard_sequence(sharded, dim=2) - whole).abs().max())
