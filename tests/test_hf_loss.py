"""The plan makes the loss of shards, so the model's own has to be the cross-entropy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from transformers import LlamaForCausalLM

from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.huggingface.loss import check_loss
from tests.families import FAMILIES, small_model
from tests.pool import Pool


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


def with_focal_loss(family: str) -> Any:
    model = small_model(family)
    model.loss_function = focal
    return model


def with_own_shift() -> Any:
    model = small_model("Llama")
    model.__class__ = ShiftsByItself
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str) -> None:
    model = small_model(family).train()
    check_loss(model)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    "make",
    [lambda: with_focal_loss("Llama"), lambda: with_focal_loss("ModernBERT"), with_own_shift],
)
def test_other_losses_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="its loss is not the cross-entropy of tokens and labels"):
        check_loss(make())


def test_a_loss_that_is_set_later(pool: Pool) -> None:
    pool.run(1, _check_later)


def _check_later() -> None:
    model, tokens = small_model("Llama"), torch.arange(8).unsqueeze(0)
    mesh = init_device_mesh("cpu", (1,))
    parallelize_module(model, mesh, context_parallel_plan(model))
    model.loss_function = focal
    with pytest.raises(ValueError, match="loss_function was set after the plan"):
        model(input_ids=tokens, labels=tokens)
    assert model(input_ids=tokens).logits.shape[:2] == (1, 8)
