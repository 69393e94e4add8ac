"""What the ring is measured against: one process, PyTorch's own ring, and bare transfers.

Nothing here uses the product. Tensors are (batch, heads, tokens, head width), attention is causal,
and a rank's shard of the tokens is the zigzag one: chunks ``r`` and ``2 * world_size - 1 - r`` of
``2 * world_size``.
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._context_parallel import _attention as templated

_flash_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

_TOKEN_DIM = 2

Stages = tuple[Callable[[], Sequence[Tensor]], Callable[[], Sequence[Tensor]]]
"""A forward, which returns the output, and the backward after it, which returns the gradients."""


def zigzag_shard(tensor: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    """Return the zigzag shard that ``rank`` holds of a whole tensor, as a new tensor."""
    chunk, remainder = divmod(tensor.size(dim), 2 * world_size)
    if remainder:
        raise ValueError(f"size {tensor.size(dim)} does not divide into {2 * world_size} chunks")
    head = tensor.narrow(dim, rank * chunk, chunk)
    tail = tensor.narrow(dim, (2 * world_size - 1 - rank) * chunk, chunk)
    return torch.cat((head, tail), dim)


def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool = True
) -> tuple[Tensor, ...]:
    """Return ``(out, lse)`` from PyTorch's CPU flash kernel."""
    return _flash_forward(query, key, value, 0.0, is_causal)


def flash_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    *,
    is_causal: bool = True,
) -> tuple[Tensor, ...]:
    """Return ``(dq, dk, dv)`` from PyTorch's CPU flash kernel."""
    return _flash_backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)


def _token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ones in the shape of ``like``, laid out in memory with tokens before heads."""
    return torch.ones_like(
        like.transpose(1, _TOKEN_DIM), dtype=dtype, memory_format=torch.contiguous_format
    ).transpose(1, _TOKEN_DIM)


class StubKernels:
    """Kernel results made in a first round of calls, and handed out again in every later round.

    The tensors of one round are distinct, laid out as those of the CPU flash kernel, and written to
    when made, so that reading them costs what it costs to read a kernel's results. What a ring
    writes into them stays there.
    """

    def __init__(self) -> None:
        self._made: list[tuple[Tensor, ...]] = []
        self._next = 0

    def restart(self) -> "StubKernels":
        """Begin a round: the next call gets what the first call got."""
        self._next = 0
        return self

    def forward(self, query: Tensor, *_: object, **__: object) -> tuple[Tensor, ...]:
        """Return ``(out, lse)`` for a query."""
        return self._take(
            lambda: (torch.ones_like(query), _token_major(query[..., 0], torch.float32))
        )

    def backward(
        self, *, query: Tensor, key: Tensor, value: Tensor, **_: object
    ) -> tuple[Tensor, ...]:
        """Return ``(dq, dk, dv)`` for a query, key and value."""
        like = (query, key, value)
        return self._take(lambda: tuple(_token_major(t, t.dtype) for t in like))

    def _take(self, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        if self._next == len(self._made):
            self._made.append(make())
        self._next += 1
        return self._made[self._next - 1]


class TemplatedRing:
    """PyTorch's templated ring attention around the CPU flash kernel, on zigzag shards.

    The rotation is "alltoall" or "allgather"; everything else is PyTorch's default: load balanced,
    with results and gradients merged in float32. With ``stub`` the kernels compute nothing, so that
    what the ring adds around them can be timed.
    """

    def __init__(self, mesh: DeviceMesh, stub: bool = False, rotation: str = "alltoall") -> None:
        if mesh.ndim != 1:
            raise ValueError(f"the mesh must have one dimension, not {mesh.ndim}")
        self._rotation = rotation
        self._group = mesh.get_group()
        self._stubs = (StubKernels(), StubKernels()) if stub else None

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)`` of this rank's shard; ``lse`` is (batch, heads, tokens)."""
        templated.set_rotate_method(self._rotation)  # for the whole process
        kernel = self._stubs[0].restart().forward if self._stubs else flash_forward
        out, lse = templated._templated_ring_attention(
            self._group, _TOKEN_DIM, kernel, query, key, value, is_causal=True
        )
        return out, lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)`` of this rank's shard, from what ``forward`` took and gave."""
        templated.set_rotate_method(self._rotation)
        kernel = self._stubs[1].restart().backward if self._stubs else flash_backward
        dq, dk, dv = templated._templated_ring_attention_backward(
            self._group,
            _TOKEN_DIM,
            kernel,
            grad_out,
            "grad_out",
            query,
            key,
            value,
            out,
            lse,
            is_causal=True,
        )
        return dq, dk, dv


def bare_transfers(
    group: dist.ProcessGroup, num_hops: int, message: Tensor, spare: Tensor
) -> Tensor:
    """Pass a message ``num_hops`` ranks on round the group, and return the one which arrived last.

    ``message`` and ``spare`` are contiguous and alike; they take turns as the buffer received into,
    so both are overwritten. A ring's forward needs ``world_size - 1`` hops of the key and value.
    """
    rank, size = group.rank(), group.size()
    next_rank = dist.get_global_rank(group, (rank + 1) % size)
    previous_rank = dist.get_global_rank(group, (rank - 1) % size)
    for _ in range(num_hops):
        transfers = [  # in this order: with the send first, gloo moves one direction at a time
            dist.P2POp(dist.irecv, spare, previous_rank, group),
            dist.P2POp(dist.isend, message, next_rank, group),
        ]
        for work in dist.batch_isend_irecv(transfers):
            work.wait()
        message, spare = spare, message
    return message


def bare_transfers_backward(
    group: dist.ProcessGroup,
    num_hops: int,
    message: Tensor,
    spare: Tensor,
    grad_message: Tensor,
    grad_spare: Tensor,
) -> tuple[Tensor, Tensor]:
    """Pass on the key and value message, then as often their float32 gradients.

    All four buffers are overwritten; returns the two messages which arrived last.
    """
    arrived = bare_transfers(group, num_hops, message, spare)
    return arrived, bare_transfers(group, num_hops, grad_message, grad_spare)


def torch_ring(
    mesh: DeviceMesh, shards: Sequence[Tensor], stub: bool, rotation: str = "alltoall"
) -> Stages:
    """Return PyTorch's ring, on shards of the output's gradient, the query, key and value."""
    ring = TemplatedRing(mesh, stub, rotation)
    grad_out, *inputs = shards
    kept: list[Tensor] = []

    def forward() -> Sequence[Tensor]:
        kept[:] = ring.forward(*inputs)
        return kept[:1]

    def backward() -> Sequence[Tensor]:
        return ring.backward(grad_out, *inputs, *kept)

    return forward, backward


def single_process(whole: Sequence[Tensor], num_threads: int) -> Stages:
    """Return PyTorch's kernel on the whole sequence, on rank 0 alone; other ranks do nothing."""
    grad_out, *inputs = whole
    kept: list[Tensor] = []

    def forward() -> Sequence[Tensor]:
        torch.set_num_threads(num_threads)
        kept[:] = flash_forward(*inputs)
        torch.set_num_threads(1)
        return kept[:1]

    def backward() -> Sequence[Tensor]:
        torch.set_num_threads(num_threads)
        grads = flash_backward(grad_out, *inputs, *kept)
        torch.set_num_threads(1)
        return grads

    return (forward, backward) if dist.get_rank() == 0 else (tuple, tuple)


def transfers(group: dist.ProcessGroup, key: Tensor, value: Tensor) -> Stages:
    """Return the transfers of a ring: key and value, and then those again and their gradients."""
    message = torch.cat((key.flatten(), value.flatten()))
    messages = message, torch.ones_like(message)
    grads = torch.ones_like(message, dtype=torch.float32), message.float().clone()
    hops = group.size() - 1
    return (
        lambda: [bare_transfers(group, hops, *messages)],
        lambda: bare_transfers_backward(group, hops, *messages, *grads),
    )


def time_paired(
    contenders: dict[str, Sequence[Callable[[], object]]],
    repeats: int,
    barrier: Callable[[], object],
    warmups: int = 1,
) -> dict[str, list[list[float]]]:
    """Time contenders in turn, A B C A B C ..., each of which runs its stages one after the other.

    ``barrier`` precedes a contender and ends each stage, so that a time is that of the whole group.
    Returns, by name and stage, the seconds from the contender's start to that stage's end in each
    repeat; ``warmups`` untimed rounds come first.
    """
    seconds = {name: [[] for _ in stages] for name, stages in contenders.items()}
    for repeat in range(-warmups, repeats):
        for name, stages in contenders.items():
            barrier()
            start = time.perf_counter()
            for index, stage in enumerate(stages):
                stage()
                barrier()
                if repeat >= 0:
                    seconds[name][index].append(time.perf_counter() - start)
    return seconds


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median of the ratios ``a[i] / b[i]``."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))
