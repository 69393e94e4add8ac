"""The public merge of partial attentions, on tensors and on DTensors, and its op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_ring.compute.accumulate import RunningOutput
from dtensor_ring.compute.memory import empty, order_of, region
from dtensor_ring.compute.merge import merge_gradients
from dtensor_ring.dtensor.annotation import tag_compiled
from dtensor_ring.dtensor.placement import describe
from dtensor_ring.dtensor.sequence_tensor import known
from dtensor_ring.ops.checks import check_strided, unit_stride
from dtensor_ring.ops.nodes import register_op


def merge_attention(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attentions of the same queries over disjoint keys into the attention over all of them.

    An attention that no single mask describes can be split into several calls. Each returns `out`
    and `lse`. With `lse = log(sum of exp(lse_i))`, the whole output is `out = sum of exp(lse_i -
    lse) * out_i` (Milakov and Gimelshein, 2018, arXiv 1805.02867; ring attention merges in the same
    way, Liu et al., 2023, arXiv 2310.01889). Exact and differentiable: gradients go to each `out_i`
    and `lse_i`. No query may see a key in two parts, or it counts twice. Pass sinks to one call.

    Args:
        parts: `(out, lse)` pairs, as `ring_attention(..., return_lse=True)` returns them: `out`
            `(B, N, S, Hv)`; `lse` natural log, `(B, N, S)`, float32 or wider, -inf in rows that
            see nothing there. Plain tensors, or DTensors with equal placements.

    Returns:
        The merged `(out, lse)`, with the shape, dtype and placements of each part; summed in
        float32 or wider, and rounded once. A row that sees nothing in any part is 0 with an lse of
        -inf, and has gradients of 0.

    Raises:
        TypeError: if `parts` are not pairs of tensors.
        ValueError: if parts are empty, or differ in shape, dtype, device or placement.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> q, k, v = (torch.randn(1, 2, 8, 4) for _ in range(3))
        >>> how = {"mask": Mask.full(), "mesh": mesh}
        >>> parts = [
        ...     ring_attention(q, k[:, :, keys], v[:, :, keys], return_lse=True, **how)
        ...     for keys in (slice(0, 3), slice(3, 8))
        ... ]
        >>> out, lse = merge_attention(parts)
        >>> torch.allclose(out, ring_attention(q, k, v, **how), atol=1e-6)
        True
    """
    outs, lses = _checked(parts)
    if not isinstance(outs[0], DTensor):
        return merge_op(outs, lses)
    if torch.compiler.is_compiling():
        tag_compiled()
    out, lse = merge_op([_local(x) for x in outs], [_local(x) for x in lses])
    return _placed(out, outs[0]), _placed(lse, lses[0])


def _local(x: Any) -> Tensor:
    return x.to_local()


def _placed(local: Tensor, like: Any) -> DTensor:
    # Pass the global shape: shards may differ in length, so it cannot be derived.
    how = {"run_check": False, "shape": like.shape, "stride": like.stride()}
    return known(DTensor.from_local(local, like.device_mesh, like.placements, **how))


def _checked(parts: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return all out and all lse, or raise if they cannot be merged."""
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"parts must be a list of (out, lse) pairs, got {type(parts).__name__}")
    if not parts:
        raise ValueError("parts must hold at least one (out, lse) pair, got none")
    for number, part in enumerate(parts):
        _check_part(number, part)
        for name, x, first in zip(("out", "lse"), part, parts[0], strict=True):
            if _kind(x) != _kind(first):
                raise ValueError(
                    "parts must be attentions of the same queries, placed alike, got as "
                    f"{name} of parts[0] {_described(first)}, of parts[{number}] {_described(x)}"
                )
    return [out for out, _ in parts], [lse for _, lse in parts]


def _check_part(number: int, part: Any) -> None:
    """Refuse a part that is not an output and its lse."""
    if not isinstance(part, (list, tuple)) or len(part) != 2:
        raise TypeError(
            f"parts must be (out, lse) pairs, got {type(part).__name__} in parts[{number}]; call "
            "ring_attention(..., return_lse=True)"
        )
    for name, x in zip(("out", "lse"), part, strict=True):
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} of parts[{number}] must be a tensor, got {type(x).__name__}")
        check_strided(f"{name} of parts[{number}]", x)
    out, lse = part
    fault = _fault(out, lse)
    if fault:
        got = f"got out {_described(out)} and lse {_described(lse)} in parts[{number}]"
        raise ValueError(f"parts must have {fault[0]}, {got}{fault[1]}")


def _fault(out: Tensor, lse: Tensor) -> tuple[str, str] | None:
    """Return what a faulty pair should be and a hint, `None` if nothing is wrong."""
    if out.ndim != 4 or lse.shape != out.shape[:3]:
        is_swapped = out.ndim == 4 and lse.shape == out.transpose(1, 2).shape[:3]
        return "out (B, N, S, Hv) and lse (B, N, S)", "; transpose(1, 2)" if is_swapped else ""
    if not out.is_floating_point() or out.dtype.itemsize < 2:
        return "an out of a floating dtype of 16 bits or more", ""
    wide = torch.promote_types(out.dtype, torch.float32)
    if not lse.is_floating_point() or torch.promote_types(lse.dtype, wide) != lse.dtype:
        return f"an lse of {wide} or wider", ""
    if _place(out) != _place(lse) or any(where.is_partial() for where in _place(out)[1]):
        return "out and lse placed alike, and not Partial", "; redistribute them"
    return None


def _place(x: Tensor) -> tuple[Any, ...]:
    """Return the device and, for a DTensor, the placements and the mesh."""
    return (x.device, x.placements, x.device_mesh) if isinstance(x, DTensor) else (x.device, ())


def _kind(x: Tensor) -> tuple[Any, ...]:
    """Return the properties that all parts must share."""
    return x.shape, x.dtype, _place(x)


def _described(x: Tensor) -> str:
    where = describe(x) if isinstance(x, DTensor) else x.device
    return f"{tuple(x.shape)} {x.dtype}, {where}"


def _forward(outs: list[Tensor], lses: list[Tensor]) -> tuple[Tensor, Tensor]:
    outs = unit_stride(*outs)
    running = RunningOutput(outs[0], outs[0].shape[3])
    rows = region(None, (0, outs[0].shape[2]))
    for number, (out, lse) in enumerate(zip(outs, lses, strict=True)):
        if not number:
            out, lse = out.clone(), lse.clone()  # the first part becomes the accumulator
        running.make_room()
        running.add(rows, out, lse)
    return running.result()


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


merge_op = register_op(
    "merge_attention",
    "(Tensor[] outs, Tensor[] lses) -> (Tensor out, Tensor lse)",
    _forward,
    _fake_forward,
    gradient=(_gradients, _setup),
)
