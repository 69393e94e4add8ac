"""Router logits and load-balancing losses of all ranks are those of one process."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import MixtralForCausalLM

from dtensor_ring import unshard_sequence
from parallel_plans.huggingface.losses.loss import other_balance
from tests.dense import largest
from tests.families import FAMILIES, small_model
from tests.huggingface.planned import gradient_errors, under_plan
from tests.huggingface.test_families import SEQ_LEN, batches
from tests.huggingface.vision.test_images import planned
from tests.multimodal import batch_of
from tests.pool import on_ranks

ASKED = {"output_router_logits": True, "use_cache": False}
NOT_ASKED = {"output_router_logits": False}


def whole(x: Tensor) -> Tensor:
    """Of router logits that were sharded, as the model gives them."""
    if isinstance(x, DTensor):
        return unshard_sequence(x, 1)[:, :SEQ_LEN].flatten(0, 1)
    return x


@pytest.mark.parametrize(
    ("unshards", "compiled"),
    # Compiled models have router outputs in test_families_compiled, too.
    [(False, False), (True, False), pytest.param(True, True, marks=pytest.mark.repeats)],
)
@on_ranks(2)
def test_router_outputs_equal_one_process(unshards: bool, compiled: bool) -> None:
    """Of losses, router logits and the gradients of routers, asked for by each call."""
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    changes = {"output_router_logits": compiled, "num_hidden_layers": 1 if compiled else 2}
    models = [small_model("Mixtral, router loss", **changes) for _ in range(2)]
    ring, stock = models
    under_plan(ring, unshard_outputs=unshards)
    if compiled:
        ring.compile(backend="aot_eager", fullgraph=True)
    errors: list[float] = []
    for name in ("plain", "padded left")[compiled:]:  # each is another graph
        batch = batches()[name] | ASKED
        ours, theirs = outputs = [model(**batch) for model in models]
        errors += [(getattr(ours, x) - getattr(theirs, x)).abs() for x in ("loss", "aux_loss")]
        is_token = batch.get("attention_mask", torch.ones(2, SEQ_LEN)).bool().flatten()
        for mine, expected in zip(ours.router_logits, theirs.router_logits, strict=True):
            assert mine.ndim == (2 if unshards else 3)
            errors.append((whole(mine) - expected)[is_token].abs().max())
        for output in outputs:
            (output.loss + 2 * output.aux_loss).backward()
    assert largest(gradient_errors(ring, stock)) < 1e-5
    ours, theirs = (x(**batches()["plain"] | ASKED | NOT_ASKED) for x in models)
    assert ours.router_logits is theirs.router_logits is None
    errors = [error.item() for error in [*errors, (ours.loss - theirs.loss).abs()]]
    assert largest(errors) < 1e-5, errors


class DoubledForCausalLM(MixtralForCausalLM):
    """Another load-balancing loss."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        if output.aux_loss is not None:
            output.aux_loss = 2 * output.aux_loss
        return output


@on_ranks(1)
def test_base_models_and_other_losses() -> None:
    model, stock = (small_model("Mixtral, router loss").model for _ in range(2))
    under_plan(model, unshard_outputs=True)
    ours, theirs = (x(batches()["plain"]["input_ids"]).router_logits for x in (model, stock))
    torch.testing.assert_close(ours, theirs)
    other: Any = small_model("Mixtral, router loss")
    other.__class__ = DoubledForCausalLM
    under_plan(other)
    with pytest.raises(
        ValueError, match=r"Doubled.* cannot take output_router_logits=True .* Switch"
    ):
        other(**batches()["plain"])
    assert other(**batches()["plain"], output_router_logits=False).loss.isfinite()


@pytest.mark.parametrize("family", FAMILIES)
def test_load_balancing_losses_of_transformers(family: str) -> None:
    assert other_balance(small_model(family)) is None


@on_ranks(2)
def test_refused_with_images() -> None:
    model, batch = planned("Llama 4"), batch_of("Llama 4", "several images")
    refused = "Llama4.* cannot take output_router_logits=True .* outer model .* leave"
    loss = model(**batch).loss.detach()
    with pytest.raises(ValueError, match=refused):
        model(**batch, output_router_logits=True)
    text: Any = model.config.get_text_config()
    text.output_router_logits = True
    with pytest.raises(ValueError, match=refused):
        model(**batch)
    text.output_router_logits = False
    assert torch.equal(model(**batch).loss, loss)
