"""Runs a function of tokens on made-up ones, to see whether it treats each token by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallel_plans.huggingface.probing.probe import TOLERANCE

# Kernels of eight bits want more than 16 tokens.
NUM_TOKENS = 32
# The tokens of the second run: a shard with a gap, without the first and the last. It does not lie
# evenly around the middle: a function that reverses tokens would give it what is right.
SHARD = (*range(2, 12), *range(19, 29))
# How much larger a token of the first run is, which the second lacks: a mean over tokens follows
# it, and a scale for all tokens rounds the others to zero.
LARGER, LARGE = 1_000.0, 16


@torch.no_grad()
def is_by_token(run: Callable[[Tensor], Tensor], like: Any) -> bool:
    """Return whether outputs of a shard are those of the whole, in which a token is larger.

    Args:
        run: takes `(..., L, H)`, and returns as many tokens.
        like: what it gets in a forward, `(..., L, H)`; other things are not tried.
    """
    if not isinstance(like, Tensor) or isinstance(like, DTensor) or not like.is_floating_point():
        return True
    numbers = torch.arange(NUM_TOKENS * like.shape[-1], device=like.device)
    shape = *(1,) * (like.ndim - 2), NUM_TOKENS, like.shape[-1]
    whole = numbers.float().sin().view(shape).to(like.dtype)
    whole[..., LARGE, :] *= LARGER
    shard = whole[..., list(SHARD), :]
    try:
        expected = run(whole)[..., list(SHARD), :].float()
        of_shard = run(shard).float()
    except Exception:  # code of a model may want other shapes, or return no tensor, as a router
        return True
    if of_shard.shape != expected.shape or not expected.isfinite().all():
        return True
    return bool((of_shard - expected).norm() <= TOLERANCE * expected.norm())
