"""What the public function refuses, before the op does: see tests/ops/test_check.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_ring import ZigZag, ring_attention, shard_sequence
from dtensor_ring.dtensor.annotation import annotation_of
from tests.pool import on_ranks


def _as_dtensors(x: Tensor, mesh: DeviceMesh) -> dict[str, Any]:
    return dict.fromkeys(("query", "key", "value"), shard_sequence(x, mesh["cp"], 2))


# What is passed instead of three local shards and the mesh, and the error.
REFUSALS: dict[str, tuple[Callable[[Tensor, DeviceMesh], dict[str, Any]], Any, str]] = {
    "no mesh": (lambda x, mesh: {"mesh": None}, ValueError, "needs mesh=.* see shard_sequence"),
    "mesh of two axes": (lambda x, mesh: {"mesh": mesh}, ValueError, "a ring runs over one axis"),
    "mesh and DTensors": (
        _as_dtensors,
        ValueError,
        "query is a DTensor, which has its own; leave it",
    ),
    "a tensor as the strategy": (
        lambda x, mesh: {"strategy": x, "validate": True},
        TypeError,
        "strategy must be a name, a str, got tensor",
    ),
    "only the query a DTensor": (
        lambda x, mesh: {"query": shard_sequence(x, mesh["cp"], 2), "mesh": None},
        TypeError,
        "all be DTensors or none, got query DTensor, key Tensor, value Tensor",
    ),
    "only the key a DTensor": (
        lambda x, mesh: {"key": shard_sequence(x, mesh["cp"], 2)},
        TypeError,
        "all be DTensors or none, got query Tensor, key DTensor, value Tensor",
    ),
    "mask a tensor": (lambda x, mesh: {"mask": x}, TypeError, r"must be a dtensor_ring\.Mask"),
    "mask 3": (lambda x, mesh: {"mask": 3}, TypeError, r"Mask\.causal\(\), got 3"),
    "softcap": (lambda x, mesh: {"softcap": -0.1}, ValueError, "must be 0 .none. or positive"),
    "infinite softcap": (
        lambda x, mesh: {"softcap": torch.inf},
        ValueError,
        "softcap must be finite in .*, got inf",
    ),
    "infinite scale": (
        lambda x, mesh: {"scale": torch.inf},
        ValueError,
        "scale must be finite in .*, got inf",
    ),
    "list for a tensor": (lambda x, mesh: {"key": [1.0]}, TypeError, "key must be a .* got list"),
    "name for a mesh": (lambda x, mesh: {"mesh": "cp"}, TypeError, "a DeviceMesh, got str"),
    "sinks of integers": (
        lambda x, mesh: {"sinks": torch.zeros(4).int()},
        ValueError,
        "sinks must have a floating dtype of 16 bits or more, got torch.int32",
    ),
    "sinks of 8 bits": (
        lambda x, mesh: {"sinks": torch.zeros(4).to(torch.float8_e4m3fn)},
        ValueError,
        "sinks must have a floating dtype of 16 bits or more, got torch.float8_e4m3fn; use .float",
    ),
    "a number for sinks": (
        lambda x, mesh: {"sinks": 0.0},
        TypeError,
        "sinks must .* got float; use",
    ),
    "a list for sinks": (lambda x, mesh: {"sinks": [0.0] * 4}, TypeError, "sinks must .* got list"),
    "a number for a kernel": (lambda x, mesh: {"kernel": 3}, TypeError, "kernel must be .* got 3"),
    "bytes for a kernel": (
        lambda x, mesh: {"kernel": b"reference"},
        TypeError,
        "kernel must be the name of a kernel, a str, got b'reference'",
    ),
    "no name of a kernel": (lambda x, mesh: {"kernel": ""}, ValueError, "unknown kernel ''; known"),
    "a string for a scale": (
        lambda x, mesh: {"scale": "a"},
        TypeError,
        "scale must be a number, got",
    ),
    "a scale in a string": (
        lambda x, mesh: {"scale": "1"},
        TypeError,
        "scale must be a number, got",
    ),
    "a string for a softcap": (
        lambda x, mesh: {"softcap": "a"},
        TypeError,
        "softcap must be a numb",
    ),
    "two scales": (
        lambda x, mesh: {"scale": torch.ones(2)},
        TypeError,
        "scale must be a number, got",
    ),
    "a scale beyond floats": (
        lambda x, mesh: {"scale": 10**400},
        ValueError,
        "scale must be finite in torch.float32, in which scores are computed, got 10000",
    ),
    "a scale beyond float32": (
        lambda x, mesh: {"scale": 1e300},
        ValueError,
        r"scale must be finite in torch.float32, in which scores are computed, got 1e\+300",
    ),
    "a softcap beyond float32": (
        lambda x, mesh: {"softcap": 1e300},
        ValueError,
        r"softcap must be finite in torch.float32, in which scores are computed, got 1e\+300",
    ),
    "a softcap that float32 rounds to 0": (
        lambda x, mesh: {"softcap": 1e-300},
        ValueError,
        "softcap must be 0 .none. or positive and finite, got 1e-300; .* in torch.float32",
    ),
    "meta cu_seqlens": (
        lambda x, mesh: {"cu_seqlens": torch.tensor([0, 8], device="meta").int()},
        ValueError,
        "^cu_seqlens must have content, with which the ring is planned, got a tensor on meta",
    ),
    "meta key_cu_seqlens": (
        lambda x, mesh: {"key_cu_seqlens": torch.tensor([0, 8], device="meta").int()},
        ValueError,
        "^key_cu_seqlens must have content, with which the ring is planned, got a tensor on meta",
    ),
    "meta runs": (
        lambda x, mesh: {"runs": torch.zeros(2, 1, 2, device="meta").int()},
        ValueError,
        "^runs must have content, with which the ring is planned, got a tensor on meta",
    ),
    "sparse cu_seqlens": (
        lambda x, mesh: {"cu_seqlens": torch.tensor([0, 8]).int().to_sparse()},
        ValueError,
        r"cu_seqlens must be a dense, strided tensor, got a torch.sparse_coo one; use \.to_dense",
    ),
    "sparse query": (
        lambda x, mesh: {"query": x.to_sparse()},
        ValueError,
        "query must be a dense, strided tensor, got a torch.sparse_coo one",
    ),
    "a key of another library": (
        lambda x, mesh: {"key": x.to_mkldnn()},
        ValueError,
        "key must be a dense, strided tensor, got a torch._mkldnn one",
    ),
    "nested value": (
        lambda x, mesh: {"value": torch.nested.nested_tensor(list(x), layout=torch.jagged)},
        ValueError,
        "value must be a dense, strided tensor, got a nested one; use torch.nested.to_padded_tens",
    ),
    "sinks elsewhere": (
        lambda x, mesh: {"sinks": torch.zeros(4, device="meta")},
        ValueError,
        "sinks must be on cpu, got meta",
    ),
    "boundaries in a list": (
        lambda x, mesh: {"cu_seqlens": [0, 4, 8]},
        TypeError,
        r"cu_seqlens must be a plain tensor, as torch.tensor\(x, dtype=torch.int32\), got list",
    ),
    "a layout for its runs": (
        lambda x, mesh: {"runs": ZigZag()},
        TypeError,
        r"runs must be a plain tensor, as sequence_runs\(layout\), got ZigZag",
    ),
    "no softcap": (lambda x, mesh: {"softcap": None}, ValueError, "0 .none. or .* got None"),
    "sinks a DTensor": (
        lambda x, mesh: {"sinks": DTensor.from_local(torch.zeros(4), mesh["cp"], run_check=False)},
        TypeError,
        "sinks beside plain query, key and value must be plain, too, got a DTensor",
    ),
    "three dims": (
        lambda x, mesh: {"query": x[0]},
        ValueError,
        r"query must be \(B, N, L, H\), got",
    ),
    "length of the key": (
        lambda x, mesh: {"query": x[:, :, :3]},
        ValueError,
        "6 query and 8 key tokens, .*cross attention, which has no diagonal: it takes Mask.full",
    ),
    "token-major, grouped": (
        lambda x, mesh: (
            dict.fromkeys(("key", "value"), torch.randn(2, 8, 2, 8))
            | {"query": torch.randn(2, 8, 4, 8)}
        ),
        ValueError,
        r"8 query and 4 key tokens, .* got Mask\(.*\); tensors are \(B, N, S, H\): if these are "
        r"\(B, S, N, H\), as in flash-attn, use transpose\(1, 2\)$",
    ),
    "token-major, documents": (
        lambda x, mesh: (
            dict.fromkeys(("query", "key", "value"), torch.randn(2, 8, 4, 8))
            | {"cu_seqlens": torch.tensor([0, 5, 16])}
        ),
        ValueError,
        r"length 8, got \[0, 5, 16\]; tensors are .*, use transpose\(1, 2\)$",
    ),
    "too long for tokens of either dim": (
        lambda x, mesh: (
            dict.fromkeys(("query", "key", "value"), torch.randn(2, 8, 4, 8))
            | {"cu_seqlens": torch.tensor([0, 5, 17])}
        ),
        ValueError,
        r"length 8, got \[0, 5, 17\]$",
    ),
    "key_cu_seqlens under a causal mask": (
        lambda x, mesh: {"key_cu_seqlens": torch.tensor([0, 8]).int()},
        ValueError,
        "documents of their own, are cross attention, which has no diagonal: it takes Mask.full",
    ),
}


@on_ranks(2)
def test_refusals() -> None:
    mesh, wrong = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "cp")), {}
    for name, (changes, error, message) in REFUSALS.items():
        annotation_of(mesh["cp"].get_group()).config = None  # that a call before has left
        x = torch.randn(2, 4, 4, 8)
        given = {"query": x, "key": x, "value": x, "mesh": mesh["cp"], **changes(x, mesh)}
        try:
            ring_attention(**given)
            wrong[name] = "nothing was raised"
        except error as raised:
            if not re.search(message, str(raised)):
                wrong[name] = str(raised)
    assert not wrong
