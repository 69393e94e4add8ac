"""Eight bits by one launch are those of plain PyTorch: in Triton's interpreter, and on a GPU.

`test_quantise_compiled.py` reads its machine code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dtensor_ring.compute.memory import HEAD_MAJOR, TOKEN_MAJOR, Order, empty
from dtensor_ring.quantised import block_scales
from dtensor_ring.quantised.block_scales import (
    FORMATS,
    Quantised,
    dequantise,
    dequantise_pair,
    quantise_keys,
    quantise_pair,
    quantise_values,
)
from dtensor_ring.transport.quantised_rotation import QuantisedPacket

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
KINDS: dict[str, Callable[..., Quantised]] = {"keys": quantise_keys, "values": quantise_values}


@dataclass(frozen=True)
class Case:
    """Keys or values: some outliers, a channel of ones, and in the second batch row zeros."""

    shape: tuple[int, int, int, int] = (2, 1, 21, 16)
    format: str = "int8"
    block_size: int = 16
    dtype: torch.dtype = BF16
    order: Order = TOKEN_MAJOR
    first: int = 0
    """Of a longer tensor's tokens."""
    last_stride: int = 1
    factor: float = 1.0
    bad: tuple[float, ...] = ()
    """Numbers that are none."""

    def tensor(self, device: str = "cpu") -> Tensor:
        batch, heads, num_tokens, head_dim = self.shape
        longer = batch, heads, num_tokens + self.first, head_dim * self.last_stride
        generator = torch.Generator().manual_seed(0)
        numbers, large, chances = (torch.randn(longer, generator=generator) for _ in range(3))
        numbers += 30 * large * (chances > 2.5)
        numbers[..., -self.last_stride] = 1.0
        numbers[1:, :, self.first : self.first + self.block_size] = 0.0
        numbers *= self.factor
        numbers[:, -1, self.first : self.first + len(self.bad), 0] = torch.tensor(self.bad)
        x = empty(torch.empty(0, dtype=self.dtype), longer, self.order).copy_(numbers)
        return x.to(device)[:, :, self.first :, :: self.last_stride]


CASES = {
    "": Case(),
    "blocks of 64": Case((1, 2, 70, 64), "fp8", 64),
    "blocks of 5": Case((1, 1, 12, 16), block_size=5),
    "blocks of 1": Case((1, 1, 3, 16), "fp8", 1),
    "80 channels": Case((1, 2, 21, 80)),
    "128 channels, head-major": Case((1, 1, 70, 128), block_size=64, order=HEAD_MAJOR),
    "192 channels, float16": Case((1, 1, 37, 192), "fp8", dtype=F16),
    "576 channels": Case((1, 1, 5, 576), order=HEAD_MAJOR),
    "5 channels, float32": Case((1, 2, 17, 5), dtype=F32),
    "1 channel, float64": Case((2, 1, 17, 1), "fp8", dtype=F64),
    "one token": Case((1, 2, 1, 8)),
    "no token": Case((1, 2, 0, 8)),
    "some of a longer": Case((1, 2, 17, 8), first=5, order=HEAD_MAJOR, dtype=F32),
    "every other number": Case((1, 2, 17, 8), "fp8", last_stride=2),
    "huge": Case((1, 1, 17, 8), factor=1e36, dtype=F32),
    "tiny": Case((1, 1, 17, 8), factor=1e-37, dtype=F32),
    "infinite": Case((1, 2, 17, 8), bad=(torch.inf,)),
    "bad": Case((1, 2, 17, 8), "fp8", bad=(torch.nan, torch.inf, -torch.inf)),
}
FEW = ("", "blocks of 5", "blocks of 1", "80 channels", "192 channels, float16", "no token")
FEW += ("1 channel, float64", "some of a longer", "every other number", "huge", "bad")
LARGE = {
    "long": Case((2, 8, 4133, 128), block_size=64),
    "long fp8": Case((1, 4, 4133, 192), "fp8", 64, order=HEAD_MAJOR),
}


def check(case: Case, kind: str, device: str) -> None:
    """Compare bytes, scales and what comes back; of blocks with an error only that it stays."""
    x = case.tensor()
    how = FORMATS[case.format], case.block_size
    expected, found = KINDS[kind](x, *how), by_kernel(KINDS[kind], case.tensor(device), *how)
    assert found.data.stride() == empty(x, x.shape, TOKEN_MAJOR).stride(), "as packets have it"
    again = by_kernel(dequantise, found, F32).cpu()
    wanted = dequantise(expected, F32)
    right = wanted.isfinite()
    assert torch.equal(again.isfinite(), right)
    assert bool(right.all()) == (not case.bad)
    assert torch.equal(again[right], wanted[right])
    if not case.bad:
        names = "data", "scales", "means"
        for one, other in ((getattr(found, name), getattr(expected, name)) for name in names):
            assert (one is None) == (other is None)
            if one is not None:
                assert (one.shape, one.dtype) == (other.shape, other.dtype)
                assert torch.equal(one.cpu().float(), other.float())
    check_ways(case, found, again)


def check_ways(case: Case, q: Quantised, wanted: Tensor) -> None:
    """Other dtypes, and scales for each token, of data in a packet that is aligned to 4 bytes."""
    wanted = wanted.nan_to_num()
    rounded = by_kernel(dequantise, q, case.dtype).cpu().nan_to_num()
    assert rounded.dtype == case.dtype
    assert torch.equal(rounded, wanted.to(case.dtype).nan_to_num())

    def by_token(x: Tensor | None) -> Any:
        of_tokens = None if x is None else x.repeat_interleave(q.block_size, 2)
        return None if of_tokens is None else of_tokens[:, :, : q.data.shape[2]]

    buffer = torch.empty(q.data.numel() + 4, dtype=torch.uint8, device=q.data.device)
    data = buffer[4:].view(q.data.dtype).view(q.data.shape).copy_(q.data)
    one = Quantised(data, by_token(q.scales), by_token(q.means), 1)
    assert torch.equal(by_kernel(dequantise, one, F32).cpu().nan_to_num(), wanted)


def by_kernel(function: Callable[..., Any], x: Any, *how: Any) -> Any:
    """Call a public function; by the interpreter tensors of CPUs count as those of a GPU."""
    data = x.data if isinstance(x, Quantised) else x
    if data.is_cuda:
        assert block_scales._has_kernel(data, 1)
        return function(x, *how)
    with (
        patch.object(block_scales, "_has_kernel", lambda x, block_size: True),
        patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)),
    ):
        return function(x, *how)


def check_pair(case: Case, value_dim: int, device: str) -> None:
    """One launch for keys and values, and one back, gives the bits of two."""
    key = case.tensor(device)
    value = replace(case, shape=(*case.shape[:3], value_dim)).tensor(device)
    how = FORMATS[case.format], case.block_size
    pair = by_kernel(quantise_pair, key, value, *how)
    alone = by_kernel(quantise_keys, key, *how), by_kernel(quantise_values, value, *how)
    for found, wanted in zip(pair, alone, strict=True):
        for name in ("data", "scales", "means"):
            one, other = getattr(found, name), getattr(wanted, name)
            assert (one is None) == (other is None)
            assert one is None or torch.equal(one.float(), other.float())
    both = by_kernel(dequantise_pair, *pair, F32)
    for found, q in zip(both, alone, strict=True):
        assert torch.equal(found, by_kernel(dequantise, q, F32))


def check_message(dtype: torch.dtype, device: str) -> None:
    """A rank's own shard is rounded into the message that it sends, which plain PyTorch packs."""
    key, value = (Case((2, 3, 150, x)).tensor() for x in (16, 8))
    plain = QuantisedPacket.of(0, (key, value), dtype)
    assert plain.memory is None
    packed = plain.empty_in(torch.empty(plain.num_bytes, dtype=torch.uint8), 0, plain.cols)
    packed.take(plain)
    pair = key.to(device), value.to(device)
    found = by_kernel(lambda *shard: QuantisedPacket.of(0, shard, dtype), *pair)
    assert found.buffer is None, "no other packet may have its memory"
    (message,), (wanted,) = found.messages(True), packed.messages(True)
    assert torch.equal(message.cpu(), wanted)


PAIRS = {"": 16, "80 channels": 64, "blocks of 5": 16, "192 channels, float16": 128}
"""Head dims of values, by cases for keys."""


every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.gpu
@every_kind
@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_on_a_gpu(name: str, kind: str) -> None:
    check((CASES | LARGE)[name], kind, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", PAIRS)
def test_both_on_a_gpu(name: str) -> None:
    check_pair(CASES[name], PAIRS[name], "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("format", FORMATS)
def test_a_message_on_a_gpu(format: str) -> None:
    check_message(FORMATS[format].dtype, "cuda")


@pytest.mark.gpu
@every_kind
def test_blocks_beyond_the_registers_of_a_gpu(kind: str) -> None:
    """Plain PyTorch serves them."""
    x = torch.randn(1, 1, 300, 576, device="cuda")
    assert not block_scales._has_kernel(x, 64)
    q = KINDS[kind](x, FORMATS["int8"])
    assert (dequantise(q, F32) - x).abs().max() < 0.1
    assert q.data.is_cuda


needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@needs_triton
def test_what_fits() -> None:
    from dtensor_ring.quantised.quantise_triton import fits

    assert fits(64, 512)
    assert fits(33, 257)
    assert fits(1, 1)
    assert not fits(64, 513)
    assert not fits(65, 257)


needs_cuda_build = pytest.mark.skipif(
    torch.version.cuda is None, reason="builds for CPUs make no fake CUDA tensors"
)


@needs_triton
@needs_cuda_build
@every_kind
@pytest.mark.parametrize(("has_triton", "head_dim"), [(False, 8), (True, 576)])
def test_what_plain_pytorch_serves(
    kind: str, has_triton: bool, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_scales, "has_triton", lambda: has_triton)
    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(1, 1, 70, head_dim)
        assert not block_scales._has_kernel(x, 64)
        q = KINDS[kind](x, FORMATS["fp8"])
        assert q.data.is_cuda
        if not has_triton:
            assert dequantise(q, BF16).is_cuda


@needs_triton
@needs_cuda_build
@every_kind
def test_old_gpus_have_no_fp8(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(1, 1, 3, 8)
        with pytest.raises(ValueError, match=r"'fp8' needs .* 8\.9 or newer, .* kv_dtype='int8'"):
            KINDS[kind](x, FORMATS["fp8"])


@contextmanager
def exact_interpreter() -> Iterator[None]:
    """Floats are rounded as GPUs do, not cut off; exclusive ors are fast."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    names = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16"}
    names |= {"float8e4nv": "float8_e4m3fn"}
    dtypes = {getattr(tl, one): getattr(torch, other) for one, other in names.items()}
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

    def converted(x: Any, source: Any, target: Any, rounding: Any) -> Any:
        numbers = torch.frombuffer(bytearray(x.tobytes()), dtype=dtypes[source])
        to = numbers.to(dtypes[target])
        return to.view(bits[to.itemsize]).numpy().reshape(x.shape)

    def reduced(self: Any, inputs: Any) -> Any:
        assert self.combine_fn is tl.standard._xor_combine
        axis = {"axis": self.axis, "keepdims": self.keep_dims}
        each = [(np.bitwise_xor.reduce(x.handle.data, **axis), x.dtype) for x in inputs]
        return [self.to_tensor(*x) for x in each]

    with (
        np.errstate(all="ignore"),  # that inf - inf is NaN is no news
        patch.object(interpreter, "_convert_float", converted),
        patch.object(interpreter.ReduceOps, "generic_reduce", reduced),
    ):
        yield


def check_far(kind: str) -> None:
    """Offsets that are computed in 32 bits are addresses outside of the memory."""
    from triton.runtime.interpreter import GridExecutor

    from dtensor_ring.quantised import quantise_triton
    from tests.compute.test_merge_triton import JUST_32_BITS, Distant

    x, how = Case((1, 6, 3, 5)).tensor(), FORMATS["int8"]
    near = by_kernel(KINDS[kind], x, how, 16)
    memory = Distant(1, JUST_32_BITS)
    # The interpreter would copy all the memory onto itself.
    with patch.object(GridExecutor, "_restore_args_dev", lambda *_: None):
        far = memory._moved(torch.zeros_like(near.data)), near.scales, near.means
        quantise_triton.quantise(memory._moved(x), far, how.largest, 16)
        out = memory._moved(torch.zeros(x.shape))
        quantise_triton.dequantise(far, out, 16)
    assert torch.equal(far[0], near.data)
    assert torch.equal(out, dequantise(near, F32))


KERNELS, PAIR = ("_quantise", "_dequantise"), ("", "_pair")


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each kernel is launched."""
    from dtensor_ring.quantised import quantise_triton

    found = Counter[str]()

    class Counting:
        def __init__(self, name: str) -> None:
            self._name, self._kernel = name, getattr(quantise_triton, name)

        def __getitem__(self, grid: Any) -> Any:
            found[self._name] += 1
            return self._kernel[grid]

    names = [x + pair for x in KERNELS for pair in PAIR]
    with patch.multiple(quantise_triton, **{name: Counting(name) for name in names}):
        yield found


def check_in_the_interpreter(names: Sequence[str]) -> None:
    """`tests/interpreted.py` calls it."""
    from tests.compute.test_merge_triton import patched_once

    with exact_interpreter(), patched_once():
        for of_kind in KINDS:
            for each in names:
                check(CASES[each], of_kind, "cpu")
            check_far(of_kind)
        with counted() as launches:
            for name, value_dim in PAIRS.items():
                check_pair(CASES[name], value_dim, "cpu")
            assert launches == Counter(
                {f"{x}{pair}": len(PAIRS) * (1 if pair else 2) for x in KERNELS for pair in PAIR}
            )
            launches.clear()
            for format in FORMATS.values():
                check_message(format.dtype, "cpu")
            assert launches == {"_quantise_pair": len(FORMATS)}
