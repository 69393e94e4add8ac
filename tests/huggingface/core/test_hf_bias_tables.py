"""What attention gets beside its mask: a bias by distance, what a block passes on, or nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_plans.huggingface import restore_model
from parallel_plans.huggingface.core.bias_tables import bias_modules, making_tables, takes_table
from parallel_plans.huggingface.core.local_attention import keeping_local_attention
from parallel_plans.huggingface.core.passed_on import deaf_attention
from tests.dense import largest
from tests.families import HYBRIDS, VOCABULARY, in_dtype, small_model
from tests.huggingface.planned import all_ranks, gradient_errors, under_plan
from tests.pool import on_ranks
from tests.results import results_of

FAMILIES = ("Inkling, scaled", "Inkling 2")
ALL_EXPERTS = {"num_experts_per_tok": 4}
"""With fewer, rounding would choose others."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_has_what_pairs_look_up(family: str) -> None:
    """By the module's own code, for tokens that it sees at once."""
    model = small_model(family)
    given: dict[nn.Module, tuple[Any, ...]] = {}
    pairs: dict[nn.Module, Tensor] = {}
    tables: dict[nn.Module, Tensor] = {}
    modules = bias_modules(model)
    assert len(modules) == model.config.num_hidden_layers

    def keep(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        given[module], pairs[module] = args, out

    hooks = [module.register_forward_hook(keep) for module in modules]
    with torch.no_grad():
        model(torch.randint(2, VOCABULARY, (2, 20)), use_cache=False)
        for hook in hooks:
            hook.remove()
        with making_tables(model):
            tables = {module: module(*args) for module, args in given.items()}
            assert any(takes_table(x) for x in model.modules())
    assert not any(takes_table(x) for x in model.modules())
    lags = torch.arange(20).unsqueeze(1) - torch.arange(20)
    for module, table in tables.items():
        assert table.shape == (2, 4, 20, module.rel_extent)
        assert pairs[module].any()
        for lag in range(20):
            wanted = table[..., lag] if lag < module.rel_extent else torch.zeros(())
            found = pairs[module][..., lags == lag]
            torch.testing.assert_close(found, wanted.broadcast_to(2, 4, 20)[..., lag:])


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_in_bfloat16_as_exact_as_the_stock_model(family: str) -> None:
    """Of the loss and each gradient, under the plan and of the stock model, of one in float32."""
    mesh = all_ranks()
    tokens = torch.randint(2, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(1))
    batch, found = {"input_ids": tokens, "labels": tokens}, []
    cases = (torch.float32, False), (torch.bfloat16, True), (torch.bfloat16, False)
    for dtype, is_planned in cases:
        model = in_dtype(small_model(family, **ALL_EXPERTS), dtype)
        if is_planned:
            under_plan(model, "zigzag")
        loss, grads = results_of(model, batch)
        grad = torch.cat([x.float().flatten() for x in grads.values()])
        if is_planned:
            dist.all_reduce(grad.div_(mesh.size()))
        found.append((loss.float().view(1), grad))
    exact, *others = found
    ours, stock = (
        [((x - y).norm() / y.norm()).item() for x, y in zip(other, exact, strict=True)]
        for other in others
    )
    found = [*zip(ours, stock, strict=True)]
    for ours, stock in found:
        assert ours < 1.5 * stock + 1e-3, found


class OverTokens(nn.Module):
    """An attention without mask and keywords, along the sequence."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.config, self.num_key_value_groups = inner, inner.config, 1

    def forward(self, block_states: Tensor, partial_block_states: Tensor) -> Any:
        from transformers.models.inkling2.modeling_inkling2 import (
            ALL_ATTENTION_FUNCTIONS,
            eager_attention_forward,
        )

        x = partial_block_states.unsqueeze(1).float()
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        return attend(self, x, x, x, None, scaling=1.0)[0].unbind(2)


@pytest.mark.skipif("Inkling 2, loop" not in HYBRIDS, reason="since transformers 5.24")
@on_ranks(1)
def test_an_attention_without_keywords_stays_within_a_token() -> None:
    """It keeps its own function; one along the sequence is refused."""
    model = small_model("Inkling 2")
    residual = model.model.layers[0].mlp_input
    own = residual.config
    with keeping_local_attention(model):
        assert residual.config is not own
        assert residual.config._attn_implementation == "eager"
        assert model.model.layers[0].self_attn.config is own
    assert residual.config is own
    under_plan(model)
    assert model.config._attn_implementation == "ring"
    assert residual.config._attn_implementation == "eager"
    restore_model(model)
    assert residual.config is own
    model.model.layers[0].mlp_input = OverTokens(residual)
    with pytest.raises(ValueError, match=r"the output of .* depends on tokens that a rank does"):
        under_plan(model)


def test_blocks_are_found_by_their_code() -> None:
    assert not deaf_attention(small_model("Llama"))
    model = small_model("Nemotron")
    layers = model.model.layers
    assert deaf_attention(model) == [(layer, layer.self_attn) for layer in layers]


def _models(num_layers: int = 2) -> tuple[Any, Any]:
    """A model under its plan, and the stock model."""
    model, stock = (small_model("Nemotron", num_hidden_layers=num_layers) for _ in range(2))
    return under_plan(model, "zigzag"), stock


@on_ranks(2)
def test_trains_as_one_process() -> None:
    """Two batches before one backward, checkpointed: each block has what its own batch gave it."""
    model, stock = _models()
    tokens = torch.randint(2, VOCABULARY, (2, 21), generator=torch.Generator().manual_seed(1))
    packed = torch.cat([torch.arange(9), torch.arange(12)]).expand(2, -1)
    batches = ({"input_ids": tokens}, {"input_ids": tokens.flip(1), "position_ids": packed})
    for each in (model, stock):
        each.train()
        each.activation_checkpointing_enable()
        losses = [
            each(**batch, labels=batch["input_ids"], use_cache=False).loss for batch in batches
        ]
        (losses[0] + 2 * losses[1]).backward()
    assert largest(gradient_errors(model, stock)) < 1e-4
    restore_model(model)
    with torch.no_grad():
        again = model(input_ids=tokens, labels=tokens).loss
        torch.testing.assert_close(again, stock(input_ids=tokens, labels=tokens).loss)


@on_ranks(2)
def test_compiled_in_one_graph() -> None:
    model, stock = _models(1)
    tokens = torch.randint(2, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": tokens, "labels": tokens}
    loss = torch.compile(model, backend="aot_eager", fullgraph=True)(**given).loss
    loss.backward()
    expected = stock(**given).loss
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert largest(gradient_errors(model, stock)) < 1e-5
