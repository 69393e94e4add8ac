"""The op that merges partial attentions, so that a compiled graph has one node for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.memory import empty, order_of, region
from dtensor_ring.compute.merge import merge_gradients
from dtensor_ring.ops.checks import unit_stride
from dtensor_ring.ops.nodes import register_gradient, register_samples

NAME = "dtensor_ring::merge_attention"

torch.library.define(NAME, "(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)")
merge_op = torch.ops.dtensor_ring.merge_attention.default


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _forward(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    outs = unit_stride(*outs)
    running = RunningOutput(outs[0], outs[0].shape[3])
    rows = region(None, (0, outs[0].shape[2]))
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if not number:
            out, lse = out.clone(), lse.clone()  # the first part becomes the accumulator
        running.add(rows, out, lse)
    return running.result()


@torch.library.register_fake(NAME)
def _fake_forward(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    # The strides must be those of `RunningOutput.result`.
    (out,) = unit_stride(outs[0])
    return empty(out, out.shape, order_of(out)), lses[0].new_empty(lses[0].shape)


def _setup(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: Any) -> None:
    outs, lses = inputs
    # Backward does not need the merged out: it follows from the parts.
    ctx.save_for_backward(*outs, *lses, output[1])


def _gradients(ctx: Any, grad_out: Tensor, grad_lse: Tensor) -> Any:
    *parts, lse = ctx.saved_tensors
    middle = len(parts) // 2
    return merge_gradients(grad_out, grad_lse, parts[:middle], parts[middle:], lse)


register_gradient(NAME, _gradients, _setup)
register_samples(NAME)
