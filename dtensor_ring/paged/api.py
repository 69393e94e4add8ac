"""The public classes: the cache of one rank, and one step of a model over pooled sequences."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.compute.kernels.kernel import Problem, Scores
from dtensor_ring.decode.api import merge_ranks, placed
from dtensor_ring.decode.call import DecodeBatch, DecodeCall
from dtensor_ring.dtensor.annotation import axis_group
from dtensor_ring.dtensor.call_check import as_flag, scores_of
from dtensor_ring.ops.checks import called_from, check_strided
from dtensor_ring.paged.block_pool import BlockPool
from dtensor_ring.paged.blocks import BlockCopy, PooledSequence
from dtensor_ring.paged.kernels import paged_kernel
from dtensor_ring.paged.page_memory import page_memory
from dtensor_ring.paged.run import PagedPlan
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.ranges import as_count
from dtensor_ring.planning.tile import CAUSAL
from dtensor_ring.quantised.kept_tokens import format_named

# The largest number of layers or heads, and the largest head dim.
MAX_SIZE = 2**20


class PagedCache:
    """The keys and values of all layers that one rank of a `BlockPool` holds.

    Memory for all blocks is allocated at once. A `PagedBatch` writes to it and attends to it.

    With `kv_dtype`, full blocks of 64 tokens (or of the pool's block, if that is smaller) are in
    eight bits, with scales: about half the bytes of bfloat16. The tokens after them are as they
    are, in memory that grows with the number of sequences. Blocks that sequences share are shared
    with their scales. Attention is exactly attention to the dequantised keys and values; it copies
    what its queries see of a layer, as no kernel reads eight bits yet. A write into a block that
    was full, after `BlockPool.crop` or once more, begins with the numbers that it was rounded to.

    Args:
        pool: the pool, which knows the content of each block.
        num_kv_heads: the number of key and value heads.
        head_dim: the head dim of keys, and of values unless `value_head_dim` is given.
        num_layers: the number of layers that keep keys and values.
        rank: this rank's index on the axis that the pool is sharded over.
        value_head_dim: the head dim of values.
        dtype: the dtype of keys and values; by default PyTorch's.
        device: the device of keys and values.
        kv_dtype: `"int8"` or `"fp8"` (e4m3), the eight bits of full blocks, the same on all ranks;
            by default nothing is rounded.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a number is out of range, `kv_dtype` is unknown, or blocks of 64 tokens do
            not divide those of the pool.

    >>> pool = BlockPool(num_blocks=4, block=4)
    >>> cache = PagedCache(pool, num_kv_heads=2, head_dim=8, num_layers=1)
    >>> cache.layer(0)[0].shape, cache.num_bytes
    (torch.Size([4, 4, 2, 8]), 2048)
    """

    def __init__(
        self,
        pool: BlockPool,
        num_kv_heads: int,
        head_dim: int,
        num_layers: int,
        rank: int = 0,
        value_head_dim: int | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        kv_dtype: str | None = None,
    ) -> None:
        if not isinstance(pool, BlockPool):
            raise TypeError(f"pool must be a BlockPool, got {pool!r}")
        self.pool = pool
        self.rank = as_count("rank", rank, 0, pool.dealing.world_size - 1)
        num_kv_heads = as_count("num_kv_heads", num_kv_heads, 1, MAX_SIZE)
        num_layers = as_count("num_layers", num_layers, 1, MAX_SIZE)
        head_dim = as_count("head_dim", head_dim, 1, MAX_SIZE)
        if value_head_dim is None:
            value_head_dim = head_dim
        value_head_dim = as_count("value_head_dim", value_head_dim, 1, MAX_SIZE)
        shape = num_layers, pool.num_blocks, pool.dealing.block, num_kv_heads
        shapes = (*shape, head_dim), (*shape, value_head_dim)
        self._num_layers, self.kv_dtype = num_layers, kv_dtype
        self._memory = page_memory(pool, rank, shapes, dtype, device, format_named(kv_dtype))

    @property
    def num_layers(self) -> int:
        """Return the number of layers."""
        return self._num_layers

    @property
    def num_bytes(self) -> int:
        """Return the memory of this rank's blocks, in bytes."""
        return self._memory.num_bytes

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return a layer's keys `(num_blocks, block, Nkv, H)`, and its values with head dim Hv.

        With `kv_dtype`, they are dequantised copies.

        Raises:
            TypeError: if `layer` is not an int.
            ValueError: if there is no such layer.
        """
        return self._memory.to_attend(self._number(layer), None)

    def _number(self, layer: int) -> int:
        """Check the number of a layer, and return it."""
        return as_count("layer", layer, 0, self._num_layers - 1)

    def copy(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the blocks that `BlockPool.append` returned, before anything else is written."""
        with torch.inference_mode(False), torch.no_grad():
            for rank, source, target in copies:
                if rank == self.rank:
                    self._memory.copy(source, target)

    def gather(
        self, layer: int, sequence: PooledSequence, length: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return copies of this rank's keys `(1, Nkv, C, H)` and values of a sequence, by position.

        `BlockPool.runs` returns their positions, in the format of `key_runs` of `ring_attention`
        and `decode_attention`.

        Args:
            layer: the index of the layer.
            sequence: the sequence.
            length: the number of its first tokens to read; by default all.

        Raises:
            TypeError: if `layer` or `length` is not an int.
            ValueError: if there is no such layer, `sequence` is not in the pool, or has fewer
                tokens.
        """
        table = self.pool.block_table(sequence, self.rank)
        length = len(sequence) if length is None else length
        length, dealing = as_count("length", length, 0, len(sequence)), self.pool.dealing
        num_cols = dealing.num_before(length, self.rank)
        keys, values = (
            x.flatten(0, 1)[:num_cols].transpose(0, 1).unsqueeze(0)
            for x in self._memory.read(self._number(layer), table[: -(-num_cols // dealing.block)])
        )
        return keys, values


class PagedBatch:
    """A step of a model: the last tokens of some sequences.

    Each layer writes the keys and values of these tokens, unless they are written already, and
    computes their attention. One batch serves all layers, until one of its sequences changes.

    Args:
        cache: the cache of this rank.
        sequences: the sequences, in the order of the batch rows.
        num_tokens: M, the number of last tokens of each sequence. Or a list with the number of each
            of the B sequences, as to verify drafts: then each token is a batch row with one query,
            `(sum(num_tokens), N, 1, H)`, sequence by sequence. It sees what it sees as the last
            token of its sequence.

    Raises:
        TypeError: if an argument has the wrong type.
        ValueError: if a sequence is not in the pool, is given twice, or has fewer tokens.

    >>> pool = BlockPool(num_blocks=4, block=4)
    >>> cache = PagedCache(pool, num_kv_heads=2, head_dim=8, num_layers=1)
    >>> prompt = pool.add([5, 6, 7])
    >>> batch = PagedBatch(cache, [prompt], num_tokens=3)
    >>> batch.write(0, torch.randn(1, 2, 3, 8), torch.randn(1, 2, 3, 8))
    >>> pool.commit(prompt)
    >>> out, lse = batch.decode(0, torch.randn(1, 4, 3, 8))
    >>> out.shape, lse.shape
    (torch.Size([1, 4, 3, 8]), torch.Size([1, 4, 3]))
    """

    def __init__(
        self,
        cache: PagedCache,
        sequences: Sequence[PooledSequence],
        num_tokens: int | Sequence[int] = 1,
    ) -> None:
        if not isinstance(cache, PagedCache):
            raise TypeError(f"cache must be a PagedCache, got {cache!r}")
        if not isinstance(sequences, (list, tuple)):
            raise TypeError(f"sequences must be a list of sequences, got {sequences!r}")
        for sequence in sequences:
            cache.pool.check(sequence)
        self.num_tokens = _num_tokens_of(sequences, num_tokens)
        if len({x.number for x in sequences}) < len(sequences):
            raise ValueError("sequences must differ, a step has the tokens of each once; fork one")
        self.sequences = tuple(sequences)
        self._cache = cache
        self._versions = [x.version for x in sequences]
        self._plan = PagedPlan(
            cache.pool, cache.rank, self.sequences, self.num_tokens, cache.kv_dtype
        )

    def write(self, layer: int, key: Tensor, value: Tensor, *, dealt: bool = False) -> None:
        """Write the keys and values of these tokens in a layer; every rank keeps those it owns.

        After all layers are written, call `BlockPool.commit`.

        Args:
            layer: the index of the layer.
            key: `(B, Nkv, M, H)`, all tokens, the same on every rank.
            value: `(B, Nkv, M, Hv)`.
            dealt: whether the tensors hold this rank's tokens only, in the order of positions. This
                is for a single sequence whose prompt was prefilled by the ring.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if shapes, dtypes or devices do not fit, a sequence has changed since the
                batch was made, or tokens were committed: other sequences may read those.
        """
        self._check_current()
        self._check_written()
        number, device = self._cache._number(layer), self._cache._memory.like[0].device
        (source,), slots = self._plan.sources.on(device), self._plan.slots
        if as_flag("dealt", dealt) and len(self.sequences) != 1:
            raise ValueError(f"dealt is for one sequence, got {len(self.sequences)}")
        num_given = len(source) if dealt else self._plan.num_queries
        check_new_tokens(self._cache, key, value, 1 if dealt else self._plan.num_rows, num_given)
        # Tensors made in the caller's inference mode could not be written outside of it.
        with torch.inference_mode(False), torch.no_grad():
            keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (key, value))
            if not dealt:
                keys, values = keys[source], values[source]
            self._cache._memory.write(number, slots, (keys, values))

    def attend(
        self,
        layer: int,
        query: Tensor,
        *,
        mask: Mask = CAUSAL,
        scale: float | None = None,
        softcap: float = 0.0,
        kernel: str | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend to the keys of this rank; `decode` merges these partial results.

        Args:
            layer: the index of the layer.
            query: `(B, N, M, H)`, the same on every rank; N is a multiple of Nkv.
            mask: which keys a query sees, by position.
            scale: the factor of the scores, `H ** -0.5` by default.
            softcap: scores become `softcap * tanh(score / softcap)`; 0 turns it off.
            kernel: the kernel that reads blocks: `"flash_attn3"`, `"flash_attn2"`, `"varlen_attn"`,
                `"paged_triton"`, `"in_place"` or `"gathered"`; by default the first that can run.

        Returns:
            `out` `(B, N, M, Hv)` and `lse` `(B, N, M)`, natural log, float32 or wider: 0 and -inf
            for a query that sees no key of this rank.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: if shapes, numbers or kernel do not fit, or a sequence has changed since the
                batch was made.
            NotImplementedError: if the query needs a gradient while gradients are enabled.
        """
        scores = self._scores(layer, query, mask, scale, softcap, None, self._cache._memory.like)
        return self._attend(layer, query, scores, kernel, None)

    def _scores(
        self,
        layer: int,
        query: Tensor,
        mask: Mask,
        scale: float | None,
        softcap: float,
        sinks: Tensor | None,
        like: tuple[Tensor, Tensor],
    ) -> Scores:
        """Check all arguments but the kernel, and return how the queries are scored."""
        self._check_current()
        self._cache._number(layer)
        keys, _ = like
        num_heads = query.shape[1] if isinstance(query, Tensor) and query.ndim == 4 else 0
        shape = self._plan.num_rows, num_heads, self._plan.num_queries, keys.shape[3]
        _check("query", query, shape, keys)
        if not num_heads or num_heads % keys.shape[2]:
            raise ValueError(
                f"query must have a multiple of the {keys.shape[2]} heads of keys, got {num_heads}"
            )
        scores = scores_of(query, mask, scale, softcap, sinks, None)
        if torch.is_grad_enabled() and any(
            x is not None and x.requires_grad for x in (query, sinks)
        ):
            raise NotImplementedError(
                "attention to a pool has no gradient, and query or sinks needs one; call it under "
                "torch.no_grad(), or take ring_attention"
            )
        return scores

    def _attend(
        self,
        layer: int,
        query: Tensor,
        scores: Scores,
        kernel: str | None,
        blocks: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, Tensor]:
        """Return this rank's partial result, without sinks, which are added after the merge."""
        if kernel is not None and not isinstance(kernel, str):
            raise TypeError(f"kernel must be the name of a kernel, a str, got {kernel!r}")
        keys, values = blocks or self._cache._memory.like
        problem = Problem(
            query.device.type,
            query.dtype,
            keys.shape[3],
            values.shape[3],
            scores.scale,
            softcap=scores.softcap,
            grouped=query.shape[1] > keys.shape[2],
        )
        reader = paged_kernel(kernel, problem, keys.shape[1])
        with torch.no_grad():
            # Kernels need the head dim to be contiguous.
            query = query if query.stride(3) == 1 else query.contiguous()
            step = self._plan.step(scores.mask, reader.whole_blocks, blocks is not None)
            keys, values = blocks or self._cache._memory.to_attend(layer, step.pages)
            return step.forward(query, keys, values, reader, scores)

    def decode(
        self,
        layer: int,
        query: Tensor,
        *,
        mesh: DeviceMesh | None = None,
        mask: Mask = CAUSAL,
        sinks: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
        kernel: str | None = None,
        merge: str | None = None,
        blocks: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend to the keys of all ranks: `attend`, and one round of messages that merges.

        All ranks get the same bits. In the same messages they compare the sequences, their lengths,
        the tokens of this step and `kv_dtype`.

        Args:
            layer: the index of the layer.
            query: `(B, N, M, H)`, the same on every rank.
            mesh: the 1-D mesh of the axis that the pool is sharded over; `None` for one rank.
            mask: which keys a query sees, by position.
            sinks: `(N,)`, one logit per query head, which joins the softmax without a value.
            scale: the factor of the scores, `H ** -0.5` by default.
            softcap: scores become `softcap * tanh(score / softcap)`; 0 turns it off.
            kernel: as for `attend`.
            merge: as for `decode_attention`.
            blocks: what to attend to in place of the cache: keys and values `(P, block, Nkv, H)`
                that a model made of `blocks(layer)`.

        Returns:
            `out` `(B, N, M, Hv)` in the query's dtype, and `lse` `(B, N, M)`.

        Raises:
            TypeError: if an argument has the wrong type.
            ValueError: as `attend` does, or if the mesh does not match the pool.
            NotImplementedError: if the query needs a gradient while gradients are enabled.
            RingError: if calls of ranks differ, or a rank ended, raised, or did not answer in time.
        """
        pool_ranks, rank = self._cache.pool.dealing.world_size, self._cache.rank
        group = None if mesh is None else axis_group(mesh)
        place = (1, 0) if group is None else (group.size(), group.rank())
        if place != (pool_ranks, rank):
            raise ValueError(
                f"the pool has {pool_ranks} ranks, and this is rank {rank} of it; mesh has "
                f"{place[0]}, and this is its rank {place[1]}; make the pool with "
                "world_size=mesh.size(), and the cache with rank=mesh.get_local_rank()"
            )
        if blocks is not None:
            self._check_blocks(keys=blocks[0], values=blocks[1])
        like = blocks or self._cache._memory.like
        scores = self._scores(layer, query, mask, scale, softcap, sinks, like)
        batch = DecodeBatch(agree=self._plan.agreed(layer))
        call = DecodeCall(batch, scores, placed(query, mesh, True, merge, "PagedBatch.decode")[0])
        here = partial(self._attend, layer, query, scores, kernel, blocks)
        # Ranks compare only heads and head dim of values, which the blocks have.
        values = like[1].transpose(1, 2)
        request = self._plan.request(mask)
        out, lse = called_from(sys._getframe(), merge_ranks, here, call, request, query, values)
        return out.to(query.dtype), lse

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return copies of the sequences' blocks on this rank: keys `(P, block, Nkv, H)`, values.

        They are for models that keep latents: `decode` takes what a model makes of them. Blocks
        that sequences share are there once. A rank without blocks has one that nobody attends to.

        Raises:
            TypeError: if `layer` is not an int.
            ValueError: if there is no such layer, or a sequence has changed since the batch was
                made.
        """
        self._check_current()
        return self._cache._memory.read(self._cache._number(layer), self._plan.pages)

    def _check_written(self) -> None:
        """Refuse to write tokens that were committed."""
        for sequence, num_tokens in zip(self.sequences, self._plan.counts, strict=True):
            num_new = len(sequence.tokens) - sequence.num_written
            if num_new < num_tokens:
                fix = f"take num_tokens={num_new}" if num_new else "append the next tokens first"
                raise ValueError(
                    f"{sequence.num_written} of {len(sequence)} tokens of sequence "
                    f"{sequence.number} were committed, others may read them; so its last "
                    f"{num_tokens} cannot be written, {fix}"
                )

    def _check_blocks(self, keys: Tensor, values: Tensor) -> None:
        """Refuse blocks that do not belong to `blocks(layer)`."""
        shape = len(self._plan.pages), self._cache.pool.dealing.block
        for name, x in (("keys", keys), ("values", values)):
            if x.ndim != 4 or (*x.shape[:2], x.shape[2]) != (*shape, keys.shape[2]):
                raise ValueError(
                    f"{name} of blocks must be {(*shape, keys.shape[-2], 'head dim')}, made of "
                    f"what blocks(layer) returned, got {tuple(x.shape)}"
                )

    def _check_current(self) -> None:
        """Refuse a batch whose sequences have changed."""
        check_current(self.sequences, self._versions, "batch")


def _num_tokens_of(
    sequences: Sequence[PooledSequence], given: int | Sequence[int]
) -> int | tuple[int, ...]:
    """Return the number of last tokens of all sequences, or of each.

    Raises:
        TypeError: if one is not an int.
        ValueError: if a sequence has fewer tokens, or there are more or fewer numbers.
    """
    if not isinstance(given, (list, tuple)):
        return as_count("num_tokens", given, 1, min(map(len, sequences), default=1))
    if len(given) != len(sequences):
        raise ValueError(
            f"num_tokens must be one number for all sequences, or one for each of the "
            f"{len(sequences)}, got {len(given)}"
        )
    pairs = zip(given, sequences, strict=True)
    return tuple(as_count("num_tokens", n, 1, len(sequence)) for n, sequence in pairs)


def check_current(sequences: Iterable[PooledSequence], versions: Iterable[int], what: str) -> None:
    """Refuse sequences that are of other versions than when `what` was made of them.

    Raises:
        ValueError: naming the sequence.
    """
    for sequence, version in zip(sequences, versions, strict=True):
        if sequence.version != version:
            raise ValueError(
                f"sequence {sequence.number} has changed since this {what} was made; make a new "
                "one for each step"
            )


def check_new_tokens(cache: PagedCache, key: Tensor, value: Tensor, batch: int, num: int) -> None:
    """Refuse keys and values that are not `(batch, Nkv, num, H)`, as the cache keeps them.

    Raises:
        TypeError: if one is not a tensor.
        ValueError: if a shape, dtype or device does not fit.
    """
    for name, x, like in zip(("key", "value"), (key, value), cache._memory.like, strict=True):
        _check(name, x, (batch, like.shape[2], num, like.shape[3]), like)


def _check(name: str, x: Tensor, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse a tensor with another shape, dtype or device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    check_strided(name, x)
    if (*x.shape, x.dtype, x.device) != (*shape, like.dtype, like.device):
        raise ValueError(
            f"{name} must be {shape} {like.dtype} on {like.device}, got {tuple(x.shape)} "
            f"{x.dtype} on {x.device}"
        )
