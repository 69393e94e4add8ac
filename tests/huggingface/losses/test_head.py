"""Heads that make the loss of their tokens: that of the stock model, without its logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from transformers import LlamaForCausalLM

from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.huggingface.losses.loss import LogitsTransform, find_logits_transform, loss_head
from tests.dense import largest
from tests.families import FAMILIES, SMALL, VOCABULARY, small_model
from tests.pool import Pool

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


@pytest.mark.parametrize("name", MODELS)
def test_logits_transforms(name: str) -> None:
    make, expected = MODELS[name]
    assert find_logits_transform(make()) == pytest.approx(expected, rel=1e-6)


def hooked() -> Any:
    model = small_model("Llama")
    model.lm_head.register_forward_hook(lambda module, args, x: 2 * x)
    return model


OTHERS: dict[str, Callable[[], Any]] = {
    "bias behind": with_bias_behind,
    "hook": hooked,
    "parametrization": lambda: parametrized(small_model("Llama")),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_transforms(name: str) -> None:
    assert find_logits_transform(OTHERS[name]()) is None


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


def averaged(x: Any) -> Tensor:
    grad = x.grad.full_tensor() if isinstance(x.grad, DTensor) else x.grad
    if not isinstance(x.grad, DTensor):
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return grad


def errors_of(name: str) -> list[float]:
    """Of the loss, and of all gradients together."""
    mesh, make = init_device_mesh("cpu", (dist.get_world_size(),)), MODELS[name][0]
    model, stock = make(), make()
    parallelize_module(model, mesh, context_parallel_plan(model, "contiguous"))
    assert loss_head(model) is not None
    errors = []
    for batch in batches():
        output, expected = model(**batch), stock(**batch, use_cache=False)
        assert output.logits is None
        for each in (output, expected):
            each.loss.backward()
        errors.append(relative(output.loss.detach(), expected.loss.detach()))
        errors += gradient_errors(model, stock)
    asked = model(**batches()[0], output_logits=True)
    assert asked.logits.shape[::2] == (2, VOCABULARY)
    assert torch.allclose(asked.loss, model(**batches()[0]).loss, rtol=1e-6)
    return errors


def relative(ours: Tensor, theirs: Tensor, scale: float = 0.0) -> float:
    return ((ours - theirs).norm() / theirs.norm().clamp(min=scale)).item()


def gradient_errors(model: Any, stock: Any) -> list[float]:
    pairs = [
        (averaged(ours), theirs.grad)
        for ours, theirs in zip(model.parameters(), stock.parameters(), strict=True)
        if theirs.grad is not None
    ]
    scale = 1e-2 * largest(theirs.norm().item() for _, theirs in pairs)
    found = [relative(ours, theirs, scale) for ours, theirs in pairs]
    model.zero_grad()
    stock.zero_grad()
    return found


@pytest.mark.parametrize("name", [x for x in MODELS if "bfloat16" not in x])
def test_loss_equals_the_stock_model(pool: Pool, name: str) -> None:
    for errors in pool.run(2, errors_of, name):
        assert largest(errors) < 1e-5, errors


def outside_of_the_head() -> None:
    """What was put into the head or around it after the plan counts, too."""
    mesh, batch = init_device_mesh("cpu", (1,)), batches()[0]
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
                parallelize_module(model, mesh, context_parallel_plan(model))
            torch.manual_seed(2)
            output = change(model)(**batch)
            assert is_ring == (output.logits is None)
            losses.append(output.loss)
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
    model = planned(mesh)
    assert loss_head(model) is model.lm_head
    model.lm_head.register_full_backward_hook(lambda *_: None)
    assert loss_head(model) is None, "the hook would see gradients of losses"


def planned(mesh: Any) -> Any:
    model = small_model("Llama")
    return parallelize_module(model, mesh, context_parallel_plan(model))


def another_head(model: Any) -> Any:
    model.set_output_embeddings(nn.Linear(16, VOCABULARY))
    return model


def wrapped_head(model: Any) -> Any:
    """In a module that has no weight, as those have that cast its logits."""
    model.set_output_embeddings(nn.Sequential(model.lm_head, nn.Tanh()))
    return model


def test_heads_that_change_after_the_plan(pool: Pool) -> None:
    pool.run(1, outside_of_the_head)


def train_own_group() -> list[float]:
    """Differences of the losses over some steps; the head is a group of FSDP2 of its own."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model, stock = (small_model("Granite", logits_scaling=3.0).train() for _ in range(2))
    parallelize_module(model, mesh, context_parallel_plan(model))
    for module in (*model.model.layers, model.lm_head, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no means
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
    return differences


def test_steps_of_a_head_in_a_group_of_its_own(pool: Pool) -> None:
    for differences in pool.run(2, train_own_group):
        assert len(differences) == STEPS
        assert largest(differences) < 1e-5, differences


CHANGED: dict[str, Callable[[Any], None]] = {
    "Gemma 2": lambda model: setattr(model.config, "final_logit_softcapping", None),
    "Gemma 3, cap": lambda model: setattr(model.config, "final_logit_softcapping", 3.0),
    "Granite": lambda model: setattr(model.config, "logits_scaling", 0.5),
    "Cohere": lambda model: setattr(model, "logit_scale", 2.0),
}
"""What a user changes after the plan, where the head of the plan knew another number."""


def test_numbers_changed_after_the_plan(pool: Pool) -> None:
    pool.run(1, _check_changed_numbers)


def _check_changed_numbers() -> None:
    mesh = init_device_mesh("cpu", (1,))
    for name, change in CHANGED.items():
        model, stock = (MODELS[name][0](num_hidden_layers=1) for _ in range(2))
        parallelize_module(model, mesh, context_parallel_plan(model, "contiguous"))
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
