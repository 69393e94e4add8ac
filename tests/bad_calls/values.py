"""Values of every kind that somebody may pass: some are right for an argument, most are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from dtensor_ring import Balanced, Mask, Striped, TransferPolicy, sequence_runs

Make = Callable[[DeviceMesh], Any]
"""Makes a value again for each call, with the mesh of one rank that all calls run on."""

SHAPE = (1, 2, 8, 4)


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same numbers for the same shape."""
    return torch.randn(shape or SHAPE, generator=torch.Generator().manual_seed(0)).to(dtype)


def ints(*values: Any, dtype: torch.dtype = torch.int32) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def dtensor(mesh: DeviceMesh, x: Tensor | None = None, dim: int = 2) -> DTensor:
    return DTensor.from_local(tensor() if x is None else x, mesh, [Shard(dim)], run_check=False)


def jagged() -> Tensor:
    return torch.nested.nested_tensor([torch.randn(8, 2, 4)], layout=torch.jagged).transpose(1, 2)


def _just(*values: Any) -> dict[str, Make]:
    return {repr(value): lambda _, value=value: value for value in values}


def _made(**makes: Callable[[], Any]) -> dict[str, Make]:
    return {name: lambda _, make=make: make() for name, make in makes.items()}


_DTYPES = (torch.float64, torch.bfloat16, torch.int32, torch.uint16, torch.bool, torch.complex64)
_SHAPES = ((), (4,), (8, 4), (2, 8), (0, 2, 8, 4), (1, 0, 8, 4), (1, 2, 0, 4), (1, 2, 8, 0))
_SHAPES += ((1, 1, 8, 4), (3, 2, 8, 4), (1, 2, 6, 4), (1, 2, 8, 3), (1, 2, 8, 4, 1))
STRANGE: dict[str, Make] = {
    **_just(None, True, 0, 1, 3, -1, 2**63, 2**70, 10**400, 1.5, -0.5, 1e300, 1e-300, 1j),
    **_just(float("nan"), float("inf"), "", "a", "2", "zigzag", "ring", "reference", b"reference"),
    **_just([], [0, 8], [0, [8]], [None], (), {}, ("query", "key"), ("query", 3), int, print),
    **_just(torch.float32, torch.int32, torch.float8_e4m3fn, torch.complex64),
    **_just(Mask.full(), Mask.sliding(2), TransferPolicy(), Striped()),
    **_just(Balanced(Mask.causal(), 8, 1), Balanced(Mask.causal(), 6, 1)),
    **{f"tensor of {dtype}": partial(lambda _, x: tensor(dtype=x), x=dtype) for dtype in _DTYPES},
    **{f"shape {shape}": partial(lambda _, x: torch.randn(x), x=shape) for shape in _SHAPES},
    **_made(
        query=tensor,
        float8=lambda: tensor(dtype=torch.float8_e4m3fn),
        quantized=lambda: torch.quantize_per_tensor(tensor(), 1.0, 0, torch.qint8),
        meta=lambda: tensor().to("meta"),
        sparse=lambda: tensor().to_sparse(),
        mkldnn=lambda: tensor().to_mkldnn(),
        nested=lambda: torch.nested.nested_tensor([torch.randn(2, 8, 4)]),
        jagged=jagged,
        recorded=lambda: tensor().requires_grad_(),
        transposed=lambda: tensor(1, 8, 2, 4).transpose(1, 2),
        number=lambda: torch.tensor(0.5),
        meta_number=lambda: torch.tensor(1, device="meta"),
        bounds=lambda: ints(0, 3, 8),
        more_bounds=lambda: ints([0, 3, 8], [0, 8, 8], [0, 4, 8]),
        long_bounds=lambda: ints(0, 8, dtype=torch.int64),
        late_bounds=lambda: ints(1, 8),
        falling_bounds=lambda: ints(0, 5, 3),
        bounds_beyond=lambda: ints(0, 9),
        negative_bounds=lambda: ints(0, -2, 8),
        no_bounds=lambda: ints(),
        meta_bounds=lambda: ints(0, 8).to("meta"),
        sparse_bounds=lambda: ints(0, 8).to_sparse(),
        nested_bounds=lambda: torch.nested.nested_tensor([ints(0, 8)]),
        runs=lambda: sequence_runs(Balanced(Mask.causal(), 8, 1)),
        other_runs=lambda: ints([[0, 3]], [[3, 3]]),
        object=object,
    ),
    "mesh": lambda mesh: mesh,
    "flat mesh": lambda _: init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "cp")),
    "DTensor": dtensor,
    "DTensor of heads": lambda mesh: dtensor(mesh, dim=1),
    "DTensor of integers": lambda mesh: dtensor(mesh, tensor(dtype=torch.int32)),
    "DTensor of one dim": lambda mesh: dtensor(mesh, torch.zeros(2), 0),
    "replicated DTensor": lambda mesh: DTensor.from_local(torch.zeros(2), mesh, [Replicate()]),
}
