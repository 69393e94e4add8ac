"""The attentions of a simulated step: what each computes, waits for and holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from dtensor_ring.lab.choose import chosen_strategy
from dtensor_ring.lab.problem import SimulatedProblem, problem_of
from dtensor_ring.lab.replay import Direction
from dtensor_ring.lab.simulated_attention import Timeline, timeline_of
from dtensor_ring.lab.training.collectives import strided
from dtensor_ring.lab.training.layer_seconds import PartSeconds
from dtensor_ring.lab.training.model_shape import LayerShape
from dtensor_ring.lab.training.step_memory import (
    AttentionRoom,
    StepMemory,
    attention_room,
    step_memory,
)
from dtensor_ring.lab.training.step_request import AUTO, StepRequest
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.strategy import Strategy


class AttentionKind(NamedTuple):
    """What equal attentions have in common.

    Attributes:
        mask: which keys a query sees.
        heads: number of query heads, and of key and value heads, of the model.
        head_dim: numbers of a head.
    """

    mask: Mask
    heads: tuple[int, int]
    head_dim: int

    @classmethod
    def of(cls, layer: LayerShape) -> AttentionKind:
        """Return the kind of a layer's attention."""
        return cls(layer.mask, layer.heads, layer.head_dim)

    @property
    def name(self) -> str:
        """What reports call it, such as "left 4095, right 0"."""
        bounds = {"left": self.mask.left, "right": self.mask.right, "chunk": self.mask.chunk}
        known = (f"{name} {size}" for name, size in bounds.items() if size is not None)
        return f"{', '.join(known)}, {self.heads[0]} heads"


class AttentionSeconds(NamedTuple):
    """Seconds of the attention of a layer.

    Attributes:
        forward: kernels of the forward.
        forward_waits: what the forward waits for messages.
        backward: kernels of the backward.
        backward_waits: what the backward waits for messages.
        room: bytes that it needs while it runs.
        timeline: when each rank does what.
    """

    forward: float
    forward_waits: float
    backward: float
    backward_waits: float
    room: AttentionRoom
    timeline: Timeline

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.forward_waits + self.backward + self.backward_waits

    @property
    def strategy(self) -> str:
        """The spec of the strategy."""
        return self.timeline.strategy

    def as_json(self) -> dict[str, Any]:
        """Return its numbers; bytes are those that the busiest rank sends."""
        sent = self.timeline.num_bytes
        numbers = {name: getattr(self, name) for name in self._fields[:-2]}
        numbers |= {"held": self.room.held, "sent": sent[0], "backward_sent": sent[1]}
        return {"strategy": self.strategy, **numbers}

    def parts(self) -> tuple[PartSeconds, PartSeconds]:
        """Return forward and backward as parts of a layer."""
        return (
            PartSeconds(attention=self.forward, ring=self.forward_waits),
            PartSeconds(attention=self.backward, ring=self.backward_waits),
        )


def model_attentions(asked: StepRequest) -> dict[AttentionKind, AttentionSeconds]:
    """Return the seconds of each kind of attention of a model, in the slowest batch.

    Raises:
        ValueError: if the strategy has too few heads, or the machine lacks a speed.
    """
    batches = dict.fromkeys(asked.batches)
    return {
        kind: max((_seconds(asked, kind, x) for x in batches), key=lambda found: found.total)
        for kind in attention_kinds(asked)
    }


def attention_kinds(asked: StepRequest) -> list[AttentionKind]:
    """Return the kinds of attention of a model, each once."""
    with_attention = (layer for layer in asked.model.layers if layer.heads[0])
    return [*dict.fromkeys(map(AttentionKind.of, with_attention))]


# The largest number of ranks of which spans are kept: more are not drawn.
MAX_SPANNED = 64


def _seconds(asked: StepRequest, kind: AttentionKind, documents: Any) -> AttentionSeconds:
    """Return the seconds of one attention in one batch."""
    problem, strategy = _made_parallel(asked, kind, documents)
    machine = strided(asked.machine, asked.mesh.tp)
    found = timeline_of(problem, strategy, machine, keeps_spans=asked.mesh.cp <= MAX_SPANNED)
    forward, forward_waits = _split(found.forward)
    backward, backward_waits = _split(found.backward)
    room = attention_room(problem, strategy, on_gpu=not asked.machine.host_waits)
    return AttentionSeconds(forward, forward_waits, backward, backward_waits, room, found)


def _made_parallel(
    asked: StepRequest, kind: AttentionKind, documents: Any
) -> tuple[SimulatedProblem, Strategy]:
    """Return an attention of a rank of tensor parallelism, and its strategy."""
    mesh = asked.mesh
    heads = kind.heads[0] // mesh.tp, kind.heads[1] // mesh.tp
    problem = problem_of(
        kind.mask,
        asked.seq_len,
        mesh.cp,
        heads,
        kind.head_dim,
        documents,
        slices=None,
        layout=asked.layout,
        batch=asked.batch,
        dtype=asked.dtype,
        policy=asked.setting.policy,
        kernel=asked.kernel,
    )
    if asked.strategy != AUTO:
        return problem, problem.able(asked.strategy)
    return problem, chosen_strategy(problem, strided(asked.machine, mesh.tp))


def rank_memory(
    asked: StepRequest, rooms: Mapping[AttentionKind, AttentionRoom] | None = None
) -> StepMemory:
    """Return what a rank keeps in a step.

    Args:
        asked: the step.
        rooms: what attentions need while they run; found without their time by default.

    Raises:
        ValueError: if the strategy has too few heads, or no kernel of the machine can be chosen by.
    """
    if rooms is None:
        rooms = {kind: _room(asked, kind) for kind in attention_kinds(asked)}
    # A layer without an attention has no room of one.
    of_layers = [rooms.get(AttentionKind.of(x), AttentionRoom()) for x in asked.model.layers]
    ranks = asked.mesh.shards(asked.machine).ranks
    return step_memory(asked.model, asked.shard, ranks, asked.setting, of_layers)


def _room(asked: StepRequest, kind: AttentionKind) -> AttentionRoom:
    on_gpu, batches = not asked.machine.host_waits, dict.fromkeys(asked.batches)
    made = (_made_parallel(asked, kind, x) for x in batches)
    return max(attention_room(problem, strategy, on_gpu=on_gpu) for problem, strategy in made)


def _split(direction: Direction) -> tuple[float, float]:
    """Return what the kernels of the last rank take, and what it waits for messages."""
    last = int(direction.ends.argmax())
    waits = float(direction.waited[last])
    return float(direction.ends[last]) - waits, waits
