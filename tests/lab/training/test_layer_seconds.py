"""Seconds of kernels and of tensor parallelism in a layer, by hand."""

from __future__ import annotations

import pytest

from dtensor_ring.lab.training.layer_seconds import (
    LayerClock,
    PartSeconds,
    Shard,
    gemm_rate,
    itemsize,
)
from dtensor_ring.lab.training.model_shape import ModelShape, Product
from tests.lab.machines import round_machine

CONFIG = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 32, "vocab_size": 16}
CONFIG |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
# A million FLOPs and bytes per second; TP's links take 1 s, and then 100 B/s.
MACHINE = round_machine()


def _clock(tokens: int = 100, tp: int = 1, dtype: str = "bfloat16", **fields: float) -> LayerClock:
    return LayerClock(round_machine(**fields), Shard(tokens, tp, 2, dtype), 8)


@pytest.mark.parametrize(
    ("clock", "product", "seconds"),
    [
        # 2 * 8 * 32 FLOPs of each token.
        (_clock(), Product(8, 32), 512 * 100 / 1e6),
        (_clock(tp=4), Product(8, 32), 512 * 25 / 1e6),
        (_clock(tp=4), Product(8, 32, divided=False), 512 * 25 / 1e6),
        (_clock(), Product(8, 32, copies=16, active=2), 2 * 512 * 100 / 1e6),
        # With slow memory: 40 numbers of each token and 256 weights, of 2 bytes.
        (_clock(memory_rate=1e3), Product(8, 32), (40 * 100 + 256) * 2 / 1e3),
        (_clock(tp=4, memory_rate=1e3), Product(8, 32), (40 * 25 + 64) * 2 / 1e3),
        # Tokens are divided in place of the weights.
        (_clock(tp=4, memory_rate=1e3), Product(8, 32, divided=False), (1000 + 256) * 2 / 1e3),
        # All experts are read.
        (_clock(1, memory_rate=1e3), Product(8, 32, 16, 2), (80 + 16 * 256) * 2 / 1e3),
    ],
)
def test_a_product_takes_its_flops_or_its_bytes(
    clock: LayerClock, product: Product, seconds: float
) -> None:
    assert clock.product(product) == pytest.approx(seconds)


def test_a_layer() -> None:
    layer = ModelShape.of(CONFIG).layers[0]
    clock = _clock()
    found = clock.layer(layer)
    # Queries, keys, values, output, gate, up and down.
    assert found.gemm == pytest.approx(2 * 8 * (16 + 8 + 3 * 32) * 100 / 1e6)
    # Norms 4 x 8, residuals 6 x 8, rotary 2 x 6 heads of 2, activation 3 x 32.
    assert found.others == pytest.approx((32 + 48 + 24 + 96) * 2 * 100 / 1e6)
    assert found.tp == 0
    assert clock.backward(found) == PartSeconds(2 * found.gemm, 2 * found.others)


def test_tensor_parallelism_gathers_and_reduces_twice() -> None:
    found = _clock(tp=4).layer(ModelShape.of(CONFIG).layers[0])
    # 3 of 4 parts of 100 tokens of 8 numbers of 2 bytes, at 100 B/s after 1 s.
    assert found.tp == pytest.approx(4 * (1 + 1600 * 3 / 4 / 100))


def test_the_loss_has_three_products_and_float32_logits() -> None:
    forward, backward = _clock().head(ModelShape.of(CONFIG))
    product, logits = 2 * 8 * 16 * 100 / 1e6, 2 * 4 * 16 * 100 / 1e6
    assert forward == pytest.approx(product + logits)
    assert backward == pytest.approx(2 * product + logits)


def test_dtypes() -> None:
    assert itemsize("float8_e4m3fn") == 1
    assert gemm_rate(MACHINE, "float16") == 1e6  # as bfloat16
    with pytest.raises(ValueError, match="round has no speed of matrix products for dtype float64"):
        gemm_rate(MACHINE, "float64")
    with pytest.raises(ValueError, match=r"dtype must be one of float8_e4m3fn, .*, got 'int8'"):
        itemsize("int8")
