"""The longest sequence that a training step fits into the memory of a device with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any, NamedTuple

import torch

from dtensor_ring.lab.machine import Machine
from dtensor_ring.lab.presets import as_machine
from dtensor_ring.lab.training.layer_attention import rank_memory
from dtensor_ring.lab.training.step import simulated_step
from dtensor_ring.lab.training.step_memory import StepMemory
from dtensor_ring.lab.training.step_request import (
    MAX_PAIRS,
    MemorySetting,
    StepRequest,
    step_request,
)
from dtensor_ring.planning.layout import Layout
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.transport.transport import TransferPolicy

# Of a device's memory, what is left for its context, for message buffers of the network, and for
# holes between tensors.
SPARE = 0.05


def usable(memory: int) -> int:
    """Return how many of a device's bytes a step may use.

    >>> usable(100)
    95
    """
    return int(memory * (1 - SPARE))


# Of the whole batch, a rank has token ids in int64, and at most 16 bytes of labels and positions.
TOKEN_BYTES = 24

# Lengths are multiples of so many tokens of a rank.
UNIT = 64


class LongestRow(NamedTuple):
    """What one setting reaches.

    Attributes:
        setting: what the step does to take less memory.
        seq_len: tokens of the longest sequence; 0 if not even the shortest one fits.
        memory: bytes of a rank at that length, or at the shortest one.
        seconds: of the step at that length, by the simulator, without transfers to the host and
            what the host computes; `None` if it was not asked for, or nothing fits.
    """

    setting: MemorySetting
    seq_len: int
    memory: StepMemory
    seconds: float | None

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, as the command prints them in JSON."""
        memory = self.memory._asdict() | {"peak": self.memory.peak}
        return {
            "setting": self.setting.as_json(),
            "seq_len": self.seq_len,
            "memory": memory,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class LongestSequences:
    """The longest sequence by setting. Printed, it is a table.

    Attributes:
        model: name of the model.
        machine: name of the machine.
        mesh: ranks by axis.
        memory: bytes that a step may take of a device.
        rows: what each setting reaches.
        seq_len: the length that was asked for; `None` if none was.
        smallest: the first setting that reaches it, at that length; `None` if none does.
    """

    model: str
    machine: str
    mesh: Mapping[str, int]
    memory: int
    rows: tuple[LongestRow, ...]
    seq_len: int | None = None
    smallest: LongestRow | None = None

    def __str__(self) -> str:
        axes = " x ".join(f"{name} {size}" for name, size in self.mesh.items() if size > 1)
        title = f"{self.model} on {self.machine}, {axes}, {self.memory / 2**30:,.1f} GiB of each"
        lines = [title, *_table([(str(x.setting), x) for x in self.rows])]
        if self.seq_len is None:
            return "\n".join(lines)
        if self.smallest is None:
            return "\n".join([*lines, f"no setting reaches {self.seq_len:,} tokens"])
        found = f"{self.seq_len:,} tokens are reached with: {self.smallest.setting}"
        return "\n".join([*lines, found, *_table([("", self.smallest)])])

    def as_json(self) -> dict[str, Any]:
        """Return the numbers, as the command prints them in JSON."""
        return {
            "model": self.model,
            "machine": self.machine,
            "mesh": dict(self.mesh),
            "memory": self.memory,
            "rows": [row.as_json() for row in self.rows],
            "seq_len": self.seq_len,
            "smallest": None if self.smallest is None else self.smallest.as_json(),
        }


# Columns of GiB: headings, and fields of `StepMemory` that are one.
PARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("states", ("parameters", "gradients", "optimizer")),
    ("gathered", ("gathered",)),
    ("kept", ("attention_kept", "others_kept")),
    ("working", ("working",)),
    ("peak", ("peak",)),
    ("host", ("host",)),
)


def _table(rows: Sequence[tuple[str, LongestRow]]) -> list[str]:
    """Return the lines of a table: lengths, seconds, and GiB by part."""
    heading = "", "tokens", "seconds", *(name for name, _ in PARTS)
    table = [heading, *((title, *_cells(row)) for title, row in rows)]
    widths = [max(len(cells[i]) for cells in table) for i in range(len(heading))]
    return [
        "  ".join([cells[0].ljust(widths[0]), *map(str.rjust, cells[1:], widths[1:])])
        for cells in table
    ]


def _cells(row: LongestRow) -> tuple[str, ...]:
    seconds = "-" if row.seconds is None else f"{row.seconds:,.1f}"
    sizes = (sum(getattr(row.memory, x) for x in fields) for _, fields in PARTS)
    tokens = f"{row.seq_len:,}" if row.seq_len else "does not fit"
    return tokens, seconds, *(f"{size / 2**30:,.1f}" for size in sizes)


def longest_sequences(
    config: Any,
    mesh: Mapping[str, int],
    machine: Machine | str = "h100",
    *,
    memory: int | None = None,
    seq_len: int | None = None,
    settings: Sequence[MemorySetting] | None = None,
    strategy: str = "ring",
    layout: Layout | str = "zigzag",
    batch: int = 1,
    dtype: torch.dtype | str = "bfloat16",
    kv_dtype: str | None = None,
    is_timed: bool = True,
) -> LongestSequences:
    """Find the longest sequence that a training step has memory for, by setting.

    Parameters, gradients and states of AdamW are float32, and sharded by FSDP2 over `dp_shard` and
    `cp` together. Layers are those of transformers without compilation; what each part of a layer
    keeps and needs is counted, see Note [Pieces], and the fullest moment of the step decides. A
    length is one whose pairs of tokens over all heads are at most 2 ** 60, as seconds need them.

    Args:
        config: as in `simulate_step`.
        mesh: ranks by axis, as in `simulate_step`.
        machine: a machine, the path of its file, or the name of a preset.
        memory: bytes that a step may take of a device; by default 95 % of what the machine has.
        seq_len: tokens of a sequence: also find the first setting that reaches it.
        settings: what steps do to take less memory, from what costs least to what costs most, such
            as those of the rows of another call; by default from nothing to all that there is.
        strategy: the strategy of attention, see `SequenceAxis`.
        layout: the layout of sequences.
        batch: sequences of each group of `cp` ranks.
        dtype: of matrix products, or its name.
        kv_dtype: what keys and values travel as in all settings, see `TransferPolicy`: "int8" and
            "fp8" take less time between hosts, and no less memory.
        is_timed: whether to simulate what a step takes at each length.

    Returns:
        A `LongestSequences`; print it.

    Raises:
        TypeError: if an argument is of another type.
        ValueError: if `simulate_step` raises it, a number is out of range, or there is no setting.

    Example:
        >>> config = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8)
        >>> config |= dict(num_hidden_layers=32, intermediate_size=14336, vocab_size=128256)
        >>> found = longest_sequences(config, {"cp": 8}, "h100", is_timed=False)
        >>> found.rows[0].seq_len < 500_000 < 3_000_000 < found.rows[-1].seq_len
        True
    """
    settings = _settings(settings)
    if not isinstance(is_timed, bool):
        raise TypeError(f"is_timed must be True or False, got {is_timed!r}")
    device = as_machine(machine)
    allowed = usable(device.memory) if memory is None else memory
    allowed = as_count("memory", allowed, 1)
    how: dict[str, Any] = {"strategy": strategy, "layout": layout, "batch": batch, "dtype": dtype}
    ranks = int(mesh.get("cp", 1)) if isinstance(mesh, Mapping) else 1
    asked = step_request(config, UNIT * max(ranks, 1), mesh, device, **how)
    if seq_len is not None:
        asked.mesh.check(asked.model, as_count("seq_len", seq_len, 1))
    tried = [_sent_as(setting, kv_dtype) for setting in settings]
    rows = tuple(_row(asked, setting, allowed, is_timed) for setting in tried)
    return LongestSequences(
        model=asked.model.name,
        machine=device.name,
        mesh=asked.mesh._asdict(),
        memory=allowed,
        rows=rows,
        seq_len=seq_len,
        smallest=_smallest(asked, rows, seq_len, is_timed),
    )


# Tokens of an MLP tile: their products are large enough for a GPU, and their memory does not count.
MLP_TILE = 4096

_PARTS = TransferPolicy(num_parts=1)

# From what costs least to what costs most: first what computes again, then what moves to the host.
SETTINGS = (
    MemorySetting(),
    MemorySetting("attention"),
    MemorySetting("attention", MLP_TILE),
    MemorySetting("attention", MLP_TILE, policy=_PARTS),
    MemorySetting("full", MLP_TILE, policy=_PARTS),
    MemorySetting("attention", MLP_TILE, ("checkpoints",), _PARTS),
    MemorySetting("attention", MLP_TILE, ("checkpoints", "optimizer"), _PARTS),
)


def _settings(given: Sequence[MemorySetting] | None) -> Sequence[MemorySetting]:
    """Return the settings to try, by default all that there are.

    Raises:
        TypeError: if they are not a sequence of settings.
        ValueError: if there are none.
    """
    if given is None:
        return SETTINGS
    if not isinstance(given, Sequence) or not all(isinstance(x, MemorySetting) for x in given):
        raise TypeError(f"settings must be a sequence of MemorySetting, got {given!r}")
    if not given:
        raise ValueError("settings must have at least one MemorySetting, got none")
    return given


def _smallest(
    asked: StepRequest, rows: Sequence[LongestRow], seq_len: int | None, is_timed: bool
) -> LongestRow | None:
    """Return the first setting that reaches a length, at that length; `None` if none does."""
    if seq_len is None:
        return None
    reached = (row.setting for row in rows if row.seq_len >= seq_len)
    return next((_at(asked, setting, seq_len, is_timed) for setting in reached), None)


def _sent_as(setting: MemorySetting, kv_dtype: str | None) -> MemorySetting:
    """Return a setting whose keys and values travel as this dtype, if one is given."""
    if kv_dtype is None:
        return setting
    return setting._replace(policy=replace(setting.policy, kv_dtype=kv_dtype))


def _row(asked: StepRequest, setting: MemorySetting, allowed: int, is_timed: bool) -> LongestRow:
    """Return the longest sequence of one setting."""
    unit = asked.seq_len
    most = _most_units(asked, allowed)
    found = _largest(lambda units: _memory(asked, setting, units * unit).peak, allowed, most)
    if not found:
        return LongestRow(setting, 0, _memory(asked, setting, unit), None)
    return _at(asked, setting, found * unit, is_timed)


def _at(asked: StepRequest, setting: MemorySetting, seq_len: int, is_timed: bool) -> LongestRow:
    """Return what a step of this length takes."""
    of_length = _with_length(asked, setting, seq_len)
    seconds = simulated_step(of_length).seconds if is_timed else None
    return LongestRow(setting, seq_len, _memory(asked, setting, seq_len), seconds)


def _with_length(asked: StepRequest, setting: MemorySetting, seq_len: int) -> StepRequest:
    """Return the same step with other sequences and another setting."""
    shard = asked.shard._replace(tokens=seq_len * asked.batch // asked.mesh.cp)
    return asked._replace(seq_len=seq_len, setting=setting, shard=shard)


def _memory(asked: StepRequest, setting: MemorySetting, seq_len: int) -> StepMemory:
    """Return the bytes of a rank, with ids, labels and positions of the whole batch."""
    found = rank_memory(_with_length(asked, setting, seq_len))
    ids = TOKEN_BYTES * seq_len * asked.batch
    return found._replace(others_kept=found.others_kept + ids)


def _largest(needed: Callable[[int], int], allowed: int, most: int) -> int:
    """Return the largest count up to `most` that needs at most what is allowed; 0 if none does.

    What is needed is a maximum of lines, so it is convex: Newton's method from a count that needs
    too much comes down to the largest one in a step for each line.
    """
    count, size = most, needed(most)
    while count and size > allowed:
        slope = max(1, size - needed(count - 1))
        # One less at least, where rounding would stop it.
        count = max(0, min(count - 1, int(count - (size - allowed) / slope)))
        size = needed(count) if count else 0
    return count


def _most_units(asked: StepRequest, allowed: int) -> int:
    """Return a number of units whose tokens between two layers alone need more than is allowed.

    It is less where their pairs of tokens, over all heads, would be more than are counted.
    """
    token = asked.model.hidden * asked.shard.itemsize * asked.batch
    heads = max(layer.heads[0] for layer in asked.model.layers)
    counted = isqrt(MAX_PAIRS // (asked.batch * max(heads, 1)))
    return min(allowed // (token * UNIT) + 1, counted // asked.seq_len)
