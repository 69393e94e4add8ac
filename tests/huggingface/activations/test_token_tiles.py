"""Modules over tiles of tokens give what they give of all at once, and keep their input only."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtensor_ring.lab.training.footprint import Storages
from parallel_plans.huggingface.activations.kept_for_backward import KeptForBackward
from parallel_plans.huggingface.activations.token_tiles import (
    check_tile,
    join_tiles,
    run_in_tiles,
    tokenwise_modules,
)
from parallel_plans.huggingface.core.modules import language_model_of
from tests.dense import largest
from tests.families import (
    BESIDE_POOLS,
    CHOOSES_BLOCKS,
    CHOOSES_POOLS,
    FAMILIES,
    HYBRIDS,
    SELECTING,
    VOCABULARY,
    small_model,
)

WIDTH, WIDE = 4, 24


class GatedMLP(nn.Module):
    """As in Llama, in float64."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"up": (WIDTH, WIDE), "gate": (WIDTH, WIDE), "down": (WIDE, WIDTH)}
        for name, size in sizes.items():
            setattr(self, name, nn.Linear(*size, bias=False, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class RoutedMLP(GatedMLP):
    """Returns scores of its flat tokens beside its output, and takes weights of them."""

    def forward(self, x: Tensor, *, weights: Tensor, scale: float, mask: None) -> Any:
        scores = self.gate(x.view(-1, WIDTH))
        assert mask is None
        return {"out": super().forward(x) * scale, "scores": scores * weights, "none": None}


class OuterMLP(GatedMLP):
    """Has no entry for each token in one of its inputs."""

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        return super().forward(x) * table.sum()


def both(module: nn.Module, size: int) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    for x in module.parameters():
        nn.init.normal_(x)
    tiled = copy.deepcopy(module)
    run_in_tiles(tiled, "mlp", size)
    return module, tiled


def tensors_of(output: Any) -> list[Tensor]:
    outputs = output.values() if isinstance(output, dict) else [output]
    return [x for x in outputs if x is not None]


@pytest.mark.pairs
@pytest.mark.parametrize("rows", [(1, 7), (2, 5), (3, 1)])
@pytest.mark.parametrize("size", [1, 3, 4, 100])
@pytest.mark.parametrize(
    ("make", "more"),
    [
        (GatedMLP, lambda n: {}),
        (
            RoutedMLP,
            lambda n: {"weights": torch.randn(n, WIDE).double(), "scale": 0.5, "mask": None},
        ),
        (OuterMLP, lambda n: {"table": torch.arange(WIDTH).double()}),
    ],
)
def test_tiles_equal_the_whole(
    make: Callable[[], nn.Module], more: Callable[[int], Any], size: int, rows: tuple[int, int]
) -> None:
    modules, given = both(make(), size), more(rows[0] * rows[1])
    x = torch.randn(*rows, WIDTH, dtype=torch.float64)
    found = []
    for module in modules:
        mine = x.clone().requires_grad_()
        outputs = tensors_of(module(mine, **given))
        sum((y * y).sum() for y in outputs).backward()
        grads = [mine.grad, *(p.grad for p in module.parameters())]
        with torch.no_grad():
            found.append([*outputs, *grads, *tensors_of(module(mine, **given))])
    for whole, tiled in zip(*found, strict=True):
        assert whole.shape == tiled.shape
        torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)


def test_copies_have_weights_of_their_own() -> None:
    _, tiled = both(GatedMLP(), 2)
    other = copy.deepcopy(tiled)
    nn.init.zeros_(other.down.weight)
    x = torch.ones(1, 3, WIDTH, dtype=torch.float64)
    assert other(x).abs().max() == 0 < tiled(x).abs().max()


def test_what_is_kept_and_made() -> None:
    """A tile's tensors at a time, and gradients of parameters without a copy for each tile."""
    num_tokens, size = 1000, 10
    _, tiled = both(GatedMLP(), size)
    x = torch.randn(1, num_tokens, WIDTH, dtype=torch.float64, requires_grad=True)
    row, weights = 8 * WIDTH * num_tokens, 8 * WIDTH * WIDE
    with Storages() as forward:
        out = tiled(x)
    assert forward.alive == row  # the output: its input was there before
    # Outputs of tiles, before they are joined; a tile keeps nothing when it is over.
    assert forward.peak <= 2 * row + 8 * size * (5 * WIDE + WIDTH)
    calls: list[int] = []
    for p in tiled.parameters():
        p.register_post_accumulate_grad_hook(lambda p: calls.append(p.numel()))
    with Storages() as backward:
        out.sum().backward()
    assert calls == 3 * [WIDTH * WIDE]
    # Gradients of the input by tile, then joined; of each weight its sum, and one tile's.
    assert backward.peak <= 2 * row + 4 * weights + 8 * size * (12 * WIDE + 4 * WIDTH)


def test_joined_tiles() -> None:
    first, second = torch.randn(6, 2), torch.randn(6, 2)
    tiles = (*first.split(4), second, *first.split(3))
    for found, whole in zip(join_tiles(tiles, 6), (first, second, first), strict=True):
        assert torch.equal(found, whole)
    assert join_tiles((), 6) == ()


@pytest.mark.parametrize("size", [0, -1, 2.0, True, "4"])
def test_sizes_that_are_none(size: Any) -> None:
    with pytest.raises(ValueError, match=f"mlp_tile is a number of tokens.* got {size}"):
        check_tile(size)


def test_a_forward_that_was_replaced() -> None:
    module = GatedMLP()
    module.forward = module.forward
    with pytest.raises(ValueError, match=r"forward of layers\.0\.mlp .*GatedMLP.*plan before"):
        run_in_tiles(module, "layers.0.mlp", 4)


NORMS = ("input_layernorm", "post_attention_layernorm")
FOUND: dict[str, list[str]] = {
    "Llama": [*NORMS, "mlp"],
    "Qwen3-MoE": [*NORMS, "mlp", "self_attn.q_norm", "self_attn.k_norm"],
    "gpt-oss": [*NORMS, "mlp"],
    # Its norms of queries and keys see heads before tokens.
    "Gemma 3": [*NORMS, "mlp", "pre_feedforward_layernorm", "post_feedforward_layernorm"],
}
"""Of the first layer."""
WITHOUT = ("OPT",)
"""Has fused norms, and the products of its MLPs are modules of the layer."""
DEFAULT = ("Llama", "Qwen3-MoE, router loss", "gpt-oss", "Gemma 3", "Qwen3-Next", "Nemotron-H")
DEFAULT += ("DeepSeek-V3.2", "MiniMax M3", "GLM-5-Next", "DeepSeek-V4")


@pytest.mark.parametrize("family", FOUND)
def test_found_by_what_they_keep(family: str) -> None:
    model = small_model(family)
    before = model.config._attn_implementation
    names = tokenwise_modules(language_model_of(model))
    first = "model.layers.0."
    assert {x.removeprefix(first) for x in names if x.startswith(first)} == set(FOUND[family])
    assert "model.norm" in names
    assert model.config._attn_implementation == before
    assert not any(x._forward_hooks for x in model.modules())


@pytest.mark.parametrize(
    "family",
    [
        *DEFAULT,
        *(
            pytest.param(family, marks=pytest.mark.repeats)
            for family in {
                **FAMILIES,
                **HYBRIDS,
                **SELECTING,
                **CHOOSES_BLOCKS,
                **CHOOSES_POOLS,
                **BESIDE_POOLS,
            }
            if family not in (*DEFAULT, *WITHOUT)
        ),
    ],
)
def test_models_over_tiles(family: str) -> None:
    """Without a mesh: loss and all gradients are those of the model, but for rounding."""
    tokens = torch.arange(2 * 9).view(2, 9) % VOCABULARY
    found: list[list[Any]] = []
    for kept in (KeptForBackward(), KeptForBackward(mlp_tile=5)):
        model = small_model(family)
        kept.install(model)
        batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        loss = model(**batch, labels=tokens, use_cache=False).loss
        loss.backward()
        found.append([loss, *(x.grad for x in model.parameters() if x.grad is not None)])
    scale = max(x.norm().item() for x in found[0])
    errors = [(tiled - whole).norm().item() for whole, tiled in zip(*found, strict=True)]
    assert largest(errors) < 1e-5 * scale, errors


@pytest.mark.parametrize("family", WITHOUT)
def test_none_found(family: str) -> None:
    name = type(small_model(family)).__name__
    with pytest.raises(ValueError, match=rf"mlp_tile=5: no module of {name} .* leave it out"):
        KeptForBackward(mlp_tile=5).install(small_model(family))
