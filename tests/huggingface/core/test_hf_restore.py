"""A model whose plan was taken off is the one that it was."""

from __future__ import annotations

import io
import pickle
from copy import deepcopy
from functools import wraps
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from parallel_plans.huggingface import restore_model, stock_model
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.pool import Pool, on_ranks

TOKENS = torch.arange(2, 20).unsqueeze(0) % VOCABULARY
CASES = {
    "head, generation": ("Gemma 2", ""),
    "rotary embeddings": ("Phi-3, longrope", ""),
    "classes": ("Llama", "ForSequenceClassification"),
    "an encoder": ("RoBERTa", ""),
}


def state(model: nn.Module) -> dict[str, Any]:
    """All that modules have, by identity, and what their configs say."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        found[f"{name} class"] = type(module)
        for key, x in vars(module).items():
            # Dicts may change inside: their items count.
            found[f"{name} {key}"] = (
                [(k, id(y)) for k, y in x.items()] if type(x) is dict else id(x)
            )
        if hasattr(module, "config"):
            found[f"{name} config says"] = module.config.to_dict() | {
                "attention": module.config._attn_implementation
            }
    return found


def logits_of(model: Any) -> Tensor:
    with torch.no_grad():
        logits = model(input_ids=TOKENS, use_cache=False).logits
    return logits.full_tensor() if isinstance(logits, torch.distributed.tensor.DTensor) else logits


def restored(family: str, head: str) -> None:
    model = small_model(family, head)
    expected = logits_of(model)
    before = state(model)
    options = {"unshard_outputs": True, "mlp_tile": 4, "offload": True}
    under_plan(model, **options)
    assert state(model) != before
    sharded = logits_of(model)
    copied = deepcopy(model)
    with stock_model(model):
        assert torch.equal(logits_of(model), expected)
    assert torch.equal(logits_of(model), sharded)
    restore_model(model)
    assert state(model) == before
    assert torch.equal(logits_of(model), expected)
    restore_model(copied)
    assert torch.equal(logits_of(copied), expected)
    assert state(copied).keys() == before.keys()
    assert torch.equal(logits_of(under_plan(model, **options)), sharded)


@pytest.mark.parametrize("case", CASES)
def test_is_as_before(pool: Pool, case: str) -> None:
    pool.run(2, restored, *CASES[case])


@on_ranks(2)
def test_changed_config() -> None:
    """What a user changes in the config holds with the plan, without it, and after it."""
    model, stock = small_model("Gemma 2"), small_model("Gemma 2")
    under_plan(model, unshard_outputs=True)
    for cap in (2.0, 5.0):
        before = logits_of(stock)
        model.config.final_logit_softcapping = stock.config.final_logit_softcapping = cap
        assert not torch.equal(logits_of(stock), before)
        torch.testing.assert_close(logits_of(model), logits_of(stock))
        with stock_model(model):
            assert torch.equal(logits_of(model), logits_of(stock))
    with stock_model(model):
        model.config.final_logit_softcapping = stock.config.final_logit_softcapping = 3.0
    torch.testing.assert_close(logits_of(model), logits_of(stock))
    model.config.final_logit_softcapping = stock.config.final_logit_softcapping = 7.0
    restore_model(model)
    assert torch.equal(logits_of(model), logits_of(stock))


@on_ranks(1)
def test_refusals() -> None:
    model = small_model("Llama")
    with pytest.raises(ValueError, match="LlamaForCausalLM is under no context_parallel_plan"):
        restore_model(model)
    before = state(model)
    hook = model.model.embed_tokens.register_forward_hook(lambda module, args, x: x.cumsum(1))
    with pytest.raises(ValueError, match="depends on tokens"):
        under_plan(model)
    hook.remove()
    assert state(model) == before, "a plan that was refused leaves no trace"
    plain = under_plan(model).forward

    @wraps(type(model).forward)
    def forward(self: Any, **kwargs: Any) -> Any:
        return plain(**kwargs)

    forward.__module__ = "trl"
    model.forward = MethodType(forward, model)
    with pytest.raises(ValueError, match=r"trl\..*forward was put over the plan's forward"):
        restore_model(model)
    model.forward = plain
    sharded: Any = fully_shard(deepcopy(model), mesh=DeviceMesh("cpu", [0]))
    with pytest.raises(ValueError, match="fully_shard was applied over the plan"):
        restore_model(sharded)


@pytest.mark.parametrize("family", ["Llama", "Jamba"])
@on_ranks(1)
def test_saved(family: str) -> None:
    """Pickle comes to the plan before what transformers has put into layers."""
    model = under_plan(small_model(family))
    for save in (pickle.dumps, lambda x: torch.save(x, io.BytesIO())):
        with pytest.raises(TypeError, match=r"state_dict\(\) .* or restore_model\(model\) before"):
            save(model)
    if family == "Llama":
        restore_model(model)
        assert torch.equal(logits_of(pickle.loads(pickle.dumps(model))), logits_of(model))


@on_ranks(1)
def test_parts() -> None:
    """A plan on a part, in whose config the outer model has set the ring."""
    model = small_model("Gemma 3")
    under_plan(model.model, unshard_outputs=True)
    model.config._attn_implementation = "ring"  # as docs/huggingface.md says of images in text
    with stock_model(model):
        assert model.config._attn_implementation == "eager"
    assert model.config._attn_implementation == "ring"
    restore_model(model)
    assert model.config._attn_implementation == "eager"
    assert logits_of(model).isfinite().all()
