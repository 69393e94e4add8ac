"""Describes how layers attend in one forward: the queries and keys of a rank, in chunks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import (
    SequenceAxis,
    Slices,
    decode_select_keys,
    decode_selected_attention,
    select_keys,
    selected_attention,
)
from dtensor_ring.extension import SharedDecode, pool_runs
from parallel_plans.huggingface.core.documents import DocumentBounds
from parallel_plans.huggingface.core.key_index import (
    KeyIndex,
    KeyPools,
    columns_in,
    documents_of_rows,
    joined_choices,
    runs_in,
    runs_of,
)


class LayerInputs(Protocol):
    """How a layer attends in one forward."""

    @property
    def documents(self) -> DocumentBounds:
        """Return where documents begin and end."""
        ...

    @property
    def key_runs(self) -> Tensor | None:
        """Return `None` if the keys of a layer are those of its queries' tokens alone."""
        ...

    @property
    def begin(self) -> int:
        """Return the position in the sequence from which documents and runs count."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **scores: Any) -> Tensor:
        """Return the outputs of this rank's queries, `(B, N, L, H)`."""
        ...

    def select(self, index: KeyIndex, strategy: str | None = None, **seen: Any) -> Tensor:
        """Return the positions that this rank's queries choose, `(B, L, K)` or `(B, G, L, K)`."""
        ...

    def attend_selected(
        self, query: Tensor, key: Tensor, value: Tensor | int, chosen: Tensor, **scores: Any
    ) -> Tensor:
        """Return attention to the keys at `chosen`, `(B, N, L, H)`."""
        ...


class InputsWithPools(LayerInputs, Protocol):
    """How a layer attends that sees pools beside tokens."""

    @property
    def num_keys(self) -> int:
        """Return the number of tokens of all ranks, with the layout's padding."""
        ...

    def attend_with_lse(
        self, query: Tensor, key: Tensor, value: Tensor, **scores: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the log-sum-exp of the scores, `(B, N, L)`."""
        ...

    def attend_pools(
        self,
        query: Tensor,
        rows: Tensor,
        pools: KeyPools,
        chosen: Tensor | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return attention to pools that are keys and values, and its lse.

        `chosen` are their numbers, `(B, L, K)`; without them a query sees all that end before it.
        """
        ...


@dataclass(frozen=True)
class ShardedInputs:
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
    documents: DocumentBounds
    runs: Tensor | None = None
    key_runs: Tensor | None = None
    begin: int = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **scores: Any) -> Tensor:
        """Return the outputs of this rank's queries, `(B, N, L, H)`."""
        return self.axis.attention(query, key, value, **self._where, **scores)

    def attend_with_lse(
        self, query: Tensor, key: Tensor, value: Tensor, **scores: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the log-sum-exp of the scores, `(B, N, L)`."""
        return self.axis.attention_with_lse(query, key, value, **self._where, **scores)

    @property
    def num_keys(self) -> int:
        """Return the number of tokens of all ranks, with the layout's padding."""
        return _num_keys(self.key_runs) if self.seq_len is None else self.seq_len

    def attend_pools(
        self,
        query: Tensor,
        rows: Tensor,
        pools: KeyPools,
        chosen: Tensor | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return attention to pools that are keys and values, and its lse.

        `chosen` are their numbers, `(B, L, K)`; without them a query sees all that end before it.
        """
        mesh, size = self.axis.mesh, pools.size
        keys = pools.keys(self._own(rows, 1), mesh, **self._order).unsqueeze(1)
        if chosen is None:
            how: dict[str, Any] = {"runs": self.runs}
            how |= {"seq_len": self.seq_len} if self.runs is None else {}
            how["key_runs"] = pool_runs(mesh.size(), size, **self._order)
            # Pools are fewer than queries: all of them travel, and slices say which have ended.
            how |= {"slices": Slices.pools(self.num_keys, size), "strategy": "ring"}
            return self.axis.attention_with_lse(query, keys, keys, scale=scale, **how)
        how = self._where | {"mesh": mesh, "scale": scale, "pool_size": size}
        return selected_attention(query, keys, keys.shape[3], chosen, return_lse=True, **how)

    @property
    def _where(self) -> dict[str, Any]:
        return {"seq_len": self.seq_len, "runs": self.runs, "key_runs": self.key_runs}

    @property
    def _order(self) -> dict[str, Any]:
        """Return which tokens ranks have keys of, see `whole_pools`."""
        runs = self.runs if self.key_runs is None else self.key_runs
        if runs is not None:
            return {"runs": runs}
        return {"layout": self.axis.layout, "seq_len": self.seq_len}

    def select(self, index: KeyIndex, strategy: str | None = None, **seen: Any) -> Tensor:
        """Return the positions that this rank's queries choose, -1 for none.

        They are `(B, L, K)`, or for each head of the index `(B, G, L, K)`.
        Keys of an index take the axis's route, so `strategy` is ignored.
        """
        if index.pools is not None and self.documents.pools is not None:
            return self._select_by_document(index, self.documents.pools)
        how = index.of(self.num_keys) | self._where | seen
        keys = self._own(index.keys, 1)
        if index.pools is not None:
            keys = index.pools.index_keys(keys, self.axis.mesh, **self._order)
        return select_keys(index.query, keys, index.weights, mesh=self.axis.mesh, **how)

    def _select_by_document(self, index: KeyIndex, bounds: Tensor) -> Tensor:
        """Select keys where pools begin with each document, see `select`."""
        mesh, rank = self.axis.mesh, self.axis.mesh.get_local_rank()
        runs = self.runs
        if runs is None:
            runs = runs_of(self.axis.layout, mesh.size(), self.num_keys)
        key_runs = runs if self.key_runs is None else self.key_runs
        parts = []
        for document in documents_of_rows(bounds, len(index.query)):
            rows, begin, end = document
            queries, keys = (columns_in(x[rank], begin, end) for x in (runs, key_runs))
            inside = {"runs": runs_in(runs, begin, end), "key_runs": runs_in(key_runs, begin, end)}
            inputs = ShardedInputs(self.axis, None, DocumentBounds(), **inside)
            chosen = inputs.select(index.part(rows, queries, keys))
            parts.append((document, queries, chosen))
        return joined_choices(parts, index.query.shape[:2], index.query.device)

    def attend_selected(
        self, query: Tensor, key: Tensor, value: Tensor | int, chosen: Tensor, **scores: Any
    ) -> Tensor:
        """Return attention of this rank's queries to the keys at `chosen`, `(B, N, L, H)`.

        A number in place of values says how many of the first numbers of a key are its value.
        """
        how: dict[str, Any] = {"mesh": self.axis.mesh, **self._where, **scores}
        key = self._own(key, 2)
        if not isinstance(value, int):
            value = self._own(value, 2)
        return selected_attention(query, key, value, chosen, **how)

    def _own(self, x: Tensor, dim: int) -> Tensor:
        """Return the keys of this rank: a cache without any gives a column that is none."""
        if self.key_runs is None:
            return x
        return x.narrow(dim, 0, _num_keys(self.key_runs[self.axis.mesh.get_local_rank()]))


@dataclass(frozen=True)
class DecodeInputs:
    """Attention with the same few queries on all ranks, and keys that are sharded or replicated.

    The queries have the last positions of the keys.

    Attributes:
        documents: where documents begin and end.
        key_runs: runs of the keys of each rank, `(W, R, 2)`, or of this rank, `(1, R, 2)`.
        num_columns: number of keys on this rank; later columns are ignored, see
            `CacheMemory.append`.
        mesh: the mesh of the ranks that share the keys; `None` if each rank has all keys.
        agree: integers that must be the same on all ranks.
        begin: the position in the sequence from which documents and runs count.
        kernel: the name of the block kernel; `None` for that of the mesh's axis.
    """

    documents: DocumentBounds
    key_runs: Tensor
    num_columns: int
    mesh: DeviceMesh | None
    agree: Tensor | None = None
    begin: int = 0
    kernel: str | None = None
    _shared: SharedDecode = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        shared = SharedDecode(self.key_runs, self.mesh, self.kernel, self.agree)
        object.__setattr__(self, "_shared", shared)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, strategy: str | None = None, **scores: Any
    ) -> Tensor:
        """Return the outputs of queries `(B, N, M, H)`; both are the same on all ranks.

        Keys stay where they are, so `strategy` is ignored.

        Raises:
            ValueError: if the layer has fewer keys than its cache.
        """
        if key.shape[2] != self.num_columns:
            key, value = self._columns(key, value)
        return self._shared(query, key, value, needs_lse=False, **scores)[0]

    def attend_with_lse(
        self, query: Tensor, key: Tensor, value: Tensor, strategy: str | None = None, **scores: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs, and the log-sum-exp of the scores, `(B, N, M)`.

        Raises:
            ValueError: if the layer has fewer keys than its cache.
        """
        if key.shape[2] != self.num_columns:
            key, value = self._columns(key, value)
        out, lse = self._shared(query, key, value, **scores)
        assert lse is not None
        return out, lse

    def _columns(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that the cache has."""
        self._check(key)
        return key.narrow(2, 0, self.num_columns), value.narrow(2, 0, self.num_columns)

    @property
    def num_keys(self) -> int:
        """Return the number of tokens of all ranks."""
        return _num_keys(self.key_runs)

    def attend_pools(
        self,
        query: Tensor,
        rows: Tensor,
        pools: KeyPools,
        chosen: Tensor | None,
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Return attention to pools that are keys and values, and its lse.

        `chosen` are their numbers, `(B, M, K)`; without them a query sees all that end before it.
        """
        if chosen is None:
            chosen = self._ended_pools(query, pools.size)
        own = rows.narrow(1, 0, self.num_columns)
        keys = pools.keys(own, self.mesh, runs=self.key_runs).unsqueeze(1)
        how: dict[str, Any] = {"key_runs": self.key_runs, "mesh": self.mesh, "agree": self.agree}
        how |= {"scale": scale, "pool_size": pools.size}
        return decode_selected_attention(query, keys, keys.shape[3], chosen, return_lse=True, **how)

    def _ended_pools(self, query: Tensor, size: int) -> Tensor:
        """Return the numbers of the pools that end before each query, `(B, M, P)`, -1 for none."""
        num_keys, (batch, _, num_queries, _) = self.num_keys, query.shape
        at = torch.arange(num_keys - num_queries, num_keys, device=query.device).unsqueeze(-1)
        # Query and keys up to it are at + 1 tokens, which fill (at + 1) // size pools.
        numbers = torch.arange(num_keys // size, dtype=torch.int32, device=query.device)
        return numbers.masked_fill(numbers >= (at + 1) // size, -1).repeat(batch, 1, 1)

    def _check(self, key: Tensor) -> None:
        """Refuse fewer keys than the cache has."""
        if key.shape[2] < self.num_columns:
            raise ValueError(
                f"a layer attends to {key.shape[2]} keys per rank where its cache has "
                f"{self.num_columns}, which is not supported over a sharded sequence; generate "
                "with use_cache=False"
            )

    def select(self, index: KeyIndex, strategy: str | None = None, **seen: Any) -> Tensor:
        """Return the positions that the queries choose, the same on all ranks."""
        if index.pools is not None and self.documents.pools is not None:
            return self._select_by_document(index, self.documents.pools)
        keys = index.keys.narrow(1, 0, self.num_columns)
        how = index.of(self.num_keys) | seen
        how |= {"key_runs": self.key_runs, "mesh": self.mesh}
        if index.pools is not None:
            keys = index.pools.index_keys(keys, self.mesh, runs=self.key_runs)
        return decode_select_keys(index.query, keys, index.weights, **how)

    def _select_by_document(self, index: KeyIndex, bounds: Tensor) -> Tensor:
        """Select keys where pools begin with the last document of each row, see `select`."""
        rank = 0 if self.mesh is None else self.mesh.get_local_rank()
        # New tokens continue the last document, so no other one is chosen from.
        end, parts, every = self.num_keys, [], slice(None)
        for document in documents_of_rows(bounds, len(index.query)):
            if document.end == end:
                runs = runs_in(self.key_runs, document.begin, end)
                keys = columns_in(self.key_runs[rank], document.begin, end)
                columns = keys.stop - keys.start
                inputs = replace(
                    self, documents=DocumentBounds(), key_runs=runs, num_columns=columns
                )
                part = index.part(document.rows, every, keys)
                parts.append((document, every, inputs.select(part)))
        return joined_choices(parts, index.query.shape[:2], index.query.device)

    def attend_selected(
        self, query: Tensor, key: Tensor, value: Tensor | int, chosen: Tensor, **scores: Any
    ) -> Tensor:
        """Return attention to the keys at `chosen`, `(B, N, M, H)`, the same on all ranks.

        A number in place of values says how many of the first numbers of a key are its value.
        """
        self._check(key)
        key = key.narrow(2, 0, self.num_columns)
        if not isinstance(value, int):
            value = value.narrow(2, 0, self.num_columns)
        how: dict[str, Any] = {"key_runs": self.key_runs, "mesh": self.mesh, "agree": self.agree}
        return decode_selected_attention(query, key, value, chosen, **how, **scores)


def compared(tokens: Tensor) -> Tensor | None:
    """Return what layers compare of new tokens, in the messages that they send anyhow.

    All layers do, not the first one alone: they then make the same call, which is bound once.
    """
    # One copy for all layers: each would wait for the device, and make a call that is not kept.
    return None if tokens.is_floating_point() else tokens.cpu().long()


def _num_keys(runs: Tensor | None) -> int:
    """Return the number of keys in runs `(..., 2)`, 0 for none."""
    return 0 if runs is None else int(runs[..., 1].sum())


class ScanChunk(NamedTuple):
    """A contiguous range of tokens of one row and one document.

    Attributes:
        begin: local index of the first token.
        end: local index after the last token.
        is_first: whether the document begins here, so that there is no state before it.
    """

    begin: int
    end: int
    is_first: bool


@dataclass(frozen=True, eq=False)
class ScanChunks:
    """What stateful layers need to know about a batch.

    This is not a tuple, because fully_shard moves tensors in a layer's tuples to the device.

    Attributes:
        length: tokens of a row on this rank.
        starts: local indices at which documents begin, for each row; a single row serves all.
        padding: attention mask of the local tokens, `(B, L)`, if the batch has one.
        stays: whether tokens stay in the axis's layout, two runs of the sequence on each rank, and
            each row is one document.
        batch: boundaries and attention mask of the tokens of all ranks; or checksums of the masks,
            `(W,)`.
    """

    length: int
    starts: tuple[tuple[int, ...], ...]
    padding: Tensor | None
    stays: bool
    batch: tuple[Tensor | None, Tensor | None]

    @classmethod
    @torch.compiler.disable
    def of(
        cls,
        boundaries: Tensor | None,
        length: int,
        paddings: tuple[Tensor | None, Tensor | None],
        mask: Tensor | None,
        mesh: DeviceMesh,
        stays_from: int | None,
    ) -> ScanChunks:
        """Return the chunks of one rank.

        Each rank has a contiguous shard of the same length, or two runs if tokens stay in place.

        Args:
            boundaries: boundaries of documents, `(D+1,)` or `(B, D+1)`; `None` for one document.
            length: tokens of a row on all ranks, with padding.
            paddings: the attention mask of this rank's tokens in contiguous order, `(B, L)`, and in
                the order of the axis's layout.
            mask: what tells the masks of batches apart, alike on all ranks: that of all tokens
                without the layout's padding, `(B, S)`, or checksums.
            mesh: the axis.
            stays_from: the length from which on tokens stay where they are; `None` for never.
        """
        # Scans run in the order of the sequence, where shards are contiguous and equal.
        rank, shard = mesh.get_local_rank(), length // mesh.size()
        begin, end = rank * shard, (rank + 1) * shard
        rows = [[0]] if boundaries is None else boundaries.reshape(-1, boundaries.shape[-1])
        # The last boundary is the end of the tokens, before the layout's padding.
        is_whole = not any(0 < int(x) < int(row[-1]) for row in rows for x in row)
        if is_whole and stays_from is not None and length >= stays_from:
            return cls(shard, ((0,),), paddings[1], True, (boundaries, mask))
        # The last boundary is the end of a row, where no document begins; it may be repeated.
        found = [sorted({int(x) - begin for x in row if begin <= x < end}) for row in rows]
        return cls(shard, tuple(map(tuple, found)), paddings[0], False, (boundaries, mask))

    def same_batch(self, other: ScanChunks) -> bool:
        """Return whether both batches have equal boundaries and masks on all ranks."""
        return all(
            x is y or (x is not None and y is not None and torch.equal(x, y))
            for x, y in zip(self.batch, other.batch, strict=True)
        )

    def of_row(self, row: int) -> list[ScanChunk]:
        """Return the chunks of a row in order."""
        starts = self.starts[row if len(self.starts) > 1 else 0]
        cuts = sorted({0, *starts, self.length})
        return [ScanChunk(x, y, x in starts) for x, y in pairwise(cuts)]

    def mask(self, rows: slice, chunk: ScanChunk) -> Tensor | None:
        """Return the attention mask of a chunk in some rows, `(rows, L)`; `None` without a mask.

        A mask of one row serves all.
        """
        if self.padding is None:
            return None
        padding = self.padding if len(self.padding) == 1 else self.padding[rows]
        return padding[:, chunk.begin : chunk.end]


def own_padding(mask: Tensor | None, indices: Tensor) -> Tensor | None:
    """Return the mask of the tokens at `indices`, `(B, L)`; those beyond the mask are missing.

    Example:
        >>> own_padding(torch.tensor([[1, 1, 1]]), torch.tensor([0, 2, 3]))
        tensor([[1, 1, 0]])
    """
    if mask is None:
        return None
    indices, last = indices.to(mask.device), mask.shape[1] - 1
    # A padded copy of the mask would grow with the tokens of all ranks.
    return mask[:, indices.clamp(max=last)] * (indices <= last)
