"""Models whose layers carry a state along the sequence."""

from __future__ import annotations

import logging
import re
import warnings
from collections import Counter
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_ring import Mask
from dtensor_ring.ops.autograd import exchange_op
from dtensor_ring.ops.state import receive_op, send_op
from dtensor_ring.planning.balancing.hybrid import Hybrid, compare_hybrid_layouts
from dtensor_ring.transport.process_group import ProcessGroupTransport
from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.huggingface.relay import KeptStates, first
from parallel_plans.huggingface.stateful import relayed, required_parameters, stateful_layers
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
    return first(layer(hidden, **dict.fromkeys(required_parameters(layer))))


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


def planned(
    family: str,
    layout: str | None = LAYOUT,
    *,
    max_position_embeddings: int = 64,
    **options: Any,
) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    model = small_model(family, max_position_embeddings=max_position_embeddings)
    return parallelize_module(model, mesh, context_parallel_plan(model, layout, **options))


def refused(family: str, layout: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        planned(family, layout)


PACKED = {("Qwen3-Next", 2, 1), ("Granite 4", 2, 1), ("LFM2", 4, 2), ("Mamba 2", 4, 2)}
"""Family, ranks and rows of the default run."""

Rows = tuple[tuple[int, ...], ...]
"""Where documents begin, by row of a batch of 24 tokens."""


def packed(rows: Rows) -> dict[str, Tensor]:
    """Tokens, and what says where their documents begin: boundaries, if there is one row."""
    torch.manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (len(rows), 24))
    lengths = [torch.tensor([*starts, 24]).diff() for starts in rows]
    positions = [torch.cat([torch.arange(int(x)) for x in row]) for row in lengths]
    given = {"input_ids": tokens, "position_ids": torch.stack(positions)}
    return given | ({"cu_seq_lens_q": torch.tensor([*rows[0], 24])} if len(rows) == 1 else {})


def gradients(model: Any) -> Tensor:
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in model.parameters()]
    return torch.cat([x.flatten() for x in grads])


def packed_error(family: str, rows: Rows, layout: str, is_checkpointed: bool) -> list[float]:
    """Of logits and gradients, relative to those of each document alone."""
    batch = packed(rows)
    model, stock = planned(family, layout, unshard_outputs=True), small_model(family)
    if is_checkpointed:
        model.train().activation_checkpointing_enable()
    parts = [
        torch.cat([stock(input_ids=x, use_cache=False).logits for x in documents], 1)
        for row, starts in zip(batch["input_ids"].split(1), rows, strict=True)
        for documents in [row.tensor_split(starts[1:], 1)]
    ]
    expected = torch.cat(parts)
    logits = model(**batch, use_cache=False).logits
    weights = torch.randn_like(logits)
    for x in (logits, expected):
        (x * weights).sum().backward()
    found, grads = gradients(model), gradients(stock)
    dist.all_reduce(found)
    found /= dist.get_world_size()
    pairs = (logits, expected), (found, grads)
    return [((x - y).norm() / y.norm()).item() for x, y in pairs]


@pytest.mark.parametrize(
    ("world_size", "rows"),
    [
        (4, ((0, 6, 18),)),  # with shards
        (2, ((0, 5, 12),)),
        (4, ((0, 5, 7, 17, 19),)),  # ends and beginnings of one token
        (4, ((0, 1, 2, 3, 23), (0, 7, 8, 9, 10))),  # other ones in each row
    ],
)
@pytest.mark.parametrize("family", HYBRIDS)
def test_packed_documents_are_as_alone(
    pool: Pool, request: pytest.FixtureRequest, family: str, world_size: int, rows: Rows
) -> None:
    """Whatever the model's own code makes of them."""
    is_sample = (family, world_size, len(rows)) in PACKED
    if not is_sample and not request.config.getoption("--all-hybrids"):
        pytest.skip("make test ARGS=--all-hybrids")
    if "Granite" in family and len(rows) > 1:
        pytest.skip("its masks do not know positions, and boundaries are those of one row")
    layout = LAYOUT if world_size == 2 else "zigzag"
    found = pool.run(world_size, packed_error, family, rows, layout, len(rows) > 1)
    assert largest(x for errors in found for x in errors) < 1e-5, found


def two_batches(family: str, is_checkpointed: bool) -> Tensor:
    """Gradients of two batches whose documents differ, in one backward."""
    model = planned(family, "zigzag").train()
    if is_checkpointed:
        model.activation_checkpointing_enable()
    losses = []
    for rows in (((0, 5, 11),), ((0, 9),)):
        batch = packed(rows)
        losses.append(model(**batch, labels=batch["input_ids"], use_cache=False).loss)
    torch.stack(losses).sum().backward()
    return gradients(model)


def test_checkpointing_repeats_a_layer_with_its_own_documents(pool: Pool) -> None:
    found, expected = (pool.run(2, two_batches, "LFM2", x) for x in (True, False))
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def refused_batches() -> None:
    with pytest.raises(ValueError, match="does not tell it of which batch"):
        two_batches("Mamba 2", True)


def test_layers_that_know_no_batch_are_not_repeated_with_another(pool: Pool) -> None:
    pool.run(2, refused_batches)


class StateCalls(TorchDispatchMode):
    """Calls of ops and what they send: messages of states, bytes of tokens dealt anew."""

    def __init__(self) -> None:
        super().__init__()
        self.states = ""
        """Calls in their order: r(eceive) and s(end)."""
        self.sent: Counter[str] = Counter()
        self._op: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.states += {receive_op: "r", send_op: "s"}.get(func, "")
        self._op = func
        return func(*args, **kwargs or {})

    def starting(self, start: Any) -> Any:
        """The same start of messages, counted."""

        def counting(transport: Any, receives: Any, sends: Any) -> Any:
            for message in sends:
                self.sent["states"] += self._op in (receive_op, send_op)
                size = message.flat.numel() * message.flat.itemsize
                self.sent["exchanged"] += size * (self._op is exchange_op)
            return start(transport, receives, sends)

        return counting


def calls(seq_len: int, num_rows: int = 1) -> str:
    """What the two layers with a state receive and send in a step."""
    model = planned("Nemotron-H")
    tokens = torch.arange(2, seq_len + 2).expand(num_rows, -1)
    with StateCalls() as found:
        model(input_ids=tokens, labels=tokens).loss.backward()
    assert len(stateful_layers(model)) == 2
    return found.states


def test_a_layer_has_one_message_of_a_row_each_way(pool: Pool) -> None:
    """Also where there are fewer tokens than ranks want."""
    assert pool.run(2, calls, 8) == ["rs" * 4] * 2
    assert pool.run(4, calls, 3) == ["rs" * 4] * 4


def test_a_row_is_handed_over_before_the_next_one_begins(pool: Pool) -> None:
    assert pool.run(2, calls, 8, 3) == ["rs" * 3 * 4] * 2


def sent(layout: str, seq_len: int) -> tuple[list[Counter[str]], int]:
    """What this rank sends forward and backward, and what all shall send to deal tokens anew."""
    model, world_size = planned("LFM2", layout), dist.get_world_size()
    tokens = torch.randint(2, VOCABULARY, (1, seq_len))
    with StateCalls() as calls:
        start = calls.starting(ProcessGroupTransport.start)
        with patch.object(ProcessGroupTransport, "start", start):
            loss = model(input_ids=tokens, labels=tokens).loss
            forward = calls.sent.copy()
            loss.backward()
    hybrid = Hybrid(len(stateful_layers(model)), 1, model.config.hidden_size, itemsize=4)
    costs = compare_hybrid_layouts(hybrid, Mask.causal(), seq_len, world_size).rows
    relayouts = [row.relayouts for row in costs if row.layout == layout]
    return [forward, calls.sent - forward], relayouts[0]


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("layout", [LAYOUT, "zigzag"])
def test_messages_are_those_of_the_schedule(pool: Pool, layout: str, world_size: int) -> None:
    """One for each layer and neighbour, and the bytes of tokens that are dealt anew."""
    found = pool.run(world_size, sent, layout, 32)
    for step, has_no_neighbour in enumerate((world_size - 1, 0)):
        counts, scheduled = [parts[step] for parts, _ in found], found[0][1]
        assert sum(x["exchanged"] for x in counts) == scheduled
        expected = [int(rank != has_no_neighbour) for rank in range(world_size)]
        assert [x["states"] for x in counts] == expected, "LFM2 has one layer with a state"
    assert (scheduled == 0) == (layout == LAYOUT)


def picked(longest: int) -> tuple[str, list[str]]:
    """The layout of a plan that was given none, and what the logger says."""
    logger, said = logging.getLogger("dtensor_ring"), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        model = planned("LFM2", None, max_position_embeddings=longest)
    finally:
        logger.setLevel(level)
        logger.removeHandler(handler)
    return model.context_parallel_sharding.axis.layout.spec, said


@pytest.mark.parametrize(("longest", "layout"), [(64, LAYOUT), (2**20, "zigzag")])
def test_the_plan_picks_a_layout_by_bytes(pool: Pool, longest: int, layout: str) -> None:
    for found, said in pool.run(2, picked, longest):
        assert found == layout
        assert len(said) == 1
        assert f"1 layers with a state, 1 with attention: {longest} tokens on 2 ranks" in said[0]
        assert f"least: {layout}" in said[0]


def compiled_error(family: str, layout: str) -> tuple[float, Counter[str]]:
    """Of loss and gradients after one before it, and what broke graphs."""
    # Dynamo looks for a gradient of what it compiles, be it a leaf or not.
    warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
    model = planned(family, layout)
    torch.manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (2, 24))
    found = []
    torch._dynamo.reset()
    counters.clear()
    for forward in (torch.compile(model, backend="aot_eager"), model):
        for _ in range(2):
            model.zero_grad()
            loss = forward(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        found.append(torch.cat([loss.detach().view(1), gradients(model)]))
    error = (found[0] - found[1]).norm() / found[1].norm()
    return error.item(), counters["graph_break"]


@pytest.mark.parametrize("layout", [LAYOUT, "zigzag"])
@pytest.mark.parametrize("family", ["LFM2", "Qwen3-Next"])
def test_compiled_as_a_whole(
    pool: Pool, request: pytest.FixtureRequest, family: str, layout: str
) -> None:
    """Graphs break at layers with a state, and where documents are read; all else compiles."""
    if not request.config.getoption("--all-hybrids"):
        pytest.skip("make test ARGS=--all-hybrids")
    for error, breaks in pool.run(2, compiled_error, family, layout):
        assert error < 1e-5
        print(breaks)
        found = {
            name for reason in breaks for name in re.findall(r"<function ([\w.<>]+) at", reason)
        }
        assert found == {"_forward.<locals>.forward", "Pieces.of"}, breaks
        assert len(breaks) == 2, breaks


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
