"""The time of an all-to-all of tokens and heads, for all ranks at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dtensor_ring.all_to_all.plan import head_shard_of
from dtensor_ring.simulate.clock import Clock
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.problem import SimulatedProblem
from dtensor_ring.transport.transport import QUANTISED


class ExchangedBytes(NamedTuple):
    """Bytes of one all-to-all by rank, `(W,)`.

    Attributes:
        sent, received: within the host and between hosts, `(2, W)`.
        kept: what stays on the rank.
    """

    sent: np.ndarray
    received: np.ndarray
    kept: np.ndarray


class Exchange:
    """The all-to-alls around the ring of an attention, see `dtensor_ring.all_to_all`.

    All ranks of a group begin when the last one is ready, and end together: each waits for all.

    Args:
        problem: the attention.
        heads: number of consecutive ranks in a group.
        machine: what each part takes.
    """

    def __init__(self, problem: SimulatedProblem, heads: int, machine: Machine) -> None:
        self._machine, self._heads = machine, heads
        sizes, size = problem.sizes, problem.world_size
        self._tokens = np.array(
            [problem.layout.num_tokens(rank, size, problem.seq_len) for rank in range(size)]
        ).reshape(-1, heads)
        shards = [head_shard_of(member, heads, sizes.heads[1]) for member in range(heads)]
        # Query and key heads of each member.
        self.member_heads = np.array([sizes.heads_of(shard) for shard in shards]).T
        (query, key), (head_dim, value_dim) = self.member_heads, sizes.head_dims
        # Bytes of a token, for the heads of each member, without scales.
        queries, self._output = (sizes.batch * sizes.itemsize * query * x for x in sizes.head_dims)
        keys = sizes.batch * key * (head_dim + value_dim)
        rounded = sizes.kv_itemsize if sizes.kv_dtype in QUANTISED else sizes.itemsize
        self._inputs, self._grads = (queries + keys * x for x in (rounded, sizes.itemsize))
        hosts = np.arange(size).reshape(-1, heads) // machine.ranks_per_host
        is_apart = hosts[:, :, None] != hosts[:, None, :]
        is_other = ~np.eye(heads, dtype=bool)
        self._levels = is_other & ~is_apart, is_other & is_apart

    def run(self, clock: Clock, of_inputs: bool, is_back: bool) -> np.ndarray:
        """Run an all-to-all; return the bytes that each rank sends, `(W,)`.

        Args:
            clock: the time of all ranks, which goes on.
            of_inputs: whether query, key and value are exchanged, or their gradients; else the
                output, or its gradient.
            is_back: whether heads are given for tokens.
        """
        inputs = self._grads if is_back else self._inputs
        found = self.amounts(inputs if of_inputs else self._output, is_back)
        sent, received = found.sent.sum(0), found.received.sum(0)
        moves = (sent > 0) | (received > 0)
        clock.at("exchange", 0)
        clock.run("pack", self._machine.pack(2.0 * sent), sent > 0)
        posted = clock.post("send", moves)
        begins, ends = self._times(found, posted, moves)
        clock.transfer(begins, ends, moves)
        clock.run("unpack", self._machine.pack(2.0 * found.kept), found.kept > 0)
        clock.wait("wait", np.where(moves, ends, -np.inf))
        clock.run("unpack", self._machine.pack(2.0 * received), received > 0)
        return sent

    def amounts(self, token: np.ndarray, is_back: bool) -> ExchangedBytes:
        """Return the bytes of each rank.

        Args:
            token: bytes of a token for the heads of each member, `(heads,)`.
            is_back: whether heads are given for tokens.
        """
        # By group: bytes of the tokens of one member for the heads of another.
        num_bytes = self._tokens[:, :, None] * token
        by_level = [np.where(level, num_bytes, 0) for level in self._levels]
        sent, received = (
            np.stack([x.sum(axis).ravel() for x in by_level])
            for axis in ((1, 2) if is_back else (2, 1))
        )
        kept = np.diagonal(num_bytes, axis1=1, axis2=2).ravel()
        return ExchangedBytes(sent, received, kept)

    def _times(
        self, found: ExchangedBytes, posted: np.ndarray, moves: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return when the messages of each rank's group begin and end."""
        most = np.maximum(found.sent, found.received)
        links = self._machine.inside, self._machine.between
        seconds = np.max(
            [
                np.where(size > 0, link.all_to_all(size.astype(float)), 0.0)
                for link, size in zip(links, most, strict=True)
            ],
            axis=0,
        )
        begins = self._of_group(np.where(moves, posted, -np.inf))
        return begins, begins + self._of_group(seconds)

    def _of_group(self, times: np.ndarray) -> np.ndarray:
        """Return the latest time of each rank's group, for each rank."""
        return np.repeat(times.reshape(-1, self._heads).max(1), self._heads)
