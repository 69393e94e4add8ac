"""Tensors that describe a batch are taken as people have them, and each is converted once."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring import Mask, ZigZag, ring_attention
from dtensor_ring.ops.attention_record import slices_text
from dtensor_ring.ops.boundaries import documents_of, on_host, run_table, slices_of_table
from dtensor_ring.ops.options import Batch, flatten
from dtensor_ring.ops.ring_op import ring_op
from tests.meshes import BATCH, SEQUENCE, annotated_mesh, place, random_inputs
from tests.pool import on_ranks
from tests.rings import Case, Ring

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
