"""What layers with a state send, and wait for, as their scans and exchanges run on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from dtensor_ring.all_to_all.plan import AllToAllPlan, all_to_all_plan
from dtensor_ring.all_to_all.rounded_keys import exchanged
from dtensor_ring.compute.trace import Label
from dtensor_ring.lab.machine import Machine
from dtensor_ring.lab.recorded import Cost, Recorder, no_content
from dtensor_ring.lab.recorded_ranks import looked_at
from dtensor_ring.lab.training.collectives import strided
from dtensor_ring.lab.training.model_shape import ModelShape
from dtensor_ring.lab.training.state_shape import StateShape
from dtensor_ring.lab.training.step_request import StepRequest
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.run_table import as_layout
from dtensor_ring.states.hybrid import Hybrid, stays_from
from dtensor_ring.states.plan import owners_of
from dtensor_ring.states.run import scan
from dtensor_ring.transport.transport import P2P, Work


class StateSeconds(NamedTuple):
    """What the ranks of an axis send and wait for in a layer with a state.

    Attributes:
        stays: whether tokens stay in the layout of the attention, with two maps of a rank; else
            they are exchanged before and after the layer, so that those of a rank are one run.
        forward: seconds that the slowest rank waits for messages, and copies them.
        backward: likewise.
        costs: what ranks send, forward and backward; of many ranks, those of some.
    """

    stays: bool
    forward: float
    backward: float
    costs: tuple[tuple[Cost, Cost], ...]

    @property
    def sent(self) -> tuple[int, int]:
        """Bytes that the busiest rank sends, forward and backward."""
        return max(x.sent for x, _ in self.costs), max(x.sent for _, x in self.costs)

    def __str__(self) -> str:
        forward, backward = (f"{x / 1e6:,.1f} MB" for x in self.sent)
        runs = "two runs" if self.stays else "one run"
        return f"{runs} of a rank, {forward} sent forward and {backward} backward"

    def as_json(self) -> dict[str, Any]:
        """Return its numbers; bytes are those that the busiest rank sends."""
        numbers = {name: getattr(self, name) for name in self._fields[:-1]}
        return numbers | dict(zip(("sent", "backward_sent"), self.sent, strict=True))


def hybrid_of(model: ModelShape, itemsize: int) -> Hybrid:
    """Return the numbers of a model that decide in which layout its layers with a state run.

    Args:
        model: the model.
        itemsize: bytes of a number between layers.
    """
    states = [layer.state for layer in model.layers if layer.state is not None]
    sent = [[maps.packed().nbytes for maps in state.maps(1, 1)] for state in states]
    attentions = [layer for layer in model.layers if layer.heads[0]]
    return Hybrid(
        stateful=len(states),
        attention=len(attentions),
        hidden_size=model.hidden,
        heads=max((x.heads for x in attentions), default=(1, 1)),
        head_dim=max((x.head_dim for x in attentions), default=1),
        itemsize=itemsize,
        # Of recurrences, and of convolutions, which come first.
        maps=(sum(sum(x[1:]) for x in sent), sum(x[0] for x in sent)),
    )


def model_states(asked: StepRequest) -> dict[StateShape, StateSeconds]:
    """Return what each kind of state of a model sends and waits for.

    Raises:
        ValueError: if the layout belongs to a batch.
    """
    kinds = dict.fromkeys(layer.state for layer in asked.model.layers if layer.state is not None)
    if not kinds:
        return {}
    layout, size = as_layout(asked.layout), asked.mesh.cp
    if layout.per_batch:
        raise ValueError(f"layers with a state take no layout of a batch, got {layout.spec!r}")
    shortest = stays_from(hybrid_of(asked.model, asked.shard.itemsize), layout, size)
    # Documents cut the two runs of a rank into different chunks.
    rows = (row for documents in asked.batches for row in documents or ())
    is_whole = not any(0 < x < row[-1] for row in rows for x in row)
    stays = shortest is not None and is_whole and asked.seq_len >= shortest
    ranks = np.unique(looked_at(size, 1)).tolist()
    return {kind: _slowest([_Layer(asked, kind, stays, x) for x in ranks]) for kind in kinds}


def _slowest(layers: Sequence[_Layer]) -> StateSeconds:
    """Return what a layer takes on its slowest rank."""
    runs = [[x.run(is_back) for is_back in (False, True)] for x in layers]
    return StateSeconds(
        stays=layers[0].stays,
        forward=max(x.seconds for x, _ in runs),
        backward=max(x.seconds for _, x in runs),
        costs=tuple((x.cost, y.cost) for x, y in runs),
    )


class _Layer(NamedTuple):
    """A layer with a state on one rank, of which only the messages run.

    Attributes:
        asked: the step.
        state: the state.
        stays: as in `StateSeconds`.
        rank: the rank.
        order: the layout in which tokens of a rank are one run.
    """

    asked: StepRequest
    state: StateShape
    stays: bool
    rank: int
    order: Layout = Contiguous()

    def run(self, is_back: bool) -> _Waits:
        """Run its exchanges and scans in one direction, see Note [One loop, counted]."""
        asked, size, order = self.asked, self.asked.mesh.cp, self.order
        layout = as_layout(asked.layout)
        transport = _Waits(strided(asked.machine, asked.mesh.tp), self.rank)
        owners = owners_of(layout if self.stays else order, size, 1 + self.stays)
        moves = size > 1 and not self.stays and layout != order
        sides = [(layout, order), (order, layout)] if moves else []
        plans = [all_to_all_plan(x, to, 1, self.rank, size, asked.seq_len) for x, to in sides]
        maps = self.state.divided(asked.mesh.tp).maps(1 + self.stays, asked.batch)
        way = -1 if is_back else 1
        exchanges = [partial(self._exchange, plan, is_back, transport) for plan in plans[::way]]
        scans = [partial(scan, transport, self.rank, owners, x, is_back) for x in maps[::way]]
        for act in (*exchanges[:1], *scans, *exchanges[1:]):
            act()
        return transport

    def _exchange(self, plan: AllToAllPlan, is_back: bool, transport: _Waits) -> None:
        """Bring the tokens of the layer into another layout."""
        shape = self.asked.batch, 1, plan.num_tokens[is_back], self.asked.model.hidden
        tokens = [no_content(shape, getattr(torch, self.asked.dtype))]
        label = Label("exchange", 0, self.rank)
        exchanged(tokens, plan, None, ((1,), 1), is_back, None, transport, label)


class _Waits(Recorder):
    """Adds up what a rank waits for its messages, round by round, and what copies of them take.

    The messages of a round are under way at once, and share the ports of a rank, one within its
    host and one to others.

    Attributes:
        seconds: what all rounds took.
    """

    def __init__(self, machine: Machine, rank: int) -> None:
        super().__init__()
        self._machine, self._host = machine, rank // machine.ranks_per_host
        self.seconds = 0.0

    def start(self, receives: list[P2P], sends: list[P2P]) -> Sequence[Work]:
        machine, slowest, copied = self._machine, 0.0, 0
        for links, is_far in ((machine.inside, False), (machine.between, True)):
            sent, received = (
                sum(x.flat.nbytes for x in side if self._is_far(x) == is_far)
                for side in (sends, receives)
            )
            copied += sent + received
            if sent or received:
                slowest = max(slowest, float(links.p2p(float(max(sent, received)))))
        if copied:
            self.seconds += machine.hop + slowest + float(machine.pack(2.0 * copied))
        return super().start(receives, sends)

    def _is_far(self, message: P2P) -> bool:
        return message.peer // self._machine.ranks_per_host != self._host
