"""Heads that make the loss of their tokens, in tiles: the stock one, without its logits."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from parallel_plans.huggingface.losses import cross_entropy
from parallel_plans.huggingface.losses.cross_entropy import IGNORE_INDEX, projected_cross_entropy
from parallel_plans.huggingface.losses.loss import LogitsTransform, find_logits_transform, loss_head
from tests.dense import largest
from tests.families import FAMILIES, SMALL, VOCABULARY, small_model
from tests.huggingface.planned import gradient_errors, relative, shard_weights, under_plan
from tests.pool import on_ranks
from tests.test_memory import Counted

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


NUM_TOKENS, NUM_ENTRIES, WIDTH = 10, 150, 6


class Case(NamedTuple):
    has_bias: bool = False
    scale: float = 1.0
    softcap: float = 0.0
    tile_bytes: int = 400  # 10 vocabulary entries
    num_tokens: int = NUM_TOKENS
    labels: int | None = None


CASES = {
    "plain": Case(),
    "one tile": Case(tile_bytes=2**20),
    "bias": Case(has_bias=True),
    "scale": Case(scale=-0.7),
    "softcap": Case(softcap=2.0),
    "all": Case(True, 3.0, 2.0),
    "no tokens": Case(True, num_tokens=0),
    "no labels": Case(True, labels=IGNORE_INDEX),
    "the last entry": Case(labels=NUM_ENTRIES - 1),
}


def tensors(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Hidden states, weight and bias; labels, one of them missing."""
    torch.manual_seed(0)
    shapes = [(case.num_tokens, WIDTH), (NUM_ENTRIES, WIDTH), (NUM_ENTRIES,)][: 2 + case.has_bias]
    labels = torch.randint(NUM_ENTRIES, (case.num_tokens,))
    labels[3:4] = IGNORE_INDEX
    if case.labels is not None:
        labels.fill_(case.labels)
    return [torch.randn(x, dtype=dtype, requires_grad=True) for x in shapes], labels


def dense(inputs: list[Tensor], labels: Tensor, case: Case) -> Tensor:
    logits = F.linear(*inputs) * case.scale
    if case.softcap:
        logits = (logits / case.softcap).tanh() * case.softcap
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="none")


def tiled(inputs: list[Tensor], labels: Tensor, case: Case) -> Tensor:
    hidden, weight, *bias = inputs
    scaling = case.scale, case.softcap
    return projected_cross_entropy(hidden, weight, bias[0] if bias else None, labels, *scaling)


def results(losses: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    grad = torch.linspace(-1, 2, len(losses)).to(losses)
    return [losses.detach(), *torch.autograd.grad(losses, inputs, grad)]


def test_equals_whole_logits() -> None:
    for name, case in CASES.items():
        inputs, labels = tensors(case)
        expected = results(dense(inputs, labels, case), inputs)
        with patch.object(cross_entropy, "TILE_BYTES", case.tile_bytes):
            found = results(tiled(inputs, labels, case), inputs)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_is_no_worse_than_whole_logits(dtype: torch.dtype) -> None:
    """Of the errors against float64: tiles add none."""
    case = CASES["all"]
    inputs, labels = tensors(case, dtype)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = results(dense(exact, labels, case), exact)
    plain = results(dense([x.float() for x in inputs], labels, case), inputs)
    found = results(tiled(inputs, labels, case), inputs)
    assert [x.dtype for x in found] == [torch.float32, *[dtype] * 3]
    for ours, theirs, x in zip(found, plain, expected, strict=True):
        error, other = ((y.double() - x).norm() / x.norm() for y in (ours, theirs))
        assert error <= 2 * other + 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("frozen", range(3))
def test_gradients_that_nobody_needs(frozen: int) -> None:
    case = CASES["all"]
    inputs, labels = tensors(case)
    expected = results(tiled(inputs, labels, case), inputs)[1:]
    inputs[frozen].requires_grad_(False)
    kept = [i for i in range(3) if i != frozen]
    found = results(tiled(inputs, labels, case), [inputs[i] for i in kept])[1:]
    torch.testing.assert_close(found, [expected[i] for i in kept], rtol=0, atol=0)


def test_entries_without_probability() -> None:
    """As a bias of -inf for entries that fill up the vocabulary; whole tiles of them come first."""
    case = CASES["bias"]
    inputs, labels = tensors(case)
    inputs[2].data[:40] = -torch.inf
    labels[labels < 40] = 50
    with patch.object(cross_entropy, "TILE_BYTES", case.tile_bytes):
        found = results(tiled(inputs, labels, case), inputs)
    torch.testing.assert_close(found, results(dense(inputs, labels, case), inputs))


def test_mean_of_no_labels() -> None:
    """0 / 0, whose gradient is infinite: that of tokens without a label is zero all the same."""
    case = CASES["no labels"]
    inputs, labels = tensors(case)
    grads = [
        torch.autograd.grad(losses.sum() / (labels != IGNORE_INDEX).sum(), inputs)
        for losses in (tiled(inputs, labels, case), dense(inputs, labels, case))
    ]
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    assert not torch.cat([x.flatten() for x in grads[0]]).any()


def test_a_second_derivative_is_refused() -> None:
    inputs, labels = tensors(Case())
    loss = tiled(inputs, labels, Case()).square().sum()
    grads = torch.autograd.grad(loss, inputs[:2], create_graph=True)
    with pytest.raises(NotImplementedError, match="differentiable once, not twice: leave create"):
        grads[0].sum().backward()


@pytest.mark.parametrize("label", [NUM_ENTRIES, -1])
def test_labels_out_of_the_vocabulary(label: int) -> None:
    inputs, labels = tensors(Case(labels=label))
    with pytest.raises(RuntimeError, match=r"labels are from 0 to 149, or -100"):
        tiled(inputs, labels, Case())


# It looks for a gradient of tensors that are no leaves.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_registered_as_torch_wants_it() -> None:
    inputs, labels = tensors(Case(has_bias=True))
    op: Any = torch.ops.dtensor_ring.projected_cross_entropy.default
    torch.library.opcheck(op, (*inputs, labels, 3.0, 2.0))


def test_autocast() -> None:
    """The projection runs in its dtype, as a linear layer does."""
    inputs, labels = tensors(Case(), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(tiled(inputs, labels, Case()), inputs)
        expected = results(dense(inputs, labels, Case()), inputs)
    assert [x.dtype for x in found] == [torch.float32] * 3
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert not torch.equal(found[0], results(tiled(inputs, labels, Case()), inputs)[0])


def peak_bytes(num_tokens: int, num_entries: int, width: int, dtype: torch.dtype) -> int:
    """Of forward and backward, beside the gradients; on the meta device, at any size."""
    options: Any = {"dtype": dtype, "device": "meta"}
    weight, hidden = (torch.empty(x, width, **options) for x in (num_entries, num_tokens))
    labels = torch.empty(num_tokens, dtype=torch.int64, device="meta")
    gradients = (num_entries + num_tokens) * width * dtype.itemsize
    with Counted(0) as counted:
        losses, lse = cross_entropy.forward(hidden, weight, None, labels, 1.0, 30.0)
        forward = counted.peak
        needs = [True, True, False]
        cross_entropy.backward(losses, hidden, weight, None, labels, lse, 1.0, 30.0, needs)
    return max(forward, counted.peak - gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1024, 4096])
def test_memory(width: int, dtype: torch.dtype) -> None:
    """Of 16k tokens and 128k vocabulary entries: less than an eighth of the logits in float32."""
    num_tokens, num_entries = 16 * 1024, 128 * 1024
    peak = peak_bytes(num_tokens, num_entries, width, dtype)
    logits = 4 * num_tokens * num_entries
    assert logits / 64 < peak < logits / 8, f"{logits / peak:.1f}"
