"""Attention of each query to its own list of keys, by a package's kernel or chunk by chunk.

A chunk of queries gathers the keys of its queries, so its memory is (queries of a chunk) x (keys of
a list), whatever the length of the sequence. Memory is the same for the gradients. This is the
reference, for any device and dtype, and what runs where no package's kernel does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dtensor_ring.compute.accumulate import add_sinks
from dtensor_ring.compute.kernels import flash_attn4
from dtensor_ring.compute.kernels.kernel import Problem, Saved, gpu_limits
from dtensor_ring.compute.memory import empty, in_order, order_of
from dtensor_ring.planning.ranges import Span


class Residents(NamedTuple):
    """The keys that are resident on a rank, and where each position of the sequence is among them.

    Attributes:
        rows: `(T, B, Nkv, D)`: the key and the value of T tokens. Gradients need it contiguous.
        places: int32 `(S + 1,)`: the row of each position, -1 where it is not resident; the last
            entry is -1, for the position -1. `None` if lists have rows in place of positions.
        head_dim: the first numbers of a row are its key.
        values: the span of its value in a row, which may overlap the key.
        apart: `(T, B, Nkv, Hv)`, values that are not in `rows` but follow them; without gradients.
    """

    rows: Tensor
    places: Tensor | None
    head_dim: int
    values: Span
    apart: Tensor | None = None


class Chunk(NamedTuple):
    """Queries with the keys that they selected, by groups of heads that share a list.

    Attributes:
        tokens: the local queries.
        where: int64 `(B, G, R, K)`: rows of the residents, 0 for none.
        is_none: `(B, G, R, K)`, true where a list has no key.
        rows: `(B, G, R, K, n, D)` in float32 or wider; n key heads share a list.
    """

    tokens: slice
    where: Tensor
    is_none: Tensor
    rows: Tensor


def gathered_forward(
    query: Tensor,
    residents: Residents,
    selected: Tensor,
    scale: float,
    sinks: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)`: `(B, N, L, Hv)` in the query's memory order, and `(B, N, L)`.

    Args:
        query: `(B, N, L, H)`.
        residents: the resident keys.
        selected: int32 `(B, G, L, K)`: positions of keys, -1 for none. Group g is for the key heads
            of the g-th part.
        scale: factor of the scores.
        sinks: one logit for each head `(N,)`.
        dtype: dtype of the output; by default the query's.
    """
    first, end = residents.values
    wide = torch.promote_types(query.dtype, torch.float32)
    out = empty(query, (*query.shape[:3], end - first), order_of(query), dtype)
    lse = query.new_empty(query.shape[:3], dtype=wide)
    for chunk in _chunks(residents, selected, wide):
        scored = _scores(_grouped(query, chunk), chunk, residents.head_dim, scale)
        own = scored.logsumexp(-1)
        # A row with no key gets weights of 0; -inf - -inf would be nan.
        base = own.masked_fill(own == -torch.inf, 0.0)
        weights = (scored - base.unsqueeze(-1)).exp_()
        own_out = _ungrouped(weights @ _values(chunk, residents.values))
        own_lse = _ungrouped(own.unsqueeze(-1)).squeeze(-1)
        if sinks is not None:
            own_lse = add_sinks(own_out, own_lse, sinks)
        out[:, :, chunk.tokens], lse[:, :, chunk.tokens] = own_out, own_lse
    return out, lse


def gathered_backward(
    saved: Saved, query: Tensor, residents: Residents, selected: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the queries and of the residents' rows, the latter wide.

    The formula is that of flash attention (Dao et al., 2022, arXiv 2205.14135, appendix B.4).
    """
    # With S = Q K^T, P = exp(scale * S - lse) and D = rowsum(dO * O) - dlse:
    #     dS = scale * P * (dO V^T - D)
    #     dQ = dS K        dK = dS^T Q        dV = P^T dO
    grad_query = empty(query, query.shape, order_of(query))
    grad_rows = torch.zeros_like(residents.rows, dtype=saved.lse.dtype)
    delta = (saved.grad_out.to(saved.lse.dtype) * saved.out).sum(-1)
    if saved.grad_lse is not None:
        # d lse / d score is the weight, so this gradient joins the term that weights multiply.
        delta -= saved.grad_lse
    of_row = torch.stack((saved.lse, delta), -1)
    for chunk in _chunks(residents, selected, saved.lse.dtype):
        queries, grads = _grouped(query, chunk), _grouped(saved.grad_out, chunk)
        # Both numbers of a row in one tensor are grouped by one permutation, not by two.
        lse, deltas = _grouped(of_row, chunk).split(1, -1)
        scored = _scores(queries, chunk, residents.head_dim, scale)
        # A row that sees nothing has an lse of -inf, and weights of 0.
        weights = (scored - lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
        grad_weights = grads @ _values(chunk, residents.values).mT
        grad_scored = weights * (grad_weights - deltas) * scale
        grad_query[:, :, chunk.tokens] = _ungrouped(grad_scored @ _keys(chunk, residents.head_dim))
        _add_rows(grad_rows, chunk, residents, (grad_scored.mT @ queries, weights.mT @ grads))
    return grad_query, grad_rows


def _chunks(residents: Residents, selected: Tensor, wide: torch.dtype) -> Iterator[Chunk]:
    """Yield chunks of queries with their keys."""
    num_queries, size = selected.shape[2], queries_at_once(selected, residents.rows)
    for start in range(0, num_queries, size):
        tokens = slice(start, min(num_queries, start + size))
        where = selected[:, :, tokens].long()
        if residents.places is not None:
            where = residents.places[where].long()
        is_none = where < 0
        # A missing key reads row 0 in its place, and `is_none` hides its score.
        where = where.masked_fill(is_none, 0)
        rows = _at(residents.rows, where)
        if residents.apart is not None:
            rows = torch.cat((rows, _at(residents.apart, where)), -1)
        # Widened after the gather, so that wide numbers are those of one chunk only.
        yield Chunk(tokens, where, is_none, rows.to(wide))


# Numbers that a chunk gathers, on CPUs and on GPUs; each is at least one query.
CHUNK, CHUNK_ON_GPUS = 1 << 21, 1 << 26


def queries_at_once(selected: Tensor, rows: Tensor) -> int:
    """Return how many queries a chunk has, for lists `(B, G, L, K)` of rows `(T, B, Nkv, D)`."""
    batch, _, _, width = selected.shape
    numbers = batch * width * rows.shape[2] * rows.shape[3]
    return max(1, (CHUNK if selected.is_cpu else CHUNK_ON_GPUS) // max(1, numbers))


def _at(rows: Tensor, where: Tensor) -> Tensor:
    """Return rows `(T, B, Nkv, D)` at `(B, G, R, K)`, as `(B, G, R, K, n, D)`; any if T is 0."""
    batch, groups = where.shape[:2]
    by_group = rows.unflatten(2, (groups, -1))
    if not len(rows):
        return rows.new_zeros((*where.shape, *by_group.shape[3:]))
    of_batch = torch.arange(batch, device=rows.device).view(-1, 1, 1, 1)
    return by_group[where, of_batch, torch.arange(groups, device=rows.device).view(-1, 1, 1)]


def _grouped(x: Tensor, chunk: Chunk) -> Tensor:
    """Return rows of a chunk by key head: `(B, N, L, H)` to `(B, G, R, n, N / Nkv, H)`, wide."""
    groups, num_heads = chunk.rows.shape[1], chunk.rows.shape[4]
    part = x[:, :, chunk.tokens].to(chunk.rows.dtype)
    return part.unflatten(1, (groups, num_heads, -1)).permute(0, 1, 4, 2, 3, 5)


def _ungrouped(x: Tensor) -> Tensor:
    """Return `(B, G, R, n, M, H)` as `(B, N, R, H)`."""
    return x.permute(0, 1, 3, 4, 2, 5).flatten(1, 3)


def _keys(chunk: Chunk, head_dim: int) -> Tensor:
    """Return the keys of a chunk, `(B, G, R, n, K, H)`."""
    return chunk.rows[..., :head_dim].transpose(3, 4)


def _values(chunk: Chunk, span: Span) -> Tensor:
    """Return the values of a chunk, `(B, G, R, n, K, Hv)`."""
    return chunk.rows[..., span[0] : span[1]].transpose(3, 4)


def _scores(queries: Tensor, chunk: Chunk, head_dim: int, scale: float) -> Tensor:
    """Return the scores of a chunk, `(B, G, R, n, M, K)`, -inf where there is no key."""
    scored = (queries @ _keys(chunk, head_dim).mT) * scale
    return scored.masked_fill_(chunk.is_none[:, :, :, None, None], -torch.inf)


def _add_rows(
    total: Tensor, chunk: Chunk, residents: Residents, grads: tuple[Tensor, Tensor]
) -> None:
    """Add the gradients of a chunk's keys and values to those of the residents' rows."""
    grad = torch.zeros_like(chunk.rows)
    of_keys, of_values = (x.transpose(3, 4) for x in grads)
    grad[..., : residents.head_dim] += of_keys
    # Added, not set: the value of a latent is a part of its key.
    grad[..., residents.values[0] : residents.values[1]] += of_values
    # What stands for no key has a gradient of 0, and is added to row 0.
    # Rows are summed as a matrix: one row for each token, sequence and group of heads.
    batch, groups = chunk.rows.shape[:2]
    number = torch.arange(batch * groups, device=total.device).view(batch, groups, 1, 1)
    where, flat = (chunk.where * (batch * groups) + number).flatten(), grad.flatten(0, 3)
    rows = total.view((-1, *flat.shape[1:]))
    if not len(rows):
        return
    if total.is_cuda:
        rows.index_put_((where,), flat, accumulate=True)  # sorts, so that runs are reproducible
    else:
        rows.index_add_(0, where, flat)


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


# Note [Kernels by facts]: whether a package's kernel computes a call follows from its facts alone.
# Messages are the same with one and without, so ranks need not agree.
def lists_of(
    query: Tensor, residents: Residents, selected: Tensor, scale: float, saved: Saved | None = None
) -> Lists:
    """Return the facts of a call, of its backward pass if `saved` is given."""
    first, end = residents.values
    has_grad_lse = saved is not None and saved.grad_lse is not None
    device, dtype = query.device.type, torch.promote_types(query.dtype, residents.rows.dtype)
    return Lists(
        Problem(
            device, dtype, residents.head_dim, end - first, scale, differentiable_lse=has_grad_lse
        ),
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
        return flash_attn4.missing_latents()

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
        out, lse = flash_attn4.attend_to_latents(_latents(query, residents, selected), scale, sinks)
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
            dq, dk, dv, dqv = flash_attn4.attend_to_latents_backward(
                _by_token(saved, batch), row, scale
            )
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


def _latents(query: Tensor, residents: Residents, selected: Tensor) -> flash_attn4.Latents:
    """Return queries, rows and lists as the package takes them, without copies of the rows."""
    by_token, rows = query.transpose(1, 2), residents.rows.transpose(0, 1)
    lists = selected[:, 0]
    if residents.places is not None:
        lists = residents.places[lists.long()]
    # Lists are padded to the width that the package reads at once; -1 is no key.
    lists = pad(lists, (0, -lists.shape[-1] % WIDTH), value=-1)
    return flash_attn4.Latents(
        q=by_token[..., VALUE:],
        k=rows[..., VALUE:],
        v=rows[..., :VALUE],
        qv=by_token[..., :VALUE],
        lists=lists,
    )


def _by_token(saved: Saved, batch: int) -> Saved:
    """Return a row of the batch, `(1, L, N, ...)`."""
    grad_out, out, lse = (
        x[batch : batch + 1].transpose(1, 2) for x in (saved.grad_out, saved.out, saved.lse)
    )
    # A gradient may be an expanded tensor, whose strides the package compiles in.
    return Saved(grad_out.contiguous(), out, lse.contiguous())
