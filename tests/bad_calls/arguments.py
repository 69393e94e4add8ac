"""Right values of each argument of the public functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import dtensor_ring as ring
from dtensor_ring import Mask
from tests.bad_calls.values import Make, dtensor, ints, tensor
from tests.lab.machines import round_machine


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
