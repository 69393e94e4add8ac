"""Where the states before the tokens of a layer come from, and where those after them go.

A layer runs on consecutive tokens of one document. For each convolution it needs the columns before
them, and for each scan what the state before them adds. A *source* gives both, and is told what the
tokens make of a state.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import SequenceAxis, StateMap, exclusive_scan

# "conv" or "recurrent", and the number of the state within the layer.
StateKey = tuple[str, int]

# The states of a layer, `(B, ...)`.
States = dict[StateKey, Tensor]


class StateSource(Protocol):
    """The states of one run of a layer.

    Attributes:
        continues: whether these tokens may follow others of their document.
        steps: whether the layer goes on from its states by itself, with a single token.
    """

    continues: bool
    steps: bool

    def columns(self, key: StateKey, columns: Tensor, num_before: int) -> Tensor:
        """Return the `num_before` columns before these, `(B, C, num_before)`.

        Args:
            key: the convolution.
            columns: the columns of these tokens, `(B, C, L)`.
            num_before: how many earlier columns the convolution reads.
        """
        ...

    def scanned(self, key: StateKey, own: StateMap) -> Tensor | None:
        """Return the state before these tokens, given their map; `None` where it is zero."""
        ...

    def given(self, key: StateKey) -> Tensor | None:
        """Return the state before these tokens to a layer that continues from it by itself."""
        ...

    def ended(self, key: StateKey, state: Tensor) -> None:
        """Take the state after these tokens from a layer that continues from one by itself."""
        ...


def last_columns(columns: Tensor, number: int, before: Tensor | None = None) -> Tensor:
    """Return the last columns of `before`, by default zeros, and `columns`: `(B, C, number)`."""
    if before is None:
        before = columns.new_zeros((*columns.shape[:-1], number))
    whole = torch.cat([before.to(columns.dtype), columns], -1)
    return whole[..., whole.shape[-1] - number :]


class GivenStates:
    """Starts from states that are known, and keeps those after the tokens.

    Attributes:
        before: the states before the tokens; empty at the start of a document.
        after: the states after them.
        sent: bytes of a row of their maps, of those states that are scanned.
    """

    steps = False

    def __init__(self, before: States) -> None:
        self.before, self.after = before, dict[StateKey, Tensor]()
        self.sent = dict[StateKey, int]()
        self.continues = bool(before)

    def columns(self, key: StateKey, columns: Tensor, num_before: int) -> Tensor:
        before = self.before.get(key)
        self.after[key] = last = last_columns(columns, num_before, before)
        self.sent[key] = _row_bytes(StateMap(last))
        if before is None:
            return columns.new_zeros((*columns.shape[:-1], num_before))
        return before.to(columns.dtype)

    def scanned(self, key: StateKey, own: StateMap) -> Tensor | None:
        before = self.before.get(key)
        self.after[key] = own.state if before is None else own.after(before)
        self.sent[key] = _row_bytes(own)
        return before

    def given(self, key: StateKey) -> Tensor | None:
        return self.before.get(key)

    def ended(self, key: StateKey, state: Tensor) -> None:
        self.after[key] = state


def _row_bytes(own: StateMap) -> int:
    """Return the bytes of a row of a map as it travels, in float32 or wider."""
    parts = [x for x in (own.state, own.decay, own.matrix) if x is not None]
    itemsize = torch.promote_types(own.state.dtype, torch.float32).itemsize
    return sum(x[0].numel() for x in parts) * itemsize


def _of_runs(own: StateMap, num_runs: int) -> list[StateMap]:
    """Return the map of each run, for rows that are neighbouring runs."""

    def part(x: Tensor | None, number: int) -> Tensor | None:
        return None if x is None else x.unflatten(0, (-1, num_runs))[:, number]

    states = own.state.unflatten(0, (-1, num_runs)).unbind(1)
    return [
        StateMap(x, decay=part(own.decay, number), matrix=part(own.matrix, number))
        for number, x in enumerate(states)
    ]


class ScannedStates:
    """Gets the states before a rank's first tokens by a scan over the ranks.

    Note [Order of scans]: each rank makes one scan for each convolution and recurrence of a layer,
    in their order. Backward goes through nodes in the reverse order of their making, so all ranks
    make the same scans there, too. A rank that needs no state takes part all the same: what its
    layer returns is attached to the states that are left over, see `unused`.

    Args:
        axis: the axis, or its mesh if ranks hold the tokens in contiguous order; with as many on
            each.
        length: tokens of a row, on the rank with fewest.
        continues: whether the first token of this rank follows another one of its document.
        ends: the states after this rank's last document if that begins here and is another one;
            they go to the next ranks.
        num_runs: how many runs of the sequence this rank has, as the layout of the axis says; they
            are neighbouring rows of what a source gets and gives.

    Attributes:
        unused: states that arrived and are not used.
    """

    steps = False

    def __init__(
        self,
        axis: SequenceAxis | DeviceMesh,
        length: int,
        continues: bool,
        ends: GivenStates | None = None,
        num_runs: int = 1,
    ) -> None:
        self._axis, self._length, self._ends, self.continues = axis, length, ends, continues
        self._num_runs = num_runs
        self.unused: list[Tensor] = []

    def columns(self, key: StateKey, columns: Tensor, num_before: int) -> Tensor:
        last = last_columns(columns, num_before)
        matrix = None
        if self._length < num_before:  # some columns before a rank are among its last ones, too
            num_left = max(0, num_before - columns.shape[-1])
            # A short shard shifts the columns before it by as many as it has.
            one = torch.eye(num_before, dtype=last.dtype, device=last.device)[:, :num_left]
            shift = torch.nn.functional.pad(one, (num_before - num_left, 0))
            matrix = shift.expand(len(last), -1, -1)
        before = self._scan(key, StateMap(last.mT, matrix=matrix), transposed=True)
        if before is None:
            return columns.new_zeros((*columns.shape[:-1], num_before))
        return before.mT.to(columns.dtype)

    def scanned(self, key: StateKey, own: StateMap) -> Tensor | None:
        return self._scan(key, own)

    def _scan(self, key: StateKey, own: StateMap, transposed: bool = False) -> Tensor | None:
        """Return the state before this rank's tokens, or `None` if their document begins there."""
        if self._ends is not None:
            end = self._ends.after[key]
            own = own.forgetting(end.mT if transposed else end)
        elif not self.continues:
            own = own.forgetting()
        # Rows with several runs, as in zigzag, are scanned in one go.
        befores = exclusive_scan(_of_runs(own, self._num_runs), self._axis)
        before = torch.stack(befores, 1).flatten(0, 1) if len(befores) > 1 else befores[0]
        if self.continues:
            return before
        self.unused.append(before)
        return None

    def given(self, key: StateKey) -> Tensor | None:
        raise AssertionError(f"{key} is not scanned")

    def ended(self, key: StateKey, state: Tensor) -> None:
        raise AssertionError(f"{key} is not scanned")
