"""How the layers of a model attend in one forward: which queries and keys a rank has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import SequenceAxis, decode_attention
from parallel_plans.huggingface.documents import Documents


@dataclass(frozen=True)
class Dealt:
    """Queries and keys are dealt to the ranks: keys and values travel, as in training.

    Not a tuple: fully_shard moves the tensors in a layer's tuples to the device.
    """

    axis: SequenceAxis
    seq_len: int | None
    """Of all ranks' tokens, with the padding that the layout needs; `None` with `key_runs`."""
    documents: Documents
    runs: Tensor | None = None
    """Of the queries of each rank, where that is not what the axis's layout says."""
    key_runs: Tensor | None = None
    """Of the keys of each rank, if a cache has more of them than there are queries."""
    begin: int = 0
    """The position in the sequence from which documents and runs count."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **scores: Any) -> Tensor:
        """From this rank's `(B, N, L, H)` to its outputs."""
        where = {"seq_len": self.seq_len, "runs": self.runs, "key_runs": self.key_runs}
        return self.axis.attention(query, key, value, **where, **scores)


@dataclass(frozen=True)
class Decoded:
    """All ranks have the same few queries, and keys are sharded, or all of them on each rank."""

    axis: SequenceAxis
    documents: Documents
    key_runs: Tensor
    """Of the keys of each rank, `(W, R, 2)`, or of this one, `(1, R, 2)`."""
    query_starts: Tensor
    """The position of the first query, `(1,)`."""
    num_columns: int
    """Keys of this rank; more are no keys, see `CacheMemory.append`."""
    mesh: DeviceMesh | None
    """`None` if all keys are here."""
    agree: Tensor | None = None
    """Integers that must be the same on all ranks."""
    begin: int = 0
    """The position in the sequence from which documents and runs count."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, strategy: str | None = None, **scores: Any
    ) -> Tensor:
        """From queries `(B, N, M, H)`, the same on all ranks, to outputs, the same on all ranks.

        Keys stay where they are, whatever the strategy is.

        Raises:
            ValueError: if the layer brings other keys than those of its cache.
        """
        if key.shape[2] < self.num_columns:
            raise ValueError(
                f"a layer attends to {key.shape[2]} keys per rank where its cache has "
                f"{self.num_columns}, which is not supported over a sharded sequence; generate "
                "with use_cache=False"
            )
        key, value = (x.narrow(2, 0, self.num_columns) for x in (key, value))
        return decode_attention(
            *(query, key, value),
            key_runs=self.key_runs,
            query_starts=self.query_starts,
            kernel=self.axis.kernel,
            mesh=self.mesh,
            agree=self.agree,
            **scores,
        )


Frame = Dealt | Decoded
