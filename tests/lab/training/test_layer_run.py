"""Layers that are run without content, those with states among them, beside real ones."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from dtensor_ring.command.main import main
from dtensor_ring.dtensor.meta_model import ModelRequest
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training.estimate import alone
from dtensor_ring.lab.training.launches import ATTENTION, LaunchRecorder, OpLaunch
from dtensor_ring.lab.training.layer_run import LayerRunner, head_run
from dtensor_ring.lab.training.layer_seconds import Shard, itemsize
from dtensor_ring.lab.training.layer_states import hybrid_of, model_states
from dtensor_ring.lab.training.model_shape import ModelShape
from dtensor_ring.lab.training.model_source import ModelSource
from dtensor_ring.lab.training.state_shape import StateShape
from dtensor_ring.lab.training.step import SimulatedStep, simulate_step
from dtensor_ring.lab.training.step_request import step_request
from dtensor_ring.states.run import Maps
from parallel_plans.huggingface.losses.cross_entropy import backward, forward
from parallel_plans.huggingface.states.default_layout import hybrid_of as hybrid_of_modules
from parallel_plans.huggingface.states.state_passing import specs_of
from parallel_plans.models import load, read_config
from tests.families import VOCABULARY, small_model
from tests.huggingface.states.hybrids import planned
from tests.huggingface.states.test_hybrids_messages import messages
from tests.lab.counted import counted
from tests.pool import Pool

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


# What layers with a state send in the laboratory, next to real ranks, and what it says of them.

H100 = as_machine("h100")
FLOAT32 = replace(H100, gemm={"float32": 1e14})
READ = ("Qwen3-Next", "Granite 4", "LFM2", "Kimi Linear", "Nemotron-H", "Qwen3.5")
READ += ("OLMo hybrid", "Bamba", "Falcon-H1")
# Sizes of experts that their kernels take, where tensors have no content.
ALIGNED = {"moe_intermediate_size": 16}
QWEN = {"model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 4}
QWEN |= {"num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256}
QWEN |= {"vocab_size": 4096, "intermediate_size": 5632, "linear_conv_kernel_dim": 4}
QWEN |= {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128}
QWEN |= {"linear_value_head_dim": 128, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
MAP, COLUMNS = 4 * 32 * 128 * 2 * 128, 4 * 3 * 8192
"""Bytes of a matrix and a state of each head, and of three tokens before a convolution."""


def said(family: str, layout: str, seq_len: int, world_size: int) -> tuple[bool, list[list[int]]]:
    """Whether tokens stay, and what all layers with a state send: by rank, forward and backward."""
    config, how = small_model(family, **ALIGNED).config, {"layout": layout, "dtype": "float32"}
    asked = step_request(config, seq_len, {"cp": world_size}, FLOAT32, **how)
    kinds = Counter(x.state for x in asked.model.layers if x.state is not None)
    found, bytes_of = model_states(asked), [[0, 0] for _ in range(world_size)]
    for kind, number in kinds.items():
        for rank, costs in enumerate(found[kind].costs):
            for way, cost in enumerate(costs):
                bytes_of[rank][way] += number * cost.sent
    return all(x.stays for x in found.values()), bytes_of


@pytest.mark.needs(
    "--all-hybrids", but=lambda family, world_size: family in READ[:3] and world_size == 4
)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("family", READ)
def test_bytes_are_those_that_ranks_send(pool: Pool, family: str, world_size: int) -> None:
    """Of each rank, in each direction: maps, and tokens that are exchanged, if they are."""
    stayed = set()
    for layout, seq_len in (("contiguous", 32), ("zigzag", 128), ("striped", 64)):
        real = pool.run(world_size, messages, family, layout, seq_len)
        stays, expected = said(family, layout, seq_len, world_size)
        found = [[x["states"] + x["exchanged"] for x in ways] for ways in real]
        assert found == expected, (layout, seq_len)
        assert all(max(way) > 0 for way in zip(*found, strict=True))
        stayed.add((layout, seq_len, stays))
    assert ("zigzag", 128, True) in stayed
    assert ("striped", 64, False) in stayed


def all_sent(family: str, seq_len: int) -> int:
    """Bytes of all messages of this rank in a step."""
    model, tokens = planned(family, "zigzag"), torch.randint(2, VOCABULARY, (1, seq_len))
    return counted(lambda: model(input_ids=tokens, labels=tokens).loss.backward())[1].sent


# torch 2.11 multiplies by experts in bfloat16 only, where tensors have no content.
@pytest.mark.needs("--all-hybrids", but=lambda family: family == "Bamba")
@pytest.mark.parametrize("family", ["Bamba", "LFM2", "OLMo hybrid", "Falcon-H1", "Zamba2"])
def test_an_estimate_has_the_messages_of_scans(
    pool: Pool, family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the last rank, also of layers that are not simulated."""
    small_model(family).config.save_pretrained(tmp_path)
    how = "--mesh cp=2 --layout zigzag --dtype float32 --json --model"
    for seq_len in (16, 128):
        command = f"estimate --seq-len {seq_len} {how}".split()
        assert main(load, [*command, str(tmp_path)], read=read_config) == 0
        sent = json.loads(capsys.readouterr().out)["messages"]["sent"]
        # The loss and its gradient travel with call records, which are not counted here.
        assert sent - 8 == pool.run(2, all_sent, family, seq_len)[-1] > 0


@pytest.mark.parametrize("family", READ)
def test_the_layout_is_chosen_by_the_same_numbers(family: str) -> None:
    """As those that the plan reads from modules, but for the heads of attention."""
    model = small_model(family, **ALIGNED)
    read = hybrid_of(ModelShape.of(model.config), model.dtype.itemsize)
    of_modules = hybrid_of_modules(model.model, specs_of(model.model))
    for name in ("stateful", "attention", "hidden_size", "itemsize", "maps"):
        assert getattr(read, name) == getattr(of_modules, name), name


def step(changes: dict[str, Any] | None = None, seq_len: int = 65536, **how: Any) -> SimulatedStep:
    return simulate_step(QWEN | (changes or {}), seq_len, {"cp": 4}, H100, **how)


def test_maps_are_sent_at_once() -> None:
    """In contiguous order to all later ranks; in zigzag order for two runs of each rank."""
    ((_, found),) = step(layout="contiguous").states.items()
    assert not found.stays
    assert [x.sent for x, _ in found.costs] == [
        COLUMNS + 3 * MAP, COLUMNS + 2 * MAP, COLUMNS + MAP, 0,
    ]  # fmt: skip
    assert [x.sent for _, x in found.costs] == [x.sent for x, _ in found.costs][::-1]
    ((_, found),) = step(layout="zigzag").states.items()
    assert found.stays
    assert sum(x.sent for x, _ in found.costs) == 6 * COLUMNS + 18 * MAP


def test_a_change_of_what_travels_changes_what_is_printed() -> None:
    before = str(step())
    assert str(step()) == before
    packed = Maps.packed

    def wide(maps: Maps) -> Tensor:
        return packed(Maps(*(None if x is None else x.double() for x in maps)))

    with patch.object(Maps, "packed", wide):
        changed = step()
    ((name, found),) = changed.states.items()
    assert found.sent == tuple(2 * x for x in step().states[name].sent)
    assert str(changed) != before
    # A smaller state is another line, too: of the state, and of the matrix as before.
    ((name, smaller),) = step({"linear_value_head_dim": 64}).states.items()
    assert name == "32 states of 128 x 64"
    assert sum(smaller.sent) < sum(step().states["32 states of 128 x 128"].sent)
    assert f"layers with {name}" in str(step({"linear_value_head_dim": 64}))


def test_a_short_sequence_and_documents_are_exchanged() -> None:
    tokens = 2 * 2048 * 2  # there and back, 2 bytes of a number
    for how in ({"seq_len": 4096}, {"batches": [[0, 1000, 65536]]}, {"layout": "striped"}):
        seq_len = how.get("seq_len", 65536)
        ((_, found),) = step(**how).states.items()
        assert not found.stays, how
        assert "one run of a rank" in str(found)
        moved = sum(x.sent for x, _ in found.costs) - 3 * COLUMNS - 6 * MAP
        assert moved == seq_len * 3 // 4 * tokens, how
    assert step(batches=[[0, 65536]]).states["32 states of 128 x 128"].stays


def test_parts_of_a_step() -> None:
    """Kernels shrink with the ranks but for the work of states, and scans are there and back."""
    plain, full = step(), step(checkpoint="full")
    ((_, found),) = plain.states.items()
    assert plain.parts["scan"] == pytest.approx(3 * (found.forward + found.backward))
    assert full.parts["scan"] == pytest.approx(3 * (2 * found.forward + found.backward))
    assert full.parts["states"] == pytest.approx(4 / 3 * plain.parts["states"])
    alone = simulate_step(QWEN, 65536, {"dp": 1}, H100)
    assert alone.parts["scan"] == 0.0 < alone.parts["states"]
    assert 1 < 4 * plain.parts["states"] / alone.parts["states"] < 1.5
    assert plain.flops == pytest.approx(alone.flops / 4)


def test_flops_of_a_chunk() -> None:
    """Next to those of products by hand, for one chunk of one head."""
    chunk, key, value = 64, 16, 32
    pairs, states = 2 * chunk * chunk, 2 * chunk * key * value
    rule = StateShape(0, 3, 0, 1, 1, (key, value), True)
    # Keys and keys, queries and keys, the inverse times keys; it and scores times values.
    assert rule.flops(False) * chunk == pairs * (3 * key + 2 * value) + 3 * states
    mamba = StateShape(0, 3, 0, 1, 1, (key, value), False, chunk)
    assert mamba.flops(False) * chunk == pairs * (key + value) + 2 * states
    assert mamba.flops(True) * chunk == pairs * (key + value) + 3 * states


@pytest.mark.parametrize(
    ("config", "how", "message"),
    [
        (QWEN, {"layout": "balanced"}, "take no layout of a batch"),
        ({"model_type": "jamba"}, {}, "only gated and Kimi delta rules, Mamba 2"),
    ],
)
def test_what_is_not_simulated(config: Any, how: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate_step(config, 8192, {"cp": 4}, **how)


def test_more_ranks_than_run() -> None:
    """Of many ranks some are counted, the first and the last among them."""
    found = simulate_step(QWEN, 2**20, {"cp": 64}, H100, layout="contiguous").states
    ((_, states),) = found.items()
    assert len(states.costs) == 32
    assert states.costs[-1][0].sent == states.costs[0][1].sent == 0
    # Six rounds of steps that double, and the first one.
    assert max(x.messages for x, _ in states.costs) == 1 + 7
