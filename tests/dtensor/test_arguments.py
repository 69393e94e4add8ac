"""What the public function refuses, before the op does: see tests/ops/test_check.py."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_ring import ZigZag, ring_attention, shard_sequence
from dtensor_ring.dtensor.annotation import annotation_of
from tests.pool import on_ranks

X = torch.randn(2, 4, 4, 8)
TOKEN_MAJOR = dict.fromkeys(("query", "key", "value"), torch.randn(2, 8, 4, 8))
GROUPED = dict.fromkeys(("key", "value"), torch.randn(2, 8, 2, 8))
ENDS = torch.tensor([0, 8]).int()
FINITE = "must be finite in torch.float32, in which scores are computed, got"
CONTENT = "must have content, with which the ring is planned, got a tensor on meta"
DENSE = "must be a dense, strided tensor, got a"

# What is passed instead of three local shards and the mesh, and the error.
TYPES: list[tuple[dict[str, Any], str]] = [
    ({"strategy": X, "validate": True}, "strategy must be a name, a str, got tensor"),
    ({"mask": X}, r"must be a dtensor_ring\.Mask"),
    ({"mask": 3}, r"Mask\.causal\(\), got 3"),
    ({"key": [1.0]}, "key must be a .* got list"),
    ({"mesh": "cp"}, "a DeviceMesh, got str"),
    ({"sinks": 0.0}, "sinks must .* got float; use"),
    ({"sinks": [0.0] * 4}, "sinks must .* got list"),
    ({"kernel": 3}, "kernel must be .* got 3"),
    ({"kernel": b"reference"}, "kernel must be the name of a kernel, a str, got b'reference'"),
    *(({"scale": wrong}, "scale must be a number, got") for wrong in ("a", "1", torch.ones(2))),
    ({"softcap": "a"}, "softcap must be a numb"),
    ({"cu_seqlens": [0, 4, 8]}, r"cu_seqlens must be a plain tensor, .*dtype=torch.int32\), got l"),
    ({"runs": ZigZag()}, r"runs must be a plain tensor, as sequence_runs\(layout\), got ZigZag"),
]
VALUES: list[tuple[dict[str, Any], str]] = [
    ({"mesh": None}, "needs mesh=.* see shard_sequence"),
    ({"softcap": -0.1}, "must be 0 .none. or positive"),
    ({"softcap": None}, "0 .none. or .* got None"),
    ({"softcap": torch.inf}, "softcap must be finite in .*, got inf"),
    ({"softcap": 1e300}, rf"softcap {FINITE} 1e\+300"),
    ({"softcap": 1e-300}, "be 0 .none. or positive and finite, got 1e-300; .* in torch.float32"),
    ({"scale": torch.inf}, "scale must be finite in .*, got inf"),
    ({"scale": 10**400}, f"scale {FINITE} 10000"),
    ({"scale": 1e300}, rf"scale {FINITE} 1e\+300"),
    ({"sinks": torch.zeros(4).int()}, "sinks must have a floating dtype .*, got torch.int32"),
    (
        {"sinks": torch.zeros(4).to(torch.float8_e4m3fn)},
        "sinks must have a floating dtype of 16 bits or more, got torch.float8_e4m3fn; use .float",
    ),
    ({"sinks": torch.zeros(4, device="meta")}, "sinks must be on cpu, got meta"),
    ({"kernel": ""}, "unknown kernel ''; known"),
    *(({x: ENDS.to("meta")}, f"^{x} {CONTENT}") for x in ("cu_seqlens", "key_cu_seqlens")),
    ({"runs": torch.zeros(2, 1, 2, device="meta").int()}, f"^runs {CONTENT}"),
    ({"cu_seqlens": ENDS.to_sparse()}, rf"cu_seqlens {DENSE} torch.sparse_coo one; use \.to_dense"),
    ({"query": X.to_sparse()}, f"query {DENSE} torch.sparse_coo one"),
    ({"key": X.to_mkldnn()}, f"key {DENSE} torch._mkldnn one"),
    (
        {"value": torch.nested.nested_tensor(list(X), layout=torch.jagged)},
        f"value {DENSE} nested one; use torch.nested.to_padded_tens",
    ),
    ({"query": X[0]}, r"query must be \(B, N, L, H\), got"),
    (
        {"query": X[:, :, :3]},
        "6 query and 8 key tokens, .*cross attention, which has no diagonal: it takes Mask.full",
    ),
    (
        TOKEN_MAJOR | GROUPED,
        r"8 query and 4 key tokens, .* got Mask\(.*\); tensors are \(B, N, S, H\): if these are "
        r"\(B, S, N, H\), as in flash-attn, use transpose\(1, 2\)$",
    ),
    (
        TOKEN_MAJOR | {"cu_seqlens": torch.tensor([0, 5, 16])},
        r"length 8, got \[0, 5, 16\]; tensors are .*, use transpose\(1, 2\)$",
    ),
    # Too long for tokens of either dim.
    (TOKEN_MAJOR | {"cu_seqlens": torch.tensor([0, 5, 17])}, r"length 8, got \[0, 5, 17\]$"),
    (
        {"key_cu_seqlens": ENDS},
        "documents of their own, are cross attention, which has no diagonal: it takes Mask.full",
    ),
]


@on_ranks(2)
def test_refusals() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp"))
    x = shard_sequence(X, mesh["cp"], 2)
    sinks = DTensor.from_local(torch.zeros(4), mesh["cp"], run_check=False)
    types = [
        ({"query": x, "mesh": None}, "or none, got query DTensor, key Tensor, value Tensor"),
        ({"key": x}, "all be DTensors or none, got query Tensor, key DTensor, value Tensor"),
        ({"sinks": sinks}, "beside plain query, key and value must be plain, too, got a DTensor"),
    ]
    values = [
        ({"mesh": mesh}, "a ring runs over one axis"),
        (dict.fromkeys(TOKEN_MAJOR, x), "query is a DTensor, which has its own; leave it"),
    ]
    wrong = []
    for error, cases in ((TypeError, TYPES + types), (ValueError, VALUES + values)):
        for changes, message in cases:
            annotation_of(mesh["cp"].get_group()).config = None  # that a call before has left
            try:
                ring_attention(**{"query": X, "key": X, "value": X, "mesh": mesh["cp"], **changes})
                wrong.append((message, "nothing was raised"))
            except error as raised:
                if not re.search(message, str(raised)):
                    wrong.append((message, str(raised)))
    assert not wrong
