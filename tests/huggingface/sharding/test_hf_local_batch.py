"""Batches that each rank brings for itself, whole or as a shard, and embeddings of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import LlamaConfig, LlamaForCausalLM

from dtensor_ring import shard_sequence, unshard_sequence
from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.huggingface.losses.loss import LossFunction
from parallel_plans.huggingface.sharding import late_embeddings
from parallel_plans.huggingface.sharding.batch import num_labels, parse, shard
from parallel_plans.huggingface.sharding.late_embeddings import LateEmbeddings, late_or_now
from tests.families import SMALL, VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.huggingface.test_families import batches
from tests.multimodal import batch_of
from tests.multimodal import small_model as image_model
from tests.pool import on_ranks
from tests.results import difference, results_of

KINDS = ("plain", "padded left", "packed", "boundaries", "numbered", "counted")
OF_BATCH = ("cu_seq_lens_q", "cu_seq_lens_k", "num_items_in_batch")
"""Arguments that are the same on all ranks."""


def whole_batch(kind: str, seq_len: int) -> dict[str, Any]:
    """The ways people feed a model, cut to a length."""
    of_kind = {"boundaries": "plain", "numbered": "packed", "counted": "padded right"}
    batch: dict[str, Any] = {
        name: x[:, :seq_len].contiguous() for name, x in batches()[of_kind.get(kind, kind)].items()
    }
    if kind == "boundaries":
        bounds = torch.tensor([0, 7, 12, seq_len], dtype=torch.int32)
        batch |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        positions = [torch.arange(end - begin) for begin, end in bounds.unfold(0, 2, 1).tolist()]
        batch["position_ids"] = torch.cat(positions).expand(2, -1)
    if kind == "counted":
        batch["num_items_in_batch"] = torch.tensor(9)
    return batch


def shards(batch: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """What a rank is given of a batch, as DTensors."""
    return {
        name: x if name in OF_BATCH else shard_sequence(x.contiguous(), mesh, 1)
        for name, x in batch.items()
    }


def plain(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: x.to_local() if isinstance(x, DTensor) else x for name, x in batch.items()}


def planned(family: str, layout: str, **options: Any) -> tuple[Any, DeviceMesh]:
    model = under_plan(small_model(family), layout, **options)
    return model, model.context_parallel_sharding.axis.mesh


CASES = [
    ("Llama", "zigzag", 2, 20, KINDS),
    ("Llama 4", "zigzag", 4, 23, ("padded left", "packed")),
    ("Qwen3-Next", "zigzag", 2, 20, ("padded left", "plain")),
]
REPEATED = [
    ("Qwen3-MoE, router loss", "striped", 2, 20, ("padded left", "packed")),
    ("Gemma 3", "contiguous", 4, 23, ("plain", "packed")),
    ("Phi-3, longrope", "zigzag", 2, 20, ("plain", "packed")),
    ("Llama", "striped", 4, 20, KINDS),
    ("Llama", "contiguous", 2, 23, KINDS),
    ("Qwen3-MoE, router loss", "zigzag", 4, 23, ("plain", "counted")),
    ("OPT", "zigzag", 2, 20, ("packed",)),
    ("BERT", "zigzag", 2, 20, ("plain", "padded left")),
    ("Jamba", "contiguous", 2, 20, ("plain", "padded left")),
]


@pytest.mark.parametrize(
    ("family", "layout", "world_size", "seq_len", "kinds"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.repeats) for case in REPEATED)],
)
@on_ranks()
def test_trains_as_one_process(
    family: str, layout: str, seq_len: int, kinds: tuple[str, ...]
) -> None:
    stock = small_model(family)
    for form in ("plain", "DTensors"):
        model, mesh = planned(family, layout, local_batch=form == "plain")
        for kind in kinds:
            batch = whole_batch(kind, seq_len)
            if kind == "numbered":  # of which stock models know nothing
                is_start = batch.pop("position_ids").diff(dim=1, prepend=torch.zeros(2, 1)) != 1
                batch["seq_idx"] = is_start.cumsum(1)
            given = shards(batch, mesh)
            found = results_of(model, plain(given) if form == "plain" else given)
            expected = results_of(stock, whole_batch(kind, seq_len))
            error, name = difference(found, expected)
            assert not name, (form, kind, name, error)


@on_ranks(2)
def test_other_inputs_and_outputs() -> None:
    """Embeddings, labels that are shifted already, and outputs of all and of the last tokens."""
    model, mesh = planned("Llama", "zigzag", local_batch=True)
    stock, batch = small_model("Llama"), whole_batch("plain", 20)
    labels, tokens = batch["labels"], batch["input_ids"]
    shifted = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    given = plain(shards({"inputs_embeds": stock.get_input_embeddings()(tokens).detach()}, mesh))
    of_labels = plain(shards({"labels": labels, "shift_labels": shifted}, mesh))
    found = model(**given, **of_labels, output_logits=True)
    expected = stock(input_ids=tokens, labels=labels)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(unshard_sequence(found.logits, 1), expected.logits)
    assert found.logits.placements == (Shard(1),)
    with torch.no_grad():
        last = model(**given, logits_to_keep=3).logits
        torch.testing.assert_close(last, expected.logits[:, -3:].detach())
        # A prompt is whole on each rank.
        asked = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
        assert torch.equal(model.generate(tokens, **asked), stock.generate(tokens, **asked))


def ids(length: int, num_rows: int = 1) -> dict[str, Tensor]:
    return {"input_ids": torch.ones(num_rows, length, dtype=torch.long)}


def replicated(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    return {"input_ids": DTensor.from_local(ids(8)["input_ids"], mesh, [Replicate()])}


REFUSALS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "fewer tokens than the layout gives": (
        r"hold \[8, 7\] .*15 together, and .* 'striped' over 2 ranks needs 16: fill rows up",
        lambda rank: ids(8 - rank),
    ),
    "lengths of another layout": (
        r"hold \[7, 9\].* gives them \[8, 8\]; shard_seq",
        lambda rank: ids(7 + 2 * rank),
    ),
    "rows of one rank": (
        r"differ in input_ids: .*\(1, L\) on \[0\].*\(2, L\) on \[1\]",
        lambda rank: ids(8, 1 + rank),
    ),
    "an error of one rank": (
        r"differ in error: none on \[0\], ValueError: input_ids must be integers, .* on \[1\]",
        lambda rank: {"input_ids": ids(8)["input_ids"].to(torch.float32 if rank else torch.int64)},
    ),
    "labels of one rank": (
        r"differ in labels: none on \[0\], torch.int64 \(1, L\) on \[1\]",
        lambda rank: ids(8) | ({"labels": ids(8)["input_ids"]} if rank else {}),
    ),
    "labels of another length": (
        r"must have one length, got {'input_ids': 8, 'labels': 16}",
        lambda rank: ids(8) | {"labels": ids(16)["input_ids"]},
    ),
    "boundaries that differ": (
        r"differ in cu_seq_lens_q: torch.int32 \(2,\) of checksum",
        lambda rank: ids(8) | {"cu_seq_lens_q": torch.tensor([0, 15 + rank]).int()},
    ),
    "two stretches of tokens": (
        "must be one stretch of tokens",
        lambda rank: ids(8) | {"attention_mask": torch.tensor([[1, 0] * 4])},
    ),
    "two that say where documents are": (
        "seq_idx and an attention_mask both",
        lambda rank: (
            {name: ids(8)["input_ids"] for name in ("input_ids", "seq_idx")}
            | {"attention_mask": ids(8)["input_ids"]}
        ),
    ),
    "replicated": (r"input_ids must be Shard\(1\) over the axis of the plan", replicated),
}


@on_ranks(2)
def test_refusals() -> None:
    """On every rank, and none waits for another."""
    model, _ = planned("Llama", "striped", local_batch=True)
    for message, given in REFUSALS.values():
        with pytest.raises(ValueError, match=message):
            model(**given(dist.get_rank()))
    assert model(**ids(8)).logits.shape == (1, 16, 32)
    counting, _ = planned("OPT", "striped", local_batch=True)
    with pytest.raises(ValueError, match=r"OPT.* counts positions .* give position_ids"):
        counting(**ids(8))


@pytest.mark.parametrize(
    ("message", "head", "layout"),
    [
        ("the head of LlamaForSequenceClassification reads", "ForSequenceClassification", "zigzag"),
        ("layout 'balanced' is made of the documents", "ForCausalLM", "balanced"),
    ],
)
def test_models_that_need_the_whole_batch(message: str, head: str, layout: str) -> None:
    with pytest.raises(ValueError, match=f"{message}.*; give every rank the whole batch"):
        context_parallel_plan(small_model("Llama", head), layout, local_batch=True)


IDS = torch.arange(8).unsqueeze(0)
REFUSED_DRAWN: dict[str, tuple[dict[str, Any], str]] = {
    "float ids": ({"input_ids": IDS.float()}, "input_ids must be integers, got torch.float32; use"),
    "no ids": (
        {"input_ids": IDS[:, :0]},
        r"input_ids must hold at least one token, got .*\(1, 0\)",
    ),
    "no rows": ({"input_ids": IDS[:0]}, r"input_ids must hold at least one token, got .*\(0, 8\)"),
    "ids beyond": ({"input_ids": IDS + 25}, "input_ids must be from 0 to 31, .* got 32"),
    "labels beyond": ({"labels": IDS + 25}, "labels must be from 0 to 31, .* got 32"),
    "negative label": ({"labels": IDS - 99}, "labels must be from 0 to 31, .* got -99"),
    "labels of bytes": (
        {"labels": IDS.byte()},
        "labels must be able to hold -100, got torch.uint8",
    ),
    "float labels": ({"labels": IDS.float()}, "labels must be integers, got torch.float32"),
    "labels of two rows": ({"labels": IDS.expand(2, 8)}, "labels must have the 1 rows of the tok"),
    "sparse mask": ({"attention_mask": IDS.to_sparse()}, "attention_mask must be a dense, strided"),
}


def test_parts_of_a_batch() -> None:
    """Labels are shifted as a rank takes its tokens; padding has none, and is no token."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    loss = LossFunction(None, True, None, None)
    types = torch.ones_like(IDS)
    given = {"input_ids": IDS, "labels": IDS, "attention_mask": types, "token_type_ids": types}
    whole = parse(model, given | {"use_cache": False}, loss)
    assert (whole.name, whole.positions, num_labels(whole)) == ("input_ids", None, 7)
    assert (whole.labels is IDS, whole.tokens is IDS) == (True, True), "nothing is copied"
    assert list(whole.others) == ["token_type_ids", "use_cache"]
    local = shard(whole, torch.tensor([1, 2, 7, 8]), 10)
    assert local.labels is not None
    assert local.mask is not None
    assert local.tokens.tolist() == [[1, 2, 7, 0]]
    assert local.labels.tolist() == [[2, 3, -100, -100]]
    assert local.positions is not None
    assert local.positions.tolist() == [[1, 2, 7, 0]]
    assert local.mask.tolist() == local.others["token_type_ids"].tolist() == [[1, 1, 1, 0]]


@on_ranks(2)
def test_refused_batches() -> None:
    model = under_plan(LlamaForCausalLM(LlamaConfig(**SMALL)))
    for changes, message in REFUSED_DRAWN.values():
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": IDS, **changes})
    assert model(input_ids=IDS, labels=IDS.masked_fill(IDS < 3, -100)).loss.isfinite()


@on_ranks(2)
def test_states_that_are_two_outputs_of_a_graph() -> None:
    """The last hidden states are one of all states, and a graph gives no tensor as two DTensors."""
    model, stock = (small_model("Llama", "Model", num_hidden_layers=1) for _ in range(2))
    under_plan(model)
    tokens = torch.randint(2, VOCABULARY, (1, 13), generator=torch.Generator().manual_seed(1))
    given = {"input_ids": tokens, "output_hidden_states": True, "use_cache": False}
    model(**given)  # transformers puts hooks into a model at its first call, which no graph can
    found = torch.compile(model, backend="aot_eager", fullgraph=True)(**given)
    assert found.hidden_states[-1] is found.last_hidden_state
    for ours, theirs in zip(found.hidden_states, stock(**given).hidden_states, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)


ROWS, TOKENS, WIDTH, COUNT = 2, 12, 8, 50
MINE = torch.tensor([1, 5, 6, 11])
GENERATOR = torch.Generator().manual_seed(0)
TOKEN_IDS = torch.randint(0, COUNT, (ROWS, TOKENS), generator=GENERATOR)
FIRST, SECOND = TOKEN_IDS < 20, (TOKEN_IDS > 15) & (TOKEN_IDS < 40)
FEATURES = torch.randn(ROWS * TOKENS, WIDTH, generator=GENERATOR)


def merged(embeds: Tensor, features: Tensor, *masks: Tensor) -> Tensor:
    """As outer models do it: features of images, then those of videos over them."""
    for mask in masks:
        where = mask.unsqueeze(-1).expand_as(embeds).to(embeds.device)
        embeds = embeds.masked_scatter(where, features[: int(mask.sum())].to(embeds))
    return embeds


def run(late: bool, call: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, ...]:
    """What a call makes of embeddings and features, and their gradients."""
    torch.manual_seed(1)
    embedding, features = nn.Embedding(COUNT, WIDTH), FEATURES.clone().requires_grad_()
    embeds = late_or_now(embedding, embedding.forward, TOKEN_IDS) if late else embedding(TOKEN_IDS)
    assert isinstance(embeds, LateEmbeddings) == late
    out = call(embeds, features)
    assert type(out) is Tensor
    (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
    assert embedding.weight.grad is not None
    return (out, embedding.weight.grad) + (() if features.grad is None else (features.grad,))


def assigned(embeds: Tensor, features: Tensor) -> Tensor:
    """Write into the embeddings, as some models do, and read them after."""
    embeds = embeds + 0 if type(embeds) is Tensor else embeds
    embeds[FIRST] = features[: int(FIRST.sum())]
    return embeds.index_select(1, MINE)


LATE = {
    "tokens": lambda x, f: x.index_select(1, MINE),
    "features": lambda x, f: merged(x, f, FIRST).index_select(1, MINE),
    "features over features": lambda x, f: merged(x, f, FIRST, SECOND).index_select(1, MINE),
    "no features": lambda x, f: merged(x, f, FIRST & ~FIRST).index_select(1, MINE),
}
WHOLE = {
    "arithmetic": lambda x, f: merged(x, f, FIRST) * 2,
    "a mask of numbers": lambda x, f: x.masked_scatter(FEATURES[:12].expand(2, -1, -1) > 0, f),
    "other dim": lambda x, f: x.index_select(2, MINE[:2]),
    "written": assigned,
    "keyword": lambda x, f: x.index_select(dim=1, index=MINE),
}


def test_equals_the_embeddings() -> None:
    for name, call in (LATE | WHOLE).items():
        expected = run(False, call)
        with patch.object(late_embeddings, "_made", wraps=late_embeddings._made) as made:
            found = run(True, call)
        assert made.called == (name in WHOLE), name
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs), name


def test_too_few_features_are_refused_before_tokens_are_taken() -> None:
    embedding = nn.Embedding(COUNT, WIDTH)
    late = late_or_now(embedding, embedding.forward, TOKEN_IDS)
    with pytest.raises(RuntimeError, match="Number of elements of source"):
        late.masked_scatter(FIRST.unsqueeze(-1), FEATURES[:1])


def with_hook() -> nn.Embedding:
    embedding = nn.Embedding(COUNT, WIDTH)
    embedding.register_forward_hook(lambda module, args, out: out + 1)
    return embedding


def test_what_may_not_be_late() -> None:
    plain = nn.Embedding(COUNT, WIDTH)
    parameter = nn.Parameter(TOKEN_IDS, requires_grad=False)
    for embedding, ids in ((with_hook(), TOKEN_IDS), (plain, parameter), (plain, TOKEN_IDS[:, :0])):
        found = late_or_now(embedding, embedding.forward, ids)
        assert torch.equal(found, embedding.forward(ids))
        assert not isinstance(found, LateEmbeddings)


def test_a_wrong_id_is_refused_on_all_ranks_alike() -> None:
    embedding = nn.Embedding(COUNT, WIDTH)
    with pytest.raises(IndexError):
        late_or_now(embedding, embedding.forward, TOKEN_IDS + COUNT)


IMAGES = ("several images", "text only")


@pytest.mark.parametrize("family", ["Gemma 3", "Qwen2.5-VL", "SmolVLM"])
@on_ranks(2)
def test_a_rank_looks_up_its_tokens_only(family: str) -> None:
    model = under_plan(image_model(family), "contiguous")
    for case in IMAGES:
        with patch.object(late_embeddings.LateEmbeddings, "looked_up", autospec=True) as select:
            select.side_effect = lambda self, tokens: self.embed(self.ids[:, tokens])
            model(**batch_of(family, case))
        count = sum(len(call.args[1]) for call in select.call_args_list)
        length, of_each = batch_of(family, case)["input_ids"].shape[1], [0, 0]
        dist.all_gather_object(of_each, count)
        assert (sum(of_each), max(of_each)) == (length, -(-length // 2)), case
