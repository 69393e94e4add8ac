"""Calls of methods, of models and of what has to be made first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers import LlamaConfig, LlamaForCausalLM

import dtensor_ring as ring
from dtensor_ring.compute.kernels.reference import Reference
from dtensor_ring.compute.kernels.registry import unregister_kernel
from dtensor_ring.dtensor.annotation import annotation_of
from parallel_plans.huggingface import context_parallel_plan
from tests.families import SMALL


class Mine(Reference):
    name = "mine"


class Attention(nn.Module):
    def forward(self, query: Any, key: Any, value: Any) -> Any:
        return ring.ring_attention(query, key, value)


def on_axis(method: str) -> Callable[..., Any]:
    return lambda mesh, **given: getattr(ring.SequenceAxis(mesh), method)(**given)


def on_pool(method: str) -> Callable[..., Any]:
    """Of a pool with a sequence, which methods about one take first."""

    def call(_: DeviceMesh, **given: Any) -> Any:
        pool = ring.BlockPool(num_blocks=8, block=2, world_size=2)
        sequence = pool.add(range(5))
        first = () if method in ("add", "held_blocks") else (sequence,)
        return getattr(pool, method)(*first, **given)

    return call


def on_cache(method: str, **turn: Any) -> Callable[..., Any]:
    """A method of a cache of two sequences of 8 tokens."""

    def call(mesh: DeviceMesh, **given: Any) -> Any:
        cache = ring.ShardedCache(mesh, 1)
        for begun in ({"num_tokens": 8, "dealt": True}, turn):
            if begun:
                cache.begin(**begun)
            if begun is not turn:
                cache[0].append(*(torch.zeros(2, 2, 8, 4) for _ in range(2)))
        return getattr(cache[0] if method == "append" else cache, method)(**given)

    return call


def given_cache(mesh: DeviceMesh) -> Any:
    """A cache of two sequences of 8 tokens, to hand over."""
    cache = ring.ShardedCache(mesh, 1)
    cache.begin(8, dealt=True)
    cache[0].append(*(torch.zeros(2, 2, 8, 4) for _ in range(2)))
    return cache


def moving(_: DeviceMesh, **given: Any) -> None:
    """Hand a cache over within a context."""
    with ring.HandOver(**given):
        pass


def paged(method: str | None) -> Callable[..., Any]:
    """A batch of one sequence, or one of its methods."""

    def call(_: DeviceMesh, **given: Any) -> Any:
        cache = ring.PagedCache(ring.BlockPool(num_blocks=8, block=2), 2, 4, 1)
        sequence = cache.pool.add(range(5))
        if method is None:
            return ring.PagedBatch(cache, [sequence], **given)
        return getattr(ring.PagedBatch(cache, [sequence]), method)(**given)

    return call


def registered(mesh: DeviceMesh, **given: Any) -> None:
    try:
        ring.register_kernel(**given)
    finally:
        if "mine" in ring.available_kernels():
            unregister_kernel("mine")


def parallel(mesh: DeviceMesh, **given: Any) -> Any:
    style = ring.ContextParallel()
    return parallelize_module(Attention(), mesh, style)(*given.values())


def model(mesh: DeviceMesh | None = None) -> nn.Module:
    model = LlamaForCausalLM(LlamaConfig(**SMALL | {"num_hidden_layers": 1}))
    return parallelize_module(model, mesh, context_parallel_plan(model)) if mesh else model


def reset(mesh: DeviceMesh) -> None:
    """Forget how the axis was configured: each call is the first."""
    annotation_of(mesh.get_group()).config = None


def block_mask() -> BlockMask:
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, 8, 8, device="cpu")


def without_mesh(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda _, **given: function(**given)
