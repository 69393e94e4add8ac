"""Attention to lists of keys: by a kernel of a package where it can, else by gathering them.

Which of both computes a call follows from its facts alone. Messages are the same with both, so
ranks need not agree.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_ring.compute.kernels.flash_attn4 import (
    Latents,
    attend_to_latents,
    attend_to_latents_backward,
    missing_latents,
)
from dtensor_ring.compute.kernels.kernel import Problem, Saved, gpu_limits
from dtensor_ring.compute.memory import in_order, order_of
from dtensor_ring.selected.listed_attention import (
    Residents,
    gathered_backward,
    gathered_forward,
)

# Of a latent: all numbers, and those that are the value. The others are rotary.
LATENT, VALUE = 576, 512

# Lists of the kernel are a multiple of this long, and a token has no more heads.
WIDTH, HEADS = 128, 128


class Lists(NamedTuple):
    """The facts that decide whether a kernel serves an attention to lists of keys.

    Attributes:
        problem: device, dtype, head dims and scale; whether gradients are asked of lse.
        num_heads: the number of query heads.
        num_key_heads: the number of key heads.
        is_latent: whether the first numbers of a key are its value.
        is_empty: whether there are no queries, no keys, or no lists.
        is_backward: whether gradients are asked for.
    """

    problem: Problem
    num_heads: int
    num_key_heads: int
    is_latent: bool
    is_empty: bool = False
    is_backward: bool = False


def lists_of(
    query: Tensor, residents: Residents, selected: Tensor, scale: float, saved: Saved | None = None
) -> Lists:
    """Return the facts of a call, of its backward pass if `saved` is given."""
    first, end = residents.values
    has_grad_lse = saved is not None and saved.grad_lse is not None
    dims = residents.head_dim, end - first
    device, dtype = query.device.type, torch.promote_types(query.dtype, residents.rows.dtype)
    return Lists(
        Problem(device, dtype, *dims, scale, differentiable_lse=has_grad_lse),
        query.shape[1],
        residents.rows.shape[2],
        first == 0 and residents.apart is None,
        not (query.numel() and residents.rows.numel() and selected.numel()),
        saved is not None,
    )


class LatentLists:
    """The kernels of flash-attn-4 for lists of latents, in bfloat16, on Blackwell.

    The score is that of latents and of their rotary parts together, and values are the latents:
    `out = softmax(scale * (q @ k.T + qv @ v.T)) @ v`. Read in the sources of 4.0.0b36, see
    `docs/sparse.md`; no GPU has run it here.
    """

    name = "flash_attn4"

    def missing(self) -> str | None:
        """Return why this machine's current GPU cannot run it, or `None`."""
        return missing_latents()

    def supports(self, lists: Lists) -> str | None:
        """Return why it cannot compute such a call, or `None`."""
        problem = lists.problem
        if reason := gpu_limits(problem):
            return reason
        if problem.dtype != torch.bfloat16:
            return f"it takes bfloat16, not {problem.dtype}"  # its gradient takes no other
        if not lists.is_latent or (problem.head_dim, problem.value_head_dim) != (LATENT, VALUE):
            return (
                f"it takes keys of {LATENT} numbers whose first {VALUE} are the value, "
                f"got {problem.head_dim} and {problem.value_head_dim}"
            )
        if lists.num_key_heads != 1 or lists.num_heads > HEADS:
            heads = f"got {lists.num_heads} and {lists.num_key_heads}"
            return f"it takes up to {HEADS} query heads and one key head, {heads}"
        if lists.is_backward and problem.determinism != "off":
            return "its gradients are summed in any order"
        return "there are no queries, keys or lists" if lists.is_empty else None

    def forward(
        self,
        query: Tensor,
        residents: Residents,
        selected: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return `(out, lse)`, as `gathered_forward` does."""
        sinks = None if sinks is None else sinks.float()
        out, lse = attend_to_latents(_latents(query, residents, selected), scale, sinks)
        out = in_order(out.transpose(1, 2), order_of(query), query.dtype)
        return out, lse.transpose(1, 2).contiguous()

    def backward(
        self, saved: Saved, query: Tensor, residents: Residents, selected: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of queries and rows, the latter in float32, see `Saved`."""
        grad_rows = torch.empty_like(residents.rows, dtype=torch.float32)
        of_queries = []
        for batch, row in enumerate(_latents(query, residents, selected).batch_rows()):
            # One row of the batch at a time: of several, the package keeps all scores at once.
            dq, dk, dv, dqv = attend_to_latents_backward(_by_token(saved, batch), row, scale)
            of_queries.append(torch.cat((dqv, dq), -1))
            grad_rows[:, batch] = torch.cat((dv, dk), -1)[0]
        grad_query = torch.cat(of_queries).transpose(1, 2)
        return in_order(grad_query, order_of(query), query.dtype), grad_rows


LISTED = LatentLists()


def refused(lists: Lists) -> str | None:
    """Return why the kernel does not compute a call on this machine, or `None`."""
    # `supports` first: it is cheap, but `missing` may import a package.
    return LISTED.supports(lists) or _missing(torch.cuda.current_device())


@lru_cache
def _missing(device: int) -> str | None:
    """Return why the kernel cannot run; `device` is the current GPU, for the cache."""
    return LISTED.missing()


def listed_forward(
    query: Tensor, residents: Residents, selected: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)`, see `gathered_forward`."""
    can = refused(lists_of(query, residents, selected, scale)) is None
    forward = LISTED.forward if can else gathered_forward
    return forward(query, residents, selected, scale, sinks)


def listed_backward(
    saved: Saved, query: Tensor, residents: Residents, selected: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the queries and of the residents' rows, see `gathered_backward`."""
    can = refused(lists_of(query, residents, selected, scale, saved)) is None
    backward = LISTED.backward if can else gathered_backward
    return backward(saved, query, residents, selected, scale)


def _latents(query: Tensor, residents: Residents, selected: Tensor) -> Latents:
    """Return queries, rows and lists as the package takes them, without copies of the rows."""
    by_token, rows = query.transpose(1, 2), residents.rows.transpose(0, 1)
    lists = selected[:, 0]
    if residents.places is not None:
        lists = residents.places[lists.long()]
    lists = pad(lists, (0, -lists.shape[-1] % WIDTH), value=-1)
    parts = by_token[..., VALUE:], rows[..., VALUE:], rows[..., :VALUE], by_token[..., :VALUE]
    return Latents(*parts, lists)


def _by_token(saved: Saved, batch: int) -> Saved:
    """Return a row of the batch, `(1, L, N, ...)`."""
    grad_out, out, lse = (
        x[batch : batch + 1].transpose(1, 2) for x in (saved.grad_out, saved.out, saved.lse)
    )
    # A gradient may be an expanded tensor, whose strides the package compiles in.
    return Saved(grad_out.contiguous(), out, lse.contiguous())
