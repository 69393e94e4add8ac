"""Late embeddings are those of the tokens, whenever they are looked up."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from parallel_plans.huggingface.sharding import late_embeddings
from parallel_plans.huggingface.sharding.late_embeddings import LateEmbeddings, late_or_now
from tests.huggingface.planned import under_plan
from tests.multimodal import batch_of, small_model
from tests.pool import on_ranks

ROWS, TOKENS, WIDTH, COUNT = 2, 12, 8, 50
MINE = torch.tensor([1, 5, 6, 11])
GENERATOR = torch.Generator().manual_seed(0)
IDS = torch.randint(0, COUNT, (ROWS, TOKENS), generator=GENERATOR)
FIRST, SECOND = IDS < 20, (IDS > 15) & (IDS < 40)
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
    embeds = late_or_now(embedding, embedding.forward, IDS) if late else embedding(IDS)
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
    late = late_or_now(embedding, embedding.forward, IDS)
    with pytest.raises(RuntimeError, match="Number of elements of source"):
        late.masked_scatter(FIRST.unsqueeze(-1), FEATURES[:1])


def with_hook() -> nn.Embedding:
    embedding = nn.Embedding(COUNT, WIDTH)
    embedding.register_forward_hook(lambda module, args, out: out + 1)
    return embedding


def test_what_may_not_be_late() -> None:
    plain = nn.Embedding(COUNT, WIDTH)
    parameter = nn.Parameter(IDS, requires_grad=False)
    for embedding, ids in ((with_hook(), IDS), (plain, parameter), (plain, IDS[:, :0])):
        found = late_or_now(embedding, embedding.forward, ids)
        assert torch.equal(found, embedding.forward(ids))
        assert not isinstance(found, LateEmbeddings)


def test_a_wrong_id_is_refused_on_all_ranks_alike() -> None:
    embedding = nn.Embedding(COUNT, WIDTH)
    with pytest.raises(IndexError):
        late_or_now(embedding, embedding.forward, IDS + COUNT)


BATCHES = ("several images", "text only")


@pytest.mark.parametrize("family", ["Gemma 3", "Qwen2.5-VL", "SmolVLM"])
@on_ranks(2)
def test_a_rank_looks_up_its_tokens_only(family: str) -> None:
    model = under_plan(small_model(family), "contiguous")
    for case in BATCHES:
        with patch.object(late_embeddings.LateEmbeddings, "looked_up", autospec=True) as select:
            select.side_effect = lambda self, tokens: self.embed(self.ids[:, tokens])
            model(**batch_of(family, case))
        count = sum(len(call.args[1]) for call in select.call_args_list)
        length, of_each = batch_of(family, case)["input_ids"].shape[1], [0, 0]
        dist.all_gather_object(of_each, count)
        assert (sum(of_each), max(of_each)) == (length, -(-length // 2)), case
