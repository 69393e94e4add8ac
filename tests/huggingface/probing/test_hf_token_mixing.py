"""Models that mix tokens outside of attention are found by what they compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_plans.huggingface.core.patterns import read_patterns
from parallel_plans.huggingface.probing.probe import check_token_mixing
from tests.families import FAMILIES, small_model


class After(nn.Module):
    """Something behind the embeddings."""

    def __init__(self, embed: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.change = embed, change

    def forward(self, tokens: Tensor) -> Tensor:
        return self.change(self.embed(tokens))


MIXES: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": lambda x: x + 0.1 * x.roll(1, 1),
    "reverse": lambda x: x.flip(1),
    "mean": lambda x: x - x.mean(1, keepdim=True),
    "index": lambda x: x + 0.1 * torch.arange(x.shape[1]).view(1, -1, 1),
    "length": lambda x: x * x.shape[1] ** 0.5,
    "number": lambda x: x * x.shape[:2].numel() ** 0.5,
}


def test_families_are_local() -> None:
    for family in FAMILIES:
        model = small_model(family).train()
        check_token_mixing(model)
        assert all(module.training for module in model.modules()), family


def test_rounding_by_the_number_of_rows_is_no_mixing() -> None:
    """As of matrix products in bfloat16, by which a router may choose another expert."""
    model = small_model("Llama").bfloat16()
    model.model.embed_tokens = After(model.model.embed_tokens, MIXES["number"])
    check_token_mixing(model)


def test_what_mixes_tokens_is_named() -> None:
    for mix in MIXES.values():
        model = small_model("Llama")
        model.model.embed_tokens = After(model.model.embed_tokens, mix)
        with pytest.raises(ValueError, match=r"model\.embed_tokens for a token depends"):
            check_token_mixing(model)


def test_rotary_embeddings_that_grow() -> None:
    model = small_model("Llama")
    model.model.rotary_emb.register_forward_hook(
        lambda module, args, output: tuple(x * x.shape[1] for x in output)
    )
    with pytest.raises(ValueError, match="for a token depends on tokens"):
        check_token_mixing(model)


def test_rotary_embeddings_that_count_by_themselves() -> None:
    model = small_model("Llama")
    rotary, forward = model.model.rotary_emb, model.model.rotary_emb.forward
    rotary.forward = lambda x, position_ids: forward(x, torch.arange(x.shape[1]).view(1, -1))
    with pytest.raises(ValueError, match="for a token depends on tokens"):
        check_token_mixing(model)


def built(name: str, head: str, **options: Any) -> Any:
    import transformers

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}
    config = getattr(transformers, f"{name}Config")(**sizes | options, pad_token_id=0)
    return getattr(transformers, name + head)(config)


def _without_keywords(forward: Any, hidden: Tensor, **known: Any) -> Any:
    return forward(hidden, **{name: x for name, x in known.items() if name != "ring"})


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_models_of_transformers() -> None:
    trigrams = {"intermediate_size": 16, "embedding_size": 16, "intra_bottleneck_size": 8}
    with pytest.raises(ValueError, match=r"mobilebert\.embeddings.* depends on tokens"):
        check_token_mixing(built("MobileBert", "ForMaskedLM", **trigrams))
    llama = built("Llama", "ForCausalLM", intermediate_size=16)
    for layer in llama.model.layers:  # its forward has no keywords that could be handed on
        layer.forward = partial(_without_keywords, layer.forward)
    with pytest.raises(ValueError, match="gets no keyword arguments"):
        check_token_mixing(llama)
    with pytest.raises(ValueError, match="works on its masks by itself"):
        read_patterns(built("Doge", "ForCausalLM", intermediate_size=16, num_key_value_heads=2))
