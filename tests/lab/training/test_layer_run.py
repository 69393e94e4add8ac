"""Layers that are run without content, beside those of transformers, with content and without."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from dtensor_ring.dtensor.meta_model import ModelRequest
from dtensor_ring.lab.training.estimate import alone
from dtensor_ring.lab.training.launches import ATTENTION, LaunchRecorder, OpLaunch
from dtensor_ring.lab.training.layer_run import LayerRunner, head_run
from dtensor_ring.lab.training.layer_seconds import Shard, itemsize
from dtensor_ring.lab.training.model_source import ModelSource
from parallel_plans.huggingface.losses.cross_entropy import backward, forward
from parallel_plans.models import load

TOKENS, HIDDEN = 64, 32
CONFIG = {"model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": 88, "head_dim": 8}
CONFIG |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
CONFIG |= {"vocab_size": 64, "tie_word_embeddings": False}


def _run(dtype: str, changes: dict[str, Any], **options: Any) -> Any:
    source, tp = ModelSource.of(CONFIG | changes), options.pop("tp", 1)
    return LayerRunner(source, 0, Shard(TOKENS, tp, itemsize(dtype), dtype), **options).run()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_flops_and_kept_bytes_are_those_of_a_layer_with_content(dtype: str) -> None:
    config = LlamaConfig(**CONFIG, attn_implementation="sdpa")
    layer = LlamaDecoderLayer(config, 0).to(getattr(torch, dtype)).train()
    x = torch.randn(1, TOKENS, HIDDEN, dtype=getattr(torch, dtype), requires_grad=True)
    tables = LlamaRotaryEmbedding(config)(x, torch.arange(TOKENS).unsqueeze(0))
    there = [*layer.parameters(), *tables]
    saved: dict[int, int] = {}

    def pack(kept: Tensor) -> Tensor:
        if all(kept.untyped_storage().data_ptr() != y.data_ptr() for y in there):
            saved[kept.untyped_storage().data_ptr()] = kept.untyped_storage().nbytes()
        return kept

    with FlopCounterMode(display=False) as counted:
        with saved_tensors_hooks(pack, lambda kept: kept):
            out = layer(x, position_embeddings=tables)
        out.sum().backward()
    found = _run(dtype, {})
    kept = found.attention_kept + found.others_kept
    # Seeds of random numbers.
    assert sum(saved.values()) == pytest.approx(kept, abs=64)
    of_attention = sum(
        size for op, size in counted.get_flop_counts()["Global"].items() if "scaled" in str(op)
    )
    recorded = sum(x.flops for x in found.forward + found.backward)
    assert recorded == counted.get_total_flops() - of_attention


def _totals(launches: Any) -> list[int]:
    """Return the FLOPs, the bytes and the numbers looked up of all but attentions."""
    kept = [x for x in launches if x.op != ATTENTION and "ring_attention" not in x.op]
    return [
        sum(x.times * y for x, y in zip(kept, numbers, strict=True))
        for numbers in zip(*((x.flops, x.num_bytes, x.elements) for x in kept), strict=True)
    ]


def _whole(config: dict[str, Any], folder: Path) -> list[list[int]]:
    """Return totals of a model of transformers with the plan, forward and backward."""
    (folder / "config.json").write_text(json.dumps(config))
    asked = ModelRequest(TOKENS, 1, "zigzag", "ring", torch.bfloat16)
    with alone(1) as mesh:
        model = load(str(folder), mesh, asked)
        with LaunchRecorder() as recorder:
            loss = model.loss()
            number = len(recorder.launches)
            loss.backward()
    return [_totals(recorder.launches[:number]), _totals(recorder.launches[number:])]


@pytest.mark.parametrize(
    "changes",
    [{"num_key_value_heads": 2}, pytest.param({"model_type": "qwen3"}, marks=pytest.mark.repeats)],
)
def test_launches_are_those_of_a_model(changes: dict[str, Any], tmp_path: Path) -> None:
    """What a model with three layers launches more than one with two."""
    two, three = (_whole(CONFIG | changes | {"num_hidden_layers": x}, tmp_path) for x in (2, 3))
    found = _run("bfloat16", changes)
    for before, after, launches in zip(two, three, (found.forward, found.backward), strict=True):
        more = [y - x for x, y in zip(before, after, strict=True)]
        assert _totals(launches) == pytest.approx(more, rel=0.02)


def test_the_loss_is_that_of_the_plan() -> None:
    tokens, entries, tiles = 65536, 128, 64
    source = ModelSource.of(CONFIG | {"vocab_size": entries * tiles})
    shapes = (tokens, HIDDEN), (entries * tiles, HIDDEN)
    hidden, weight = (torch.empty(x, dtype=torch.bfloat16, device="meta") for x in shapes)
    labels = torch.zeros(tokens, dtype=torch.long, device="meta")
    numbers = torch.empty(tokens, device="meta")
    with LaunchRecorder() as ahead:
        forward(hidden, weight, None, labels, 1.0, 0.0)
    with LaunchRecorder() as back:
        backward(numbers, hidden, weight, None, labels, numbers, 1.0, 0.0, [True, True, False])
    found = head_run(source, entries, tiles, Shard(tokens, 1, 2, "bfloat16"), None)
    for ours, theirs in ((found.forward, ahead), (found.backward, back)):
        (flops, size, _), expected = _totals(ours), _totals(theirs.launches)
        assert flops == expected[0]
        assert size == pytest.approx(expected[1], rel=0.05)


def test_tiles_run_once_and_count_as_many() -> None:
    whole, tiles = (_run("bfloat16", {}, tile=x) for x in (None, TOKENS // 4))
    # Weights are read once for each tile.
    assert _totals(tiles.forward)[::2] == _totals(whole.forward)[::2]
    again = [x for x in whole.forward if x.flops][-3:]  # of the MLP
    assert _totals(tiles.backward)[0] - _totals(whole.backward)[0] == _totals(again)[0]
    assert tiles.most < whole.most


def test_a_rank_of_tensor_parallelism_has_its_part() -> None:
    """Of heads and inner sizes for all tokens, and of tokens for norms."""
    whole, half = (_run("bfloat16", {}, tp=x) for x in (1, 2))
    assert 2 * _totals(half.forward)[0] == _totals(whole.forward)[0]
    assert 2 * half.attention_kept == whole.attention_kept
    assert half.blocks == whole.blocks == 2
    squares = [
        [sum(y for _, y in x.writes) for x in run.forward if x.op == "pow"] for run in (half, whole)
    ]
    assert [2 * x for x in squares[0]] == squares[1]


@pytest.mark.parametrize("tile", [None, TOKENS // 4])
def test_products_of_experts_are_counted(tile: int | None) -> None:
    sizes = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
    found = _run("bfloat16", sizes | {"moe_intermediate_size": 16}, tile=tile)
    flops = 2 * TOKENS * 2 * HIDDEN * 3 * 16  # of two experts, with three matrices each
    sides = ([x for x in side if "grouped" in x.op] for side in (found.forward, found.backward))
    forward, backward = (sum(x.times * x.flops for x in side) for side in sides)
    assert (forward, backward) == (flops, (3 if tile else 2) * flops)


def test_a_launch_of_an_attention_has_its_tensors() -> None:
    (found,) = (x for x in _run("bfloat16", {}).forward if x.op == ATTENTION)
    assert found == OpLaunch(ATTENTION, 0, found.reads, found.writes)
    assert found.num_bytes == 4 * TOKENS * HIDDEN * 2
