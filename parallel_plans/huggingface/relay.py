"""What moves the states of layers: between the ranks of an axis, or between shards in a probe."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtensor_ring import SequenceAxis, relayout
from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.ops.state import attached, receive_op, send_op
from dtensor_ring.planning.layout import Contiguous, Layout
from dtensor_ring.planning.spelling import LAYOUTS, as_layout
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
        self.reorders = False
        self.padding: Tensor | None = None
        self._states: dict[int, States] = {}
        self.unused: dict[int, StateKey] = {}
        """By layer: a state that it does not go on from."""

    def call(self, number: int, hidden: Tensor, trains: bool, run: Run) -> Any:
        before = self._states.get(number, {})
        output, self._states[number] = run(hidden, before)
        for key, x in before.items():  # some layers use a state for single tokens only
            other = first(run(hidden, before | {key: x + 1})[0])
            if torch.equal(other, first(output)):
                self.unused.setdefault(number, key)
        return output

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
    """The ranks of an axis. A layer's states are one message.

    Args:
        axis: over which tokens are dealt.
        specs: the states of each layer.
        order: in which the tokens of a rank follow those of the rank before. If the axis has
            another layout, tokens are dealt anew around each layer.
    """

    def __init__(
        self, axis: SequenceAxis, specs: StateSpecs, order: Layout | str = Contiguous.name
    ) -> None:
        self._axis, self._specs, self._order = axis, specs, order
        self.reorders = axis.layout != as_layout(order)
        self.padding: Tensor | None = None
        self.begins: Tensor | None = None
        """Rows of the batch, `(B, 1)`, in which a document begins with this rank's first token."""

    # A compiler would drop the messages of the backward, whose results nobody uses.
    @torch.compiler.disable
    def call(self, number: int, hidden: Tensor, trains: bool, run: Run) -> Any:
        mesh = self._axis.mesh
        x = relayout(hidden, mesh, 1, self._order)
        # What is received needs a gradient on all ranks, if what is sent has one.
        needs_own = trains and not x.requires_grad and torch.is_grad_enabled()
        anchor = x.detach().requires_grad_() if needs_own else x
        output, after = run(x, self._receive(number, anchor))
        wide = torch.promote_types(x.dtype, torch.float32)
        parts = [after[spec.key].flatten(1).to(wide) for spec in self._specs[number]]
        token = send_op(torch.cat(parts, 1), 1, self._group_name())
        out = attached(first(output), token)
        out = relayout(out, mesh, 1, self._axis.layout, layout=self._order)
        return (out, *output[1:]) if isinstance(output, tuple) else out

    def begin(self, boundaries: Tensor | None, length: int, mask: Tensor | None) -> None:
        """Begin a batch of so many tokens.

        Args:
            boundaries: of documents, `(D+1,)` or `(B, D+1)`; `None` for one document.
            length: of all ranks' tokens, with padding.
            mask: the attention mask of all of them but those, `(B, S)`.

        Raises:
            ValueError: if a document begins within a shard: the layers would go on over it.
        """
        self.begins = self.padding = None
        shard, rank = length // self._axis.mesh.size(), self._axis.mesh.get_local_rank()
        if mask is not None:
            whole = nn.functional.pad(mask, (0, length - mask.shape[1]))
            self.padding = whole[:, rank * shard : (rank + 1) * shard]
        if boundaries is None:
            return
        bounds = boundaries.reshape(-1, boundaries.shape[-1])
        within = (bounds % shard != 0) & (bounds < bounds[:, -1:])
        if within.any():
            raise ValueError(
                "layers with a state go on over the beginning of a document, as the model's own "
                f"code does on one process; here one begins at token {int(bounds[within][0])}, "
                f"within the shard of a rank, of {shard} tokens: give each document a row of its "
                "own, or pad documents to whole shards"
            )
        self.begins = (bounds == rank * shard).any(-1, keepdim=True)

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
    """Refuse a layout that belongs to a batch, for a model with layers that hand over a state.

    Raises:
        ValueError: naming such a layer.
    """
    layers = stateful_layers(model)
    if not layers or not layout.per_batch:
        return
    name = next(name for name, x in model.named_modules() if x is layers[0])
    known = ", ".join(repr(x.name) for x in LAYOUTS.values() if not x.parameters)
    raise ValueError(
        f"{name} ({type(layers[0]).__name__}) carries a state from token to token, which a rank "
        f"gets from the one with the tokens before its own; the layout {layout.spec!r} belongs to "
        f"a batch, for which that is not supported: context_parallel_plan(model, layout) with one "
        f"of {known}"
    )
