"""Eight bits by block, and tokens that are kept so: errors, scales, bytes, crops, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring.quantised import block_scales, kept_tokens
from dtensor_ring.quantised.block_scales import (
    FORMATS,
    Quantised,
    dequantise,
    num_bytes,
    quantise_keys,
    quantise_values,
)
from dtensor_ring.quantised.kept_tokens import (
    KINDS,
    KeptTokens,
    QuantisedTokens,
    blocks_at_once,
    format_named,
    kept_bytes,
    no_tokens,
)
from tests.refusals import Refused, check_refused


class Rounded:
    """Tokens, one block after the other; a block is rounded when it is full."""

    def __init__(self, like: Tensor, name: str | None, kind: str) -> None:
        self._name, self._kind = name, kind
        self._closed: list[Tensor] = []
        self._open = like[:, :, :0]

    def append(self, x: Tensor) -> None:
        size = kept_tokens.BLOCK_SIZE
        if self._name is None:
            size = self._open.shape[2] + x.shape[2] + 1
        while x.shape[2]:
            room = size - self._open.shape[2]
            self._open, x = torch.cat([self._open, x[:, :, :room]], 2), x[:, :, room:]
            if self._name is not None and self._open.shape[2] == size:
                block = KINDS[self._kind](self._open, FORMATS[self._name], size)
                self._closed.append(dequantise(block, x.dtype))
                self._open = x[:, :, :0]

    def crop(self, num_tokens: int) -> None:
        while self._closed and num_tokens < self.read().shape[2] - self._open.shape[2]:
            self._open = self._closed.pop()
        before = sum(x.shape[2] for x in self._closed)
        self._open = self._open[:, :, : num_tokens - before]

    def rows(self, change: Callable[[Tensor], Tensor]) -> None:
        self._closed, self._open = [change(x) for x in self._closed], change(self._open)

    def read(self) -> Tensor:
        return torch.cat([*self._closed, self._open], 2)


BOTH_KINDS: dict[str, Callable[..., Quantised]] = {"keys": quantise_keys, "values": quantise_values}
of_both = pytest.mark.parametrize("kind", BOTH_KINDS)
every_dtype = pytest.mark.parametrize("format", FORMATS.values(), ids=list(FORMATS))


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


@of_both
@every_dtype
@pytest.mark.parametrize("shape", [(2, 3, 100, 8), (1, 2, 5, 12), (1, 1, 0, 4), (1, 1, 3, 1)])
def test_each_number_is_near(kind: str, format: object, shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(4)).bfloat16()
    q = BOTH_KINDS[kind](x, format, 16)
    found = dequantise(q, torch.float32)
    assert found.shape == x.shape
    scale = x.float().norm(dim=-1, keepdim=True) + 1
    assert ((found - x.float()).abs() <= 0.08 * scale).all()
    own = [y for y in (q.data, q.scales, q.means) if y is not None]
    assert num_bytes(shape, format, 16, kind) == sum(y.nbytes for y in own)


@of_both
@every_dtype
def test_zeros_stay_and_blocks_are_apart(kind: str, format: object) -> None:
    x = torch.zeros(1, 1, 48, 8)
    x[:, :, 16] = 1e4
    found = dequantise(BOTH_KINDS[kind](x, format, 16), torch.float32)
    assert not found[:, :, :16].any()
    assert not found[:, :, 32:].any()


@of_both
@every_dtype
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_errors_stay_errors(kind: str, format: object, bad: float) -> None:
    x = torch.randn(1, 1, 48, 8)
    x[0, 0, 20, 3] = bad
    finite = dequantise(BOTH_KINDS[kind](x, format, 16), torch.float32).isfinite()
    assert not finite[0, 0, 20, 3]
    assert finite[:, :, :16].all()
    assert finite[:, :, 32:].all()


@of_both
@every_dtype
def test_sums_of_large_numbers(kind: str, format: object) -> None:
    """Those over a block of values, or over a rotated token, would not be finite."""
    largest = {"keys": 2e37, "values": 1.6e38}[kind]
    x = largest * torch.randn(1, 1, 70, 128, generator=torch.Generator().manual_seed(5)).sign()
    found = dequantise(BOTH_KINDS[kind](x, format), torch.float32)
    assert ((found - x).abs() <= 0.2 * largest).all()


@of_both
def test_no_channels_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="of head dim 0 have no eight bits"):
        BOTH_KINDS[kind](torch.zeros(1, 1, 4, 0), FORMATS["int8"])


@of_both
@pytest.mark.parametrize("block_size", [0, -1])
def test_blocks_without_tokens_are_refused(kind: str, block_size: int) -> None:
    with pytest.raises(ValueError, match=f"has {block_size} tokens: choose a block_size of 1 or"):
        BOTH_KINDS[kind](torch.zeros(1, 1, 4, 8), FORMATS["int8"], block_size)


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


@of_both
@every_dtype
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_strides_and_dtypes(kind: str, format: object, dtype: torch.dtype) -> None:
    x = torch.randn(1, 40, 2, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    strided, whole = (
        dequantise(BOTH_KINDS[kind](y, format, 16), dtype)
        for y in (x.transpose(1, 2), x.transpose(1, 2).contiguous())
    )
    assert strided.dtype == dtype
    assert torch.equal(strided, whole)


@of_both
@every_dtype
def test_fake_tensors_have_the_shapes_and_dtypes_of_real_ones(kind: str, format: object) -> None:
    x = torch.ones(1, 2, 37, 12)
    with FakeTensorMode() as mode:
        fake = BOTH_KINDS[kind](mode.from_tensor(x), format, 16)
        out = dequantise(fake, torch.bfloat16)
    real = BOTH_KINDS[kind](x, format, 16)
    for one, other in ((fake.data, real.data), (fake.scales, real.scales)):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    assert (out.shape, out.dtype) == (x.shape, torch.bfloat16)


def test_what_fills_the_last_block_up_takes_no_part_in_its_scale() -> None:
    """A token of a block of 64, far from 0 and near the others, is as exact as in a full one."""
    x = 8 + 0.01 * torch.randn(1, 1, 70, 4, generator=torch.Generator().manual_seed(0))
    error = dequantise(quantise_values(x, FORMATS["int8"], 64), x.dtype) - x
    assert error[:, :, 64:].abs().max() < 2e-3


every_kind = pytest.mark.parametrize("kind", KINDS)
every_format = pytest.mark.parametrize("name", [None, *FORMATS])
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def tokens(num_tokens: int, dtype: torch.dtype = torch.float32, head_dim: int = 12) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(2, 3, num_tokens, head_dim, generator=generator).to(dtype)


def kept(x: Tensor, name: str | None, kind: str, sizes: list[int]) -> KeptTokens:
    """In parts of these sizes; the rest at once."""
    found = no_tokens(x, format_named(name), kind)
    for part in x.split([*sizes, x.shape[2] - sum(sizes)], 2):
        found = found.append(part)
    return found


def tensors(x: KeptTokens) -> list[Tensor]:
    """All that is kept."""
    if not isinstance(x, QuantisedTokens):
        return [x.read()]
    found = [x.closed.data.view(torch.uint8), x.closed.scales, x.closed.means, x.open]
    return [y for y in found if y is not None]


@pytest.mark.pairs
@every_kind
@every_format
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [12, 128])
def test_one_by_one_is_at_once(
    kind: str, name: str | None, dtype: torch.dtype, head_dim: int
) -> None:
    x = tokens(200, dtype, head_dim)
    whole = kept(x, name, kind, [])
    assert whole.read().dtype == dtype
    for sizes in ([1] * 200, [64, 64], [63, 1, 2], [130]):
        found = kept(x, name, kind, sizes)
        assert all(map(torch.equal, tensors(found), tensors(whole))), sizes
    expected = Rounded(x, name, kind)
    expected.append(x)
    assert torch.equal(whole.read(), expected.read())


@pytest.mark.pairs
@every_kind
@every_format
@pytest.mark.parametrize("length", [0, 10, 63, 64, 65, 100, 128, 150, 200, 300])
def test_cropped_and_appended_again(kind: str, name: str | None, length: int) -> None:
    x, more = tokens(200), tokens(77)
    expected = Rounded(x, name, kind)
    expected.append(x)
    found = kept(x, name, kind, [])
    found, _ = found.crop(length), expected.crop(length)
    assert torch.equal(found.read(), expected.read())
    assert found.num_tokens == min(length, 200)
    found, _ = found.append(more), expected.append(more)
    assert torch.equal(found.read(), expected.read())


@every_kind
@every_format
def test_rows_and_the_beginning(kind: str, name: str | None) -> None:
    found = kept(tokens(150), name, kind, [])
    rows = torch.tensor([1, 1, 0])
    assert torch.equal(found.select(rows).read(), found.read()[rows])
    assert torch.equal(found.drop(64).read(), found.read()[:, :, 64:])
    assert found.drop(128).num_tokens == 22


@every_kind
@every_format
def test_long_texts_are_read_in_parts(kind: str, name: str | None) -> None:
    x = tokens(64 * 5 + 3)
    expected = Rounded(x, name, kind)
    expected.append(x)
    with patch.object(kept_tokens, "AT_ONCE_ON_CPU", 2 * x[:, :, :64].numel()):
        assert blocks_at_once(x[:, :, :64].numel(), x.device) == 2
        assert torch.equal(kept(x, name, kind, [1]).read(), expected.read())


@pytest.mark.pairs
@every_kind
@every_format
@pytest.mark.parametrize("num_tokens", [0, 63, 64, 150])
def test_bytes(kind: str, name: str | None, num_tokens: int) -> None:
    x = tokens(num_tokens, torch.bfloat16)
    found = kept(x, name, kind, [])
    assert found.num_bytes == kept_bytes(x.shape, x.dtype, format_named(name), kind)
    # A crop frees what it drops, a drop too.
    for less in (found.crop(5), found.drop(num_tokens // 64 * 64)):
        held = {y.untyped_storage().data_ptr(): y.untyped_storage().nbytes() for y in tensors(less)}
        assert name is None or sum(held.values()) == less.num_bytes


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_half_the_bytes_of_a_long_text(name: str, head_dim: int) -> None:
    shape, dtype = (1, 8, 32_768 + 63, head_dim), torch.bfloat16
    found, plain = (
        sum(kept_bytes(shape, dtype, format_named(x), kind) for kind in KINDS) for x in (name, None)
    )
    assert found <= 0.53 * plain


REFUSED: Refused = {
    ValueError: {
        'one of "int8", "fp8", or None .* \'int4\'': lambda: format_named("int4"),
        "of torch.int64 have no eight bits, .*; leave kv_dtype out": lambda: kept(
            torch.zeros(1, 1, 2, 4, dtype=torch.int64), "int8", "keys", []
        ),
        "of head dim 0 have no eight bits: leave kv_dtype out": lambda: kept(
            torch.zeros(1, 1, 2, 0), "int8", "keys", []
        ),
    },
    TypeError: {'one of "int8", .* torch.int8': lambda: format_named(torch.int8)},
}


def test_refused() -> None:
    check_refused(REFUSED)
