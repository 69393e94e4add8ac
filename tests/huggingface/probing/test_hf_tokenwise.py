"""What is put into a planned model: by token it is right, else it is refused by name.

Such as linear layers that quantise what they get, adapters, and layers of a user.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from parallel_plans.huggingface import stock_model
from tests.families import VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.pool import on_ranks

TOKENS = torch.arange(2, 20).unsqueeze(0) % VOCABULARY
REFUSED = r"{} \({}\) has one scale for all tokens that it gets"


class DynamicLinear(nn.Linear):
    """As of libraries that quantise activations: rounded with one scale for all, or by token."""

    by_token = False

    def forward(self, input: Tensor) -> Tensor:
        size = input.abs().amax(-1, keepdim=True) if self.by_token else input.abs().amax()
        scale = size / 127
        return nn.functional.linear((input / scale).round() * scale, self.weight, self.bias)


class ByToken(DynamicLinear):
    by_token = True


class Rounded(Tensor):
    """As weights of torchao, which round the other factor of a product in their dispatcher."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            scale = args[0].abs().amax() / 127
            return func((args[0] / scale).round() * scale, *args[1:])


def quantised(model: Any, kind: type, names: str = "up_proj") -> Any:
    """The model, whose layers with such names are of that class now."""
    for name, module in model.named_modules():
        if names in name and isinstance(module, nn.Linear):
            module.__class__ = kind
    return model


def with_rounded_weights(model: Any) -> Any:
    layer = model.model.layers[1].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(Rounded), requires_grad=False)
    return model


@on_ranks(2)
def test_scales_of_all_tokens() -> None:
    plain = small_model("Llama").eval()
    expected = plain(TOKENS, labels=TOKENS).loss
    by_token = quantised(under_plan(deepcopy(plain)), ByToken)
    with stock_model(by_token):
        rounded = by_token(TOKENS, labels=TOKENS).loss
    torch.testing.assert_close(by_token(TOKENS, labels=TOKENS).loss, rounded)
    assert rounded != expected
    name = "model.layers.0.mlp.up_proj"
    for head in (False, True):
        ours = under_plan(deepcopy(plain))
        torch.testing.assert_close(ours(TOKENS, labels=TOKENS).loss, expected)
        quantised(ours, DynamicLinear, "lm_head" if head else "up_proj")
        refused = REFUSED.format("lm_head" if head else name, "DynamicLinear")
        for call in (
            lambda x: x(TOKENS, labels=TOKENS),
            lambda x: x(TOKENS),  # a refused call is refused again
            lambda x: x(TOKENS, logits_to_keep=1),
            lambda x: x.generate(TOKENS, max_new_tokens=2),
        ):
            with pytest.raises(ValueError, match=refused):
                call(ours)
        with stock_model(ours):
            ours(TOKENS)
    ours = with_rounded_weights(under_plan(deepcopy(plain)))
    with pytest.raises(ValueError, match=REFUSED.format("model.layers.1.mlp.up_proj", "Linear")):
        ours(TOKENS)
    sharded = fully_shard(quantised(under_plan(small_model("Llama")), DynamicLinear))
    with pytest.raises(ValueError, match=REFUSED.format(name, "FSDPDynamicLinear|DynamicLinear")):
        sharded(TOKENS)


class Around(nn.Module):
    """A layer with something of a user's own after it."""

    def __init__(self, inner: nn.Module, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.then = inner, then

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.then(self.inner(*args, **kwargs))


class ByName(nn.Module):
    """Calls a layer by the name of its argument, with few tokens only."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        out = self.inner(hidden_states=x)
        assert x.shape[1] <= 16
        return out


class Mixes(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.cumsum(1)


def shifted(x: Tensor) -> Tensor:
    return x + nn.functional.pad(x, (0, 0, 1, -1))


MIXING: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: x + x.mean(1, keepdim=True),
    "token before": shifted,
    "positions": lambda x: x + torch.arange(float(x.shape[1])).view(1, -1, 1),
    "number of tokens": lambda x: x * x.shape[1],
}


@on_ranks(2)
def test_layers_that_come_after_the_plan() -> None:
    """Layers, or their forwards, that come after the plan; also of copies and under FSDP2."""
    for name, then in MIXING.items():
        model = under_plan(small_model("Llama"))
        model(TOKENS)
        for part in (model, deepcopy(model), fully_shard(model)):
            part(TOKENS)
            layer = part.model.layers[1]
            mlp, layer.mlp = layer.mlp, Around(layer.mlp, then)
            for _ in range(2):
                with pytest.raises(ValueError, match=r"layers\.1\.mlp \(Around\) was put into"):
                    part(TOKENS)
            layer.mlp = mlp
            if name == "mean":
                plain = mlp.forward
                mlp.forward = lambda x, plain=plain: plain(x).roll(1, 1)
                with pytest.raises(ValueError, match=r"layers\.1\.mlp \(LlamaMLP\) was put into"):
                    part(TOKENS)
                del mlp.forward
                layer.mlp = nn.Sequential(mlp, ByName(Mixes()))
                with pytest.raises(ValueError, match=r"layers\.1\.mlp\.1\.inner \(Mixes\) was put"):
                    part(TOKENS)
                layer.mlp = mlp
            part(TOKENS)


@on_ranks(2)
def test_layers_that_come_after_the_plan_by_token() -> None:
    """These give what the stock model gives with them: by token, or around what mixes tokens."""
    tokens, options = TOKENS[:, :16], {"use_cache": False}
    for kind in ("Llama", "Qwen3.5"):
        model, seen = under_plan(small_model(kind)), list[int]()
        model(tokens)
        for layer in model.model.layers:
            layer.mlp = Around(layer.mlp, torch.tanh)
        if kind == "Qwen3.5":
            model.model.layers[0].linear_attn = Around(
                model.model.layers[0].linear_attn, torch.tanh
            )
        model.model.layers[0] = Around(model.model.layers[0], lambda x: 1.5 * x)
        layer.mlp.register_forward_pre_hook(partial(record_tokens, seen))
        with stock_model(model):
            expected = model(tokens, labels=tokens, **options).loss
        for _ in range(2):
            found = model(tokens, labels=tokens, **options).loss
            torch.testing.assert_close(found, expected)
        assert seen == [16, 8, 8]  # hooks see no other tokens


Hook = Callable[..., Any]
HOOKS: dict[str, tuple[str, dict[str, Any], Hook]] = {
    "a mean": ("layers.1.mlp", {}, lambda module, args, out: out - out.mean(1, keepdim=True)),
    "the last token": ("layers.0", {}, lambda module, args, out: _with_last(out)),
    "the last token, in place": ("layers.0", {}, lambda module, args, out: _scale_last(out)),
    "what a layer gets": (
        "layers.1.mlp",
        {"is_pre": True},
        lambda module, args: args[0].roll(1, 1),
    ),
    "what a layer gets, by name": (
        "layers.1",
        {"is_pre": True, "with_kwargs": True},
        lambda module, args, named: ((args[0].cumsum(1), *args[1:]), named),
    ),
    "an attention": (
        "layers.0.self_attn",
        {},
        lambda module, args, out: (out[0] - out[0].mean(1, keepdim=True), *out[1:]),
    ),
    "an attention, reversed": (
        "layers.0.self_attn",
        {},
        lambda module, args, out: (out[0].flip(1), *out[1:]),
    ),
}


def _with_last(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], 3 * x[:, -1:]], 1)


def _scale_last(x: Tensor) -> None:
    x[:, -1] *= 3


def hooked(model: Any, name: str, hook: Hook, is_pre: bool = False, **how: Any) -> Any:
    module = model.model.get_submodule(name)
    register = module.register_forward_pre_hook if is_pre else module.register_forward_hook
    return register(hook, **how)


@on_ranks(2)
def test_hooks() -> None:
    """Hooks that come after the plan and mix tokens are refused, until they are taken off."""
    for name, how, hook in HOOKS.values():
        model = under_plan(small_model("Llama"))
        expected = model(TOKENS, labels=TOKENS).loss
        handle = hooked(model, name, hook, **how)
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"a hook of model\.{name} \(Llama\w+\) was set"):
                model(TOKENS, labels=TOKENS)
        with stock_model(model):
            model(TOKENS, labels=TOKENS)
        handle.remove()
        torch.testing.assert_close(model(TOKENS, labels=TOKENS).loss, expected)


@on_ranks(2)
def test_hooks_by_token() -> None:
    """Hooks that change tokens alone, or only look on, are called as often as without a check."""
    model, stock = under_plan(small_model("Llama")), small_model("Llama")
    calls = Counter[tuple[str, str]]()

    def by_token(module: nn.Module, args: Any, out: Any) -> Any:
        return out.tanh()

    def doubled(module: nn.Module, args: Any, named: Any) -> Any:
        return (2 * args[0], *args[1:]), named

    def seen(module: nn.Module, args: Any, out: Any) -> None:
        calls["seen", type(module).__name__] += 1

    for part in (stock, model):
        hooked(part, "layers.0.mlp", by_token)
        hooked(part, "layers.1", doubled, is_pre=True, with_kwargs=True)
        hooked(part, "norm", seen)
        part.register_forward_pre_hook(lambda module, args: seen(module, args, None))
    for _ in range(3):
        found = model(TOKENS, labels=TOKENS).loss
        torch.testing.assert_close(found, stock(TOKENS, labels=TOKENS).loss)
    assert calls["seen", "LlamaRMSNorm"] == calls["seen", "LlamaForCausalLM"] == 6
    hooked(model, "layers.1.mlp", lambda module, args, out: out.cumsum(1))  # a later one
    with pytest.raises(ValueError, match=r"a hook of model\.layers\.1\.mlp"):
        model(TOKENS)


def record_tokens(seen: list[int], _: nn.Module, given: tuple[Tensor]) -> None:
    seen.append(given[0].shape[1])


@on_ranks(2)
def test_adapters() -> None:
    """Of peft, with dropout, in training: they are no other layers, and nothing draws numbers."""
    model = under_plan(small_model("Llama")).train()
    adapters = LoraConfig(target_modules=["q_proj"], lora_dropout=0.5)
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # asked by peft
    model = get_peft_model(model, adapters)
    state = torch.get_rng_state()
    with torch.no_grad():
        model.eval()(TOKENS)
    assert torch.equal(state, torch.get_rng_state())


@on_ranks(2)
def test_last_tokens() -> None:
    """A rank without the last token gives the head another one, and its logits are dropped."""
    model, stock = under_plan(small_model("Llama").double()), small_model("Llama").double()
    seen: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, given: seen.append(given[0].shape[1]))
    for kept in (1, 2, 5, 18, 99):
        for options in ({}, {"use_cache": True}):
            with torch.no_grad():
                found = model(TOKENS, logits_to_keep=kept, **options).logits
                expected = stock(TOKENS, logits_to_keep=kept).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert min(seen) == 1
