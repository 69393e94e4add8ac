"""The plan makes the loss of shards, so the model's own has to be the cross-entropy."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import LlamaForCausalLM, MixtralForCausalLM

from dtensor_ring import unshard_sequence
from parallel_plans.huggingface.losses.loss import other_balance, other_loss
from tests.dense import largest
from tests.families import FAMILIES, small_model
from tests.huggingface.planned import gradient_errors, under_plan
from tests.huggingface.test_families import SEQ_LEN, batches
from tests.huggingface.vision.test_images import planned
from tests.multimodal import batch_of
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


def test_losses_of_transformers() -> None:
    for name, make in SERVED.items():
        model = make().train()
        assert other_loss(model) is None, name
        assert name not in FAMILIES or other_balance(model) is None, name
        assert all(module.training for module in model.modules()), name


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


def test_other_losses() -> None:
    for name, (make, reason) in OTHERS.items():
        assert re.search(reason, other_loss(make()) or ""), name


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


ASKED = {"output_router_logits": True, "use_cache": False}
NOT_ASKED = {"output_router_logits": False}


def whole(x: Tensor) -> Tensor:
    """Of router logits that were sharded, as the model gives them."""
    if isinstance(x, DTensor):
        return unshard_sequence(x, 1)[:, :SEQ_LEN].flatten(0, 1)
    return x


@pytest.mark.parametrize(
    ("unshards", "compiled"),
    # Compiled models have router outputs in test_families, too.
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
