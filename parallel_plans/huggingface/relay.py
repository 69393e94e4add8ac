"""What moves the states of layers: between the ranks of an axis, or between shards in a probe."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtensor_ring import SequenceAxis
from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.ops.state import attached, receive_op, send_op
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.spelling import LAYOUTS
from parallel_plans.huggingface.stateful import Run, StateKey, States, stateful_layers


class StateSpec(NamedTuple):
    """A state of a layer."""

    key: StateKey
    shape: tuple[int, ...]
    """Of a row of the batch."""
    dtype: torch.dtype


StateSpecs = tuple[tuple[StateSpec, ...], ...]
"""The states of each layer."""


class KeptStates:
    """Shards of one process, one after another: each goes on from the states of the one before."""

    def __init__(self) -> None:
        self._states: dict[int, States] = {}
        self.unused: dict[int, StateKey] = {}
        """By layer: a state that it does not go on from."""

    def call(self, number: int, anchor: Tensor, run: Run) -> Any:
        before = self._states.get(number, {})
        output, self._states[number] = run(before)
        self._check(number, before, first(output), run)
        return output

    def _check(self, number: int, before: States, out: Tensor, run: Run) -> None:
        """Whether the layer's output depends on each state: some use it for single tokens only."""
        for key, x in before.items():
            other = first(run(before | {key: x + 1})[0])
            if torch.equal(other, out):
                self.unused.setdefault(number, key)

    def forget(self) -> None:
        """Begin a sequence."""
        self._states = {}

    def specs(self, num_layers: int) -> StateSpecs:
        """The states that each layer told."""
        return tuple(
            tuple(
                StateSpec(key, tuple(x.shape[1:]), x.dtype)
                for key, x in self._states.get(number, {}).items()
            )
            for number in range(num_layers)
        )


class AxisRelay:
    """The ranks of an axis, whose shards follow one another. A layer's states are one message."""

    def __init__(self, axis: SequenceAxis, specs: StateSpecs) -> None:
        self._axis, self._specs = axis, specs
        self.begins: Tensor | None = None
        """Rows of the batch, `(B, 1)`, in which a document begins with this rank's first token."""

    # A compiler would drop the messages of the backward, whose results nobody uses.
    @torch.compiler.disable
    def call(self, number: int, anchor: Tensor, run: Run) -> Any:
        output, after = run(self._receive(number, anchor))
        wide = torch.promote_types(anchor.dtype, torch.float32)
        parts = [after[spec.key].flatten(1).to(wide) for spec in self._specs[number]]
        token = send_op(torch.cat(parts, 1), 1, self._group_name())
        out = attached(first(output), token)
        return (out, *output[1:]) if isinstance(output, tuple) else out

    def begin(self, boundaries: Tensor | None, length: int) -> None:
        """Begin a batch of so many tokens.

        Args:
            boundaries: of documents, `(D+1,)` or `(B, D+1)`; `None` for one document.
            length: of all ranks' tokens, with padding.

        Raises:
            ValueError: if a document begins within a shard: the layers would go on over it.
        """
        self.begins = None
        if boundaries is None:
            return
        bounds = boundaries.reshape(-1, boundaries.shape[-1])
        shard = length // self._axis.mesh.size()
        within = (bounds % shard != 0) & (bounds < bounds[:, -1:])
        if within.any():
            raise ValueError(
                "layers with a state go on over the beginning of a document, as the model's own "
                f"code does on one process; here one begins at token {int(bounds[within][0])}, "
                f"within the shard of a rank, of {shard} tokens: give each document a row of its "
                "own, or pad documents to whole shards"
            )
        start = self._axis.mesh.get_local_rank() * shard
        self.begins = (bounds == start).any(-1, keepdim=True)

    def _receive(self, number: int, anchor: Tensor) -> States:
        specs, rows = self._specs[number], anchor.shape[0]
        sizes = [torch.Size(spec.shape).numel() for spec in specs]
        flat = receive_op(anchor, rows, sum(sizes), 1, self._group_name())
        if self.begins is not None:
            flat = flat.masked_fill(self.begins.to(flat.device), 0.0)
        parts = zip(specs, flat.split(sizes, 1), strict=True)
        return {spec.key: x.reshape(rows, *spec.shape).to(spec.dtype) for spec, x in parts}

    def _group_name(self) -> str:
        return axis_group(self._axis.mesh).group_name


def first(output: Any) -> Tensor:
    """The hidden states of a layer's output."""
    return output[0] if isinstance(output, tuple) else output


def check_layout(model: nn.Module, layout: Layout) -> None:
    """Refuse a layout in which a rank's tokens do not follow those of the rank before.

    Raises:
        ValueError: if the model has layers that hand over a state.
    """
    layers = stateful_layers(model)
    if not layers or (not layout.per_batch and _in_order(layout)):
        return
    name = next(name for name, x in model.named_modules() if x is layers[0])
    others = [repr(x.name) for x in LAYOUTS.values() if not x.parameters and _in_order(x())]
    raise ValueError(
        f"{name} ({type(layers[0]).__name__}) carries a state from token to token, which a rank "
        "gets from the one with the tokens before its own; in the layout "
        f"{layout.spec!r} the tokens of a rank do not follow those of another: "
        f"context_parallel_plan(model, layout={' or '.join(others)})"
    )


def _in_order(layout: Layout) -> bool:
    """Whether each rank holds a stretch of the sequence, in the order of the ranks."""
    return all(
        layout.positions(rank, 3, 12) == [*range(4 * rank, 4 * rank + 4)] for rank in (0, 1, 2)
    )
