"""Arguments of the op: what is refused before anything is sent, and how batches are taken."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring import Mask, ZigZag, ring_attention
from dtensor_ring.ops.attention_record import slices_text
from dtensor_ring.ops.boundaries import documents_of, on_host, run_table, slices_of_table
from dtensor_ring.ops.options import LEAVES, Batch, Call, flatten
from dtensor_ring.ops.ring_op import ring_op
from dtensor_ring.planning.run_table import RunTable
from tests.meshes import BATCH, SEQUENCE, annotated_mesh, place, random_inputs
from tests.pool import on_ranks
from tests.rings import Case, Ring, local

WORLD_SIZE = 2
BASE = Case(Ring(ZigZag(), WORLD_SIZE, 8, Mask.causal()), torch.float32, heads=(4, 2))


class Arguments(NamedTuple):
    """Of the op: the shards of a sequence of 8 tokens, (2, 4, 4, 8) and (2, 2, 4, 8)."""

    query: Tensor
    key: Tensor
    value: Tensor
    call: Call


Change = Callable[[Arguments], Arguments]


def tensors(**changes: Callable[[Tensor], Tensor]) -> Change:
    """Change the tensors of these names."""

    def change(arguments: Arguments) -> Arguments:
        return arguments._replace(
            **{name: f(getattr(arguments, name)) for name, f in changes.items()}
        )

    return change


def options(**changes: Any) -> Change:
    """Change the fields of these names, of whichever value has them."""

    def change(arguments: Arguments) -> Arguments:
        return arguments._replace(call=changed(arguments.call, changes))

    return change


def changed(call: Call, changes: dict[str, Any]) -> Call:
    """Fields of batch, scores and place."""
    values, left = {}, dict(changes)
    for name, value in call._asdict().items():
        here = {*getattr(value, "_fields", ())} & left.keys()
        values[name] = (
            value._replace(**{field: left.pop(field) for field in here}) if here else value
        )
    assert not left, f"no option is called {list(left)}"
    return Call(**values)


def mask(**changes: Any) -> Change:
    """Change an argument of the mask as it travels, past the checks of `Mask`."""
    position = [leaf.name for leaf in LEAVES].index

    def change(arguments: Arguments) -> Any:
        flat = list(flatten(arguments.call))
        for name, value in changes.items():
            flat[position(name)] = value
        return (*arguments[:3], flat)

    return change


def bounds(*values: Any, dtype: torch.dtype = torch.int32) -> Change:
    return options(cu_seqlens=torch.tensor(values, dtype=dtype))


def key_bounds(*values: Any, dtype: torch.dtype = torch.int32) -> Change:
    """With one query document and the mask of cross attention."""
    key_cu_seqlens, documents = torch.tensor(values, dtype=dtype), torch.tensor([0, 8]).int()
    return options(mask=Mask.full(), cu_seqlens=documents, key_cu_seqlens=key_cu_seqlens)


def runs(*values: Any, dtype: torch.dtype = torch.int32, **changes: Any) -> Change:
    return options(layout="balanced", runs=torch.tensor(values, dtype=dtype), **changes)


def to(*args: Any) -> dict[str, Callable[[Tensor], Tensor]]:
    return dict.fromkeys(("query", "key", "value"), lambda x: x.to(*args))


BOUNDS = "cu_seqlens must start at 0, never decrease and end at or before the sequence length 8, "
REFUSALS: dict[str, Change] = {
    "must be (B, N, L, H), got query (2, 4, 4, 8), key (2, ": tensors(key=lambda x: x[0]),
    (
        "query, key and value must have one dtype, got query torch.float32, key torch.float32, "
        "value torch.bfloat16; use .to()"
    ): tensors(value=Tensor.bfloat16),
    "must have one device, got query cpu, key meta, value cpu; use .to()": tensors(
        key=lambda x: x.to("meta")
    ),
    "a floating dtype of 16 bits or more, got torch.int3": tensors(**to(torch.int32)),
    "of 16 bits or more, got torch.float8_e4m3fn": tensors(**to(torch.float8_e4m3fn)),
    "disagree in batch, heads or length: query (1, 4,": tensors(query=lambda x: x[:1]),
    "in batch, heads or length: query (2, 4, 4": tensors(value=lambda x: x[:, :1]),
    "in batch, heads or length: query (2,": tensors(value=lambda x: x[:, :, :3]),
    " of 2 holds 3 tokens, but its shard of seq_len 8 has 4": tensors(
        key=lambda x: x[:, :, :3], value=lambda x: x[:, :, :3]
    ),
    "query and key must have one head dim, got": tensors(query=lambda x: x[..., :6]),
    "query heads must be a multiple of the key heads, got query (2, 3, 4, 8), key (2": tensors(
        query=lambda x: x[:, :3]
    ),
    "key and value need heads, got query (2, 4, 4, 8), key (2, 0, 4, 8), value (2, 0": tensors(
        key=lambda x: x[:, :0], value=lambda x: x[:, :0]
    ),
    "query, key and value need heads, got query (2, 0, 4, 8), key (2, 0, 4, 8)": tensors(
        **dict.fromkeys(("query", "key", "value"), lambda x: x[:, :0])
    ),
    "sinks must hold one logit per query head, shape (4,), got (2,); where heads are": options(
        sinks=torch.zeros(2)
    ),
    "shape (4,), got (1, 4)": options(sinks=torch.zeros(1, 4)),
    " of 2 holds 4 tokens, but its shard of seq_len 12 has 6": options(seq_len=12, key_seq_len=12),
    "unknown layout 'ring'; known layouts: contiguous, striped": options(layout="ring"),
    "a layout is a Layout or its name, got NoneType": options(layout=None),
    "got 7; pad it to 8 tokens or use zigzag or": options(
        layout="striped", seq_len=7, key_seq_len=7
    ),
    "Mask left counts tokens and is at least 0, got -1; None means": mask(left=-1),
    "a mask has chunks or a prefix, not both": mask(chunk=4, prefix=2),
    (
        "8 query and 6 key tokens, or documents of their own, are cross attention, which has no "
        "diagonal: it takes Mask.full() only, got Mask(left=None, right=0"
    ): options(key_seq_len=6),
    " of 2 holds 4 tokens, but its shard of seq_len 6 has 3": options(
        key_seq_len=6, mask=Mask.full()
    ),
    "unknown kernel 'fast'; known kernels: flash_attn3, flash": options(kernel="fast"),
    "kernel 'cpu_flash' cannot serve this attention (cpu_flash: it has no softcap)": options(
        kernel="cpu_flash", softcap=1.0
    ),
    "cu_seqlens must be int32 or int64, got torch.float64; use .int()": bounds(
        0, 8, dtype=torch.float64
    ),
    BOUNDS + "got [1, 8]": bounds(1, 8),
    BOUNDS + "got [0, 5, 4]": bounds(0, 5, 4),
    BOUNDS + "got [0, 5, 9]": bounds(0, 5, 9),
    BOUNDS + "got [0, 7, 6]": bounds([0, 5, 8], [0, 7, 6]),
    BOUNDS + "got []": bounds(),
    "cu_seqlens must have shape (D+1,) or (2, D+1), got (3, 2)": bounds([0, 8], [0, 8], [0, 8]),
    "or (2, D+1), got ()": options(cu_seqlens=torch.tensor(0).int()),
    "key_cu_seqlens must be int32 or int64, got torch.bool; use .int()": key_bounds(
        0, 8, dtype=torch.bool
    ),
    "key_" + BOUNDS + "got [0, 9]": key_bounds(0, 9),
    "key_cu_seqlens must have shape (D+1,) or (2, D+1), got (3, 2)": key_bounds(
        [0, 8], [0, 8], [0, 8]
    ),
    "as many boundaries in cu_seqlens as in key_cu_seqlens, got 2 and 3": key_bounds(0, 5, 8),
    "the balanced layout belongs to one bat": options(layout="balanced"),
    "runs must be int32 or int64, got torch.int16; use .int()": runs(
        [[0, 4]], [[4, 4]], dtype=torch.int16
    ),
    "of each rank, shape (W, R, 2), got (2, 2); see": runs([0, 4], [4, 4]),
    "shape (W, R, 2), got (2, 1, 3); see": runs([[0, 4, 2]], [[1, 4, 2]]),
    "hold each position once, not so position 4": runs([[0, 4]], [[5, 4]]),
    "each position once, not so position 3": runs([[0, 4]], [[3, 4]]),
    "runs must hold each position once, not so position 0": runs([[1, 4]], [[5, 3]]),
    "holds 4 tokens, but its shard of runs has ": runs([[0, 3]], [[3, 5]]),
    "these runs shard 6 tokens over 2 ranks, not 8 tokens over 2": runs([[0, 3]], [[3, 3]]),
    "these runs shard 8 tokens over 3 ranks, not 8 tokens over 2; make a layout": runs(
        [[0, 3]], [[3, 3]], [[6, 2]]
    ),
    "these runs shard 8 tokens over 2 ranks, not 6 tokens over 2": runs(
        [[0, 4]], [[4, 4]], key_seq_len=6, mask=Mask.full()
    ),
}


@on_ranks(WORLD_SIZE)
def test_every_rank_refuses_and_the_ring_still_works() -> None:
    right = Arguments(*BASE.shards(dist.get_rank()), BASE.call())
    wrong = {}
    for expected, change in REFUSALS.items():
        *shards, rest = change(Arguments(*(x.detach() for x in right[:3]), right.call))
        said = "nothing was raised"
        try:
            ring_op(*shards, *(flatten(rest) if isinstance(rest, Call) else rest))
        except (TypeError, ValueError) as error:
            said = str(error)
        if expected not in said:
            wrong[expected] = said
    assert not wrong
    out, _ = ring_op(*right[:3], *flatten(right.call))
    expected = local(BASE.expected()[0], BASE.ring.positions(dist.get_rank()))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("cu_seqlens", "batch", "documents"),
    [
        (torch.tensor([0, 3, 8]), 2, ((0, 3, 8),)),
        (torch.tensor([[0, 3, 8], [0, 8, 8]]), 2, ((0, 3, 8), (0, 8))),
        (torch.tensor([[0, 8, 8], [0, 0, 8]]), 2, ((0, 8),)),
        (torch.zeros(0, 3), 0, ()),
    ],
    ids=["for all rows", "by row", "alike but for empty ones", "empty batch"],
)
def test_documents_of(cu_seqlens: Tensor, batch: int, documents: Any) -> None:
    assert documents_of(cu_seqlens.int(), "cu_seqlens", batch).rows == documents


def test_numbered_documents_may_be_empty() -> None:
    cu_seqlens = torch.tensor([[0, 3, 3, 8]], dtype=torch.int32)
    assert documents_of(cu_seqlens, "cu_seqlens", 1, is_numbered=True).rows == ((0, 3, 3, 8),)


def test_run_table_leaves_out_what_fills_up() -> None:
    table = run_table(torch.tensor([[[0, 2], [6, 2]], [[2, 4], [0, 0]]]).int())
    assert table == RunTable((((0, 2), (6, 2)), ((2, 4),)))


# Tensors that describe a batch are taken as people have them, and each is converted once.

READ: dict[str, tuple[Callable[[Tensor], Any], list[Any]]] = {
    "cu_seqlens": (lambda x: documents_of(x, "cu_seqlens", 2), [[0, 3, 8], [0, 8, 8]]),
    "key_cu_seqlens": (lambda x: documents_of(x, "key_cu_seqlens", 2, True), [0, 3, 3, 8]),
    "key_runs": (partial(run_table, name="key_runs"), [[[0, 2], [6, 1]], [[2, 4], [7, 9]]]),
    "runs": (run_table, [[[0, 2], [6, 2]], [[2, 4], [0, 0]]]),
    "slices": (lambda x: slices_of_table(x, 2), [[0, 3, 0, 3, 2**31 - 1, 0], [3, 8, 3, 8, 4, -1]]),
}


class OnGpu(Tensor):
    """A stand-in for a tensor on a GPU: it can only be copied."""

    is_cpu = False
    __torch_function__ = torch._C._disabled_torch_function_impl

    def cpu(self) -> Tensor:
        return self.as_subclass(Tensor).clone()

    def numpy(self) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def on_gpu(numbers: Any, dtype: torch.dtype = torch.int64) -> OnGpu:
    return torch.tensor(numbers, dtype=dtype).as_subclass(OnGpu)


every_tensor = pytest.mark.parametrize("name", READ)


@every_tensor
def test_integers_of_both_sizes_are_the_same(name: str) -> None:
    read, numbers = READ[name]
    narrow = torch.tensor(numbers, dtype=torch.int32)
    expected = read(narrow)
    every_second = torch.stack([narrow.long(), narrow.long() + 1], -1)[..., 0]
    for x in (narrow.long(), every_second, on_gpu(numbers), on_gpu(numbers, torch.int32)):
        found = read(x)
        assert found == expected
        assert read(x) is found, "known by now"


def test_a_change_on_the_gpu_is_seen() -> None:
    """Also one that leaves no trace, as that of a collective."""
    x = on_gpu([0, 3, 8])
    assert documents_of(x, "x", 1).rows == ((0, 3, 8),)
    x.data[1] = 5
    assert documents_of(x, "x", 1).rows == ((0, 5, 8),)


@pytest.mark.gpu
@every_tensor
def test_on_a_gpu(name: str) -> None:
    read, numbers = READ[name]
    expected = read(torch.tensor(numbers))
    for dtype in (torch.int32, torch.int64):
        x = torch.tensor(numbers, dtype=dtype, device="cuda")
        assert read(x) == expected


@pytest.mark.gpu
def test_a_cuda_graph_is_for_boundaries_on_the_cpu() -> None:
    x = torch.tensor([0, 3, 8], device="cuda")
    on_host(x)
    with pytest.raises(RuntimeError, match="pass them on the CPU"):
        _capture(x)


def _capture(x: Tensor) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.clone()  # torch warns of a graph without ops
        on_host(x)


@every_tensor
def test_other_dtypes_are_refused(name: str) -> None:
    for dtype in (torch.float32, torch.bool, torch.uint8, torch.int16):
        message = f"{name} must be int32 or int64, got {dtype}; use .int()"
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            READ[name][0](torch.zeros(2, dtype=dtype))


@every_tensor
def test_tensors_without_content_are_refused(name: str) -> None:
    message = f"{name} must have content, with which the ring is planned, got a tensor on meta; "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}make it on the CPU$"):
        READ[name][0](torch.zeros(2, dtype=torch.int64, device="meta"))


def test_large_numbers_do_not_become_small_ones() -> None:
    documents = documents_of(torch.tensor([0, 2**32 + 8]), "cu_seqlens", 1)
    documents.check(2**33)
    with pytest.raises(ValueError, match=r"before the sequence length 8, got .0, 4294967304."):
        documents.check(8)


@on_ranks(4)
def test_results_are_those_of_int32_on_the_cpu() -> None:
    """Of the boundaries of all rows, of which a rank takes its own; forward and backward."""
    mesh = annotated_mesh((2, 2), (BATCH, SEQUENCE), "zigzag")
    *whole, grad_out = (place(x, mesh, (BATCH, SEQUENCE)) for x in random_inputs(kv_heads=4))
    narrow = torch.tensor([[0, 5, 16], [0, 9, 12]], dtype=torch.int32)
    results = []
    for cu_seqlens in (narrow, narrow.long(), on_gpu(narrow.tolist())):
        inputs = query, key, value = [x.detach().requires_grad_() for x in whole]
        query = ring_attention(query, key, value, cu_seqlens=cu_seqlens)
        grads = torch.autograd.grad(query, inputs, grad_out)
        results.append([x.to_local() for x in (query, *grads)])
    assert all(all(map(torch.equal, result, results[0])) for result in results)


@on_ranks(1)
def test_fake_kernels_do_not_read() -> None:
    """As a compiler calls them: tensors of a GPU have no content."""
    case = Case(Ring(ZigZag(), 1, 8, Mask.causal()), torch.float32)
    with FakeTensorMode():
        query = torch.empty(2, 4, 8, 8, device="cuda")
        for device in ("cuda", "cpu"):
            cu_seqlens = torch.empty(3, dtype=torch.int64, device=device)
            call = case.call()._replace(batch=Batch(cu_seqlens))
            out, _ = ring_op(query, query, query, *flatten(call))
            assert (out.shape, out.device) == (query.shape, query.device)


def test_the_record_of_an_empty_batch() -> None:
    """A rank without rows tells the others of its ring what it does, too."""
    assert slices_text(slices_of_table(torch.zeros(0, 3, 6, dtype=torch.int32), 0)) == ""


def test_rows_that_are_alike_are_one() -> None:
    rows = torch.tensor([[[0, 3, 0, 3, 9, 0]]] * 2)
    assert len(slices_of_table(rows, 2)) == 1
    rows[1, 0, 1] = 2
    assert len(slices_of_table(rows, 2)) == 2
