"""A family that is not of transformers: each layer has a window of its own, `attn_span`.

The config has no `sliding_window`, so nothing but the masks that the model asks for tells of them.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import create_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

from dtensor_ring import Mask
from parallel_plans.huggingface.core.patterns import LayerMask, LayerPattern, read_patterns
from tests.dense import largest
from tests.families import SMALL
from tests.huggingface.generation.generating import CACHE, exact_softmax, generate, tokens
from tests.huggingface.planned import errors_of, under_plan
from tests.huggingface.test_families import batches
from tests.pool import on_ranks
from tests.results import results_with_logits

SPANS = (3, 7, 1, 100_000, 7)
"""The last one but one is longer than any batch."""


class SpanConfig(LlamaConfig):
    """A model type that nobody registered."""

    model_type = "span"


class SpanAttention(modeling_llama.LlamaAttention):
    """Has a window that no config names."""

    def __init__(self, config: Any, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.attn_span = config.attn_spans[layer_idx]

    def sees(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        return query - key < self.attn_span

    def hidden(self, num_queries: int, num_keys: int) -> Tensor:
        """The window as numbers to add to a mask."""
        query = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
        return 1e9 * (self.sees(0, 0, query, torch.arange(num_keys)).double() - 1)


class SpanModel(modeling_llama.LlamaModel):
    """Makes a mask for each layer."""

    attention = SpanAttention

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for number, layer in enumerate(self.layers):
            layer.self_attn = self.attention(config, number)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **options: Any,
    ) -> BaseModelOutputWithPast:
        cache = options.get(CACHE)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if position_ids is None:
            past = 0 if cache is None else cache.get_seq_length()
            position_ids = torch.arange(past, past + x.shape[1]).unsqueeze(0)
        given = {"attention_mask": attention_mask, "position_ids": position_ids, CACHE: cache}
        masks = [self.mask(layer, x, **given) for layer in self.layers]
        rotary = self.rotary_emb(x, position_ids=position_ids)
        shared = options | {"position_ids": position_ids, "position_embeddings": rotary}
        for layer, mask in zip(self.layers, masks, strict=True):
            x = layer(x, attention_mask=mask, **shared)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(x), **{CACHE: cache})

    def mask(self, layer: Any, x: Tensor, **given: Any) -> Any:
        sees = layer.self_attn.sees
        return create_causal_mask(self.config, x, and_mask_function=sees, **given)


class SpanForCausalLM(LlamaForCausalLM):
    """The whole model."""

    backbone = SpanModel

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = self.backbone(config)
        self.post_init()


def config_of(spans: tuple[int, ...]) -> SpanConfig:
    return SpanConfig(**SMALL | {"num_hidden_layers": len(spans), "attn_spans": list(spans)})


def stock(kind: type[SpanForCausalLM] = SpanForCausalLM, spans: tuple[int, ...] = SPANS) -> Any:
    """The same weights at every call, in float64, so that rounding decides no token."""
    torch.manual_seed(0)
    model = kind(config_of(spans)).double()
    model.set_attn_implementation("eager")
    return model.eval()


def planned(model: Any, layout: str = "zigzag") -> Any:
    return under_plan(model, layout, unshard_outputs=True)


@pytest.mark.parametrize(("world_size", "layout"), [(2, "zigzag"), (3, "contiguous")])
@on_ranks()
def test_trains_as_one_process(layout: str) -> None:
    models = stock().float(), stock().float()  # eager softmax is float32, and loses its masks
    ours, theirs = planned(models[0], layout), models[1]
    for name, batch in batches().items():
        errors = errors_of(*(results_with_logits(x, batch) for x in (ours, theirs)))
        assert largest(errors.values()) < 1e-5, (name, errors)


def test_the_windows_matter() -> None:
    """A plan that shows too much or too little would be noticed."""
    batch = batches()["plain"]
    losses = [stock(spans=x)(**batch).loss for x in (SPANS, SPANS[::-1], (100_000,) * 5)]
    assert min((x - y).abs() for x, y in pairwise(losses)) > 1e-3


@on_ranks(2)
def test_generates_as_one_process() -> None:
    ours, theirs = planned(stock()), stock()
    left = (torch.arange(13).expand(2, -1) >= torch.tensor([[5], [0]])).long()
    for way in ({}, {"attention_mask": left}, {"prefill_chunk_size": 5}, {"use_cache": False}):
        found = generate(ours, input_ids=tokens(), **way)
        with exact_softmax():
            expected = generate(theirs, input_ids=tokens(), **way)
        assert torch.equal(found.sequences, expected.sequences), way
        torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-4)


@on_ranks(2)
def test_compiles_into_one_graph() -> None:
    eager, compiled = (planned(stock(spans=SPANS[:2])) for _ in range(2))
    counter = CompileCounterWithBackend("eager")
    compiled.compile(backend=counter, fullgraph=True)
    batch = {name: tokens(24, rows=1) for name in ("input_ids", "labels")}
    torch.testing.assert_close(compiled(**batch).loss, eager(**batch).loss)
    assert counter.frame_count == 1


@on_ranks(1)
def test_layers_are_told_apart_without_weights() -> None:
    """The proxy of a model on the meta device has one layer of each kind, of another index."""
    with torch.device("meta"):
        model = SpanForCausalLM(config_of(SPANS))
    layer_masks = planned(model).context_parallel_sharding.layer_masks
    assert layer_masks == read_patterns(stock())


def test_each_layer_has_its_mask() -> None:
    masks = {x.layer: y for x, y in read_patterns(stock()).items() if isinstance(x, LayerPattern)}
    windows = (Mask.sliding(span - 1) for span in SPANS)
    assert masks == {number: LayerMask(x, x.left > 0) for number, x in enumerate(windows)}


class GrowingModel(SpanModel):
    """Its windows are half of the batch."""

    def mask(self, layer: Any, x: Tensor, **given: Any) -> Any:
        def sees(batch: Any, head: Any, query: Any, key: Any) -> Any:
            return query - key < x.shape[1] // 2

        return create_causal_mask(self.config, x, and_mask_function=sees, **given)


def test_models_whose_masks_cannot_be_read() -> None:
    """Layers have no number to be told apart by, or windows depend on the batch."""
    unnumbered = stock()
    for layer in unnumbered.model.layers:
        layer.self_attn.layer_idx = None
    growing = GrowingModel(config_of(SPANS)).eval()
    told = "have no layer_idx of their own", "depends on the batch"
    for model, match in zip((unnumbered, growing), told, strict=True):
        (reason,) = read_patterns(model).values()
        assert isinstance(reason, str)
        assert match in reason


class Hiding(SpanAttention):
    """Windows that are not in the masks: the model asks for causal ones."""

    def changed(self, mask: Any, num_queries: int) -> Any:
        return mask

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        mask = self.changed(options.pop("attention_mask"), hidden_states.shape[1])
        return super().forward(hidden_states, *args, attention_mask=mask, **options)


class Added(Hiding):
    def changed(self, mask: Any, num_queries: int) -> Any:
        return mask + self.hidden(num_queries, num_queries)


class AddedToTensors(Hiding):
    def changed(self, mask: Any, num_queries: int) -> Any:
        is_dense = isinstance(mask, Tensor)
        return mask + self.hidden(num_queries, num_queries) if is_dense else mask


class Made(Hiding):
    def changed(self, mask: Any, num_queries: int) -> Any:
        return self.hidden(num_queries, num_queries)[None, None]


class Keyword(Hiding):
    def forward(self, *args: Any, **options: Any) -> Any:
        return super().forward(*args, sliding_window=self.attn_span, **options)


class OwnFunction(Hiding):
    def forward(self, hidden_states: Tensor, *_: Any, attention_mask: Any, **options: Any) -> Any:
        parts = self.q_proj, self.k_proj, self.v_proj
        heads = (x(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for x in parts)
        name = self.config._attn_implementation
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager_attention_forward)
        out, _ = attend(self, *heads, attention_mask, scaling=self.scaling, **options)
        return self.o_proj(out.flatten(2)), None


def eager_attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
) -> Any:
    """What files of transformers call so."""
    mask = mask + module.hidden(query.shape[2], key.shape[2]).to(query)
    return modeling_llama.eager_attention_forward(module, query, key, value, mask, **options)


def hiding(kind: type[nn.Module]) -> Any:
    class Plain(SpanModel):
        attention = kind

        def mask(self, layer: Any, x: Tensor, **given: Any) -> Any:
            return create_causal_mask(self.config, x, **given)

    class PlainForCausalLM(SpanForCausalLM):
        backbone = Plain

    return stock(PlainForCausalLM, (5, 100_000))


REFUSED: dict[Callable[..., Any], str] = {
    Added: "works on its masks by itself.*and_mask_function",
    AddedToTensors: r"layers\.0\.self_attn \(AddedToTensors\) changes or replaces the masks",
    Made: r"layers\.0\.self_attn \(Made\) changes or replaces the masks",
    OwnFunction: r"\(OwnFunction\) has an attention function that hides keys",
}


@on_ranks(1)
def test_windows_that_are_not_in_the_masks_are_refused() -> None:
    """Under a plan they would be lost, and the numbers wrong."""
    for kind, match in REFUSED.items():
        with pytest.raises(ValueError, match=match):
            planned(hiding(kind))
    with pytest.raises(ValueError, match=r"sliding_window of 5 beside it.*and_mask_function"):
        planned(hiding(Keyword))(tokens())
    planned(hiding(Hiding))(tokens())
