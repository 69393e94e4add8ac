"""The attentions of a simulated step: what each computes, waits for and holds."""

from __future__ import annotations

from typing import Any, NamedTuple

from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import FULL
from dtensor_ring.simulate.choose import chosen_strategy
from dtensor_ring.simulate.comparison import rank_costs
from dtensor_ring.simulate.problem import SimulatedProblem, problem_of
from dtensor_ring.simulate.recurrence import Direction
from dtensor_ring.simulate.simulated_attention import timeline_of
from dtensor_ring.simulate.timeline import Timeline
from dtensor_ring.simulate.training.collectives import strided
from dtensor_ring.simulate.training.layer_seconds import PartSeconds
from dtensor_ring.simulate.training.model_shape import LayerShape
from dtensor_ring.simulate.training.step_request import AUTO, StepRequest
from dtensor_ring.transport.transport import DEFAULT_POLICY

# The largest number of ranks of which spans are kept: more are not drawn.
MAX_SPANNED = 64


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

    @property
    def strategy(self) -> str:
        """The spec of the strategy."""
        return self.timeline.strategy

    def as_json(self) -> dict[str, Any]:
        """Return its numbers; bytes are those that the busiest rank sends."""
        sent = self.timeline.num_bytes
        numbers = {name: getattr(self, name) for name in self._fields[:-1]}
        return {"strategy": self.strategy, **numbers, "sent": sent[0], "backward_sent": sent[1]}

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
    # Equal ones once.
    kinds = dict.fromkeys(map(AttentionKind.of, asked.model.layers))
    batches = dict.fromkeys(asked.batches)
    return {
        kind: max((_seconds(asked, kind, x) for x in batches), key=lambda found: found.total)
        for kind in kinds
    }


def _seconds(asked: StepRequest, kind: AttentionKind, documents: Any) -> AttentionSeconds:
    """Return the seconds of one attention in one batch."""
    mesh = asked.mesh
    heads = kind.heads[0] // mesh.tp, kind.heads[1] // mesh.tp
    problem = problem_of(
        *(kind.mask, asked.seq_len, mesh.cp, heads, kind.head_dim, documents),
        slices=None,
        layout=asked.layout,
        batch=asked.batch,
        dtype=asked.dtype,
        policy=DEFAULT_POLICY,
        kernel=asked.kernel,
    )
    machine = strided(asked.machine, mesh.tp)
    is_auto = asked.strategy == AUTO
    strategy = chosen_strategy(problem, machine) if is_auto else problem.able(asked.strategy)
    found = timeline_of(problem, strategy, machine, keeps_spans=mesh.cp <= MAX_SPANNED)
    forward, backward = (_split(x) for x in (found.forward, found.backward))
    return AttentionSeconds(*forward, *backward, _held(problem, strategy), found)


def _held(problem: SimulatedProblem, strategy: Strategy) -> int:
    """Return the bytes that the last rank holds of others, which with a causal mask receives most.

    Its backward holds more than its forward.
    """
    size, rank = problem.world_size, problem.world_size - 1
    mask = FULL if problem.mask is None else problem.mask
    where = rank, size, problem.seq_len, problem.documents
    of_rank = plan(problem.layout, mask, *where, strategy=strategy)
    all_to_all = None
    if strategy.heads > 1:
        layouts = problem.layout, problem.layout
        all_to_all = all_to_all_plan(*layouts, strategy.heads, rank, size, problem.seq_len)
    return rank_costs(of_rank, all_to_all, problem.sizes)[1].held


def _split(direction: Direction) -> tuple[float, float]:
    """Return what the kernels of the last rank take, and what it waits for messages."""
    last = int(direction.ends.argmax())
    waits = float(direction.waited[last])
    return float(direction.ends[last]) - waits, waits
