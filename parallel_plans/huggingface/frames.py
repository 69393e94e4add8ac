"""Describes how layers attend in one forward: which queries and keys a rank has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import SequenceAxis, decode_attention
from parallel_plans.huggingface.documents import Documents


@dataclass(frozen=True)
class Dealt:
    """Attention with sharded queries and keys: keys and values travel, as in training.

    This is not a tuple: fully_shard moves the tensors in a layer's tuples to the device.

    Attributes:
        axis: the axis that shards the sequence.
        seq_len: tokens of all ranks, with the layout's padding; `None` with `key_runs`.
        documents: where documents begin and end.
        runs: runs of each rank's queries, `(W, R, 2)`, if they differ from the axis's layout.
        key_runs: runs of each rank's keys, if a cache has more keys than there are queries.
        begin: the position in the sequence from which documents and runs count.
    """

    axis: SequenceAxis
    seq_len: int | None
    documents: Documents
    runs: Tensor | None = None
    key_runs: Tensor | None = None
    begin: int = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **scores: Any) -> Tensor:
        """Return the outputs of this rank's queries, `(B, N, L, H)`."""
        where = {"seq_len": self.seq_len, "runs": self.runs, "key_runs": self.key_runs}
        return self.axis.attention(query, key, value, **where, **scores)


@dataclass(frozen=True)
class Decoded:
    """Attention with the same few queries on all ranks, and keys that are sharded or replicated.

    Attributes:
        axis: the axis that shards the sequence.
        documents: where documents begin and end.
        key_runs: runs of the keys of each rank, `(W, R, 2)`, or of this rank, `(1, R, 2)`.
        query_starts: the position of the first query, `(1,)`.
        num_columns: number of keys on this rank; later columns are ignored, see
            `CacheMemory.append`.
        mesh: the mesh of the ranks that share the keys; `None` if each rank has all keys.
        agree: integers that must be the same on all ranks.
        begin: the position in the sequence from which documents and runs count.
    """

    axis: SequenceAxis
    documents: Documents
    key_runs: Tensor
    query_starts: Tensor
    num_columns: int
    mesh: DeviceMesh | None
    agree: Tensor | None = None
    begin: int = 0

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, strategy: str | None = None, **scores: Any
    ) -> Tensor:
        """Return the outputs of queries `(B, N, M, H)`; both are the same on all ranks.

        Keys stay where they are, so `strategy` is ignored.

        Raises:
            ValueError: if the layer has fewer keys than its cache.
        """
        if key.shape[2] < self.num_columns:
            raise ValueError(
                f"a layer attends to {key.shape[2]} keys per rank where its cache has "
                f"{self.num_columns}, which is not supported over a sharded sequence; generate "
                "with use_cache=False"
            )
        if key.shape[2] > self.num_columns:
            key, value = key.narrow(2, 0, self.num_columns), value.narrow(2, 0, self.num_columns)
        return decode_attention(
            query,
            key,
            value,
            key_runs=self.key_runs,
            query_starts=self.query_starts,
            kernel=self.axis.kernel,
            mesh=self.mesh,
            agree=self.agree,
            **scores,
        )


Frame = Dealt | Decoded
