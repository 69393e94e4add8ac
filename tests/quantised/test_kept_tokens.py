"""Kept tokens: the same bits however many come at a time, crops, rows, bytes, and refusals."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from dtensor_ring.quantised import kept_tokens
from dtensor_ring.quantised.block_scales import FORMATS
from dtensor_ring.quantised.kept_tokens import (
    KINDS,
    KeptTokens,
    QuantisedTokens,
    blocks_at_once,
    format_named,
    kept_bytes,
    no_tokens,
)
from tests.quantised.rounded import Rounded
from tests.refusals import Refused, check_refused

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
