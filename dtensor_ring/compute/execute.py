"""Runs the launches of a step through a block kernel."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from dtensor_ring.compute.kernels.kernel import Gradients, Kernel, Result
from dtensor_ring.compute.kernels.launch import Launch
from dtensor_ring.compute.kernels.saved import Saved
from dtensor_ring.compute.kernels.scores import Scores
from dtensor_ring.compute.launches import launches
from dtensor_ring.compute.memory import Region, part_of
from dtensor_ring.compute.partial import Partial
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.plan import Step

Pair = tuple[Tensor, Tensor]
"""Key and value, or their gradients."""


class Accumulator(Protocol):
    """The target of gradients: a sum, or a list of parts for a sum in transit."""

    def make_room(self) -> None:
        """Add up what is kept if another gradient would be one too many."""

    def add(self, at: Region, grad: Tensor) -> None:
        """Add the gradient of a region of `(B, N, L)`."""


def forward_step(
    step: Step,
    query: Tensor,
    kv: Pair,
    partial: Partial,
    kernel: Kernel,
    scores: Scores,
    label: Label,
    with_segments: bool = True,
    in_flight: bool = False,
) -> None:
    """Add the attention over the keys and values of a step to `partial`.

    Args:
        step: whose tiles to compute.
        query: local queries `(B, N, L, H)`.
        kv: resident keys and values `(B, Nkv, C, H)` and `(B, Nkv, C, Hv)`.
        partial: the running result of the local queries.
        kernel: the block kernel.
        scores: how a query scores a key.
        label: names this step in a profile.
        with_segments: whether tiles may be joined to segments, for which keys may be copied.
        in_flight: whether messages are in flight meanwhile.
    """
    has_segments = with_segments and kernel.has_segments
    for launch in _launches(step, query, kv[0], has_segments, in_flight):
        with label("merge"):
            partial.make_room()
        with label("tile"):
            out, lse = _forward(launch, query, kv, kernel, scores)
        partial.add(launch.rows, out, lse)


def backward_step(
    step: Step,
    saved: Saved,
    query: Tensor,
    kv: Pair,
    grad_query: Accumulator,
    grad_kv: tuple[Accumulator, Accumulator],
    kernel: Kernel,
    scores: Scores,
    label: Label,
) -> None:
    """Add the gradients of a step to those of the queries and of the resident keys and values.

    Args:
        step: whose tiles to compute.
        saved: what forward returned for the local queries, and its gradients.
        query: local queries `(B, N, L, H)`.
        kv: resident keys and values `(B, Nkv, C, H)` and `(B, Nkv, C, Hv)`.
        grad_query: gets regions of `(B, N, L)`.
        grad_kv: get regions of `(B, Nkv, C)`.
        kernel: the block kernel.
        scores: how a query scored a key.
        label: names this step in a profile.
    """
    for launch in _launches(step, query, kv[0], kernel.has_segments):
        sums = grad_query, *grad_kv
        with label("merge"):
            for one in sums:
                one.make_room()
        with label("tile"):
            grads = _backward(launch, saved, query, kv, kernel, scores)
        for one, at, grad in zip(sums, (launch.rows, launch.cols, launch.cols), grads, strict=True):
            one.add(at, grad)


def _launches(
    step: Step, query: Tensor, key: Tensor, has_segments: bool, in_flight: bool = False
) -> tuple[Launch, ...]:
    batch_size, _, num_rows, _ = query.shape
    if not batch_size:
        return ()  # some kernels refuse an empty batch, others return nothing for it
    return launches(step, (batch_size, num_rows, key.shape[2]), has_segments, in_flight)


def _forward(launch: Launch, query: Tensor, kv: Pair, kernel: Kernel, scores: Scores) -> Result:
    """`out` `(B, N, R, Hv)` and `lse` `(B, N, R)` of a launch."""
    q, (k, v) = part_of(query, launch.rows), _columns(kv, launch)
    if launch.segments is None:
        return kernel.forward(q, k, v, launch, scores)
    # Segments count through all batch rows, so these become one dimension.
    out, lse = kernel.forward(_flat(q), _flat(k), _flat(v), launch, scores)
    batch_size = q.shape[0]
    return _by_batch(out, batch_size), lse.unflatten(1, (batch_size, -1)).transpose(0, 1)


def _backward(
    launch: Launch, saved: Saved, query: Tensor, kv: Pair, kernel: Kernel, scores: Scores
) -> Gradients:
    """Gradients of the query, key and value `(B, N, R, H)` of a launch."""
    saved = saved.at(launch.rows)
    q, (k, v) = part_of(query, launch.rows), _columns(kv, launch)
    if launch.segments is None:
        return kernel.backward(saved, q, k, v, launch, scores)
    slopes = None if saved.grad_lse is None else _heads_first(saved.grad_lse)
    flat = Saved(_flat(saved.grad_out), _flat(saved.out), _heads_first(saved.lse), slopes)
    grads = kernel.backward(flat, _flat(q), _flat(k), _flat(v), launch, scores)
    dq, dk, dv = (_by_batch(grad, q.shape[0]) for grad in grads)
    return dq, dk, dv


def _columns(kv: Pair, launch: Launch) -> Pair:
    return part_of(kv[0], launch.cols), part_of(kv[1], launch.cols)


def _flat(x: Tensor) -> Tensor:
    """`(B, N, L, H)` to `(B * L, N, H)`: a view, if it is token-major or the batch is 1."""
    return x.transpose(1, 2).flatten(0, 1)


def _heads_first(lse: Tensor) -> Tensor:
    """`(B, N, L)` to `(N, B * L)`: a copy, if the batch is not 1."""
    return lse.transpose(0, 1).flatten(1)


def _by_batch(x: Tensor, batch_size: int) -> Tensor:
    """`(B * L, N, H)` back to `(B, N, L, H)`."""
    return x.unflatten(0, (batch_size, -1)).transpose(1, 2)
