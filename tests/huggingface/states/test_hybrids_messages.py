"""Messages and scans of layers with a state."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.granitemoehybrid import modeling_granitemoehybrid
from transformers.models.qwen3_next import modeling_qwen3_next

from dtensor_ring import Mask, StateMap
from dtensor_ring.all_to_all.op import all_to_all_op
from dtensor_ring.ops.axis_ops import receive_op, send_op
from dtensor_ring.states.hybrid import HybridCost, compare_hybrid_layouts
from dtensor_ring.states.op import scan_op
from dtensor_ring.transport.transport import ProcessGroupTransport
from parallel_plans.huggingface.states.default_layout import hybrid_of
from parallel_plans.huggingface.states.scans import SCANS
from parallel_plans.huggingface.states.state_passing import specs_of
from tests.families import VOCABULARY
from tests.huggingface.states.hybrids import LAYOUT, planned
from tests.pool import Pool, on_ranks


class StateCalls(TorchDispatchMode):
    """Calls of ops and what they send: messages of states, bytes of tokens sharded again."""

    def __init__(self) -> None:
        super().__init__()
        self.states = ""
        """Calls in their order: r(eceive) and s(end), or scans of c(olumns) and m(aps)."""
        self.sent: Counter[str] = Counter()
        self._op: Any = None
        self._shards_tokens = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.states += {receive_op: "r", send_op: "s"}.get(func, "")
        if func is scan_op:
            self.states += "c" if args[1] is None and args[2] is None else "m"
        self._op = func
        # The sum of the ranks' losses is an exchange, too: of one number each.
        self._shards_tokens = func is all_to_all_op and args[0][0].shape[-1] > 1
        return func(*args, **kwargs or {})

    def starting(self, start: Any) -> Any:
        """The same start of messages, counted."""

        def counting(transport: Any, receives: Any, sends: Any) -> Any:
            for message in sends:
                size = message.flat.numel() * message.flat.itemsize
                self.sent["states"] += size * (self._op is scan_op)
                self.sent["exchanged"] += size * self._shards_tokens
            return start(transport, receives, sends)

        return counting


def calls(family: str, seq_len: int, num_rows: int = 1, starts: tuple[int, ...] = ()) -> str:
    """What the layers with a state receive and send in a step."""
    model = planned(family)
    tokens = torch.arange(2, seq_len + 2).expand(num_rows, -1)
    how = {}
    if starts:
        is_start = torch.zeros_like(tokens)
        for row, start in enumerate(starts):
            is_start[row, start] = 1
        how["seq_idx"] = is_start.cumsum(1)
    with StateCalls() as found:
        model(input_ids=tokens, labels=tokens, **how).loss.backward()
    return found.states


def calls_in_turn(family: str, seq_len: int, num_rows: int) -> str:
    """The same of layers whose scans are not known."""
    with patch("parallel_plans.huggingface.states.stateful.scan_of", return_value=None):
        return calls(family, seq_len, num_rows)


def test_all_ranks_scan_at_once(pool: Pool) -> None:
    """Each of the two layers the columns of its convolution and the map of its state, for all rows.

    Also where there are fewer tokens than ranks want: then columns have a map, too.
    """
    for rows in (1, 3):
        assert pool.run(2, calls, "Nemotron-H", 8, rows) == ["cm" * 2 + "mc" * 2] * 2
    assert pool.run(4, calls, "Nemotron-H", 3) == ["mm" * 4] * 4


def test_rows_with_other_documents_scan_one_by_one(pool: Pool) -> None:
    """A document begins on either rank, within its shard or with it, or on none."""
    for starts in ((2, 6), (4, 6), (3, 0)):
        expected = "cm" * 2 * 2 + "mc" * 2 * 2
        assert pool.run(2, calls, "Nemotron-H", 8, 2, starts) == [expected] * 2


def test_other_layers_have_one_message_of_a_row_each_way(pool: Pool) -> None:
    """A row is handed over before the next one begins."""
    for rows in (1, 3):
        assert pool.run(2, calls_in_turn, "MiniMax-01", 8, rows) == ["rs" * rows * 2] * 2
        assert pool.run(2, calls, "MiniMax-01", 8, rows) == ["mm"] * 2


def messages(family: str, layout: str, seq_len: int) -> list[Counter[str]]:
    """What this rank sends in a step, forward and backward, see `StateCalls`."""
    return counted(planned(family, layout), seq_len)


def counted(model: Any, seq_len: int) -> list[Counter[str]]:
    tokens = torch.randint(2, VOCABULARY, (1, seq_len))
    with StateCalls() as calls:
        start = calls.starting(ProcessGroupTransport.start)
        with patch.object(ProcessGroupTransport, "start", start):
            loss = model(input_ids=tokens, labels=tokens).loss
            forward = calls.sent.copy()
            loss.backward()
    return [forward, calls.sent - forward]


def sent(family: str, layout: str, seq_len: int) -> tuple[list[Counter[str]], HybridCost]:
    """What this rank sends, and what the comparison of layouts has for all ranks."""
    model, world_size = planned(family, layout), dist.get_world_size()
    found = counted(model, seq_len)
    hybrid = hybrid_of(model.model, specs_of(model.model))  # makes its layers stock ones again
    costs = compare_hybrid_layouts(hybrid, Mask.causal(), seq_len, world_size).rows
    [cost] = [row for row in costs if row.layout == layout]
    return found, cost


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.repeats), 4])
@pytest.mark.parametrize("family", ["LFM2", "Granite 4", "Qwen3-Next"])
def test_bytes_are_those_of_the_schedule(pool: Pool, family: str, world_size: int) -> None:
    """Those of maps, once in each direction, and of tokens that are sharded again, if they are."""
    moves = set()
    for layout, seq_len in ((LAYOUT, 32), ("zigzag", 16), ("zigzag", 128)):
        found = pool.run(world_size, sent, family, layout, seq_len)
        for step in range(2):
            counts, cost = [parts[step] for parts, _ in found], found[0][1]
            assert sum(x["exchanged"] for x in counts) == cost.relayouts
            assert sum(x["states"] for x in counts) == cost.states > 0
        moves.add((layout, cost.relayouts > 0))
    assert (LAYOUT, False) in moves
    assert ("zigzag", False) in moves, "two maps cost less than tokens in a long sequence"
    assert ("zigzag", True) in moves or family == "LFM2", "a short one costs less than two maps"


@pytest.mark.parametrize(("longest", "layout"), [(64, LAYOUT), (2**20, "zigzag")])
@on_ranks(2)
def test_the_plan_picks_a_layout_by_bytes(longest: int, layout: str) -> None:
    """A plan that was given none; and the logger says so."""
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
    assert model.context_parallel_sharding.axis.layout.spec == layout
    assert len(said) == 1
    assert f"1 layers with a state, 1 with attention: {longest} tokens on 2 ranks" in said[0]
    assert f"least: {layout}" in said[0]


SHARDS = 4
LENGTHS = (2048, pytest.param(1 << 16, marks=pytest.mark.repeats))
NAMES = {
    "torch_chunk_gated_delta_rule": modeling_qwen3_next,
    "mamba2_chunk_scan": modeling_granitemoehybrid,
}


def inputs(name: str, length: int) -> list[Tensor]:
    """Tensors by token, with decays so slow that all tokens matter."""
    torch.manual_seed(0)
    if name == "mamba2_chunk_scan":
        x, steps = torch.randn(1, length, 2, 4), torch.rand(1, length, 2) * 1e-2
        return [x, steps, *torch.randn(2, 1, length, 1, 8).unbind()]
    query, key, value = torch.randn(3, 1, length, 2, 8).unbind()
    query, key = (nn.functional.normalize(x, dim=-1) for x in (query, key))
    return [query, key, value, -torch.rand(1, length, 2) * 1e-3, torch.rand(1, length, 2)]


A = -torch.tensor([0.1, 1.0])


def called(name: str, scan: Callable[..., Any], given: list[Tensor]) -> Tensor:
    if name == "mamba2_chunk_scan":
        x, steps, b, c = given
        return scan(x, steps, A, b, c, chunk_size=64, return_final_states=True)[0]
    query, key, value, g, beta = given
    return scan(query, key, value, g=g, beta=beta, output_final_state=True)[0]


def exact(name: str, given: list[Tensor]) -> Tensor:
    """One token after another, in float64."""
    outs, by_token = [], zip(*(x[0].double() for x in given), strict=True)
    if name == "mamba2_chunk_scan":
        state = torch.zeros(2, 4, 8, dtype=torch.float64)
        for value, step, own, read in by_token:
            state = state * (A * step).exp()[:, None, None]
            state = state + (value * step[:, None])[:, :, None] * own[:, None]
            outs.append((state @ read[0][:, None])[:, :, 0])
        return torch.stack(outs)[None]
    state = torch.zeros(2, 8, 8, dtype=torch.float64)
    for q, k, v, decay, rate in by_token:
        state = state * decay.exp()[:, None, None]
        delta = (v - (k[:, None] @ state)[:, 0]) * rate[:, None]
        state = state + k[:, :, None] * delta[:, None]
        outs.append((q[:, None] @ state)[:, 0] * q.shape[-1] ** -0.5)
    return torch.stack(outs)[None]


@torch.no_grad()
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", NAMES)
def test_error_of_shards(name: str, length: int) -> None:
    """Is not larger than 1.5 times that of one process."""
    given, plain = inputs(name, length), getattr(NAMES[name], name)
    states: list[Tensor] = []

    def pass_on(own: StateMap) -> Tensor | None:
        before = states[-1] if states else None
        states.append(own.state if before is None else own.after(before))
        return before

    parts = zip(*(x.chunk(SHARDS, 1) for x in given), strict=True)
    outs = [
        called(name, SCANS[name](plain, pass_on, number > 0), [*part])
        for number, part in enumerate(parts)
    ]
    expected = exact(name, given)
    whole, sharded = (
        (x.double() - expected).norm() / expected.norm()
        for x in (called(name, plain, given), torch.cat(outs, 1))
    )
    assert sharded <= 1.5 * whole, (sharded, whole)
