"""Machine code of the launches that rings make: registers, width of accesses, variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring import Mask, ZigZag
from dtensor_ring.compute.kernels import Saved, Scores
from dtensor_ring.compute.memory import (
    HEAD_MAJOR,
    TOKEN_MAJOR,
    WHOLE,
    Accumulation,
    Order,
    Partial,
    Region,
    empty,
    region,
)
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.transport.transport import TransferPolicy
from tests.machine_code import ARCHITECTURES, Compiling, MachineCode, compiling, launch
from tests.rings import Ring
from tests.test_code import SOURCES
from tests.test_public import ROOT
from tests.traffic import HEADS, KV_HEADS, Fresh, Silent, Traffic, merging_by

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
RING = Ring(ZigZag(), 8, 8 * 1024, Mask.causal())
MOST_REGISTERS = 256
"""Of a thread, so that two programs fit a multiprocessor: one loads while the other stores."""

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="builds for CPUs make no fake CUDA tensors"
)


@dataclass(frozen=True)
class Model:
    """An attention whose launches are compiled. `head_dims` are those of keys and of values."""

    head_dims: tuple[int, int]
    dtype: torch.dtype = BF16
    order: Order = TOKEN_MAJOR
    has_sinks: bool = False

    def tensor(self, num_heads: int, head_dim: int) -> Tensor:
        rows = RING.seq_len // RING.world_size
        like = torch.empty(0, dtype=self.dtype)
        return empty(like, (1, num_heads, rows, head_dim), self.order)


MODELS = {
    "128": Model((128, 128)),
    "72": Model((72, 72)),
    "192 and 128": Model((192, 128)),
    "64 with sinks": Model((64, 64), has_sinks=True),
    "256": Model((256, 256)),
    "576 and 512": Model((576, 512)),
    "120 head-major": Model((120, 120), order=HEAD_MAJOR),
    "float16": Model((128, 128), F16),
    "float32": Model((128, 128), F32),
    "float64": Model((128, 128), F64),
}
# Each architecture, and each head dim with a way to go wrong, at least once in every run.
ALWAYS = [("sm_80", "128"), ("sm_90", "72"), ("sm_100", "192 and 128"), ("gfx942", "64 with sinks")]
REPEATED = [(x, name) for x in ARCHITECTURES for name in MODELS]


@cache
def launches(model: Model) -> list[tuple[Accumulation, ...]]:
    """Return the merges of a ring's last rank, forward and backward, on tensors without memory."""
    found: list[tuple[Accumulation, ...]] = []
    plan, kernel = RING.plans()[-1], Fresh(Traffic())
    query_dim, value_dim = model.head_dims
    with FakeTensorMode(), torch.device("cuda"), merging_by(lambda *sums: found.append(sums)):
        query, key = (model.tensor(num, query_dim) for num in (HEADS, KV_HEADS))
        grad_out, value = (model.tensor(num, value_dim) for num in (HEADS, KV_HEADS))
        scores = Scores(RING.mask, 1.0, sinks=torch.empty(HEADS) if model.has_sinks else None)
        for num_parts in (None, 8):
            rest = (key, value), plan, kernel, scores, Silent(), TransferPolicy(num_parts=num_parts)
            out, lse = ring_forward(query, *rest)
            ring_backward(Saved(grad_out, out, lse), query, *rest)
    return [tuple(without_memory(one) for one in sums) for sums in found]


def without_memory(one: Accumulation) -> Accumulation:
    """Return the sum on meta tensors. They have addresses, whose alignment the compiler learns."""
    partials = [replace(x, x=on_meta(x.x), lse=_on_meta(x.lse)) for x in one.partials]
    target, lse, sinks = on_meta(one.target), _on_meta(one.lse), _on_meta(one.sinks)
    return replace(one, target=target, partials=partials, lse=lse, sinks=sinks)


def on_meta(x: Tensor) -> Tensor:
    memory = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device="meta")
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _on_meta(x: Tensor | None) -> Tensor | None:
    return None if x is None else on_meta(x)


def kind(sums: Sequence[Accumulation]) -> str:
    return "two sums" if len(sums) == 2 else "sum" if sums[0].lse is None else "mean"


def largest(found: Sequence[tuple[Accumulation, ...]]) -> list[tuple[Accumulation, ...]]:
    """Return the launch of each kind with the most partials, which needs the most registers."""
    by_size = sorted(found, key=lambda sums: sum(len(one.partials) for one in sums))
    return list({kind(sums): sums for sums in by_size}.values())


def check(sums: Sequence[Accumulation], found: Compiling) -> None:
    code = MachineCode.of(found.last)
    what = kind(sums), [len(one.partials) for one in sums], str(code)
    assert code.spilled == 0, what
    assert code.num_registers <= MOST_REGISTERS, what
    rows, dims = found.block
    # What loads and stores move in 16 bytes, is all of a sum; code of two like sums is shared.
    bytes_loaded, bytes_stored = (
        rows * dims * max(sum(x.itemsize for x in tensors) for tensors in by_sum)
        for by_sum in (
            [[partial.x for partial in one.partials] for one in sums],
            [[one.target] for one in sums],
        )
    )
    for name, num_bytes in (("load", bytes_loaded), ("store", bytes_stored)):
        widths = code.widths(name)
        assert 16 * widths.count(16) * code.num_threads >= num_bytes, what
        # The others are those of an lse.
        narrow = {width for width in widths if width != 16}
        assert narrow <= {one.lse.itemsize for one in sums if one.lse is not None}, what
    # All warps load each lse, and one of them overwrites it.
    assert code.has_barrier(), what


@needs_triton
@needs_cuda_build
@pytest.mark.parametrize(("architecture", "name"), ALWAYS)
def test_machine_code_of_the_largest_launches(architecture: str, name: str) -> None:
    found = largest(launches(MODELS[name]))
    assert sorted(map(kind, found)) == ["mean", "sum", "two sums"]
    with compiling(architecture) as compiled:
        for sums in found:
            launch(*sums)
            check(sums, compiled)


@needs_triton
@needs_cuda_build
@pytest.mark.repeats
@pytest.mark.parametrize(("architecture", "name"), REPEATED)
def test_machine_code_of_all_launches(architecture: str, name: str) -> None:
    with compiling(architecture) as compiled:
        for sums in launches(MODELS[name]):
            launch(*sums)
            check(sums, compiled)


def test_no_other_kernel() -> None:
    """The kernels of a file that is not compiled here would pass unseen."""
    found = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES.values()
        if "triton.jit" in path.read_text()
    }
    assert found == {
        "dtensor_ring/compute/merge_triton.py",
        "dtensor_ring/paged/paged_triton.py",
        "dtensor_ring/quantised/quantise_triton.py",
    }


LENGTHS = ((4096, 2048), (4097, 1), (16, 3), (33, 17), (1, 0))
"""Rows, and the first of a later region: those of a batch of documents differ from any other's."""


def of_regions(*regions: Region, rows: int, is_mean: bool) -> list[Accumulation]:
    """Return a mean, or two sums, of partials of these regions, in memory as kernels return it."""

    def tensor(num_rows: int) -> Tensor:
        return torch.empty(1, num_rows, 2, 128, dtype=BF16, device="meta").transpose(1, 2)

    def lse(num_rows: int) -> Tensor | None:
        return torch.empty(1, 2, num_rows, device="meta") if is_mean else None

    lengths = [len(range(*where[2].indices(rows))) for where in regions]
    partials = [
        Partial(where, tensor(length), lse(length))
        for where, length in zip(regions, lengths, strict=True)
    ]
    return [Accumulation(tensor(rows), partials, lse(rows))] * (1 if is_mean else 2)


@needs_triton
@pytest.mark.parametrize("is_mean", [True, False])
def test_lengths_compile_nothing_new(is_mean: bool) -> None:
    with compiling("sm_90") as found:
        for rows, first in LENGTHS:
            regions = WHOLE, region(None, (first, rows)), region(0, (0, rows - first))
            launch(*of_regions(*regions, rows=rows, is_mean=is_mean))
            assert found.number == 1, (rows, first)
        launch(*of_regions(*[WHOLE] * 4, rows=33, is_mean=is_mean))
        assert found.number == 1, "three parts are compiled as four"
