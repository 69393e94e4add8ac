"""Values of every kind that somebody may pass, and the right ones of each argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import dtensor_ring as ring
from dtensor_ring import Balanced, Mask, Striped, TransferPolicy, sequence_runs
from tests.lab.machines import round_machine

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


def just(*values: Any) -> list[Make]:
    return [lambda _, value=value: value for value in values]


def made(*makes: Callable[[], Any]) -> list[Make]:
    return [lambda _, make=make: make() for make in makes]


ROUND = round_machine()
ROUND = replace(
    ROUND, kernels=(*ROUND.kernels, *(replace(x, dtype="float64") for x in ROUND.kernels))
)
SLICES = ring.Slices.prefix([0, 8], 3)
Right = dict[str, list[Make]]
QKV: Right = {
    # As they are, and where not all strides are those of a contiguous tensor.
    name: made(tensor, lambda: tensor(1, 8, 2, 4).transpose(1, 2))
    for name in ("query", "key", "value")
}
SHARDED: Right = {name: [dtensor] for name in QKV}
DIMS: Right = {"dim": just(2, -2)}
OPTIONS: Right = {
    "mask": just(Mask.full(), Mask.causal(), Mask.sliding(2), Mask.local(1, 3), Mask.chunked(3))
    + just(Mask.prefix_causal(2), Mask.sliding(2**63 - 1)),
    "cu_seqlens": made(lambda: ints(0, 3, 8), lambda: ints([0, 3, 3, 6]), lambda: None),
    "key_cu_seqlens": just(None),
    "runs": just(None),
    "key_runs": just(None),
    "slices": just(None),
    "sinks": made(lambda: None, lambda: tensor(2), lambda: tensor(2, dtype=torch.bfloat16)),
    "relative_bias": just(None),
    "scale": just(None, 0.3, -1, 0),
    "softcap": just(0.0, 0, 1.5, 30),
}
CALLED: Right = {
    **OPTIONS,
    "kernel": just(None, "reference"),
    "return_lse": just(False, True),
    "strategy": just(None, "all_gather", "ulysses", "auto"),
    "validate": just(False, True),
}
DECODED: Right = {
    **{name: x for name, x in OPTIONS.items() if name not in ("key_cu_seqlens", "runs")},
    "kernel": CALLED["kernel"],
    "return_lse": CALLED["return_lse"],
    "key_runs": made(lambda: None, lambda: ints([[0, 8]]), lambda: ints([[0, 3], [3, 5], [0, 0]])),
    "query_starts": made(lambda: None, lambda: ints(0)),
    "merge": just(None, "one_shot", "two_shot"),
    "agree": made(lambda: None, lambda: torch.arange(5)),
    "mesh": [lambda mesh: mesh, lambda _: None],
}
INDEXED: Right = {
    "index_query": made(lambda: tensor(1, 8, 2, 4)),
    "index_key": made(lambda: tensor(1, 8, 4)),
    "weights": made(lambda: tensor(1, 8, 2), lambda: None),
    "k": just(1, 20),
    "scale": just(1.0, -0.5),
    **{name: OPTIONS[name] for name in ("mask", "cu_seqlens", "slices")},
}
LISTED: Right = {
    "selected": made(lambda: ints([[0]] * 8), lambda: ints([[[3, -1]] * 8] * 2)),
    **{name: OPTIONS[name] for name in ("scale", "sinks")},
}
AXIS: Right = {
    "layout": just("zigzag", "contiguous", "block_cyclic:2", ring.Striped()),
    "strategy": just(None, "ring", "direct", "ulysses", "auto"),
    "kernel": just(None, "reference"),
    "policy": just(None, ring.TransferPolicy(torch.bfloat16)),
    "machine": just(None, "h100"),
}
PLANNED: Right = {
    "mask": OPTIONS["mask"],
    "seq_len": just(8, 12),
    "world_size": just(1, 2, 4),
    "cu_seqlens": just(None, (0, 3, 8), [[0, 8], [0, 5]]),
}
STRATEGY: Right = {"strategy": just("ring", "all_gather", "ulysses")}
COMPARED: Right = {
    "heads": just((4, 2), [6, 1]),
    "head_dim": just(8),
    "layout": just("zigzag", "contiguous"),
    "batch": just(1, 2),
    "dtype": just(torch.float16, torch.float64),
    "policy": AXIS["policy"][1:],
    "strategies": just(None, ["ulysses", "ring"]),
    "max_held": just(None, 0, 10**9),
    "machine": just(None, ROUND),
}
ATTENTION: Right = {
    "mask": OPTIONS["mask"],
    "seq_len": just(8, 12),
    "world_size": just(1, 2, 4),
    "heads": just((4, 2), [6, 1]),
    "head_dim": just(8),
    "cu_seqlens": just(None, (0, 3, 8)),
    "layout": just("zigzag", "contiguous"),
    "strategy": just("ring", "ulysses"),
    "batch": just(1, 2),
    "dtype": just(torch.bfloat16, "float16"),
    "policy": AXIS["policy"][1:],
    "kernel": just(None, "flash_attn3"),
    "machine": just("h100", ROUND),
}
LAID_OUT: Right = {
    **{name: COMPARED[name] for name in ("heads", "head_dim", "batch", "policy")},
    "world_size": just(1, 2),
    "dtype": just(torch.bfloat16, "float16"),
    "masks": just(Mask.causal(), [Mask.sliding(2), Mask.full()]),
    "seq_len": just(8, 9),
    "cu_seqlens": just(None, (0, 3, 8)),
    "strategy": just("auto", "ring"),
    "machine": just("a100"),
}
SIMULATED: Right = {
    "config": just(
        {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 8}
        | {"num_attention_heads": 4, "num_hidden_layers": 1}
    ),
    "seq_len": just(8, 16),
    "mesh": just({"cp": 2}, {"dp": 2, "cp": 2, "tp": 2}),
    "machine": just("h100", "b200"),
    "layout": just("zigzag", "contiguous"),
    "strategy": just("ring", "ulysses", "auto"),
    "batch": just(1, 2),
    "dtype": just(torch.float16, "float8_e4m3fn"),
    "checkpoint": just("none", "full"),
    "kernel": just(None, "cudnn"),
    "batches": just(None),
    "world_size": just(None),
    "compiled": just(False, True),
}
LONGEST: Right = {
    name: SIMULATED[name]
    for name in ("config", "mesh", "machine", "layout", "strategy", "batch", "dtype")
} | {
    "memory": just(None, 10**9),
    "seq_len": just(None, 64),
    "settings": just(None),
    "kv_dtype": just(None, "int8"),
    "is_timed": just(True, False),
}
TOKENS: Right = {
    "tokens": made(lambda: torch.arange(8), lambda: torch.ones(1, 8, dtype=torch.int32)),
    "cu_seqlens": made(lambda: None, lambda: ints(0, 3, 8)),
    "ignore_index": just(-100, 0),
}
MASK: Right = {
    "left": just(None, 0, 5),
    "right": just(None, 0, 5),
    "chunk": just(None),
    "prefix": just(None, 3),
}
BOUNDS: Right = {
    "cu_seqlens": made(lambda: ints(0, 3, 8), lambda: [0, 8], lambda: [[0, 8], [0, 5]])
}
BANDS_ONLY = just(Mask.causal(), Mask.sliding(2))
LENGTHS: Right = {"lengths": just([3, 2], [[3, 2], [5, 0]])}
BUILDERS: dict[str, Right] = {
    "documents": BOUNDS | {"mask": OPTIONS["mask"]},
    "prefix": BOUNDS | {"prefix_lengths": just(0, 3)},
    "blocks": BOUNDS | {"begins": just([3]), "ends": just([5]), "mask": BANDS_ONLY},
    "global_tokens": BOUNDS | {"num_global": just(0, 3), "window": just(0, 3)},
    "bottom_right": {
        "cu_seqlens": just([0, 4]),
        "key_cu_seqlens": just([0, 8], [0, 3]),
        "mask": BANDS_ONLY,
    },
    "per_query": {"begins": just([0, 2]), "ends": just([2, 5])},
    "pools": {"num_tokens": just(0, 9), "size": just(1, 4)},
    "block_causal": LENGTHS | {"num_earlier": just(None, 1)},
    "block_diffusion": LENGTHS,
    "tree": {"parents": just([-1, 0]), **LENGTHS},
    "shared_prefix": {"prefix_lengths": just(2, [2]), "answer_lengths": just([2, 3])},
    "batched": {"parts": just([SLICES, SLICES], [])},
}
PAGED: Right = {
    "num_kv_heads": just(2),
    "head_dim": just(4),
    "num_layers": just(1, 2),
    "rank": just(0),
    "value_head_dim": just(None, 3),
    "kv_dtype": just(None, "int8"),
}
QUERIES: Right = {
    "layer": just(0),
    "query": made(lambda: tensor(1, 2, 1, 4), lambda: tensor(1, 1, 2, 4).transpose(1, 2)),
    **{name: OPTIONS[name] for name in ("scale", "softcap")},
    "mask": OPTIONS["mask"],
    "kernel": just(None, "in_place", "gathered"),
}
POOLED: Right = {"tokens": made(lambda: [1, 2, 3], lambda: torch.arange(3), tuple)}
MESH: Right = {"mesh": [lambda mesh: mesh]}
INPUTS: Right = {"inputs": just(("query", "key", "value"), ["q", "kv"])}
IDS: Right = {
    "input_ids": made(lambda: torch.arange(8).unsqueeze(0), lambda: torch.ones(2, 8).long())
}
