"""The plan makes the loss of shards, so the model's own has to be the cross-entropy."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from transformers import LlamaForCausalLM

from parallel_plans.huggingface.losses.loss import other_loss
from tests.families import FAMILIES, small_model
from tests.huggingface.planned import under_plan
from tests.pool import on_ranks


def focal(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return ((1 - (-losses).exp()) ** 2 * losses).mean()


class ShiftsByItself(LlamaForCausalLM):
    """As code from before transformers had a loss function does."""

    def forward(self, input_ids: Any = None, labels: Any = None, **more: Any) -> Any:
        output = super().forward(input_ids, **more | {"shift_labels": None})
        if labels is not None:
            output.loss = F.cross_entropy(output.logits[0, :-1], labels[0, 1:])
        return output


def with_loss(family: str, function: Any) -> Any:
    model = small_model(family)
    model.loss_function = function
    return model


def with_own_shift() -> Any:
    model = small_model("Llama")
    model.__class__ = ShiftsByItself
    return model


def built(name: str, **options: Any) -> Any:
    """A model of transformers, small, by the name of its class."""
    family = name.removesuffix("ForTokenClassification").removesuffix("LMHeadModel")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
    config = getattr(transformers, f"{family}Config")(**sizes | options)
    return getattr(transformers, name)(config)


SERVED: dict[str, Callable[[], Any]] = {
    **{family: partial(small_model, family) for family in FAMILIES},
    "in bfloat16": lambda: small_model("Llama").bfloat16(),
    "one label": lambda: built("LlamaForTokenClassification", intermediate_size=8, num_labels=1),
    "BERT that predicts": lambda: built("BertLMHeadModel", intermediate_size=8, is_decoder=True),
    "GPT-2": lambda: built("GPT2LMHeadModel", bos_token_id=0, eos_token_id=0),
}


@pytest.mark.parametrize("name", SERVED)
def test_losses_of_transformers(name: str) -> None:
    model = SERVED[name]().train()
    assert other_loss(model) is None
    assert all(module.training for module in model.modules())


OTHERS: dict[str, tuple[Callable[[], Any], str]] = {
    "focal": (lambda: with_loss("Llama", focal), "of a few tokens is .* their cross-entropy is"),
    "focal, masked": (lambda: with_loss("ModernBERT", focal), "of a few tokens is"),
    "own shift": (with_own_shift, "of a few tokens is"),
    "no keywords": (
        lambda: with_loss("Llama", lambda logits, labels, vocab_size: logits.sum()),
        "takes no labels that are shifted already",
    ),
    "none": (lambda: with_loss("Llama", lambda **_: None), "takes no labels that are shifted"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_losses(name: str) -> None:
    make, reason = OTHERS[name]
    assert re.search(reason, other_loss(make()) or "")


def test_weights_that_are_not_loaded_yet() -> None:
    model = small_model("Llama")
    model.lm_head.weight.data.fill_(torch.nan)
    assert other_loss(model) is None


@on_ranks(1)
def test_labels_for_other_losses_are_refused() -> None:
    tokens = torch.arange(8).unsqueeze(0)
    before, later = with_loss("Llama", focal), small_model("Llama")
    for model, reason in ((before, "its loss of a few tokens"), (later, "was set after the plan")):
        under_plan(model)
        model.loss_function = focal
        with pytest.raises(ValueError, match=f"LlamaForCausalLM cannot take labels .*: .*{reason}"):
            model(input_ids=tokens, labels=tokens)
        assert model(input_ids=tokens).logits.shape[:2] == (1, 8)
