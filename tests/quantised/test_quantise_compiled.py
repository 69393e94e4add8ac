"""Machine code of the launches that quantise: registers, width of accesses, variants."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from dtensor_ring.compute.memory import HEAD_MAJOR, TOKEN_MAJOR, Order, empty
from dtensor_ring.quantised.block_scales import FORMATS
from tests.machine_code import ARCHITECTURES, Compiling, MachineCode, compiling

BF16, F32 = torch.bfloat16, torch.float32
KERNELS = "_quantise", "_dequantise"
PAIRS = "_quantise_pair", "_dequantise_pair"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@dataclass(frozen=True)
class Shard:
    """Keys, or values, on tensors without memory. They have addresses, whose alignment counts."""

    head_dim: int = 128
    format: str = "int8"
    is_keys: bool = True
    num_tokens: int = 8192
    dtype: torch.dtype = BF16
    order: Order = TOKEN_MAJOR
    block_size: int = 64
    token_scales: bool = False
    """Whether each token has scales of its own, as in packets that begin within a block."""

    def launch(self, kernel: str) -> None:
        from dtensor_ring.quantised import quantise_triton

        block_size = 1 if self.token_scales else self.block_size
        largest, x = FORMATS[self.format].largest, self._wide()
        both, pair = (self._eight_bits(True), self._eight_bits(False)), (x, self._wide())
        if kernel == "_quantise":
            quantise_triton.quantise(x, both[0 if self.is_keys else 1], largest, block_size)
        elif kernel == "_dequantise":
            quantise_triton.dequantise(both[0 if self.is_keys else 1], x, block_size)
        elif kernel == "_quantise_pair":
            quantise_triton.quantise_pair(pair, both, largest, block_size)
        else:
            quantise_triton.dequantise_pair(both, pair, block_size)

    def _wide(self) -> Tensor:
        return self._tensor(self.num_tokens, self.head_dim, self.dtype, self.order)

    def _eight_bits(self, is_keys: bool) -> tuple[Tensor, Tensor, Tensor | None]:
        num_blocks = -(-self.num_tokens // (1 if self.token_scales else self.block_size))
        data = self._tensor(self.num_tokens, self.head_dim, FORMATS[self.format].dtype)
        if is_keys:
            return data, self._tensor(num_blocks, 1, F32), None
        scales, means = (self._tensor(num_blocks, self.head_dim, BF16) for _ in range(2))
        return data, scales, means

    @staticmethod
    def _tensor(
        num_tokens: int, head_dim: int, dtype: torch.dtype, order: Order = TOKEN_MAJOR
    ) -> Tensor:
        like = torch.empty(0, dtype=dtype, device="meta")
        return empty(like, (1, 8, num_tokens, head_dim), order)


KEYS = {
    "128": Shard(),
    "fp8": Shard(format="fp8"),
    "72": Shard(72),
    "192 fp8": Shard(192, "fp8"),
    "64 head-major": Shard(64, order=HEAD_MAJOR),
    "512": Shard(512),
    "576 in blocks of 16": Shard(576, block_size=16),
    "float32": Shard(dtype=F32),
    "blocks of 128": Shard(block_size=128),
}
VALUES = {
    f"values {name}": Shard(**(vars(shard) | {"is_keys": False})) for name, shard in KEYS.items()
}
SHARDS = KEYS | VALUES
ALWAYS = [
    ("sm_80", "128", "_quantise"),
    ("sm_90", "values 192 fp8", "_quantise"),
    ("sm_100", "fp8", "_dequantise"),
    ("gfx942", "values 72", "_dequantise"),
    ("sm_90", "128", "_quantise_pair"),
    ("sm_100", "128", "_quantise_pair"),
    ("sm_90", "fp8", "_dequantise_pair"),
    ("sm_100", "128", "_dequantise_pair"),
]
REPEATED = [(x, name, kernel) for x in ARCHITECTURES for name in SHARDS for kernel in KERNELS]
REPEATED += [(x, name, kernel) for x in ARCHITECTURES for name in KEYS for kernel in PAIRS]


@contextmanager
def compiled_for(architecture: str, kernel: str) -> Iterator[Compiling]:
    module = "dtensor_ring.quantised.quantise_triton"
    with compiling(architecture, module, kernel) as found:
        yield found


def check(architecture: str, shard: Shard, kernel: str) -> None:
    """Nothing is spilled, and the wide tensor moves in 16 bytes of a thread."""
    with compiled_for(architecture, kernel) as found:
        shard.launch(kernel)
        code = MachineCode.of(found.last)
    assert code.spilled == 0, str(code)
    prefix = "KEY_" if kernel in PAIRS else ""
    rows, dims = (found.options[f"{prefix}BLOCK_{side}"] for side in ("ROWS", "DIMS"))
    what = "load" if "_quantise" in kernel else "store"
    wide = 16 * code.widths(what).count(16) * code.num_threads
    assert wide >= rows * dims * shard.dtype.itemsize, str(code)


@pytest.mark.parametrize(("architecture", "name", "kernel"), ALWAYS)
def test_machine_code(architecture: str, name: str, kernel: str) -> None:
    check(architecture, SHARDS[name], kernel)


@pytest.mark.repeats
@pytest.mark.parametrize(("architecture", "name", "kernel"), REPEATED)
def test_machine_code_of_all(architecture: str, name: str, kernel: str) -> None:
    if architecture == "sm_80" and SHARDS[name].format == "fp8":
        pytest.skip("it has no fp8")
    check(architecture, SHARDS[name], kernel)


@pytest.mark.parametrize("kernel", [*KERNELS, *PAIRS])
def test_lengths_compile_nothing_new(kernel: str) -> None:
    with compiled_for("sm_90", kernel) as found:
        for num_tokens in (8192, 4097, 33, 16, 1):
            Shard(num_tokens=num_tokens).launch(kernel)
            assert found.number == 1, num_tokens
