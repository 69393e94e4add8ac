"""Models whose layers carry a state along the sequence."""

from __future__ import annotations

from collections import Counter
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_ring.ops.state import receive_op, send_op
from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.huggingface.relay import KeptStates, first
from parallel_plans.huggingface.stateful import relayed, stateful_layers
from tests.dense import largest
from tests.families import HYBRIDS, VOCABULARY, small_model
from tests.huggingface.test_families import compare
from tests.huggingface.test_families_trained import CHECKPOINTING, train_both
from tests.pool import Pool

LAYOUT = "contiguous"
KINDS = ("plain", "padded left", "padded right")
SAMPLE = ("Qwen3-Next", "Granite 4", "LFM2")
"""A delta rule, a selective scan, and convolutions alone; `--all-hybrids` runs the others, too."""


@pytest.mark.parametrize(("world_size", "layout"), [*product([2, 4], [LAYOUT, "zigzag"])])
@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrid_equals_the_stock_model(
    pool: Pool, request: pytest.FixtureRequest, family: str, world_size: int, layout: str
) -> None:
    is_sample = family in SAMPLE and (world_size, layout) != (2, "zigzag")
    if not is_sample and not request.config.getoption("--all-hybrids"):
        pytest.skip("make test ARGS=--all-hybrids")
    for rank, errors in enumerate(pool.run(world_size, compare, family, layout, None, KINDS)):
        assert set(errors) == set(KINDS)
        worst = largest(x for error in errors.values() for x in error.values())
        assert worst < 1e-5, f"rank {rank}: {errors}"


@pytest.mark.parametrize("family", HYBRIDS)
def test_layers_go_on_from_their_states(family: str) -> None:
    """Two halves of a sequence are the whole with the states of the first half, and not without."""
    layers, states = stateful_layers(small_model(family)), KeptStates()
    assert bool(layers) == ("attention only" not in family)
    torch.manual_seed(1)
    x = torch.randn(2, 10, 16)
    with torch.no_grad(), relayed(layers, states):
        for layer in layers:
            whole, ends = output(layer, x), []
            for forgets in (False, True):
                states.forget()
                output(layer, x[:, :5])
                if forgets:
                    states.forget()
                ends.append(output(layer, x[:, 5:]))
            torch.testing.assert_close(ends[0], whole[:, 5:], rtol=1e-4, atol=1e-5)
            assert (ends[1] - whole[:, 5:]).norm() > 1e-3 * whole.norm()
    assert not states.unused


def output(layer: Any, hidden: Tensor) -> Tensor:
    """That of a layer that gets nothing else."""
    parameters = signature(type(layer).forward).parameters.values()
    others = [x.name for x in parameters if x.default is x.empty and x.kind is not x.VAR_KEYWORD]
    return first(layer(hidden, **dict.fromkeys(others[2:])))


@pytest.mark.parametrize(
    ("family", "layout", "reason"),
    [
        ("Jamba", LAYOUT, r"layers\.0\.mamba goes on from the recurrent state .* a single token"),
        ("RecurrentGemma", LAYOUT, r"layers\.0 \(linear_attention\).* tell no cache"),
        ("xLSTM", LAYOUT, "tell no cache"),
        (
            "LFM2",
            "balanced",
            r"layers\.0\.conv .*'balanced' belongs to a batch.* 'contiguous', 'st",
        ),
    ],
)
def test_refused_with_the_reason(pool: Pool, family: str, layout: str, reason: str) -> None:
    pool.run(1, refused, family, layout, reason)


def planned(family: str, layout: str = LAYOUT, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = small_model(family)
    return parallelize_module(model, mesh, context_parallel_plan(model, layout, **options))


def refused(family: str, layout: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        planned(family, layout)


def packed(starts: list[int]) -> tuple[Tensor, Tensor]:
    """Tokens of 24, and their positions, in documents that start there."""
    torch.manual_seed(1)
    lengths = torch.tensor([*starts, 24]).diff()
    positions = torch.cat([torch.arange(int(x)) for x in lengths]).unsqueeze(0)
    return torch.randint(2, VOCABULARY, (1, 24)), positions


def packed_error(family: str, starts: list[int], layout: str = LAYOUT) -> float:
    """Of logits, relative to those of each document alone."""
    tokens, positions = packed(starts)
    model, stock = planned(family, layout, unshard_outputs=True), small_model(family)
    with torch.no_grad():
        logits = model(input_ids=tokens, position_ids=positions, use_cache=False).logits
        parts = tokens.tensor_split(starts[1:], 1)
        expected = torch.cat([stock(input_ids=x, use_cache=False).logits for x in parts], 1)
    return ((logits - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize(("family", "layout"), [("Qwen3-Next", LAYOUT), ("LFM2", "zigzag")])
def test_documents_begin_with_shards(pool: Pool, family: str, layout: str) -> None:
    assert largest(pool.run(4, packed_error, family, [0, 6, 18], layout)) < 1e-5


def test_documents_that_begin_within_a_shard_are_refused(pool: Pool) -> None:
    pool.run(2, refused_document)


def refused_document() -> None:
    with pytest.raises(ValueError, match="begins at token 5, within the shard of a rank, of 12"):
        packed_error("LFM2", [0, 5, 12])


class StateCalls(TorchDispatchMode):
    """Counts the calls of both ops."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func] += func in (receive_op, send_op)
        return func(*args, **kwargs or {})


def calls(seq_len: int) -> tuple[int, int, int]:
    """Layers with a state, and what they receive and send in a step."""
    model = planned("Nemotron-H")
    tokens = torch.arange(2, seq_len + 2).unsqueeze(0)
    with StateCalls() as found:
        model(input_ids=tokens, labels=tokens).loss.backward()
    return len(stateful_layers(model)), found.counts[receive_op], found.counts[send_op]


def test_a_layer_has_one_message_each_way(pool: Pool) -> None:
    """Also where there are fewer tokens than ranks want."""
    assert pool.run(2, calls, 8) == [(2, 4, 4)] * 2
    assert pool.run(4, calls, 3) == [(2, 4, 4)] * 4


@pytest.mark.parametrize("name", ["none", "full"])
@pytest.mark.parametrize("family", ["Granite 4", "Nemotron-H", "LFM2"])
def test_ten_steps_of_fsdp_equal_one_process(
    pool: Pool, request: pytest.FixtureRequest, family: str, name: str
) -> None:
    """Not of a delta rule: one process alone is 0.1 off after ten steps if weights are rounded."""
    is_default = (family, name) == ("Granite 4", "full")
    if not is_default and not request.config.getoption("--all-hybrids"):
        pytest.skip("make test ARGS=--all-hybrids")
    for found in pool.run(4, train_both, family, CHECKPOINTING[name], LAYOUT):
        assert found["loss"] < 1e-5, found
        assert found["parameters"] < 1e-5, found
