"""Heads that make the loss of their tokens: that of the stock model, without its logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from parallel_plans.huggingface.losses.loss import LogitsTransform, find_logits_transform, loss_head
from tests.dense import largest
from tests.families import FAMILIES, SMALL, VOCABULARY, small_model
from tests.huggingface.planned import gradient_errors, relative, shard_weights, under_plan
from tests.pool import on_ranks

SEQ_LEN, STEPS = 23, 4


class AddsBehindTheHead(LlamaForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits + torch.arange(VOCABULARY).to(output.logits)
        return output


def with_bias_behind() -> Any:
    model = small_model("Llama")
    model.__class__ = AddsBehindTheHead
    return model


def cohere(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.CohereConfig(**SMALL | {"logit_scale": 0.3} | changes)
    return transformers.CohereForCausalLM(config)


MODELS: dict[str, tuple[Callable[..., Any], LogitsTransform | None]] = {
    **{family: (partial(small_model, family), LogitsTransform()) for family in FAMILIES},
    "Gemma 2": (
        partial(small_model, "Gemma 2", final_logit_softcapping=2.0),
        LogitsTransform(1.0, 2.0),
    ),
    "Gemma 3, cap": (
        partial(small_model, "Gemma 3", final_logit_softcapping=30.0),
        LogitsTransform(1.0, 30),
    ),
    "Granite": (partial(small_model, "Granite", logits_scaling=3.0), LogitsTransform(1 / 3)),
    "Cohere": (cohere, LogitsTransform(0.3)),
    "Llama, tied": (partial(small_model, "Llama", tie_word_embeddings=True), LogitsTransform()),
    "Granite, bfloat16": (
        lambda: small_model("Granite", logits_scaling=3.0).bfloat16(),
        LogitsTransform(1 / 3),
    ),
}


def test_logits_transforms() -> None:
    for name, (make, expected) in MODELS.items():
        assert find_logits_transform(make()) == pytest.approx(expected, rel=1e-6), name


def hooked() -> Any:
    model = small_model("Llama")
    model.lm_head.register_forward_hook(lambda module, args, x: 2 * x)
    return model


OTHERS: dict[str, Callable[[], Any]] = {
    "bias behind": with_bias_behind,
    "hook": hooked,
    "parametrization": lambda: parametrized(small_model("Llama")),
}


def test_other_transforms() -> None:
    for name, make in OTHERS.items():
        assert find_logits_transform(make()) is None, name


def parametrized(model: Any) -> Any:
    nn.utils.parametrizations.spectral_norm(model.lm_head)
    return model


def batches() -> list[dict[str, Tensor]]:
    """With labels nearly everywhere, and on the first rank only."""
    torch.manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (2, SEQ_LEN))
    some, few = tokens.clone(), torch.full_like(tokens, -100)
    some[0, 5:9] = -100
    few[:, 1:4] = tokens[:, 1:4]
    return [{"input_ids": tokens, "labels": x} for x in (some, few)]


@pytest.mark.parametrize("name", [x for x in MODELS if "bfloat16" not in x])
@on_ranks(2)
def test_loss_equals_the_stock_model(name: str) -> None:
    make = MODELS[name][0]
    model, stock = under_plan(make(), "contiguous"), make()
    assert loss_head(model) is not None
    errors = []
    for batch in batches():
        output, expected = model(**batch), stock(**batch, use_cache=False)
        assert output.logits is None
        for each in (output, expected):
            each.loss.backward()
        errors.append(relative(output.loss, expected.loss))
        errors += gradient_errors(model, stock)
    asked = model(**batches()[0], output_logits=True)
    assert asked.logits.shape[::2] == (2, VOCABULARY)
    assert torch.allclose(asked.loss, model(**batches()[0]).loss, rtol=1e-6)
    assert largest(errors) < 1e-5, errors


def another_head(model: Any) -> Any:
    model.set_output_embeddings(nn.Linear(16, VOCABULARY))
    return model


def wrapped_head(model: Any) -> Any:
    """In a module that has no weight, as those have that cast its logits."""
    model.set_output_embeddings(nn.Sequential(model.lm_head, nn.Tanh()))
    return model


@on_ranks(1)
def test_heads_that_change_after_the_plan() -> None:
    """What was put into the head or around it after the plan counts, too."""
    batch = batches()[0]
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # asked by peft
    adapters = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
    changes: dict[str, Callable[[Any], Any]] = {
        "hook": lambda x: x.lm_head.register_forward_hook(lambda module, args, y: 2 * y) and x,
        "hook of no module": lambda x: (
            x.lm_head.register_forward_hook(eval("lambda module, args, y: 2 * y", {})) and x
        ),
        "hook before": lambda x: (
            x.lm_head.register_forward_pre_hook(lambda module, args: (2 * args[0],)) and x
        ),
        "parametrization": parametrized,
        "adapter": lambda x: get_peft_model(x, adapters),
        "another head": another_head,
        "modules around it": wrapped_head,
    }
    for change in changes.values():
        losses = []
        for is_ring in (True, False):
            model = small_model("Llama")
            if is_ring:
                under_plan(model)
            torch.manual_seed(2)
            output = change(model)(**batch)
            assert is_ring == (output.logits is None)
            losses.append(output.loss)
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    model = under_plan(small_model("Llama"))
    assert loss_head(model) is model.lm_head
    model.lm_head.register_full_backward_hook(lambda *_: None)
    assert loss_head(model) is None, "the hook would see gradients of losses"


@on_ranks(2)
def test_steps_of_a_head_in_a_group_of_its_own() -> None:
    model, stock = (small_model("Granite", logits_scaling=3.0).train() for _ in range(2))
    under_plan(model)
    shard_weights(model, [*model.model.layers, model.lm_head])
    assert loss_head(model) is model.lm_head
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.05) for x in (model, stock)]
    differences = []
    for _ in range(STEPS):
        losses = [x(**batches()[0]).loss for x in (model, stock)]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        differences.append(abs(losses[0].item() - losses[1].item()))
    assert len(differences) == STEPS
    assert largest(differences) < 1e-5, differences


CHANGED: dict[str, Callable[[Any], None]] = {
    "Gemma 2": lambda model: setattr(model.config, "final_logit_softcapping", None),
    "Gemma 3, cap": lambda model: setattr(model.config, "final_logit_softcapping", 3.0),
    "Granite": lambda model: setattr(model.config, "logits_scaling", 0.5),
    "Cohere": lambda model: setattr(model, "logit_scale", 2.0),
}
"""What a user changes after the plan, where the head of the plan knew another number."""


@on_ranks(1)
def test_numbers_changed_after_the_plan() -> None:
    for name, change in CHANGED.items():
        model, stock = (MODELS[name][0](num_hidden_layers=1) for _ in range(2))
        under_plan(model, "contiguous")
        with TemporaryDirectory() as folder:  # which writes into the config
            model.save_pretrained(folder)
        assert loss_head(model) is not None
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        calls = model, compiled if name == "Gemma 2" else model
        for is_changed in (False, True):
            for call in calls:
                ours, expected = call(**batches()[0]).loss, stock(**batches()[0]).loss
                assert relative(ours, expected) < 1e-5, (name, is_changed)
            for each in (model, stock):
                change(each)
