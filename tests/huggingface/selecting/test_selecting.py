"""Models whose layers choose their keys, blocks or pools equal the stock model."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parallel_plans.huggingface import ContextParallelCache, restore_model
from parallel_plans.huggingface.core.whole_rows import are_whole
from parallel_plans.huggingface.selecting.indexers import indexers_of, selecting_layers
from parallel_plans.huggingface.selecting.selection import (
    attend_to_latents,
    has_latents,
    keep_latents,
)
from tests.families import (
    BESIDE_POOLS,
    CHOOSES_BLOCKS,
    CHOOSES_POOLS,
    SELECTING,
    VOCABULARY,
    small_model,
)
from tests.huggingface.planned import under_plan
from tests.huggingface.sharding.test_hf_local_batch import shards
from tests.huggingface.test_families import batches, check_family
from tests.huggingface.test_families_trained import CHECKPOINTING, check_steps
from tests.pool import on_ranks
from tests.results import difference, results_of

LAYOUTS = ("zigzag", "contiguous")
OF_ROWS = {**CHOOSES_BLOCKS, **CHOOSES_POOLS, **BESIDE_POOLS}


def every_family() -> list[Any]:
    """Each family over one layout and number of ranks, in turn; the others repeat these."""
    worlds = list(product((2, 4), LAYOUTS))
    often = {(family, *worlds[number % 4]) for number, family in enumerate(SELECTING)}
    return [
        pytest.param(family, *world, marks=() if (family, *world) in often else pytest.mark.repeats)
        for family, world in product(SELECTING, worlds)
    ]


@pytest.mark.parametrize(("family", "world_size", "layout"), every_family())
@on_ranks()
def test_family_equals_the_stock_model(family: str, layout: str) -> None:
    check_family(family, layout)


# Hy 4 has layers that share an index, and all kinds of this plan; `--all-cases` has the others.
TRAINED = {("Hy 4", "selective"), ("MiniMax M3", "full")}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        pytest.param(*x, marks=() if x in TRAINED else pytest.mark.repeats)
        for x in product((*SELECTING, *OF_ROWS), CHECKPOINTING)
    ],
)
@on_ranks(4)
def test_steps_of_fsdp_equal_one_process(family: str, name: str) -> None:
    check_steps(family, CHECKPOINTING[name])


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(x, marks=() if x in ("GLM-5", *OF_ROWS) else pytest.mark.repeats)
        for x in (*SELECTING, *OF_ROWS)
    ],
)
@on_ranks(2)
def test_models_in_16_bits(family: str) -> None:
    """Rounding chooses other keys here and there, so only the loss is near."""
    tokens = torch.randint(2, VOCABULARY, (2, 24), generator=torch.Generator().manual_seed(0))
    losses = []
    for make in (small_model, lambda x: under_plan(small_model(x))):
        model = make(family).bfloat16()
        model.set_experts_implementation("eager")
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        assert all(x.grad.isfinite().all() for x in model.parameters() if x.grad is not None)
        losses.append(loss.item())
        use_cache = family not in BESIDE_POOLS
        model.eval().generate(tokens, max_new_tokens=3, do_sample=False, use_cache=use_cache)
    stock, ours = losses
    assert ours == pytest.approx(stock, rel=0.03)


@on_ranks(1)
def test_restored_model_is_the_stock_model() -> None:
    model = under_plan(small_model("GLM-5"))
    layers = selecting_layers(model)
    assert len(layers) == 3
    assert all(has_latents(x) for x in layers)
    restore_model(model)
    assert not any(has_latents(x) for x in layers)
    assert not any("forward" in vars(x) for x in indexers_of(model))
    tokens = torch.full((1, 7), VOCABULARY - 1)
    torch.testing.assert_close(model(tokens).logits, small_model("GLM-5")(tokens).logits)


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
def test_models_of_rows_equal_the_stock_model(family: str, layout: str) -> None:
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


HEADS, LENGTH = 4, 9


def dense(query: Tensor, key: Tensor, value: Tensor | int, seen: Tensor, scale: float) -> Tensor:
    """Attention written out, to the keys that `seen`, `(B, L, C)`, shows."""
    value = key[..., :value] if isinstance(value, int) else value
    scores = (query @ key.mT * scale).masked_fill(~seen.unsqueeze(1), -torch.inf)
    return scores.softmax(-1) @ value


class Adapted(nn.Module):
    """A projection with an adapter beside it, as libraries put it in place of the plain one."""

    def __init__(self, plain: nn.Linear) -> None:
        super().__init__()
        self.plain, self.down = plain, nn.Linear(plain.in_features, 2, bias=False)
        self.up = nn.Linear(2, plain.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(x) + self.up(self.down(x))


@pytest.mark.parametrize("is_adapted", [False, True])
def test_latents_equal_what_they_expand_to(is_adapted: bool) -> None:
    model = small_model("DeepSeek-V3.2").double()
    module: Any = selecting_layers(model)[0].double()
    if is_adapted:
        module.kv_b_proj = Adapted(module.kv_b_proj).double()
    torch.manual_seed(0)
    query = torch.randn(2, HEADS, LENGTH, 12, dtype=torch.float64)
    parts = [torch.randn(2, 1, LENGTH, x, dtype=torch.float64, requires_grad=True) for x in (8, 4)]
    seen = torch.rand(2, LENGTH, LENGTH) < 0.5
    seen |= torch.eye(LENGTH).bool()
    expected = dense(query, *module.expand_kv(*parts), seen, 0.3)
    weights = [*parts, *module.kv_b_proj.parameters()]
    gradients = torch.autograd.grad(expected.square().sum(), weights)
    keep_latents([module])
    assert has_latents(module)
    inputs: Any = SimpleNamespace(attend_selected=dense)
    latents, value = module.expand_kv(*parts)
    assert latents is value
    found = attend_to_latents(module, (query, latents), seen, inputs, {"scale": 0.3})
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    ours = torch.autograd.grad(found.square().sum(), weights)
    torch.testing.assert_close(ours, gradients, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("family", SELECTING)
def test_all_layers_keep_latents(family: str) -> None:
    layers = selecting_layers(small_model(family))
    assert len(layers) == 3
    keep_latents(layers)
    assert all(has_latents(x) for x in layers)


def test_modules_without_latents_stay() -> None:
    plain = nn.Linear(2, 2)
    keep_latents([plain])
    assert not has_latents(plain)
