"""The attentions of a simulated step: what each computes, waits for and holds."""

from __future__ import annotations

from typing import Any, NamedTuple

from dtensor_ring.planning.mask import Mask
from dtensor_ring.simulate.attention import simulate_attention
from dtensor_ring.simulate.collectives import strided
from dtensor_ring.simulate.layer_seconds import PartSeconds
from dtensor_ring.simulate.model_shape import LayerShape
from dtensor_ring.simulate.recurrence import Direction
from dtensor_ring.simulate.step_request import StepRequest
from dtensor_ring.simulate.timeline import Timeline


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


class AttentionSeconds(NamedTuple):
    """Seconds of the attention of a layer.

    Attributes:
        forward: kernels of the forward.
        forward_waits: what the forward waits for messages.
        backward: kernels of the backward.
        backward_waits: what the backward waits for messages.
        held: bytes of other ranks that it holds at most.
        timeline: when each rank does what.
    """

    forward: float
    forward_waits: float
    backward: float
    backward_waits: float
    held: int
    timeline: Timeline

    @property
    def total(self) -> float:
        """Seconds of forward and backward."""
        return self.forward + self.forward_waits + self.backward + self.backward_waits

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
    kinds = dict.fromkeys(map(AttentionKind.of, asked.model.layers))
    return {
        kind: max((_seconds(asked, kind, x) for x in asked.batches), key=lambda found: found.total)
        for kind in kinds
    }


def _seconds(asked: StepRequest, kind: AttentionKind, documents: Any) -> AttentionSeconds:
    """Return the seconds of one attention in one batch."""
    mesh = asked.mesh
    found = simulate_attention(
        kind.mask,
        asked.seq_len,
        mesh.cp,
        (kind.heads[0] // mesh.tp, kind.heads[1] // mesh.tp),
        kind.head_dim,
        documents,
        layout=asked.layout,
        strategy=asked.strategy,
        batch=asked.batch,
        dtype=asked.dtype,
        kernel=asked.kernel,
        machine=strided(asked.machine, mesh.tp),
    )
    forward, backward = (_split(x) for x in (found.forward, found.backward))
    return AttentionSeconds(*forward, *backward, 0, found)


def _split(direction: Direction) -> tuple[float, float]:
    """Return what the kernels of the last rank take, and what it waits for messages."""
    last = int(direction.ends.argmax())
    waits = float(direction.waited[last])
    return float(direction.ends[last]) - waits, waits
