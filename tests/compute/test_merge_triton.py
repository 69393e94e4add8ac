"""The fused merge gives what the other gives: by Triton's interpreter on a CPU, and on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dtensor_ring.compute.memory import TOKEN_MAJOR, Order, in_order
from dtensor_ring.compute.merge import merge_

ROOT = Path(__file__).parents[2]
HEAD_MAJOR = (0, 1, 2, 3)


@dataclass(frozen=True)
class Case:
    """Two partial results; the accumulators are a region of larger ones."""

    shape: tuple[int, int, int, int] = (2, 3, 70, 8)
    out: torch.dtype = torch.float32
    block: torch.dtype = torch.bfloat16
    target: torch.dtype | None = None
    orders: tuple[Order, Order] = (TOKEN_MAJOR, TOKEN_MAJOR)

    def tensor(self, dtype: torch.dtype, order: Order, device: str) -> Tensor:
        """Rows 5 and later of a longer tensor."""
        batch, heads, rows, head_dim = self.shape
        x = torch.randn(batch, heads, rows + 5, head_dim)
        return in_order(x, order, dtype).to(device)[:, :, 5:]

    def lse(self, dtype: torch.dtype, hidden: slice, device: str) -> Tensor:
        x = 30 * torch.randn(*self.shape[:2], self.shape[2] + 5)
        x[:, :, hidden] = -torch.inf
        return x.to(device, dtype)[:, :, 5:]


CASES = {
    "": Case(),
    "head-major": Case(orders=(HEAD_MAJOR, HEAD_MAJOR)),
    "mixed": Case(orders=(HEAD_MAJOR, TOKEN_MAJOR)),
    "odd": Case((1, 2, 33, 5)),
    "one row": Case((2, 2, 1, 1)),
    "no rows": Case((2, 2, 0, 8)),
    "wide": Case((1, 1, 40, 200), block=torch.float32),
    "to bfloat16": Case(target=torch.bfloat16),
    "in bfloat16": Case(out=torch.bfloat16),
    "float64": Case(out=torch.float64, block=torch.float64),
}


def check(case: Case, device: str) -> None:
    from dtensor_ring.compute.merge_triton import merge_ as fused

    torch.manual_seed(0)
    wide = torch.promote_types(case.out, torch.float32)
    out = case.tensor(case.out, case.orders[0], device)
    lse = case.lse(wide, slice(0, 20), device)
    block = case.tensor(case.block, case.orders[1], device), case.lse(wide, slice(10, 30), device)
    for partial_out, partial_lse in ((out, lse), block):
        partial_out.masked_fill_(partial_lse.unsqueeze(-1) == -torch.inf, 0.0)
    # Infinite outputs on either side; where a weight is 0 they would be NaN.
    out[:, :, 30:35, 0], block[0][:, :, 35:, 0] = torch.inf, -torch.inf
    lse[:, :, 30:], block[1][:, :, 30:] = 0.0, 1.0
    expected = [x.cpu().clone() for x in (out, lse)]
    rounded = torch.empty_like(expected[0], dtype=case.target)
    merge_(*expected, *(x.cpu() for x in block), rounded if case.target else None)
    target = torch.empty_like(out, dtype=case.target) if case.target else out
    fused(out, lse, *block, target)
    result, wanted = target, rounded if case.target else expected[0]
    close = {"rtol": 1e-5, "atol": 1e-5} if wanted.dtype != torch.bfloat16 else {}
    torch.testing.assert_close(result.cpu(), wanted, **close)
    torch.testing.assert_close(lse.cpu(), expected[1], rtol=1e-6, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_on_a_gpu(case: Case) -> None:
    check(case, "cuda")


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@needs_triton
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize(
    ("capability", "dtype"), [(80, "fp32"), (90, "fp32"), (100, "fp32"), (90, "bf16"), (90, "fp64")]
)
def test_compiles_for_gpus(capability: int, dtype: str) -> None:
    """Without one: down to machine code."""
    import triton
    from triton.backends.compiler import GPUTarget

    from dtensor_ring.compute.merge_triton import _merge

    types = dict.fromkeys(_merge.arg_names, "i32")
    types |= dict.fromkeys(("out", "block_out", "target"), f"*{dtype}")
    types |= dict.fromkeys(("lse", "block_lse"), "*fp64" if dtype == "fp64" else "*fp32")
    blocks = {"BLOCK_ROWS": 32, "BLOCK_DIMS": 128}
    source = triton.compiler.ASTSource(_merge, types | dict.fromkeys(blocks, "constexpr"), blocks)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32))
    assert compiled.asm["cubin"]
    # All warps load each lse, and one of them overwrites it.
    lines = [line.strip() for line in compiled.asm["ptx"].splitlines()]
    loads, stores = (
        [n for n, line in enumerate(lines) if f"{what}.global" in line] for what in ("ld", "st")
    )
    assert any("bar.sync" in line for line in lines[max(loads) : min(stores)])


@needs_triton
def test_by_the_interpreter() -> None:
    """In a process of its own: Triton decides when it is imported."""
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "error", "-m", "tests.compute.test_merge_triton"]
    subprocess.run(command, check=True, cwd=ROOT, env=environment, timeout=300)


if __name__ == "__main__":
    for one in CASES.values():
        check(one, "cpu")
