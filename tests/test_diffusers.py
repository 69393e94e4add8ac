"""Models of diffusers under its own context parallelism, with our attention, and without."""

from __future__ import annotations

import warnings
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.forced import machine_for, taken
from tests.pool import Pool, on_ranks

pytest.importorskip("diffusers")

TEXT, IMAGE = 8, 24


def _model(num_layers: int = 1) -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    sizes = {"in_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16}
    widths = {"joint_attention_dim": 12, "pooled_projection_dim": 12, "axes_dims_rope": (4, 4, 8)}
    model = FluxTransformer2DModel(
        num_layers=num_layers, num_single_layers=num_layers, **sizes, **widths
    )
    return model.double()


def _inputs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    shapes = {"hidden_states": (1, IMAGE, 4), "encoder_hidden_states": (1, TEXT, 12)}
    shapes |= {"pooled_projections": (1, 12), "img_ids": (IMAGE, 3), "txt_ids": (TEXT, 3)}
    found = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    return found | {"timestep": torch.ones(1, dtype=torch.float64)}


def _step(model: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradient of each parameter."""
    out = model(**inputs, return_dict=False)[0]
    (out**2).sum().backward()
    return out.detach(), {name: x.grad for name, x in model.named_parameters()}


def _compared(
    ring: int, ulysses: int, strategy: str | None = None
) -> tuple[float, float, set[str]]:
    """Largest differences of the output and of the gradients, and the strategies."""
    from diffusers import ContextParallelConfig

    from parallel_plans import diffusers

    # With the newest torch, diffusers gathers the output by a function of an old name.
    warnings.filterwarnings("ignore", ".*all_gather_tensor. is deprecated", FutureWarning)
    expected, grads = _step(_model(), _inputs())
    how: Any = {"strategy": strategy, "machine": machine_for("ulysses") if strategy else None}
    diffusers.use_ring_attention(kernel="reference", **how)
    diffusers.use_ring_attention(kernel="reference", **how)  # twice is as good as once
    model = _model()
    # It divides by the number of accelerators, which is none on a CPU.
    with patch.object(torch.accelerator, "device_count", lambda: 1):
        config = ContextParallelConfig(ring_degree=ring, ulysses_degree=ulysses)
        model.enable_parallelism(config=config)
    try:
        with taken() as calls:
            out, found = _step(model, _inputs())
    finally:
        diffusers.use_stock_attention()
    for x in found.values():
        dist.all_reduce(x)
    off = max(float((found[name] - x).abs().max()) for name, x in grads.items())
    assert len(calls) == 4, "two layers, forward and backward"
    return float((out - expected).abs().max()), off, {x for _, x, _ in calls}


@pytest.mark.parametrize(
    ("ring", "ulysses", "strategy", "expected"),
    [
        (2, 1, None, "ring"),
        (2, 2, None, "ulysses:2"),
        pytest.param(1, 2, None, "ulysses:2", marks=pytest.mark.repeats),
        (2, 1, "auto", "ulysses:2"),
    ],
)
def test_forward_and_backward_are_those_of_one_process(
    pool: Pool, ring: int, ulysses: int, strategy: str | None, expected: str
) -> None:
    for out, grad, strategies in pool.run(ring * ulysses, _compared, ring, ulysses, strategy):
        assert out < 1e-12
        assert grad < 1e-11
        assert strategies == {expected}


def test_without_parallelism_the_stock_attention_runs() -> None:
    from parallel_plans.diffusers import use_ring_attention, use_stock_attention

    expected, _ = _step(_model(), _inputs())
    use_ring_attention()
    try:
        out, _ = _step(_model(), _inputs())
    finally:
        use_stock_attention()
    assert torch.equal(out, expected)


@pytest.mark.parametrize("given", [{"is_causal": True}, {"dropout_p": 0.1}, {"return_lse": True}])
def test_what_a_ring_cannot_do_is_said(given: dict[str, Any]) -> None:
    from types import SimpleNamespace

    from parallel_plans.diffusers import RingBackend

    config = SimpleNamespace(context_parallel_config=SimpleNamespace())
    x = torch.randn(1, 4, 2, 8)
    with pytest.raises(ValueError, match=next(iter(given))):
        RingBackend(lambda *_: None, None, None)(x, x, x, **given, _parallel_config=config)


def qwen_image() -> Any:
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    sizes = {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2}
    model = QwenImageTransformer2DModel(
        in_channels=4, out_channels=4, joint_attention_dim=12, axes_dims_rope=(4, 6, 6), **sizes
    )
    return model.double()


@on_ranks(2)
def test_a_mask_that_hides_nothing_is_none() -> None:
    """Of the text, with which Qwen-Image masks the keys of its joint attention."""
    from diffusers import ContextParallelConfig

    from parallel_plans import diffusers

    warnings.filterwarnings("ignore", ".*all_gather_tensor. is deprecated", FutureWarning)
    torch.manual_seed(1)
    given: dict[str, Any] = {
        "hidden_states": torch.randn(1, IMAGE, 4, dtype=torch.float64),
        "encoder_hidden_states": torch.randn(1, TEXT, 12, dtype=torch.float64),
        "timestep": torch.ones(1, dtype=torch.float64),
        "img_shapes": [[(1, 4, 6)]],
        "return_dict": False,
    }
    ones = torch.ones(1, TEXT, dtype=torch.bool)
    padded = ones.index_fill(1, torch.tensor([TEXT - 1]), False)  # on the last rank only
    with torch.no_grad():
        expected = qwen_image()(**given)[0]
        model = qwen_image()
        diffusers.use_ring_attention(kernel="reference")
        try:
            with patch.object(torch.accelerator, "device_count", lambda: 1):
                model.enable_parallelism(config=ContextParallelConfig(ring_degree=2))
            for mask in (None, ones):
                found = model(**given, encoder_hidden_states_mask=mask)[0]
                torch.testing.assert_close(found, expected)
            with pytest.raises(
                ValueError, match=r"no attn_mask that hides keys, .* hides 1 on all"
            ):
                model(**given, encoder_hidden_states_mask=padded)
        finally:
            diffusers.use_stock_attention()
