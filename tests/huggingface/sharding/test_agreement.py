"""Ranks compare their batches in each forward, and their models in some, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.huggingface.sharding.agreement import Parts, checksum_words
from tests.families import VOCABULARY, small_model
from tests.pool import Pool

SEQ_LEN, PARTS_AT = 16, 3
"""The forward in which batches part is one of those that do not compare models."""
DIFFER = "must get the same batch .*they differ in "


def planned(change: Callable[[Any, int], None] | None = None, **changes: Any) -> Any:
    model = small_model("Llama", **changes)
    model.config._attn_implementation = "eager"
    if change is not None:
        change(model, dist.get_rank())
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, context_parallel_plan(model, "zigzag"))


def batch(step: int = 0, **others: Any) -> dict[str, Any]:
    tokens = torch.randint(2, VOCABULARY, (1, SEQ_LEN), generator=_seeded(step))
    return {"input_ids": tokens, "labels": tokens} | others


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def embedded(step: int, rank: int) -> dict[str, Any]:
    x = torch.randn(1, SEQ_LEN, small_model("Llama").config.hidden_size, generator=_seeded(step))
    x[0, 3] += rank
    return {"inputs_embeds": x, "labels": batch()["labels"]}


# A batch of this step and rank, and what the error names, if ranks part in it.
BATCHES: dict[str, tuple[Callable[[int, int], dict[str, Any]], str]] = {
    "tokens": (lambda step, rank: batch(step + 100 * rank), "input_ids: .*checksum"),
    "labels": (
        lambda step, rank: batch(step, labels=batch(rank)["labels"]),
        "labels: .*checksum",
    ),
    "items": (lambda step, rank: batch(step, num_items_in_batch=9 + rank), "num_items_in_batch: 9"),
    "items, tensor": (
        lambda step, rank: batch(step, num_items_in_batch=torch.tensor(9 + rank)),
        "num_items_in_batch: .*checksum",
    ),
    "positions": (
        lambda step, rank: batch(step, position_ids=torch.arange(SEQ_LEN)[None] % (16 - 8 * rank)),
        "position_ids: .*checksum",
    ),
    "mask": (
        lambda step, rank: batch(
            step, attention_mask=(torch.arange(SEQ_LEN) < SEQ_LEN - rank).long()[None]
        ),
        "attention_mask: .*checksum",
    ),
    "documents": (
        lambda step, rank: batch(
            step,
            **dict.fromkeys(
                ("cu_seq_lens_q", "cu_seq_lens_k"),
                torch.tensor([0, 5 + rank, SEQ_LEN], dtype=torch.int32),
            ),
        ),
        "cu_seq_lens_q: .*checksum",
    ),
    "embeddings": (embedded, "inputs_embeds: mean and mean size"),
}


def test_batches_that_part(pool: Pool) -> None:
    pool.run(2, _check_parting)


def _check_parting() -> None:
    """In the forward in which they do, whatever its number, on all ranks; and all may go on."""
    rank = dist.get_rank()
    for make, reported in BATCHES.values():
        model = planned(num_hidden_layers=1)
        for step in range(1, PARTS_AT):
            model(**make(step, 0)).loss.backward()
        with pytest.raises(ValueError, match=DIFFER + reported):
            model(**make(PARTS_AT, rank))
        assert model(**make(PARTS_AT, 0)).loss.isfinite()


def test_compiled_batches_that_part(pool: Pool) -> None:
    pool.run(2, _check_compiled)


def _check_compiled() -> None:
    """No step of these compiles again."""
    counter = CompileCounterWithBackend("eager")
    model = planned(num_hidden_layers=1)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    make, reported = BATCHES["items, tensor"]
    for step in range(1, PARTS_AT):
        compiled(**make(step, 0)).loss.backward()
    with pytest.raises(ValueError, match=DIFFER + reported):
        compiled(**make(PARTS_AT, dist.get_rank()))
    assert compiled(**make(PARTS_AT, 0)).loss.isfinite()
    assert counter.frame_count == 1


def _scaled(model: Any, rank: int) -> None:
    model.model.layers[0].mlp.up_proj.weight.data *= 1 + rank


def _other_eps(model: Any, rank: int) -> None:
    model.model.norm.variance_epsilon *= 1 + rank


def _other_config(model: Any, rank: int) -> None:
    model.config.rms_norm_eps *= 1 + rank


def _other_buffer(model: Any, rank: int) -> None:
    model.model.rotary_emb.inv_freq *= 1 + rank


MODELS: dict[str, tuple[Callable[[Any, int], None], str]] = {
    "weights": (_scaled, "weights: checksum .*"),
    "eps": (_other_eps, r"modules: .*LlamaRMSNorm.variance_epsilon=.*"),
    "config": (_other_config, "config: .*rms_norm_eps=.*"),
    "buffers": (_other_buffer, "buffers: checksum .*"),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        *((name, None) for name in MODELS),
        ("weights", "eager"),
        # What is compared does not depend on what is called.
        *(pytest.param(x, "eager", marks=pytest.mark.repeats) for x in MODELS if x != "weights"),
    ],
)
def test_models_that_differ(pool: Pool, name: str, backend: str | None) -> None:
    pool.run(2, _check_models, name, backend)


def _check_models(name: str, backend: str | None) -> None:
    change, reported = MODELS[name]
    model: Any = planned(change)
    if backend is not None:
        model = torch.compile(model, backend=backend, fullgraph=True)
    with pytest.raises(ValueError, match=DIFFER + reported):
        model(**batch())


def test_embeddings_that_differ_in_rounding(pool: Pool) -> None:
    pool.run(2, _check_rounding)


def _check_rounding() -> None:
    """Ranks may compute them in another order; they are compared by their means from then on."""
    model = planned()
    for step in range(4):
        given = embedded(step, 0)
        given["inputs_embeds"] += 1e-7 * dist.get_rank()
        assert model(**given).loss.isfinite()
    assert not model.context_parallel_sharding.agreement._reads_floats


def test_text_of_parts() -> None:
    """What an op gets makes the same parts again."""
    given = batch(num_items_in_batch=3, output_hidden_states=True, past=None)
    given["features"] = [torch.ones(2), nn.Parameter(torch.ones(3))]
    parts = Parts.of(given)
    again = Parts.parse([*parts.tensors.values()], [*parts.numbers.values()], parts.text)
    assert again.described == parts.described
    assert checksum_words(again, True) == checksum_words(parts, True)
    assert [*parts.tensors] == ["input_ids", "labels", "features[0]", "features[1]"]


def test_lengths_are_symbols(pool: Pool) -> None:
    pool.run(2, _check_lengths)


def _check_lengths() -> None:
    """A graph for the first length, and one for all others, uneven ones as well."""
    counter, one_layer = CompileCounterWithBackend("eager"), {"num_hidden_layers": 1}
    model, stock = planned(**one_layer), small_model("Llama", **one_layer)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for seq_len in (32, 31, 48):
        tokens = torch.randint(2, VOCABULARY, (1, seq_len), generator=_seeded(seq_len))
        given = {"input_ids": tokens, "labels": tokens.clone()}
        for each in (model, stock):
            each.zero_grad()
        loss, expected = compiled(**given).loss, stock(**given).loss
        loss.backward()
        expected.backward()
        grad = model.lm_head.weight.grad
        dist.all_reduce(grad)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(grad / 2, stock.lm_head.weight.grad)
    assert counter.frame_count <= 3
