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


def zigzag_shard(tensor: Tensor, dim: int, rank: int, world_size: int) -> Tensor:
    """Return the zigzag shard that ``rank`` holds of a whole tensor, as a new tensor."""
    chunk, remainder = divmod(tensor.size(dim), 2 * world_size)
    if remainder:
        raise ValueError(f"size {tensor.size(dim)} does not divide into {2 * world_size} chunks")
    head = tensor.narrow(dim, rank * chunk, chunk)
    tail = tensor.narrow(dim, (2 * world_size - 1 - rank) * chunk, chunk)
    return torch.cat((head, tail), dim)


def single_process_attention(
    query: Tensor, key: Tensor, value: Tensor, grad_out: Tensor | None = None
) -> tuple[Tensor, ...]:
    """Run PyTorch's CPU flash kernel on the whole sequence.

    Returns ``(out, lse)``, followed by ``(dq, dk, dv)`` when ``grad_out`` is given.
    """
    out, lse = _flash_forward(query, key, value, 0.0, True)
    if grad_out is None:
        return out, lse
    return out, lse, *_flash_backward(grad_out, query, key, value, out, lse, 0.0, True)


def _kernel_forward(
    query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
) -> tuple[Tensor, ...]:
    """Call the CPU flash kernel in the way that the templated forward calls its kernel."""
    return _flash_forward(query, key, value, 0.0, is_causal)


def _kernel_backward(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
) -> tuple[Tensor, ...]:
    """Call the CPU flash kernel in the way that the templated backward calls its kernel."""
    return _flash_backward(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)


def _token_major(like: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros in the shape of ``like``, laid out in memory with tokens before heads."""
    return torch.zeros_like(
        like.transpose(1, _TOKEN_DIM), dtype=dtype, memory_format=torch.contiguous_format
    ).transpose(1, _TOKEN_DIM)


class _StubKernels:
    """Kernels that compute nothing: they return zeros laid out as the CPU flash kernel's results.

    The zeros are made on the first call with given shapes and handed out again on every later one,
    so a first, untimed call is needed before timing.
    """

    def __init__(self) -> None:
        self._ready: dict[tuple[object, ...], tuple[Tensor, ...]] = {}

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, is_causal: bool
    ) -> tuple[Tensor, ...]:
        """Stand in for ``_kernel_forward``."""
        name = ("forward", query.shape, query.stride(), query.dtype)
        if name not in self._ready:
            lse = _token_major(query[..., 0], torch.float32)
            self._ready[name] = (torch.zeros_like(query), lse)
        return self._ready[name]

    def backward(
        self, *, query: Tensor, key: Tensor, value: Tensor, **_: object
    ) -> tuple[Tensor, ...]:
        """Stand in for ``_kernel_backward``."""
        name = ("backward", query.shape, key.shape, query.dtype)
        if name not in self._ready:
            self._ready[name] = tuple(_token_major(t, t.dtype) for t in (query, key, value))
        return self._ready[name]


class TemplatedRing:
    """PyTorch's templated ring attention around the CPU flash kernel, on zigzag shards.

    The rotation is the all-to-all one (a setting of the whole process); everything else is
    PyTorch's default: load balanced, with results and gradients merged in float32. With ``stub``
    the kernels compute nothing, so that what the ring adds around them can be timed.
    """

    def __init__(self, mesh: DeviceMesh, stub: bool = False) -> None:
        if mesh.ndim != 1:
            raise ValueError(f"the mesh must have one dimension, not {mesh.ndim}")
        templated.set_rotate_method("alltoall")
        self._group = mesh.get_group()
        self._forward_kernel, self._backward_kernel = _kernel_forward, _kernel_backward
        if stub:
            kernels = _StubKernels()
            self._forward_kernel, self._backward_kernel = kernels.forward, kernels.backward

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(out, lse)`` of this rank's shard; ``lse`` is (batch, heads, tokens)."""
        out, lse = templated._templated_ring_attention(
            self._group, _TOKEN_DIM, self._forward_kernel, query, key, value, is_causal=True
        )
        return out, lse

    def backward(
        self, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(dq, dk, dv)`` of this rank's shard, from what ``forward`` took and gave."""
        dq, dk, dv = templated._templated_ring_attention_backward(
            self._group,
            _TOKEN_DIM,
            self._backward_kernel,
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
        transfers = [
            dist.P2POp(dist.isend, message, next_rank, group),
            dist.P2POp(dist.irecv, spare, previous_rank, group),
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


def time_paired(
    functions: dict[str, Callable[[], object]],
    repeats: int,
    barrier: Callable[[], object] | None = None,
    warmups: int = 1,
) -> dict[str, list[float]]:
    """Time functions in turn, A B C A B C ..., and return the seconds of each call by name.

    ``barrier`` is called before every call, untimed; ``warmups`` untimed rounds come first.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for round_index in range(warmups + repeats):
        for name, function in functions.items():
            if barrier is not None:
                barrier()
            start = time.perf_counter()
            function()
            elapsed = time.perf_counter() - start
            if round_index >= warmups:
                seconds[name].append(elapsed)
    return seconds


def median_ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the median of the ratios ``a[i] / b[i]``."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))
