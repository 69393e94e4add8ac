"""Machine code of attention that reads block tables: registers, width of accesses, variants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from dtensor_ring import Mask
from dtensor_ring.compute.kernels.kernel import Pages, Scores
from tests.machine_code import ARCHITECTURES, Compiling, MachineCode, compiling

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
MODULE = "dtensor_ring.paged.paged_triton"
KERNELS = "_attend", "_merge"
MOST_SHARED = {"sm_80": 81, "sm_90": 113, "sm_100": 113, "gfx942": 64}
"""KiB of shared memory of a program, so that two fit a multiprocessor; of an MI300 one."""
PAIR = 8
"""Bytes of two registers, which the compiler of Triton 3.6 spills to fit more programs."""
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@dataclass(frozen=True)
class Served:
    """A layer that decodes, on tensors without memory. They have addresses, whose alignment counts.

    Queries are those that models make: heads of a token lie next to each other.
    """

    head_dims: tuple[int, int] = (128, 128)
    dtype: torch.dtype = BF16
    block: int = 64
    num_queries: int = 1
    heads: tuple[int, int] = (32, 8)
    lengths: tuple[int, ...] = (8192,) * 16
    splits: int = 2
    softcap: float = 0.0

    def launch(self) -> None:
        from dtensor_ring.paged.paged_triton import attend

        num_blocks = max(-(-x // self.block) for x in self.lengths)
        shape = len(self.lengths), self.num_queries, self.heads[0], self.head_dims[0]
        how: dict[str, Any] = {"dtype": self.dtype, "device": "meta"}
        blocks = [torch.empty(99, self.block, self.heads[1], x, **how) for x in self.head_dims]
        tables = np.zeros((len(self.lengths), num_blocks), dtype=np.int32)
        pages = Pages(tables, np.array(self.lengths, dtype=np.int32), self.block)
        scores = Scores(Mask.full(), self.head_dims[0] ** -0.5, self.softcap)
        attend(torch.empty(shape, **how), *blocks, pages, scores, self.splits)


CASES = {
    "128": Served(),
    "one split": Served(splits=1),
    "blocks of 16": Served(block=16),
    "blocks of 256, float16": Served(block=256, dtype=F16),
    "3 queries": Served(num_queries=3, heads=(8, 8)),
    "many queries": Served(num_queries=16),
    "64": Served((64, 64)),
    "64, many queries": Served((64, 64), num_queries=16),
    "72 and 40": Served((72, 40)),
    "192 and 128": Served((192, 128)),
    "256 with a softcap": Served((256, 256), softcap=50.0),
    "512": Served((512, 512), heads=(16, 1)),
    "float32": Served(dtype=F32),
    "float32, many queries": Served(dtype=F32, num_queries=16),
}
ALWAYS = [
    ("sm_80", "128", "_attend"),
    ("sm_90", "blocks of 16", "_attend"),
    ("sm_90", "128", "_merge"),
    ("sm_100", "256 with a softcap", "_attend"),
    ("gfx942", "72 and 40", "_attend"),
]
REPEATED = [(x, name, kernel) for x in ARCHITECTURES for name in CASES for kernel in KERNELS]


class Unlaunched:
    """In place of the other kernel."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: None


@contextmanager
def compiled_for(architecture: str, kernel: str) -> Iterator[Compiling]:
    (other,) = {*KERNELS} - {kernel}
    with compiling(architecture, MODULE, kernel) as found, patch(f"{MODULE}.{other}", Unlaunched()):
        yield found


def check(architecture: str, case: Served, kernel: str) -> None:
    """Registers hold what is used; keys, values and partial results come early, in 16 bytes."""
    with compiled_for(architecture, kernel) as found:
        case.launch()
        code = MachineCode.of(found.last)
        shared = found.last.metadata.shared
    assert code.spilled <= PAIR, str(code)
    assert shared <= MOST_SHARED[architecture] << 10, shared
    widths = code.widths("load")
    # The others are blocks and lengths, or lse, and queries that are too few for 16 bytes.
    assert {*widths} <= {4, 8, 16}, str(code)
    wide = 16 * widths.count(16) * code.num_threads
    if kernel == "_attend":
        # The code loads two steps before the loop and one in it, so two while it computes one.
        numbers = 3 * found.options["KEYS"] * sum(case.head_dims)
        assert wide >= numbers * case.dtype.itemsize, str(code)
    else:
        assert wide >= found.options["SPLITS"] * case.head_dims[1] * F32.itemsize, str(code)


@pytest.mark.parametrize(("architecture", "name", "kernel"), ALWAYS)
def test_machine_code(architecture: str, name: str, kernel: str) -> None:
    check(architecture, CASES[name], kernel)


@pytest.mark.repeats
@pytest.mark.parametrize(("architecture", "name", "kernel"), REPEATED)
def test_machine_code_of_all(architecture: str, name: str, kernel: str) -> None:
    if kernel == "_merge" and CASES[name].splits == 1:
        pytest.skip("it merges nothing")
    check(architecture, CASES[name], kernel)


@pytest.mark.parametrize("kernel", KERNELS)
def test_lengths_compile_nothing_new(kernel: str) -> None:
    with compiled_for("sm_90", kernel) as found:
        for lengths, splits, heads in (
            ((8192,) * 16, 2, (32, 8)),
            ((8191,), 16, (32, 8)),
            ((1000, 999, 1), 3, (4, 1)),
            ((1025,) * 3, 2, (64, 16)),
        ):
            Served(lengths=lengths, splits=splits, heads=heads).launch()
            assert found.number == 1, lengths
        Served(num_queries=2).launch()
        assert found.number == 1
