"""Eight bits: errors against float64, outliers, odd shapes, numbers that are none, and bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring.quantised import block_scales
from dtensor_ring.quantised.block_scales import (
    FORMATS,
    Quantised,
    dequantise,
    num_bytes,
    quantise_keys,
    quantise_values,
)

KINDS: dict[str, Callable[..., Quantised]] = {"keys": quantise_keys, "values": quantise_values}
every_kind = pytest.mark.parametrize("kind", KINDS)
every_format = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))


@pytest.mark.parametrize(("name", "most"), [("int8", 2.0e-3), ("fp8", 7.2e-3)])
def test_error_of_attention_with_outliers(name: str, most: float) -> None:
    """The experiment of flash attention 3's paper: N(0, 1) and N(0, 100) in one of 1,000."""
    generator = torch.Generator().manual_seed(0)
    shape = 1, 2, 2048, 128

    def drawn() -> Tensor:
        is_outlier = torch.rand(shape, generator=generator) < 0.001
        normal = [torch.randn(shape, generator=generator) for _ in range(2)]
        return normal[0] + 10 * normal[1] * is_outlier

    query, key, value = drawn(), drawn(), drawn()
    rounded = [
        dequantise(quantise(x, FORMATS[name]), torch.float64)
        for quantise, x in ((quantise_keys, key), (quantise_values, value))
    ]
    exact, found = (
        F.scaled_dot_product_attention(query.double(), k, v)
        for k, v in ((key.double(), value.double()), rounded)
    )
    assert (found - exact).square().mean().sqrt() <= most


@every_kind
@every_format
@pytest.mark.parametrize("shape", [(2, 3, 100, 8), (1, 2, 5, 12), (1, 1, 0, 4), (1, 1, 3, 1)])
def test_each_number_is_near(kind: str, format: object, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    q = KINDS[kind](x, format, 16)
    found = dequantise(q, torch.float32)
    assert found.shape == x.shape
    scale = x.float().norm(dim=-1, keepdim=True) + 1
    assert ((found - x.float()).abs() <= 0.08 * scale).all()
    own = [y for y in (q.data, q.scales, q.means) if y is not None]
    assert num_bytes(shape, format, 16, kind) == sum(y.nbytes for y in own)


@every_kind
@every_format
def test_zeros_stay_and_blocks_are_apart(kind: str, format: object) -> None:
    x = torch.zeros(1, 1, 48, 8)
    x[:, :, 16] = 1e4
    found = dequantise(KINDS[kind](x, format, 16), torch.float32)
    assert not found[:, :, :16].any()
    assert not found[:, :, 32:].any()


@every_kind
@every_format
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_errors_stay_errors(kind: str, format: object, bad: float) -> None:
    x = torch.randn(1, 1, 48, 8)
    x[0, 0, 20, 3] = bad
    finite = dequantise(KINDS[kind](x, format, 16), torch.float32).isfinite()
    assert not finite[0, 0, 20, 3]
    assert finite[:, :, :16].all()
    assert finite[:, :, 32:].all()


@every_kind
@every_format
def test_sums_of_large_numbers(kind: str, format: object) -> None:
    """Those over a block of values, or over a rotated token, would not be finite."""
    largest = {"keys": 2e37, "values": 1.6e38}[kind]
    x = largest * torch.randn(1, 1, 70, 128, generator=torch.Generator().manual_seed(5)).sign()
    found = dequantise(KINDS[kind](x, format), torch.float32)
    assert ((found - x).abs() <= 0.2 * largest).all()


@every_kind
def test_no_channels_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="of head dim 0 have no eight bits"):
        KINDS[kind](torch.zeros(1, 1, 4, 0), FORMATS["int8"])


@every_kind
@pytest.mark.parametrize("block_size", [0, -1])
def test_blocks_without_tokens_are_refused(kind: str, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"has {block_size} tokens: choose a block_size of 1 or"):
        KINDS[kind](torch.zeros(1, 1, 4, 8), FORMATS["int8"], block_size)


@pytest.mark.parametrize("head_dim", [1, 2, 12, 96, 128])
def test_the_rotation_is_hadamards_matrices(head_dim: int) -> None:
    """Sylvester's: the sign of an entry is the parity of the bits that row and column share."""
    widths = [1 << bit for bit in reversed(range(8)) if head_dim >> bit & 1]
    expected = torch.block_diag(
        *(
            torch.tensor([[(-1.0) ** (i & j).bit_count() for i in range(n)] for j in range(n)])
            / n**0.5
            for n in widths
        )
    )
    torch.testing.assert_close(block_scales._hadamard(torch.eye(head_dim)), expected)


def test_the_rotation_halves_the_error_of_int8_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    normal, large = (torch.randn(1, 2, 512, 128, generator=generator) for _ in range(2))
    key = normal + 10 * large * (torch.rand(normal.shape, generator=generator) < 0.001)

    def error() -> float:
        found = dequantise(quantise_keys(key, FORMATS["int8"]), torch.float32)
        return (found - key).square().mean().sqrt().item()

    rotated = error()
    monkeypatch.setattr(block_scales, "_hadamard", lambda x: x)
    assert rotated <= 0.5 * error()


@every_kind
@every_format
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_dtypes(kind: str, format: object, dtype: torch.dtype) -> None:
    x = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    strided, whole = (
        dequantise(KINDS[kind](y, format, 16), dtype)
        for y in (x.transpose(1, 2), x.transpose(1, 2).contiguous())
    )
    assert strided.dtype == dtype
    assert torch.equal(strided, whole)


@every_kind
@every_format
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(kind: str, format: object) -> None:
    x = torch.ones(1, 2, 37, 12)
    with FakeTensorMode() as mode:
        fake = KINDS[kind](mode.from_tensor(x), format, 16)
        out = dequantise(fake, torch.bfloat16)
    real = KINDS[kind](x, format, 16)
    for one, other in ((fake.data, real.data), (fake.scales, real.scales)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert (out.shape, out.dtype) == (x.shape, torch.bfloat16)


def test_what_fills_the_last_block_up_takes_no_part_in_its_scale() -> None:
    """A token of a block of 64, far from 0 and near the others, is as exact as in a full one."""
    x = 8 + 0.01 * torch.randn(1, 1, 70, 4, generator=torch.Generator().manual_seed(0))
    error = dequantise(quantise_values(x, FORMATS["int8"], 64), x.dtype) - x
    assert error[:, :, 64:].abs().max() < 2e-3
