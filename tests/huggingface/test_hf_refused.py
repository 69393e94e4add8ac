"""What the Hugging Face plan refuses: calls, models, misuse, and ranks that differ."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from parts.small_models import small_model
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from torch import nn
from torch._dynamo.exc import Unsupported
from torch.distributed.fsdp import fully_shard
from transformers.modeling_layers import MtpModel

from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.huggingface.core.patterns import MARKER
from tests.huggingface.planned import all_ranks, under_plan
from tests.huggingface.test_hf_calls import parallel_model
from tests.pool import Pool, on_ranks

TOKENS = torch.zeros(1, 16, dtype=torch.int64)
HOLED = torch.ones(1, 16).index_fill(1, torch.tensor(7), 0)
NUMBERED = torch.arange(16).unsqueeze(0) // 4 + 1  # documents
CUTS = torch.tensor([0, 20], dtype=torch.int32)


REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("attention_mask must be one stretch", {"attention_mask": HOLED}),
    (
        "attention_mask must be 1 .* such as 2: .* position_ids .* cu_seq_lens_q and",
        {"attention_mask": NUMBERED},
    ),
    (
        "attention_mask must be 1 .* such as 2",
        {"attention_mask": NUMBERED, "use_cache": True, "grad": False},
    ),
    ("attention_mask must be 1 .* such as 0.5", {"attention_mask": HOLED / 2}),
    (
        r"attention_mask must be .*\(1, 1, 16, 16\)",
        {"attention_mask": torch.ones(1, 1, 16, 16)},
    ),
    (
        r"attention_mask must be .*\(1, 16\) for full_attention.*_attn_implementation",
        {"attention_mask": {"full_attention": TOKENS}},
    ),
    ("input_ids must be one tensor .* got list", {"input_ids": [[1, 2]]}),
    ("cu_seq_lens_q .* at or before 16", {"cu_seq_lens_q": CUTS}),
    ("one row of boundaries", {"cu_seq_lens_q": CUTS.view(1, 2)}),
    ("output_router_logits=True .* no routers", {"output_router_logits": True}),
    ("ignore_index is -100.*got 3", {"ignore_index": 3}),
    (r"position_ids must be \(B, S\)", {"position_ids": torch.arange(16)}),
    ("use_cache", {"use_cache": True}),
    ("output_attentions", {"output_attentions": True}),
    ("labels need the logits of all .*leave one out", {"logits_to_keep": 1, "labels": TOKENS}),
    ("logits_to_keep must be a number .*got -1", {"logits_to_keep": -1}),
    ("encoder_hidden_states is what an encoder.*leave it", {"encoder_hidden_states": TOKENS}),
    ("one length.*'labels': 15", {"labels": TOKENS[:, 1:]}),
    ("input_ids or inputs_embeds", {"input_ids": None}),
]
"""Arguments beside tokens, and what is said of them."""


@on_ranks(2)
def test_refuses() -> None:
    """A refused call leaves no state: the second one is refused alike, and so are others."""
    ring = parallel_model("striped", 16)
    for reported, given in REFUSED:
        arguments = {"input_ids": TOKENS} | given
        has_grad = arguments.pop("grad", True)
        for _ in range(2):
            with torch.set_grad_enabled(has_grad), pytest.raises(ValueError, match=reported):
                ring(**arguments)


def small(name: str, head: str = "ForCausalLM", **options: Any) -> Any:
    """A model of transformers that is as small as can be."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 8}
    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")(**sizes | options)
        return getattr(transformers, name + head)(config)


def with_positions() -> Any:
    model = small("Llama")
    model.model.position = nn.Embedding(8, 8, padding_idx=0)
    return model


def drafting() -> Any:
    model = small("Llama", intermediate_size=8)
    model.config.get_mtp_config = lambda: model.config
    return MtpModel(model, 1)


UNSUPPORTED = {
    "MtpModel: its heads draft .* does not train them: .*; torchtitan trains such": drafting,
    "T5ForConditionalGeneration: its decoder attends to .* an encoder .* cross attention": lambda: (
        small("T5", "ForConditionalGeneration")
    ),
    "BartForCausalLM: its attention does not go": lambda: small(
        "Bart", decoder_attention_heads=2, decoder_ffn_dim=8, decoder_layers=1, is_decoder=True
    ),
    r"RwkvForCausalLM: rwkv\.blocks\.0 \(RwkvBlock\), .* carry a state": lambda: small("Rwkv"),
    "LlamaForQuestionAnswering: its head reads the sequence as a whole": lambda: small(
        "Llama", "ForQuestionAnswering"
    ),
    "BertForSequenceClassification: pooler pools one rank's": lambda: small(
        "Bert", "ForSequenceClassification"
    ),
    "pooler pools one rank's tokens.*add_pooling_layer=False": lambda: small("Bert", "Model"),
    r"model\.position counts .* method create_position.* of LlamaModel": lambda: with_positions(),
    "GPT2DoubleHeadsModel: its head": lambda: transformers.GPT2DoubleHeadsModel(
        transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=8)
    ),
    "returns tuples.*return_dict = True": lambda: small("Llama", return_dict=False),
    "token_dropout scales embeddings": lambda: small(
        "Esm",
        "ForMaskedLM",
        **{"position_embedding_type": "rotary", "token_dropout": True},
        **{"mask_token_id": 3, "pad_token_id": 1, "intermediate_size": 8},
    ),
    "one of transformers 5.x for a context-parallel plan, got Linear": lambda: nn.Linear(2, 2),
}


def test_models_without_a_plan() -> None:
    for match, make in UNSUPPORTED.items():
        with pytest.raises(ValueError, match=match):
            context_parallel_plan(make())
    for rope in ("dynamic", "longrope"):
        model = small("Llama")
        model.config.rope_parameters["rope_type"] = rope
        with pytest.raises(ValueError, match=f"'{rope}' depend on the largest position"):
            context_parallel_plan(model)


def build_unsupported() -> None:
    with pytest.raises(ValueError, match="unknown layout 'spiral'"):
        parallel_model("spiral", 8)
    with pytest.raises(ValueError, match="unknown kernel 'flesh'; known kernels: flash_attn3"):
        parallel_model("zigzag", 8, kernel="flesh")(TOKENS)
    with pytest.raises(TypeError, match=r"policy must be a TransferPolicy, such as .* got 'fast'"):
        parallel_model("zigzag", 8, policy="fast")
    ring = parallel_model("zigzag", 8)
    for given, match in (
        ({"position_bias": torch.zeros(2, 4, 4)}, "LlamaAttention gives position_bias"),
        ({"attention_mask": torch.zeros(4, 4)}, r"got the mask \(4, 4\), where the model's"),
        ({"attention_mask": (MARKER, False, 5, False)}, "bidirectional of 5 tokens, .* not seen"),
    ):
        layer = ring.model.layers[1].self_attn
        changed = layer.register_forward_pre_hook(
            lambda module, args, kwargs, given=given: (args, kwargs | given), with_kwargs=True
        )
        with pytest.raises(ValueError, match=match):
            ring(TOKENS)
        changed.remove()
    with pytest.raises(ValueError, match="was replaced already, by a context_parallel_plan"):
        under_plan(ring)
    for layer in ring.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with pytest.raises(
        ValueError, match=r"drops attention weights, 0\.5, .* with attention_dropout=0,"
    ):
        ring.train()(TOKENS)
    with pytest.raises(ValueError, match="called as a whole"):
        ring.model(TOKENS)


def another_kernel() -> None:
    ring = parallel_model("zigzag", 8, kernel="flash_attn3")
    with pytest.raises(ValueError, match="'flash_attn3' cannot serve this attention"):
        ring(TOKENS)


@on_ranks(2)
def test_misuse() -> None:
    """Errors that the plan leaves no trace of, or that come with later changes."""
    albert = transformers.AlbertModel(
        transformers.AlbertConfig(
            vocab_size=8, hidden_size=8, num_attention_heads=2, intermediate_size=8
        )
    )
    mesh = all_ranks()
    under_plan(albert)
    with pytest.raises(ValueError, match=r"output pooler_output, \(1, 8\), has no token"):
        albert(input_ids=TOKENS)
    llama = small_model("llama", 16)
    llama.set_attn_implementation("sdpa")
    llama.model.embed_tokens.register_forward_hook(lambda module, args, x: x.cumsum(1) + 1)
    with pytest.raises(ValueError, match="embed_tokens for a token depends"):
        under_plan(llama)
    assert llama.config._attn_implementation == "sdpa"
    sharded: Any = fully_shard(small_model("llama", 16), mesh=mesh)
    with pytest.raises(ValueError, match="apply the plan before fully_shard"):
        under_plan(sharded)
    ring = small_model("llama", 16)
    under_plan(ring)
    ring.set_attn_implementation("sdpa")
    with pytest.raises(ValueError, match="set to 'sdpa' after the plan"):
        ring(TOKENS)
    ring = parallel_model("zigzag", 8)
    ring.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"LlamaAttention\.is_causal is False and its mask"):
        ring(TOKENS)
    ring.model.layers[1].self_attn.is_causal = True
    with pytest.raises(ValueError, match="export within `with stock_model"):
        torch.export.export(ring, (TOKENS,), strict=False)
    for name in ("sdpa", "eager"):
        ring, other = parallel_model("zigzag", 8), small_model("llama", 16)
        other.set_attn_implementation(name)
        ring.model.layers[1] = other.model.layers[1]
        with pytest.raises(ValueError, match=r"a layer gave the mask .* after the plan; change"):
            ring(TOKENS)
    with pytest.raises(ValueError, match=r"is compiled, .* then torch.compile\(model\)"):
        context_parallel_plan(torch.compile(small_model("llama", 16)))
    adapters = LoraConfig(
        target_modules=["q_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=[3, 4]
    )
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated")  # asked by peft
    with pytest.raises(ValueError, match="leave alora_invocation_tokens out"):
        get_peft_model(ring, adapters)(TOKENS)
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=5)
    with pytest.raises(ValueError, match=r"DynamicCache.* prefix tuning .* not supported .* LoRA"):
        get_peft_model(parallel_model("zigzag", 8), prefix)(input_ids=TOKENS, labels=TOKENS)
    with pytest.raises(ValueError, match=r"prefix tuning .* not supported .* PromptTuningConfig"):
        context_parallel_plan(get_peft_model(small_model("llama", 16), prefix))


@pytest.mark.parametrize("whole_graph", [False, True])
@on_ranks(2)
def test_layout_of_a_batch_in_a_graph(whole_graph: bool) -> None:
    """The plan says so, or its compiler does."""
    ring = parallel_model("balanced", 16)
    ring.compile(backend="eager", fullgraph=whole_graph)
    with pytest.raises(
        ValueError if not whole_graph else Unsupported, match="which a graph cannot"
    ):
        ring(input_ids=TOKENS)


@pytest.mark.parametrize(("when", "sees"), [(2, 2), (3, 4), (5, 8)])
@on_ranks(2)
def test_weights_that_drift_apart(when: int, sees: int) -> None:
    """Weights that differ from one forward of training on, and in which forward that is seen."""
    ring, rank = parallel_model("zigzag", 16), dist.get_rank()
    for count in range(1, sees + 1):
        if count == when:
            ring.lm_head.weight.data[0, 0] += rank
        if count < sees:
            ring(TOKENS, labels=TOKENS).loss.backward()
    with pytest.raises(ValueError, match=r"gradients averaged over them.*, they differ in weights"):
        ring(TOKENS, labels=TOKENS)


@on_ranks(2)
def test_weights_that_differ() -> None:
    """In one element of one of them; and again after training."""
    ring, rank = parallel_model("zigzag", 16), dist.get_rank()
    weight = ring.model.layers[1].mlp.up_proj.weight.data
    reported = "have the same weights .*, they differ in weights: checksum .* on .0., .* on .1.$"
    before = weight.clone()
    weight[-1, -1] += rank
    with pytest.raises(ValueError, match=reported):
        ring(TOKENS)
    weight.copy_(before)
    ring(TOKENS)
    weight[0, 0] += rank
    with pytest.raises(ValueError, match=reported):  # as where nobody averaged gradients
        ring(TOKENS)
    with torch.no_grad(), pytest.raises(ValueError, match=reported):
        ring(TOKENS)


@on_ranks(2)
def test_batches_that_differ() -> None:
    """As under a sampler that counts all ranks; then the ranks agree."""
    ring, rank = parallel_model("zigzag", 16), dist.get_rank()
    reported = "input_ids: torch.int64 .1, 16. of checksum .* on .0., torch.int64 .* on .1.$"
    with pytest.raises(ValueError, match="must get the same batch .*, they differ in " + reported):
        ring(TOKENS + rank)
    with pytest.raises(ValueError, match=r"labels: none on .0., torch.int64 .* on .1.$"):
        ring(TOKENS, **{"labels": TOKENS} if rank else {})
    assert ring(TOKENS, labels=TOKENS).loss.isfinite()
    with torch.no_grad(), pytest.raises(ValueError, match="must get the same batch"):
        ring(TOKENS + rank)


def test_refuses_other_models(pool: Pool) -> None:
    pool.run(1, build_unsupported)
    pool.run(1, another_kernel)
