"""The states of pooled sequences, and how layers with a state run on their next tokens.

All ranks keep the states of all sequences, as all of them decode. Tokens of prompts are where the
pool keeps them, in blocks. So a layer exchanges them: each rank gets neighbours, of one prompt or
several, and a scan brings it the states before the first ones. At the end of the forward, each rank
tells the others the states after the prompts that end on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import BlockPool, Contiguous, relayout
from dtensor_ring.extension import Layout, PooledSequence, as_layout, gather_rows, prompt_layout
from parallel_plans.huggingface.serving.state_slots import SlotCopy, StateSlots
from parallel_plans.huggingface.states.state_passing import AxisStatePassing, StateSpecs
from parallel_plans.huggingface.states.state_sources import GivenStates, States
from parallel_plans.huggingface.states.state_steps import PrefillStates, SingleStates
from parallel_plans.huggingface.states.stateful import LayerCall, RunLayer, first, with_hidden

Chunk = tuple[PooledSequence, int]


class PooledStates:
    """The states of all layers of a model on this rank, for the sequences of a pool.

    Args:
        passing: by which layers of the model get their states.
        mesh: the ranks of the pool.
        pool: the pool, which says whose states are where.
        device: the device of the model.
    """

    def __init__(
        self, passing: AxisStatePassing, mesh: DeviceMesh, pool: BlockPool, device: torch.device
    ) -> None:
        assert isinstance(pool, StateSlots), "its sequences have states"
        self._passing, self._mesh, self._pool = passing, mesh, pool
        self._memory = StateMemory(passing.specs, device)
        self._decoded: DecodedStates | None = None  # of the last forward
        self._undecided = set[int]()  # sequences of which some tokens may be wrong

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all states."""
        return self._memory.num_bytes

    @contextmanager
    def running(
        self, chunks: Sequence[Chunk], decoding: Sequence[PooledSequence], lengths: Sequence[int]
    ) -> Iterator[None]:
        """Return a context in which layers go on from the states of sequences.

        Args:
            chunks: prompts, and the number of tokens of each.
            decoding: sequences whose last tokens, one or more of each, are new.
            lengths: the number of tokens of both on this rank, without those that are empty.
        """
        self.copy()
        # After an error no sequence goes on, so each one here has the states of its tokens.
        assert self._undecided.isdisjoint(x.number for x in decoding), "keep was not called"
        self._undecided = {x.number for x in decoding if len(x) - x.num_written > 1}
        self._decoded, parts = None, list[PrefilledStates | DecodedStates]()
        if chunks:
            parts.append(PrefilledStates(self._memory, self._mesh, self._pool, chunks))
        if decoding:
            counts = [len(x) - x.num_written for x in decoding]
            self._decoded = DecodedStates(self._memory, self._slots(decoding), counts)
            parts.append(self._decoded)
        step = StepStates([*zip(parts, lengths, strict=True)])
        with self._passing.stepping(step):
            yield
        step.finish()

    def keep(self, counts: Sequence[int]) -> None:
        """Go on from the states after the first tokens of each sequence that was just decoded.

        If it was one token of each, these are kept already.
        """
        self._undecided = set()
        if self._decoded is not None:
            self._decoded.keep(counts)

    def copy(self) -> None:
        """Make the copies that the pool has decided."""
        self._memory.reserve(self._pool.num_slots)
        self._memory.copy(self._pool.take_copies())

    def of(self, sequences: Sequence[PooledSequence]) -> list[Tensor]:
        """Return copies of the states of sequences, `(len(sequences), ...)` each."""
        self.copy()
        return self._memory.rows(self._slots(sequences))

    def take(self, sequences: Sequence[PooledSequence], tensors: Sequence[Tensor]) -> None:
        """Give sequences the states that `of` returned on other ranks."""
        self._memory.reserve(self._pool.num_slots)
        self._memory.put(self._slots(sequences), tensors)
        self.copy()

    def _slots(self, sequences: Sequence[PooledSequence]) -> list[int]:
        return [self._pool.slot(x) for x in sequences]


# A table grows by this many slots at a time.
SPARE_SLOTS = 4

# Slots, as `StateMemory.indices` returns them, or a range of them.
Slots = Tensor | slice


class StateMemory:
    """The states of all layers on this rank: a table for each state of a layer, a row for a slot.

    Args:
        specs: the states of each layer.
        device: the device of the model.
    """

    def __init__(self, specs: StateSpecs, device: torch.device) -> None:
        self._device = device
        with torch.inference_mode(False):  # later steps may run outside of it
            self._layers: list[States] = [
                {x.key: torch.zeros((1, *x.shape), dtype=x.dtype, device=device) for x in layer}
                for layer in specs
            ]

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tables."""
        return sum(x.nbytes for layer in self._layers for x in layer.values())

    def indices(self, slots: Sequence[int]) -> Tensor:
        """Return slots as the calls of all layers take them."""
        return torch.tensor(slots, dtype=torch.int64, device=self._device)

    def reserve(self, num_slots: int) -> None:
        """Make room for so many slots, and a few more."""
        with torch.inference_mode(False):
            for layer in self._layers:
                for key, x in layer.items():
                    if len(x) < num_slots:
                        layer[key] = x.new_zeros((num_slots + SPARE_SLOTS, *x.shape[1:]))
                        # Slots keep their numbers, so states stay in their rows.
                        layer[key][: len(x)] = x

    def copy(self, copies: Sequence[SlotCopy]) -> None:
        """Copy states from slots to slots, in this order."""
        for together in _independent(copies):
            sources = self.indices([x.source for x in together])
            targets = self.indices([x.target for x in together])
            for layer in self._layers:
                for x in layer.values():
                    x[targets] = x[sources]

    def read(self, layer: int, slots: Slots) -> States:
        """Return the states of a layer in some slots, `(number of slots, ...)`."""
        return {key: x[slots] for key, x in self._layers[layer].items()}

    def write(self, layer: int, slots: Slots, states: States) -> None:
        """Replace states of a layer in some slots."""
        tables = self._layers[layer]
        for key, new in states.items():
            # A model that was cast after its plan may have wider states than it had.
            table = tables[key].to(torch.promote_types(tables[key].dtype, new.dtype))
            table[slots] = new.to(table.dtype)
            tables[key] = table

    def rows(self, slots: Sequence[int]) -> list[Tensor]:
        """Return copies of the states of all layers in some slots."""
        rows = self.indices(slots)
        return [x[rows] for layer in self._layers for x in layer.values()]

    def put(self, slots: Sequence[int], tensors: Sequence[Tensor]) -> None:
        """Replace the states of all layers in some slots, as `rows` returns them."""
        rows, found = self.indices(slots), iter(tensors)
        for number, layer in enumerate(self._layers):
            self.write(number, rows, {key: next(found) for key in layer})


def _independent(copies: Sequence[SlotCopy]) -> Iterator[list[SlotCopy]]:
    """Yield copies that can be made at once: none reads or writes what one before it writes."""
    at_once, written = list[SlotCopy](), set[int]()
    for copy in copies:
        # A copy that reads what an earlier one writes has to wait for it.
        if not written.isdisjoint(copy):
            yield at_once
            at_once, written = [], set()
        at_once.append(copy)
        written.add(copy.target)
    if at_once:
        yield at_once


class _Piece(NamedTuple):
    """Neighbouring tokens of a prompt on this rank, in contiguous order.

    Attributes:
        slot: the slot of the prompt.
        tokens: begin and end of their local indices.
        begins: whether the tokens of this step begin here.
        ends: whether they end here.
        is_new: whether nothing comes before the tokens of this step.
    """

    slot: int
    tokens: tuple[int, int]
    begins: bool
    ends: bool
    is_new: bool


class PrefilledStates:
    """Runs layers on tokens of prompts, which the ranks have as the pool keeps them.

    Args:
        memory: the states of all sequences.
        mesh: the axis.
        pool: the pool of the prompts.
        chunks: the prompts, and the number of tokens of each.
        order: a layout in which the tokens of a rank follow those of the previous rank.
    """

    def __init__(
        self,
        memory: StateMemory,
        mesh: DeviceMesh,
        pool: StateSlots,
        chunks: Sequence[Chunk],
        order: Layout | str = Contiguous.name,
    ) -> None:
        self._memory, self._mesh, self._order = memory, mesh, as_layout(order)
        self._slots = [pool.slot(sequence) for sequence, _ in chunks]
        firsts = [*accumulate((num_tokens for _, num_tokens in chunks), initial=0)]
        self._total, self._layout = firsts[-1], prompt_layout(pool, chunks)
        size, rank = mesh.size(), mesh.get_local_rank()
        self._num_tokens = self._layout.num_tokens(rank, size, self._total)
        shards = [self._order.num_tokens(x, size, self._total) for x in range(size)]
        bounds, self._fewest = [*accumulate(shards, initial=0)], min(shards)
        # Each prompt ends on one rank, which tells the others.
        self._num_ends = [sum(x < end <= y for end in firsts[1:]) for x, y in pairwise(bounds)]
        begin, end = bounds[rank : rank + 2]
        self._pieces = [
            _Piece(slot, (lo - begin, hi - begin), lo == x, hi == y, not sequence.num_written)
            for slot, (sequence, _), (x, y) in zip(
                self._slots, chunks, pairwise(firsts), strict=True
            )
            # The part of a prompt that is on this rank, if any.
            if (lo := max(x, begin)) < (hi := min(y, end))
        ]
        # All ranks make the same scans: one without tokens runs one that nobody sees.
        self._pieces = self._pieces or [_Piece(0, (0, 1), False, False, False)]
        self._after: dict[int, list[States]] = {}
        self._like: dict[int, States] = {}

    def call(self, number: int, x: Tensor, run: RunLayer) -> Any:
        """Return the output of a layer for this rank's tokens `(1, L, H)`."""
        held = self._relayout(x[:, : self._num_tokens], self._layout, self._order)
        padded = torch.nn.functional.pad(held, (0, 0, 0, not held.shape[1]))
        head, *others = self._pieces
        sources: list[Any] = [GivenStates(self._known(number, piece)) for piece in others]
        outputs = [
            run(padded[:, piece.tokens[0] : piece.tokens[1]], None, source)
            for piece, source in zip(others, sources, strict=True)
        ]
        known = self._known(number, head) if head.begins else None
        last = sources[-1] if sources else None
        # The first piece may go on from the rank before, so its scan comes after the last piece has
        # its states.
        sources.insert(0, PrefillStates(self._mesh, self._fewest, known, last))
        outputs.insert(0, run(padded[:, head.tokens[0] : head.tokens[1]], None, sources[0]))
        pieces = zip(self._pieces, sources, strict=True)
        self._after[number] = [source.after for piece, source in pieces if piece.ends]
        self._like[number] = sources[0].after
        out = torch.cat([first(output) for output in outputs], 1)[:, : held.shape[1]]
        out = self._relayout(out, self._order, self._layout)
        out = torch.nn.functional.pad(out, (0, 0, 0, x.shape[1] - out.shape[1]))
        return with_hidden(outputs[0], out)

    def _known(self, number: int, piece: _Piece) -> States:
        if piece.is_new:
            return {}
        return self._memory.read(number, slice(piece.slot, piece.slot + 1))

    def _relayout(self, x: Tensor, layout: Layout, to: Layout) -> Tensor:
        if self._mesh.size() == 1:  # blocks of a prompt are in order
            return x
        return relayout(x, self._mesh, 1, to, layout=layout, seq_len=self._total)

    def finish(self) -> None:
        """Keep the states after these tokens, once all layers ran; all ranks must call it."""
        names = [(number, key) for number, layer in self._like.items() for key in layer]
        like = [self._like[number][key] for number, key in names]
        # All states go in one exchange, in a dtype that holds each of them.
        wide = torch.float32
        for x in like:
            wide = torch.promote_types(wide, x.dtype)
        num_ends = self._num_ends[self._mesh.get_local_rank()]
        own = [
            torch.cat([self._after[number][i][key].flatten().to(wide) for number, key in names])
            for i in range(num_ends)
        ]
        width = sum(x.numel() for x in like)
        flat = torch.stack(own) if own else like[0].new_empty(0, width, dtype=wide)
        found = gather_rows(flat, self._num_ends, self._mesh)
        parts, rows = found.split([x.numel() for x in like], 1), self._memory.indices(self._slots)
        for (number, key), x, part in zip(names, like, parts, strict=True):
            states = part.reshape((-1, *x.shape[1:])).to(x.dtype)
            self._memory.write(number, rows, {key: states})


class DecodedStates:
    """Runs layers on the next tokens of sequences, on all ranks: a row of the batch for each.

    Layers take them one after another, as `generate` does. Of several tokens some may turn out to
    be wrong, see Note [Drafts] in `scheduler.py`: `keep` says how many were right.

    Args:
        memory: the states of all sequences.
        slots: the slots of the sequences.
        counts: the number of tokens of each.
    """

    def __init__(self, memory: StateMemory, slots: Sequence[int], counts: Sequence[int]) -> None:
        self._memory, self._all, self._slots = memory, memory.indices(slots), slots
        firsts = [*accumulate(counts, initial=0)]
        # The rows that have a first, a second, ... token, and the places of these.
        self._rows = [
            [row for row, count in enumerate(counts) if count > number]
            for number in range(max(counts))
        ]
        self._places = [
            memory.indices([firsts[row] + number for row in rows])
            for number, rows in enumerate(self._rows)
        ]
        self._indices = [memory.indices(rows) for rows in self._rows]
        self._after: dict[int, list[States]] = {}

    def call(self, number: int, x: Tensor, run: RunLayer) -> Any:
        """Return the output of a layer for these tokens `(1, T, H)`, sequence by sequence."""
        states, outputs, after = self._memory.read(number, self._all), [], []
        for place, (rows, places) in enumerate(zip(self._indices, self._places, strict=True)):
            # All sequences have a first token.
            before = {key: state[rows] for key, state in states.items()} if place else states
            source = SingleStates(before)
            outputs.append(run(x[0, places].unsqueeze(1), None, source))
            after.append(source.after)
            for key, new in source.after.items() if place + 1 < len(self._rows) else ():
                # The second token of a sequence goes on from the state after its first one.
                states[key] = states[key].to(new.dtype).index_copy(0, rows, new)
        self._after[number] = after
        found = torch.cat([first(output) for output in outputs])
        # Outputs came place by place; the model has them sequence by sequence.
        out = torch.empty_like(found).index_copy(0, torch.cat(self._places), found)
        return with_hidden(outputs[-1], out.transpose(0, 1))

    def finish(self) -> None:
        """Keep the states after these tokens, if they are one of each sequence."""
        if len(self._rows) == 1:
            self.keep([1] * len(self._slots))

    def keep(self, counts: Sequence[int]) -> None:
        """Keep the states after the first tokens of each sequence, at least one."""
        found, self._after = self._after, {}
        for number, rows in enumerate(self._rows if found else ()):
            chosen = [at for at, row in enumerate(rows) if counts[row] == number + 1]
            slots = self._memory.indices([self._slots[rows[at]] for at in chosen])
            places = self._memory.indices(chosen)
            for layer, after in found.items():
                states = {key: x[places] for key, x in after[number].items()}
                self._memory.write(layer, slots, states)


class StepStates:
    """Runs layers with a state in one forward, see `StatePassing`.

    Args:
        parts: the parts of the forward, and the number of tokens of each on this rank.
    """

    def __init__(self, parts: Sequence[tuple[PrefilledStates | DecodedStates, int]]) -> None:
        self._parts = parts

    def call(self, call: LayerCall, run: RunLayer) -> Any:
        """Return the output of a layer for this rank's tokens."""
        hidden = call.hidden.split([length for _, length in self._parts], 1)
        outputs = [
            part.call(call.number, x, run) for (part, _), x in zip(self._parts, hidden, strict=True)
        ]
        return with_hidden(outputs[-1], torch.cat([first(x) for x in outputs], 1))

    def finish(self) -> None:
        """Keep the states after these tokens, once all layers ran; all ranks must call it."""
        for part, _ in self._parts:
            part.finish()
