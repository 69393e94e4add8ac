"""Runs layers with a state on new tokens after those of a cache, for generation.

Many tokens are sharded, and a scan over ranks brings each the state before its own. The rank with
the last token has the state after them, from which all ranks go on. Few tokens are on every rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import Contiguous, StateMap, relayout
from dtensor_ring.extension import Layout, gather_rows
from parallel_plans.huggingface.states.state_sources import (
    GivenStates,
    ScannedStates,
    StateKey,
    States,
    last_columns,
)
from parallel_plans.huggingface.states.stateful import LayerCall, RunLayer, first, with_hidden

# The states of layers by their number, the same on all ranks.
LayerStates = dict[int, States]


class StepTokens(NamedTuple):
    """New tokens of a forward with a cache.

    Attributes:
        mesh: the axis.
        layout: the layout in which they are sharded.
        number: how many they are, on all ranks together.
        sharded_length: the same with the padding of the layout; 0 if they are on every rank.
        mask: their attention mask, `(B, T)`, if some are padding.
        order: a layout in which the tokens of a rank follow those of the previous rank.
    """

    mesh: DeviceMesh
    layout: Layout
    number: int
    sharded_length: int
    mask: Tensor | None
    order: Layout = Contiguous()


class SingleStates(GivenStates):
    """States of one token, which a layer continues from by itself, and may change in place."""

    steps = True

    def __init__(self, before: States) -> None:
        super().__init__(before)
        # An error in the forward must leave the states of the cache as they were.
        self.after = {key: x.clone() for key, x in before.items()}

    def given(self, key: StateKey) -> Tensor | None:
        return self.after.get(key)


class PrefillStates(ScannedStates):
    """States of sharded tokens, the first of which may follow cached ones.

    Args:
        mesh: the axis; its ranks hold the tokens in contiguous order.
        length: tokens of a row on the rank with fewest.
        known: the states before these tokens, where they are known: none at the start of a
            document. `None` if these tokens follow those of the rank before.
        ends: the states after the last tokens of this rank, if these are of another document.

    Attributes:
        after: the states after these tokens.
    """

    def __init__(
        self, mesh: DeviceMesh, length: int, known: States | None, ends: GivenStates | None = None
    ) -> None:
        super().__init__(mesh, length, known is None or bool(known), ends)
        self._known, self.after = known, dict[StateKey, Tensor]()

    def columns(self, key: StateKey, columns: Tensor, num_before: int) -> Tensor:
        before = super().columns(key, columns, num_before)
        self.after[key] = last_columns(columns, num_before, before)
        return before

    def scanned(self, key: StateKey, own: StateMap) -> Tensor | None:
        before = super().scanned(key, own)
        self.after[key] = own.state if before is None else own.after(before)
        return before

    def _scan(self, key: StateKey, own: StateMap, transposed: bool = False) -> Tensor | None:
        if not self._known:
            return super()._scan(key, own, transposed)
        known = self._known[key]
        known = known.mT if transposed else known
        # All ranks make the same scans; what this one gives already holds the cached tokens.
        super()._scan(key, own.forgetting(own.after(known)), transposed)
        return known


class StateStep:
    """Runs layers in one forward with a cache.

    Args:
        before: the states before the new tokens; empty at the start.
        tokens: the new tokens.
    """

    def __init__(self, before: LayerStates, tokens: StepTokens) -> None:
        self._before, self._tokens = before, tokens
        self._after: LayerStates = {}

    def call(self, call: LayerCall, run: RunLayer) -> Any:
        """Return the output of a layer for this rank's new tokens."""
        step = self._sharded if self._tokens.sharded_length else self._on_every_rank
        output, self._after[call.number] = step(call.hidden, run, self._before.get(call.number, {}))
        return output

    def after(self) -> LayerStates:
        """Return the states after the new tokens, once all layers ran; all ranks must call it."""
        if not self._tokens.sharded_length:
            return self._after
        mesh, shard = self._tokens.mesh, self._shard(0)[1]
        # The last token's rank has the states after all of them; later ranks have padding.
        owner = (self._tokens.number - 1) // shard
        states = [x for layer in self._after.values() for x in layer.values()]
        wide = torch.float32
        for x in states:
            wide = torch.promote_types(wide, x.dtype)
        flat = torch.cat([x.flatten().to(wide) for x in states]).unsqueeze(0)
        rows = [int(rank == owner) for rank in range(mesh.size())]
        found = gather_rows(flat[: rows[mesh.get_local_rank()]], rows, mesh).squeeze(0)
        parts = iter(found.split([x.numel() for x in states]))
        return {
            number: {key: next(parts).view(x.shape).to(x.dtype) for key, x in layer.items()}
            for number, layer in self._after.items()
        }

    def _on_every_rank(self, x: Tensor, run: RunLayer, before: States) -> tuple[Any, States]:
        is_single = x.shape[1] == 1 and bool(before)
        source = SingleStates(before) if is_single else GivenStates(before)
        return run(x, None if is_single else self._tokens.mask, source), source.after

    def _sharded(self, x: Tensor, run: RunLayer, before: States) -> tuple[Any, States]:
        mesh, layout, length = self._tokens.mesh, self._tokens.layout, self._tokens.sharded_length
        order = self._tokens.order
        x = relayout(x, mesh, 1, order, layout=layout, seq_len=length)
        rank = mesh.get_local_rank()
        begin, held = self._shard(rank)
        # A rank after the last token runs its padding, as all make the same scans.
        number = min(held, max(0, self._tokens.number - begin)) or held
        # Only rank 0 has the token after the cached ones; others get its state by the scan.
        known = None if rank else before
        source = PrefillStates(mesh, self._shard(mesh.size() - 1)[1], known)
        mask = self._tokens.mask
        if mask is not None:
            mask = mask[:, begin : begin + number] if begin < self._tokens.number else None
        output = run(x[:, :number], mask, source)
        out = torch.nn.functional.pad(first(output), (0, 0, 0, held - number))
        out = relayout(out, mesh, 1, layout, layout=order, seq_len=length)
        return with_hidden(output, out), source.after

    def _shard(self, rank: int) -> tuple[int, int]:
        """Return the first position of a rank's tokens in their order, and their number."""
        size, length = self._tokens.mesh.size(), self._tokens.sharded_length
        [run] = self._tokens.order.runs(rank, size, length)
        return run.start, run.length


def named(states: LayerStates) -> dict[str, Tensor]:
    """Return states by name, on the CPU, to be saved."""
    return {
        f"{number}.{kind}.{index}": x.cpu()
        for number, layer in states.items()
        for (kind, index), x in layer.items()
    }


def unnamed(states: dict[str, Tensor], device: str) -> LayerStates:
    """Return the states that `named` gave their names."""
    found: LayerStates = {}
    for name, x in states.items():
        number, kind, index = name.split(".")
        found.setdefault(int(number), {})[kind, int(index)] = x.to(device)
    return found


def rows_of(states: LayerStates, rows: Tensor) -> LayerStates:
    """Return the states of some rows of the batch."""
    return {
        number: {key: x[rows.to(x.device)] for key, x in layer.items()}
        for number, layer in states.items()
    }
