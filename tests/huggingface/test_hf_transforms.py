"""`torch.func` over a planned model: the gradients that backward gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad

from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.pool import on_ranks

TOKENS = torch.arange(2, 34).view(2, 16) % VOCABULARY
PACKED = torch.arange(16).repeat(2, 1) % 10  # two documents in each row


@pytest.mark.parametrize(("family", "strategy"), [("Llama", "ulysses"), ("Qwen3.5", None)])
@on_ranks(2)
def test_gradients(family: str, strategy: str | None) -> None:
    model = small_model(family)
    under_plan(model, strategy=strategy)
    batch = {"input_ids": TOKENS, "labels": TOKENS, "position_ids": PACKED}
    model(**batch).loss.backward()
    expected = {name: x.grad for name, x in model.named_parameters()}
    parameters = {name: x.detach() for name, x in model.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return functional_call(model, parameters, (), batch).loss

    found = grad(loss)(parameters)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
