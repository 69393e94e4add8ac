"""Ring attention on DTensors and on local shards of meshes, against the dense result."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Shard

from dtensor_ring import (
    Balanced,
    Mask,
    SequenceAxis,
    TransferPolicy,
    ZigZag,
    ring_attention,
    sequence_runs,
    shard_sequence,
)
from dtensor_ring.compute.memory import in_order, order_of, strides
from dtensor_ring.dtensor.annotation import annotation_of
from dtensor_ring.planning.run_table import as_layout
from tests.dense import dense_attention
from tests.meshes import (
    BATCH,
    HEADS,
    REPLICATE,
    SEQUENCE,
    annotated_mesh,
    assert_same,
    eager_and_compiled,
    place,
    random_inputs,
)
from tests.pool import Pool, on_ranks

CAUSAL, FULL = Mask.causal(), Mask.full()


@dataclass(frozen=True)
class Case:
    """The mesh by sizes and placements, the shapes, and what is asked of ring_attention."""

    sizes: tuple[int, ...]
    placements: tuple[Placement, ...]
    layout: str = "zigzag"
    seq_len: int = 16
    key_seq_len: int | None = None
    batch: int = 2
    heads: tuple[int, int] = (4, 2)
    value_head_dim: int = 8
    mask: Mask = CAUSAL
    cu_seqlens: list[Any] | None = None
    key_cu_seqlens: list[Any] | None = None
    sinks: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    grad_lse: bool = False

    @property
    def world_size(self) -> int:
        return math.prod(self.sizes)

    def balanced(self) -> Balanced | None:
        """Where the layout belongs to a batch, that of this one."""
        if self.layout != Balanced.name:
            return None
        ring_size = self.sizes[self.placements.index(SEQUENCE)]
        return Balanced(self.mask, self.seq_len, ring_size, self.cu_seqlens, block=2)

    def boundaries(self) -> dict[str, Tensor | None]:
        given = {"cu_seqlens": self.cu_seqlens, "key_cu_seqlens": self.key_cu_seqlens}
        return {k: None if rows is None else torch.tensor(rows).int() for k, rows in given.items()}


DP_CP = (2, 2), (BATCH, SEQUENCE)
CP_TP = (2, 2), (SEQUENCE, HEADS)
CP = (4,), (SEQUENCE,)
ROWS = [[0, 2, 16, 16], [0, 9, 11, 16], [0, 4, 6, 13]]

CASES = {
    "cp": Case(*CP, layout="striped", grad_lse=True),
    "cp of three": Case((3,), (SEQUENCE,), seq_len=12),
    "cp of one": Case((1,), (SEQUENCE,)),
    "replicate, cp": Case((2, 2), (REPLICATE, SEQUENCE), layout="contiguous"),
    "dp, cp, tp of one": Case((2, 2, 1), (BATCH, SEQUENCE, HEADS)),
    "dp of one, cp, tp": Case((1, 2, 2), (BATCH, SEQUENCE, HEADS), grad_lse=True),
    "uneven contiguous": Case(*CP, layout="contiguous", seq_len=13, grad_lse=True),
    "uneven zigzag": Case(*CP, seq_len=13, mask=Mask.sliding(4)),
    "uneven dp, cp": Case(*DP_CP, batch=3, seq_len=15),
    "empty sequence shard": Case(*CP, seq_len=5, sinks="tensor", grad_lse=True),
    "empty batch shard": Case(*DP_CP, batch=1, cu_seqlens=[[0, 7, 12]], sinks="dtensor"),
    "empty batch shard, cross": Case(
        *DP_CP, batch=1, mask=FULL, cu_seqlens=[[0, 7, 12]], key_cu_seqlens=[[0, 9, 16]]
    ),
    "balanced on four": Case(*CP, "balanced", 32, cu_seqlens=[0, 18, 26, 32], grad_lse=True),
    "cross on four, empty shard": Case(*CP, seq_len=13, key_seq_len=5, mask=FULL),
    "documents by row, replicated": Case(
        (2, 2), (SEQUENCE, REPLICATE), cu_seqlens=[[0, 2, 16], [0, 9, 16]]
    ),
    "sinks, replicated": Case((2, 2), (REPLICATE, SEQUENCE), sinks="tensor"),
    "DTensor sinks, replicated": Case((2, 2), (REPLICATE, SEQUENCE), sinks="dtensor"),
}

# What each mesh of two axes takes; masks beside these are those of tests/ops/test_op.py.
EVERYWHERE: dict[str, dict[str, Any]] = {
    "multi-query": {"heads": (6, 2), "mask": Mask.local(3, 2)},
    "documents and a tail": {"cu_seqlens": [0, 5, 11], "grad_lse": True},
    "documents by row": {"batch": 3, "cu_seqlens": ROWS, "grad_lse": True},
    "sinks": {"sinks": "tensor", "grad_lse": True},
    "DTensor sinks": {"sinks": "dtensor", "cu_seqlens": [0, 6, 14], "grad_lse": True},
    "value head dim": {"value_head_dim": 4, "mask": Mask.chunked(6)},
    "cross": {"key_seq_len": 6, "mask": FULL, "grad_lse": True},
    "cross, documents": {
        "key_seq_len": 23, "mask": FULL, "sinks": "dtensor",
        "cu_seqlens": [0, 3, 9, 15], "key_cu_seqlens": [0, 8, 8, 21],
    },
    "cross, documents by row": {
        "batch": 3, "mask": FULL, "cu_seqlens": ROWS, "grad_lse": True,
        "key_cu_seqlens": [[0, 8, 12, 16], [0, 0, 14, 16], [0, 1, 2, 3]],
    },
    "balanced": {"layout": "balanced", "cu_seqlens": [0, 12, 16], "grad_lse": True},
    "balanced, every option": {
        "layout": "balanced", "batch": 3, "mask": Mask(6, 1, prefix=5), "cu_seqlens": ROWS,
        "sinks": "dtensor", "value_head_dim": 4, "options": {"softcap": 2.0, "scale": 0.4},
        "grad_lse": True,
    },
    "uneven zigzag, prefix": {"seq_len": 13, "mask": Mask.prefix_causal(5), "grad_lse": True},
}  # fmt: skip
OF_HEADS = "multi-query", "sinks", "DTensor sinks", "value head dim", "cross, documents"
OF_BOTH = "documents by row", "balanced, every option"
"""What is of heads matters where heads are sharded, all else where batches are."""
CASES |= {f"dp, cp: {x}": Case(*DP_CP, **EVERYWHERE[x]) for x in EVERYWHERE if x not in OF_HEADS}
CASES |= {f"cp, tp: {x}": Case(*CP_TP, **EVERYWHERE[x]) for x in OF_HEADS + OF_BOTH}


@pytest.mark.parametrize("name", CASES)
def test_dense_result(pool: Pool, name: str) -> None:
    pool.run(CASES[name].world_size, _check_case, CASES[name])


@pytest.mark.parametrize(
    "name",
    [
        "cp, tp: DTensor sinks",
        "dp, cp: balanced, every option",  # a window, too
        "dp, cp: uneven zigzag, prefix",
    ],
)
def test_compiled(pool: Pool, name: str) -> None:
    pool.run(CASES[name].world_size, _check_case, CASES[name], True)


def _check_case(case: Case, compiled: bool = False) -> None:
    balanced = case.balanced()
    mesh = annotated_mesh(case.sizes, case.placements, balanced or case.layout)
    query, key, value, grad_out = random_inputs(
        case.batch, case.seq_len, *case.heads, case.value_head_dim, case.key_seq_len
    )
    sinks = torch.randn(case.heads[0]) if case.sinks else None
    grads = [grad_out, torch.randn(grad_out.shape[:3])][: 1 + case.grad_lse]
    options = {"mask": case.mask, **case.boundaries(), **case.options}
    dense = dense_attention(query, key, value, sinks=sinks, **options)
    expected = [dense.out, dense.lse, *dense.backward(*grads)]
    options["runs"] = None if balanced is None else sequence_runs(balanced)

    def run(query: Any, key: Any, value: Any, sinks: Any = None) -> tuple[Any, ...]:
        out, lse = ring_attention(query, key, value, sinks=sinks, return_lse=True, **options)
        # A compiled backward wants a gradient for every output that could have one.
        return out, lse if case.grad_lse else lse.detach()

    attention = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    inputs = [place(x, mesh, case.placements).requires_grad_() for x in (query, key, value)]
    inputs += [] if sinks is None else [place_sinks(sinks, mesh, case).requires_grad_()]
    outputs = attention(*inputs)
    placed_grads = [place(x, mesh, case.placements) for x in grads]
    results = [*outputs, *torch.autograd.grad(outputs[: len(grads)], inputs, placed_grads)]
    if sinks is not None:
        results.append(summed_over_ranks(results.pop(), mesh, case))
    for actual, dense_result in zip(results, expected, strict=True):
        assert_same(actual, dense_result, case.placements)


def place_sinks(sinks: Tensor, mesh: DeviceMesh, case: Case) -> Any:
    """This rank's heads, as a DTensor where the case says so."""
    placements = [Shard(0) if where == HEADS else REPLICATE for where in case.placements]
    placed = place(sinks, mesh, placements)
    return placed if case.sinks == "dtensor" else placed.to_local()


def summed_over_ranks(grad_sinks: Any, mesh: DeviceMesh, case: Case) -> Tensor:
    """The gradient of the sinks, of which each rank has the share of its own tokens."""
    share = {HEADS: Shard(0), REPLICATE: REPLICATE}
    placements = tuple(share.get(where, Partial()) for where in case.placements)
    if case.sinks == "tensor":
        return DTensor.from_local(grad_sinks, mesh, placements, run_check=False).full_tensor()
    assert grad_sinks.placements == placements
    return grad_sinks.full_tensor()


ORDERS = {"heads first": (0, 1, 2, 3), "token-major": (0, 2, 1, 3)}


@pytest.mark.parametrize(
    ("order", "backend"), [*product(ORDERS, [""]), ("token-major", "inductor")]
)
@on_ranks(4)
def test_memory_order_of_the_query_is_kept(order: str, backend: str) -> None:
    """Both a DTensor and its local tensor say how the dimensions lie in memory."""
    memory_order = ORDERS[order]
    mesh = annotated_mesh(*DP_CP, "zigzag")
    query, key, value, grad_out = (
        place(in_order(x, memory_order, x.dtype), mesh, DP_CP[1]) for x in random_inputs(4, 13)
    )
    inputs = [x.requires_grad_() for x in (query, key, value)]
    attention = partial(ring_attention, mask=CAUSAL)
    if backend:
        attention = torch.compile(attention, fullgraph=True, backend=backend)
    out = attention(*inputs)
    grads = torch.autograd.grad(out, inputs, grad_out)
    assert out.stride() == query.stride() == strides((4, 4, 13, 8), memory_order)
    assert out.to_local().stride() == query.to_local().stride()
    for x in (out, *grads):
        assert order_of(x) == order_of(x.to_local())


@dataclass(frozen=True)
class Refusal:
    """Placements of query, key and value, and what the error says."""

    message: str
    query: tuple[Placement, ...]
    key: tuple[Placement, ...] | None = None
    value: tuple[Placement, ...] | None = None
    error: type[Exception] = ValueError
    heads: tuple[int, int] = (4, 2)
    sinks: tuple[Placement, ...] | None = None
    cu_seqlens: Any = None
    key_mesh: tuple[int, int] = (2, 2)


REFUSALS = {
    "key on another mesh": Refusal("alike on one mesh, got", (BATCH, SEQUENCE), key_mesh=(4, 1)),
    "no sequence": Refusal("on exactly one mesh axis, it is on no axis", (BATCH, REPLICATE)),
    "two sequence axes": Refusal("exactly one mesh axis, it is on 2 axes", (SEQUENCE, SEQUENCE)),
    "sharded head dim": Refusal(r"got (S|Shard)\((dim=)?3\) on mesh axis 1", (SEQUENCE, Shard(3))),
    "partial": Refusal(r"got P(artial)?\(sum\) on mesh axis 0", (Partial(), SEQUENCE)),
    "key replicated": Refusal("sharded alike", (REPLICATE, SEQUENCE), key=(REPLICATE, REPLICATE)),
    "value on the other axis": Refusal(
        "sharded alike", (REPLICATE, SEQUENCE), value=(SEQUENCE, REPLICATE)
    ),
    "key a tensor": Refusal("or none, got .* key Tensor", (BATCH, SEQUENCE), (), error=TypeError),
    "query heads": Refusal("2 ways only if that divides", (SEQUENCE, HEADS), heads=(3, 1)),
    "key heads": Refusal("'key': 1, 'value': 1}", (SEQUENCE, HEADS), heads=(4, 1)),
    "sinks of all heads": Refusal(
        "sinks must be .*as the query's heads are", (SEQUENCE, HEADS), sinks=(REPLICATE, REPLICATE)
    ),
    "sinks over the batch": Refusal(
        "sinks must be", (BATCH, SEQUENCE), sinks=(Shard(0), REPLICATE)
    ),
    "rows of cu_seqlens": Refusal(
        r"of the whole batch, shape \(D\+1,\) or \(2, D\+1\), got \(3, 2\)",
        (BATCH, SEQUENCE),
        cu_seqlens=[[0, 16]] * 3,
    ),
}


@on_ranks(4)
def test_refusals() -> None:
    mesh = annotated_mesh((2, 2), (SEQUENCE, REPLICATE), "zigzag")
    for case in REFUSALS.values():
        _check_refusal(mesh, case)


def _check_refusal(mesh: DeviceMesh, case: Refusal) -> None:
    query, key, value, _ = random_inputs(2, 16, *case.heads)
    other_mesh = init_device_mesh("cpu", case.key_mesh, mesh_dim_names=mesh.mesh_dim_names)
    placed: list[Any] = [place(query, mesh, case.query)]
    for x, placements, where in ((key, case.key, other_mesh), (value, case.value, mesh)):
        here = case.query if placements is None else placements
        placed.append(place(x, where, here) if here else x)
    sinks = None if case.sinks is None else place(torch.zeros(4), mesh, case.sinks)
    cu_seqlens = None if case.cu_seqlens is None else torch.tensor(case.cu_seqlens).int()
    with pytest.raises(case.error, match=case.message):
        ring_attention(*placed, sinks=sinks, cu_seqlens=cu_seqlens)


# Ring attention on local shards and a mesh.

SEQ_LEN = 12

LOCAL_CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "every option": {
        "mask": Mask.local(4, 1),
        "cu_seqlens": torch.tensor([[0, 5, 11], [0, 7, 12]], dtype=torch.int32),
        "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0]),
        "scale": 0.4,
        "softcap": 3.0,
        "kernel": "reference",
        "policy": TransferPolicy(grad_dtype=torch.float64),
    },
}
HOW = ("kernel",)
"""Options that change no result."""


@pytest.mark.parametrize(
    ("world_size", "name", "layout"),
    [
        (1, "every option", "zigzag"),
        (3, "defaults", None),
        (3, "defaults", "zigzag"),
        (3, "every option", "contiguous"),
        (3, "every option", "striped"),
    ],
)
@on_ranks()
def test_local_shards_equal_the_dense_result(name: str, layout: str | None) -> None:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    options = dict(LOCAL_CASES[name])
    policy = options.pop("policy", None)
    if layout:
        SequenceAxis(mesh, layout, policy=policy)
    mine = as_layout(layout or "contiguous").positions(dist.get_rank(), world_size, SEQ_LEN)
    *inputs, grad_out = random_inputs(seq_len=SEQ_LEN)
    grad_lse = torch.randn(grad_out.shape[:3])
    scoring = {key: value for key, value in options.items() if key not in HOW}
    dense = dense_attention(*inputs, **{"mask": Mask.causal(), **scoring})
    expected = dense.out, dense.lse, *dense.backward(grad_out, grad_lse)[:3]

    def run(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return ring_attention(query, key, value, mesh=mesh, return_lse=True, **options)

    for attention in eager_and_compiled(run):
        local = [x[:, :, mine].clone().requires_grad_() for x in inputs]
        outputs = attention(*local)
        grads = grad_out[:, :, mine], grad_lse[:, :, mine]
        results = *outputs, *torch.autograd.grad(outputs, local, grads)
        for actual, whole in zip(results, expected, strict=True):
            assert actual.dtype == torch.float32
            torch.testing.assert_close(actual.double(), whole[:, :, mine], atol=1e-5, rtol=1e-5)
    assert torch.equal(ring_attention(*local, mesh=mesh, **options), outputs[0])


@on_ranks(1)
def test_float64_takes_larger_numbers() -> None:
    mesh = init_device_mesh("cpu", (1,))
    query, key, value = (x.double() for x in random_inputs()[:3])
    out = ring_attention(query * 1e-300, key, value, mesh=mesh, scale=1e300, softcap=1e200)
    expected = dense_attention(query, key, value, Mask.causal(), scale=1.0).out
    torch.testing.assert_close(out, expected)


@on_ranks(1)
def test_a_scale_that_float32_rounds_to_0() -> None:
    inputs = random_inputs()[:3]
    out = ring_attention(*inputs, mesh=init_device_mesh("cpu", (1,)), scale=1e-300)
    expected = dense_attention(*inputs, Mask.causal(), scale=0.0).out
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


# What the public function refuses, before the op does: see tests/ops/test_check.py.

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
def test_refused_arguments() -> None:
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
