"""The public functions: what is right for each argument, and what a valid call returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import dtensor_ring as ring
from dtensor_ring import Mask
from parallel_plans.huggingface import context_parallel_plan
from tests.bad_calls.arguments import (
    ATTENTION,
    AXIS,
    BUILDERS,
    CALLED,
    COMPARED,
    DECODED,
    DIMS,
    IDS,
    INDEXED,
    INPUTS,
    LAID_OUT,
    LISTED,
    LONGEST,
    MASK,
    MESH,
    OPTIONS,
    PAGED,
    PLANNED,
    POOLED,
    QKV,
    QUERIES,
    SHARDED,
    SIMULATED,
    SLICES,
    STRATEGY,
    TOKENS,
    Make,
    dtensor,
    ints,
    just,
    made,
    tensor,
)
from tests.bad_calls.calls import (
    Mine,
    block_mask,
    given_cache,
    model,
    moving,
    on_axis,
    on_cache,
    on_pool,
    paged,
    parallel,
    registered,
    without_mesh,
)
from tests.bad_calls.checks import (
    check_all_to_all,
    check_attention,
    check_labels,
    check_positions,
    check_same,
    check_slices,
    nothing,
)


@dataclass(frozen=True)
class Function:
    """One public function: `call(mesh, **arguments)`, and right values of each argument."""

    call: Callable[..., Any]
    right: dict[str, list[Make]]
    check: Callable[[dict[str, Any], Any], None] = nothing


FUNCTIONS: dict[str, Function] = {
    "ring_attention": Function(
        lambda _, **given: ring.ring_attention(**given), QKV | CALLED | MESH, check_attention
    ),
    "ring_attention of a turn": Function(
        lambda _, **given: ring.ring_attention(**given),
        QKV
        | MESH
        | {name: made(lambda: ints([[0, 8]])) for name in ("runs", "key_runs")}
        | {"mask": OPTIONS["mask"]},
        check_attention,
    ),
    "ring_attention on DTensors": Function(
        lambda _, **given: ring.ring_attention(**given), SHARDED | CALLED, check_attention
    ),
    "decode_attention": Function(
        lambda _, **given: ring.decode_attention(**given), QKV | DECODED, check_attention
    ),
    "select_keys": Function(
        lambda _, **given: ring.select_keys(**given),
        INDEXED
        | MESH
        | {"block_size": just(2), "local_blocks": just(0, 1), "route": just(None, "all_gather")}
        | {"seq_len": just(None, 8), "runs": just(None), "key_runs": just(None)},
    ),
    "selected_attention": Function(
        lambda _, **given: ring.selected_attention(**given),
        QKV
        | MESH
        | LISTED
        | {"value": just(2) + QKV["value"], "route": just(None, "all", "selected")}
        | {"return_lse": CALLED["return_lse"], "seq_len": just(None, 8)}
        | {"runs": just(None), "key_runs": just(None)},
    ),
    "decode_select_keys": Function(
        lambda _, **given: ring.decode_select_keys(**given),
        INDEXED
        | {"block_size": just(2), "local_blocks": just(0, 1)}
        | {name: DECODED[name] for name in ("key_runs", "query_starts", "agree", "mesh")},
    ),
    "decode_selected_attention": Function(
        lambda _, **given: ring.decode_selected_attention(**given),
        QKV
        | LISTED
        | {"value": just(2) + QKV["value"]}
        | {name: DECODED[name] for name in ("key_runs", "agree", "mesh")},
    ),
    "SequenceAxis.attention": Function(
        on_axis("attention"),
        QKV | OPTIONS | {"seq_len": just(None, 8), "strategy": CALLED["strategy"]},
        check_attention,
    ),
    "SequenceAxis.shard": Function(
        on_axis("shard"), {"tensor": QKV["query"], **DIMS}, check_same("tensor")
    ),
    "SequenceAxis.unshard": Function(
        on_axis("unshard"), {"dtensor": [dtensor], **DIMS}, check_same("dtensor")
    ),
    "SequenceAxis.sum": Function(on_axis("sum"), {"local": QKV["query"]}, check_same("local")),
    "SequenceAxis.prepare": Function(
        on_axis("prepare"),
        {name: OPTIONS[name] for name in ("mask", "cu_seqlens", "runs")} | {"seq_len": just(8, 9)},
        nothing,
    ),
    "SequenceAxis.positions": Function(
        on_axis("positions"), {"seq_len": just(8, 0, 9)}, check_positions
    ),
}
FUNCTIONS |= {
    name: Function(without_mesh(getattr(ring, name)), right, check)
    for name, right, check in (
        (
            "SequenceAxis",
            MESH | AXIS | {"transport": just(None), "strict": just(None, True, False)},
            nothing,
        ),
        ("sequence_layout", MESH, nothing),
        (
            "ShardedCache",
            MESH
            | {"num_layers": just(1, 3), "layout": just(None, "zigzag"), "block": just(1, 256)}
            | {"kv_dtype": just(None, "fp8")},
            nothing,
        ),
        (
            "exchange",
            {
                "tensors": made(lambda: [tensor(), tensor(1, 4, 8, 3)], lambda: (tensor(),)),
                **MESH,
                "to": just("heads", "tokens"),
                "heads": just(None, 1),
                "num_heads": just(None),
                "num_key_heads": just(None, 1, 2),
                "seq_len": just(None, 8),
                "runs": just(None),
            },
            check_all_to_all,
        ),
        (
            "relayout",
            {
                **{"tensor": [*QKV["query"], dtensor], **MESH, **DIMS, "seq_len": just(None)},
                "to": just("contiguous", "zigzag", ring.Balanced(Mask.causal(), 8, 1)),
                "layout": just(None, "zigzag", ring.Striped()),
            },
            check_same("tensor"),
        ),
        (
            "shard_sequence",
            {"tensor": QKV["query"], **MESH, **DIMS, "layout": just(None, "zigzag")},
            check_same("tensor"),
        ),
        (
            "unshard_sequence",
            {"dtensor": [dtensor], **DIMS, "layout": just(None)},
            check_same("dtensor"),
        ),
        (
            "StateMap",
            {
                "state": made(lambda: torch.ones(2, 3, 4)),
                "decay": made(lambda: torch.zeros(2), lambda: None),
                "matrix": just(None),
            },
            nothing,
        ),
        (
            "exclusive_scan",
            {
                "maps": made(lambda: [ring.StateMap(torch.ones(2, 3), decay=torch.zeros(2))]),
                "axis": MESH["mesh"],
            },
            nothing,
        ),
        ("sum_over_sequence", {"local": QKV["query"], **MESH}, check_same("local")),
        ("sequence_runs", {"layout": just(ring.Balanced(Mask.causal(), 8, 2))}, nothing),
        ("slices_of_block_mask", {"block_mask": made(block_mask)}, nothing),
        ("describe_schedule", PLANNED | {"layout": just("zigzag"), **STRATEGY}, nothing),
        ("compare_layouts", PLANNED, nothing),
        ("compare_strategies", PLANNED | COMPARED, nothing),
        ("simulate_attention", ATTENTION, nothing),
        ("choose_layout", LAID_OUT, nothing),
        ("simulate_step", SIMULATED, nothing),
        ("longest_sequences", LONGEST, nothing),
        ("Balanced", PLANNED | {"block": just(None, 2)}, nothing),
        ("BlockCyclic", {"block": just(2)}, nothing),
        ("WholeBlocks", {"block": just(2)}, nothing),
        ("DocumentRoom", MESH | {"seq_len": just(8), "max_documents": just(1, 4)}, nothing),
        (
            "BlockPool",
            {"num_blocks": just(4), "block": just(2, 64), "world_size": just(1, 2)},
            nothing,
        ),
        ("Mask", MASK, nothing),
        (
            "TransferPolicy",
            {
                "kv_dtype": just(None, torch.bfloat16, "int8"),
                "grad_dtype": just(torch.float32, torch.float16),
                "num_parts": just(None, 4),
            },
            nothing,
        ),
        ("next_token_labels", TOKENS, check_labels),
        ("merge_attention", {"parts": made(lambda: [(tensor(), tensor(1, 2, 8))] * 2)}, nothing),
        ("ContextParallel", AXIS | INPUTS, nothing),
    )
}
FUNCTIONS |= {
    "PagedCache": Function(lambda _, **given: ring.PagedCache(ring.BlockPool(4), **given), PAGED),
    "DocumentRoom.fill": Function(
        lambda mesh, **given: ring.DocumentRoom(mesh, 8, 4).fill(**given),
        {"cu_seqlens": made(lambda: ints(0, 3, 8), lambda: ints(0, 8))},
    ),
    "PagedBatch": Function(paged(None), {"num_tokens": just(1, 2)}),
    "PagedBatch.attend": Function(paged("attend"), QUERIES),
    "PagedBatch.decode": Function(
        paged("decode"),
        QUERIES | {"sinks": OPTIONS["sinks"], "mesh": [lambda _: None, lambda mesh: mesh]},
    ),
    "PagedBatch.write": Function(
        paged("write"), {"layer": just(0)} | dict.fromkeys(("key", "value"), QUERIES["query"])
    ),
}
FUNCTIONS |= {
    f"BlockPool.{name}": Function(on_pool(name), right)
    for name, right in (
        ("add", POOLED),
        ("append", POOLED),
        ("crop", {"length": just(0, 5)}),
        ("commit", {"length": just(None, 5)}),
        ("block_table", {"rank": just(0, 1)}),
        ("held_blocks", {"rank": just(0, 1)}),
        ("runs", {"begin": just(0, 3)}),
    )
}
CACHES = {"source": [given_cache], "target": [lambda mesh: ring.ShardedCache(mesh, 1)]}
CACHES |= MESH | {"heads": just(None)}
LIKE = {"like": [lambda _: (tensor(2, 2, 8, 4), tensor(2, 2, 8, 4))], "seq_len": just(None, 5)}
FUNCTIONS |= {
    "hand_over": Function(without_mesh(ring.hand_over), CACHES),
    "HandOver": Function(moving, CACHES | LIKE),
}
FUNCTIONS |= {
    f"ShardedCache.{name}": Function(on_cache(name, **turn), right)
    for name, turn, right in (
        ("begin", {}, {"num_tokens": just(1, 8), "dealt": just(False, True)}),
        (
            "append",
            {"num_tokens": 3, "dealt": False},
            {name: made(lambda: tensor(2, 2, 3, 4)) for name in ("key", "value")},
        ),
        ("crop", {}, {"seq_len": just(0, 5, 8)}),
        ("select", {}, {"rows": made(lambda: ints(1), lambda: ints(0, 1, 0))}),
        ("reorder", {}, {"rows": made(lambda: ints(1, 1))}),
        ("repeat", {}, {"times": just(1, 2)}),
        ("whole", {}, {"number": just(0)}),
        ("load_state_dict", {}, {"state": just({"seq_len": 0})}),
    )
}
FUNCTIONS |= {
    f"Slices.{name}": Function(without_mesh(getattr(ring.Slices, name)), right, check_slices)
    for name, right in BUILDERS.items()
}
FUNCTIONS |= {
    "Slices": Function(
        without_mesh(ring.Slices),
        {
            "query_ranges": just([(0, 3)], ints([0, 3])),
            "key_ranges": just([(0, 5)], ints([2, 5])),
            "bands": just([(None, 0)], [(3, -1)]),
        },
        check_slices,
    ),
    "Slices.shifted": Function(
        without_mesh(SLICES.shifted), {"by": just(0, 3), "key_by": just(None, 2)}, check_slices
    ),
    "Slices.sees": Function(
        without_mesh(SLICES.sees), {"query": just(0), "key": just(9), "row": just(0, 1)}
    ),
    "sequence_slices": Function(
        without_mesh(ring.sequence_slices), {"slices": just(SLICES), "num_slices": just(None, 5)}
    ),
    "merge_attention, one part": Function(
        lambda _, out, lse: ring.merge_attention([(out, lse)])[0],
        {"out": QKV["query"], "lse": made(lambda: tensor(1, 2, 8))},
        check_same("out"),
    ),
    "register_kernel": Function(
        registered, {"kernel": made(Mine), "before": just(None, "cpu_flash")}, nothing
    ),
    "ContextParallel, called": Function(parallel, QKV),
    "context_parallel_plan": Function(
        without_mesh(context_parallel_plan), {"model": made(model), **AXIS}
    ),
    "context_parallel_plan, called": Function(
        lambda mesh, **given: model(mesh)(**given),
        {
            **IDS,
            "labels": made(lambda: None),
            "attention_mask": made(lambda: None),
            "position_ids": made(lambda: None, lambda: torch.arange(8).unsqueeze(0)),
        },
    ),
}
