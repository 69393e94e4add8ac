"""Models whose layers choose blocks or pools equal the stock model, in rows where that is right."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel_plans.huggingface import ContextParallelCache
from parallel_plans.huggingface.core.whole_rows import are_whole
from tests.families import BESIDE_POOLS, CHOOSES_BLOCKS, CHOOSES_POOLS, VOCABULARY, small_model
from tests.huggingface.planned import under_plan
from tests.huggingface.sharding.test_hf_local_batch import shards
from tests.huggingface.test_families import batches, check_family
from tests.pool import on_ranks
from tests.results import difference, results_of

READ_WHOLE = ("GLM-5-Next",)
"""An outer model merges images into embeddings of the whole batch."""
KINDS = ("plain", "padded right")
"""Of 23 tokens, which neither ranks nor blocks divide."""
PADDED = (*KINDS, "padded left")
FAMILIES = {**CHOOSES_BLOCKS, **CHOOSES_POOLS, **BESIDE_POOLS}
OFTEN = {
    "MiniMax M3": {(3, "balanced"), (4, "zigzag")},
    "GLM-5-Next": {(2, "striped"), (3, "contiguous")},
    "Qwen4-Exp": {(2, "zigzag"), (3, "striped")},
    "DeepSeek-V4": {(3, "balanced"), (4, "contiguous")},
}
WORLDS = [*product((2, 3, 4), ("contiguous", "zigzag", "striped", "balanced"))]


@pytest.mark.parametrize(
    ("family", "world_size", "layout"),
    [
        pytest.param(family, *x, marks=() if x in OFTEN[family] else pytest.mark.repeats)
        for family, x in product(FAMILIES, WORLDS)
        if family not in CHOOSES_POOLS
        or x[1] != "balanced"  # which layers with a state do not take
    ],
)
@on_ranks()
def test_family_equals_the_stock_model(family: str, layout: str) -> None:
    check_family(family, layout, None, PADDED if family in CHOOSES_POOLS else KINDS)


@on_ranks(2)
def test_over_tiles_of_tokens() -> None:
    check_family("MiniMax M3", "zigzag", None, KINDS, mlp_tile=5)


def planned(family: str, **options: Any) -> Any:
    return under_plan(small_model(family), **options)


def with_positions(seq_len: int) -> dict[str, Tensor]:
    """What a tokenizer and a collator make of rows with padding after their tokens."""
    batch = {name: x[:, :seq_len] for name, x in batches()["padded right"].items()}
    mask = batch["attention_mask"]
    return batch | {"position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)}


@pytest.mark.parametrize("family", [x for x in FAMILIES if x not in READ_WHOLE])
@on_ranks(2)
def test_sharded_batches_equal_the_stock_model(family: str) -> None:
    model, stock = planned(family, layout="zigzag"), small_model(family)
    mesh = model.context_parallel_sharding.axis.mesh
    plain = {name: x[:, :20] for name, x in batches()["plain"].items()}
    for batch in (plain, with_positions(20)):
        error, name = difference(results_of(model, shards(batch, mesh)), results_of(stock, batch))
        assert not name, error


def refused_batches() -> dict[str, dict[str, Tensor]]:
    """Of 20 tokens: which ranks divide."""
    known = {kind: {k: x[:, :20] for k, x in batch.items()} for kind, batch in batches().items()}
    plain, index = known["plain"], torch.arange(20).expand(2, -1)
    bounds = torch.tensor([0, 20], dtype=torch.int32)
    return {
        "packed": known["packed"],
        "padded left": known["padded left"],
        "from 5": plain | {"position_ids": index + 5},
        "cu_seq_lens_q": plain | {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds},
        "seq_idx": plain | {"seq_idx": index // 10},
        "other positions": with_positions(20) | {"position_ids": index.flip(1)},
    }


SERVED: dict[str, set[str]] = {
    "GLM-5-Next": {"padded left"},
    "Qwen4-Exp": {"packed", "padded left", "from 5", "cu_seq_lens_q", "seq_idx", "other positions"},
}
"""Of whole batches, where pools begin with the tokens of a row, or of each document."""


def refused_mask() -> Tensor:
    """Of 24 tokens, the first of which are padding in one row."""
    return (torch.arange(24) >= torch.tensor([[3], [0]])).long()


@pytest.mark.parametrize("family", FAMILIES)
@on_ranks(2)
def test_rows_of_several_documents_are_refused(family: str) -> None:
    """On every rank, whole and sharded: no rank waits, so the same model goes on."""
    model, served = planned(family, layout="zigzag"), SERVED.get(family, set())
    mesh = model.context_parallel_sharding.axis.mesh
    for name, batch in refused_batches().items():
        whole = () if name in served else (batch,)
        for given in whole if family in READ_WHOLE else (*whole, shards(batch, mesh)):
            with pytest.raises(ValueError, match=r"each row must be one document") as raised:
                model(**given)
            if "_" in name:
                assert str(raised.value).startswith(name)
    plain = batches()["plain"]
    with torch.no_grad():
        cache = ContextParallelCache(model)
        model(plain["input_ids"], cache=cache)
        late = {"position_ids": torch.full((2, 1), 24), "cache": cache}
        padded = {"attention_mask": refused_mask(), "cache": cache}
        for more in (late,) if served else (late, padded):
            with pytest.raises(ValueError, match="each row must be one document"):
                model(plain["input_ids"][:, :1], **more)
        assert cache.get_seq_length() == 23
        if served:
            return
        with pytest.raises(ValueError, match="each row must be one document"):
            model.generate(
                plain["input_ids"], attention_mask=refused_mask()[:, 1:], max_new_tokens=2
            )


@pytest.mark.parametrize("block", [2, 8192])
def test_are_whole(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """However many tokens are read at a time."""
    monkeypatch.setattr("parallel_plans.huggingface.core.documents.BLOCK", block)
    index, mask = torch.arange(5).unsqueeze(0), torch.tensor([[1, 1, 1, 0, 0]])
    assert are_whole(None, None)
    assert are_whole(mask, None)
    assert are_whole(None, index + 7, begin=7)
    assert are_whole(mask, index * mask)
    assert are_whole(mask.flip(1), None, begin=5)
    assert not are_whole(mask.flip(1), None)
    assert not are_whole(None, index * mask)
    assert not are_whole(mask, index.flip(1))
    axes = torch.stack([index, index * 0, index * 0, index * 0])
    assert are_whole(mask, axes)
    assert not are_whole(mask, axes.flip(2))
    late = torch.tensor([[1, 1, 0, 1, 2]])
    assert are_whole(None, late, padding=torch.tensor([2]))
    assert not are_whole(None, late, padding=torch.tensor([1]))
    assert are_whole(None, late[:, 3:], begin=3, padding=torch.tensor([2]))
    assert are_whole(mask, axes[1:])


@on_ranks(2)
def test_heads_of_the_index_are_groups_of_key_heads() -> None:
    """The first forward of a model whose index has more heads than keys have."""
    model = under_plan(small_model("MiniMax M3", index_n_heads=4))
    with pytest.raises(ValueError, match="groups that divide the 2 key heads"):
        model(torch.full((1, 9), VOCABULARY - 1))
