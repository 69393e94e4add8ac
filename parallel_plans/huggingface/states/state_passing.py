"""Moves the states of layers between the ranks of an axis, or between shards in a probe."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dtensor_ring import Contiguous, SequenceAxis, relayout
from dtensor_ring.extension import (
    Hybrid,
    Layout,
    as_layout,
    attached,
    layout_names,
    receive_state,
    send_state,
    stays_from,
)
from parallel_plans.huggingface.core.layer_inputs import ScanChunk, ScanChunks
from parallel_plans.huggingface.core.patterns import frozen
from parallel_plans.huggingface.states.state_sources import (
    GivenStates,
    ScannedStates,
    StateKey,
    States,
    StateSource,
)
from parallel_plans.huggingface.states.stateful import (
    LayerCall,
    RunLayer,
    StatePassing,
    first,
    passing_states,
    required_parameters,
    stateful_layers,
    with_hidden,
)


class StateSpec(NamedTuple):
    """A state of a layer.

    Attributes:
        key: which one of the layer.
        shape: its shape for one row of the batch.
        dtype: its dtype.
        sent: bytes of a row of the map of some tokens; `None` if it is not scanned.
    """

    key: StateKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    sent: int | None = None


# Runs a layer on a range of tokens.
RunChunk = Callable[[ScanChunk, StateSource], Any]

# The states of each layer.
StateSpecs = tuple[tuple[StateSpec, ...], ...]


class LocalStatePassing:
    """Passes states from shard to shard in one process, in sequence order."""

    def __init__(self) -> None:
        self._states: dict[tuple[int, int], States] = {}
        self._sent: dict[int, dict[StateKey, int]] = {}
        self._times: Counter[int] | None = None
        self._tests: list[tuple[int, StateKey, Callable[[], bool]]] = []

    def begin(self) -> None:
        """Begin a forward, in which each of several calls of a layer has states of its own."""
        self._times = Counter()

    def call(self, call: LayerCall, run: RunLayer) -> Any:
        number, time = call.number, 0
        if self._times is not None:
            time, self._times[number] = self._times[number], self._times[number] + 1
        before = self._states.get((number, time), {})
        source = GivenStates(before)
        output = run(call.hidden, None, source)
        self._states[number, time], self._sent[number] = source.after, source.sent
        for key, x in before.items():
            # Another state must change the outputs, unless the layer ignores it.
            given = GivenStates(before | {key: x + 1})
            self._tests.append((number, key, partial(_is_same, run, call.hidden, given, output)))
        return output

    def unused(self) -> dict[int, StateKey]:
        """Return a state that a layer ignores when it has several tokens, by layer.

        Some layers read a state for single tokens only. They run again here, unseen by hooks.
        """
        tests, self._tests = self._tests, []
        return {number: key for number, key, is_unused in tests if is_unused()}

    def forget(self) -> None:
        """Drop all states, before a new sequence."""
        self._states = {}

    def specs(self, num_layers: int) -> StateSpecs:
        """Return the states that each layer has stored."""
        return tuple(
            tuple(
                StateSpec(key, tuple(x.shape[1:]), x.dtype, self._sent[number].get(key))
                for key, x in self._states.get((number, 0), {}).items()
            )
            for number in range(num_layers)
        )


def _is_same(run: RunLayer, hidden: Tensor, states: StateSource, output: Any) -> bool:
    return torch.equal(first(run(hidden, None, states)), first(output))


def specs_of(model: Any) -> StateSpecs:
    """Return the states of a model's layers from a run of two tokens, also on the meta device."""
    layers, states = stateful_layers(model), LocalStatePassing()
    hidden = next(model.parameters()).new_zeros(1, 2, model.config.hidden_size)
    with frozen(model), passing_states(layers, states):
        for layer in layers:
            _run_alone(layer, hidden)
    return states.specs(len(layers))


def _run_alone(layer: nn.Module, hidden: Tensor) -> None:
    """Run a layer on hidden states of the model, or on tokens as wide as its weights ask for.

    Where it takes other tensors beside, these are the hidden states of the model.
    """
    needed = required_parameters(layer)
    # The width of a layer within another is some size of its weights.
    sizes = sorted({size for x in layer.parameters() for size in x.shape}, reverse=True)
    errors: list[Exception] = []
    for width, beside in product([hidden.shape[-1], *sizes], (None, hidden)):
        given = {name: None if name.endswith("_mask") else beside for name in needed}
        try:
            layer(hidden.new_zeros(1, 2, width), **given)
            return
        except Exception as error:  # model code may raise anything for another width
            errors.append(error)
    raise errors[0]


def map_bytes(specs: StateSpecs) -> tuple[int, int] | None:
    """Return the bytes of a row of the maps of all layers: of recurrences, and of convolutions.

    `None` if a layer has a state that is not scanned.
    """
    found = [spec for layer in specs for spec in layer]
    if any(spec.sent is None for spec in found):
        return None
    kinds = ([x.sent or 0 for x in found if x.key[0] == kind] for kind in ("recurrent", "conv"))
    recurrences, convolutions = map(sum, kinds)
    return recurrences, convolutions


class AxisStatePassing:
    """Gives each rank the states before its tokens, and passes on those after them.

    Ranks run a layer whose states are scanned all at once. Rows with the same documents are one
    call of the layer.

    Note [Row by row]: in other layers the ranks process a row in turn, since each needs the states
    of the previous rank, in one message for each row. While the next rank processes a row, this one
    processes the row after it.

    Note [Two runs of a rank]: in the layout zigzag a rank has two runs of the sequence. If tokens
    stay where they are, the runs are rows of one call, and have a map each. Otherwise tokens are
    exchanged before and after each layer, so that those of a rank follow the previous rank's. The
    lesser bytes decide. Documents are exchanged: they cut the two runs into different chunks.

    Args:
        axis: the axis that shards the tokens.
        specs: the states of each layer.
        hybrid: the sizes of the model, which say when tokens stay where they are.
        order: a layout in which the tokens of a rank follow those of the previous rank.

    Attributes:
        specs: the states of each layer.
    """

    def __init__(
        self,
        axis: SequenceAxis,
        specs: StateSpecs,
        hybrid: Hybrid,
        order: Layout | str = Contiguous.name,
    ) -> None:
        self._axis, self.specs, self.order = axis, specs, as_layout(order)
        self._stays_from = stays_from(hybrid, axis.layout, axis.mesh.size())
        self._last: ScanChunks | None = None
        self._step: StatePassing | None = None
        self._alive: WeakSet[ScanChunks] = WeakSet()

    def begin(
        self,
        boundaries: Tensor | None,
        length: int,
        paddings: tuple[Tensor | None, Tensor | None],
        mask: Tensor | None,
    ) -> ScanChunks:
        """Begin a batch of `length` tokens.

        Args:
            boundaries: boundaries of documents, `(D+1,)` or `(B, D+1)`; `None` for one document.
            length: tokens of a row on all ranks, with padding.
            paddings: the attention mask of this rank's tokens, see `ScanChunks.of`.
            mask: what tells the masks of batches apart, see `ScanChunks.of`.

        Returns:
            The chunks to pass to calls of layers. Checkpointing repeats these calls in backward,
            when there may be a later batch. A call without chunks uses those of the last batch.
        """
        self._last = ScanChunks.of(
            boundaries, length, paddings, mask, mesh=self._axis.mesh, stays_from=self._stays_from
        )
        self._alive.add(self._last)
        return self._last

    @contextmanager
    def stepping(self, step: StatePassing) -> Iterator[None]:
        """Open a context in which layers run on new tokens after those of a cache or a pool."""
        self._step = step
        try:
            yield
        finally:
            self._step = None

    def keep(self, output: dict[str, Any]) -> None:
        """Keep the chunks of the last batch alive as long as its outputs."""
        for x in () if torch.compiler.is_compiling() else output.values():
            if isinstance(x, Tensor) and x.grad_fn is not None:
                found: Any = x.grad_fn.metadata
                found["scan_chunks"] = self._last

    def call(self, call: LayerCall, run: RunLayer) -> Any:
        if self._step is not None:
            return self._step.call(call, run)
        chunks = self._chunks(call) if call.chunks is None else call.chunks
        if chunks.stays:
            return self._in_place(call.hidden, chunks, run)
        mesh = self._axis.mesh
        # A scan needs tokens in the order of the sequence, whatever the layout of attention.
        x = relayout(call.hidden, mesh, 1, self.order)
        outputs = [*(self._at_once if call.is_scanned else self._in_turn)(call, x, chunks, run)]
        out = torch.cat([first(output) for output in outputs])
        out = relayout(out, mesh, 1, self._axis.layout, layout=self.order)
        return with_hidden(outputs[-1], out)

    def _in_place(self, x: Tensor, chunks: ScanChunks, run: RunLayer) -> Any:
        """Return the output of a layer for the two runs of each row, which are rows of the call."""
        mask = chunks.padding
        if mask is not None:
            # The two runs of a zigzag shard, each half of it.
            mask = mask.expand(len(x), -1).reshape(2 * len(x), -1)
        source = ScannedStates(self._axis, chunks.length // 2, True, num_runs=2)
        output = run(x.reshape(2 * len(x), -1, x.shape[-1]), mask, source)
        return with_hidden(output, first(output).reshape(len(x), x.shape[1], -1))

    def _at_once(
        self, call: LayerCall, x: Tensor, chunks: ScanChunks, run: RunLayer
    ) -> Iterator[Any]:
        """Yield the outputs of a layer for rows that have the same documents."""
        # One list of starts stands for all rows.
        together = slice(0, len(x)) if len(chunks.starts) == 1 else None
        for rows in [together] if together else [slice(i, i + 1) for i in range(len(x))]:
            *before, last = chunks.of_row(rows.start)

            def of_chunk(chunk: ScanChunk, source: StateSource, rows: slice = rows) -> Any:
                part = x[rows, chunk.begin : chunk.end]
                return run(part, chunks.mask(rows, chunk), source)

            yield self._of_documents(before, last, chunks.length, of_chunk)

    def _of_documents(
        self, before: list[ScanChunk], last: ScanChunk, length: int, run: RunChunk
    ) -> Any:
        """Return the output of a layer for this rank's documents, of which the last one goes on."""
        # A document that begins here needs no other rank. So the last one is first: the ranks after
        # this one get its states in the scan that brings this rank the states before its tokens.
        ends = GivenStates({}) if before else None
        of_last = run(last, ends) if ends else None
        begin = before[0] if before else last
        source = ScannedStates(self._axis.mesh, length, not begin.is_first, ends)
        outputs = [run(begin, source)]
        outputs += [run(chunk, GivenStates({})) for chunk in before[1:]]
        outputs += [of_last] if ends else []
        out = torch.cat([first(output) for output in outputs], 1)
        for state in source.unused:
            # The scan is part of all ranks' backward, also of those that do not use its state.
            out = attached(out, state)
        return with_hidden(outputs[-1], out)

    def _in_turn(
        self, call: LayerCall, x: Tensor, chunks: ScanChunks, run: RunLayer
    ) -> Iterator[Any]:
        """Yield the outputs of a layer for each row, one rank after another."""
        # Received states need a gradient on all ranks if the sent ones have one.
        needs_own = call.trains and not x.requires_grad and torch.is_grad_enabled()
        for row in range(len(x)):
            yield self._row(call.number, x[row : row + 1], needs_own, chunks, row, run)

    def _row(
        self, number: int, x: Tensor, needs_own: bool, chunks: ScanChunks, row: int, run: RunLayer
    ) -> Any:
        """Return the output of a layer for one row."""
        specs = self.specs[number]
        sizes = [torch.Size(spec.shape).numel() for spec in specs]
        # A tensor that autograd knows, for a message whose backward has a gradient to send.
        anchor = x.detach().requires_grad_() if needs_own else x
        flat = receive_state(anchor, 1, sum(sizes), self._axis.mesh)
        parts = zip(specs, flat.split(sizes, 1), strict=True)
        states = {spec.key: part.reshape((1, *spec.shape)).to(spec.dtype) for spec, part in parts}
        outs = []
        for chunk in chunks.of_row(row):
            before = {} if chunk.is_first else states
            output, states = _run_chunk(
                run,
                x[:, chunk.begin : chunk.end],
                chunks.mask(slice(row, row + 1), chunk),
                before,
            )
            outs.append(first(output))
        # One message holds all states, so its dtype must be wide enough for each.
        wide = torch.promote_types(x.dtype, torch.float32)
        after = torch.cat([states[spec.key].flatten(1).to(wide) for spec in specs], 1)
        out = send_state(after, torch.cat(outs, 1), self._axis.mesh, received=flat)
        return with_hidden(output, out)

    def _chunks(self, call: LayerCall) -> ScanChunks:
        """Return the chunks for a call without any, as in models without attention.

        Raises:
            ValueError: if checkpointing repeats the call, and batches that await backward differ.
        """
        assert self._last is not None, "no batch was begun yet"
        # In backward a checkpointed layer runs again, maybe not for the last batch.
        in_backward = torch._C._current_graph_task_id() != -1
        others = [x for x in self._alive if x is not self._last and not x.same_batch(self._last)]
        if in_backward and others:
            raise ValueError(
                "checkpointing repeats a layer with a state, whose model does not say of which "
                "batch, and batches with other documents or padding wait for their backward: run "
                "the backward of a batch before the next forward, and drop its outputs"
            )
        return self._last


def _run_chunk(run: RunLayer, x: Tensor, mask: Tensor | None, before: States) -> tuple[Any, States]:
    """Return the output for a chunk, and the states after it."""
    source = GivenStates(before)
    if x.shape[1] > 1 or not before:
        return run(x, mask, source), source.after
    # A layer may process a single token differently, for generation, so the token is repeated.
    # It ends its document, so the states after it are not used.
    mask = None if mask is None else mask.repeat(1, 2)
    output = run(x.repeat(1, 2, 1), mask, source)
    return with_hidden(output, first(output)[:, :1]), source.after


def check_layout(model: nn.Module, layout: Layout) -> None:
    """Refuse a layout that belongs to a batch, for a model with stateful layers.

    Raises:
        ValueError: naming a stateful layer.
    """
    layers = stateful_layers(model)
    if not layers or not layout.per_batch:
        return
    name = next(name for name, x in model.named_modules() if x is layers[0])
    known = ", ".join(map(repr, layout_names()))
    raise ValueError(
        f"{name} ({type(layers[0]).__name__}) carries a state from token to token, which a rank "
        f"gets from the one with the tokens before its own; the layout {layout.spec!r} belongs to "
        f"a batch, for which that is not supported: context_parallel_plan(model, layout) with one "
        f"of {known}"
    )
