"""Runs a model on the next tokens of pooled sequences: what layers write, and attend to.

All sequences of a forward stand in one row of tokens, so that the projections of all are computed
together. Attention takes them apart again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtensor_ring import BlockPool, Mask, PagedBatch, PagedCache, SequenceAxis
from dtensor_ring.extension import BlockCopy, PagedPrefill, PooledSequence
from parallel_plans.huggingface.core.attention_function import RingInputs
from parallel_plans.huggingface.core.documents import DocumentBounds
from parallel_plans.huggingface.core.key_index import KeyIndex
from parallel_plans.huggingface.core.positions import counter_of, length_dependent
from parallel_plans.huggingface.core.versions import cache_name
from parallel_plans.huggingface.probing.probe import ROUTER_LOGITS
from parallel_plans.huggingface.serving.pooled_states import PooledStates
from parallel_plans.huggingface.sharding.batch import LOGITS_TO_KEEP, ModelBatch, keywords
from parallel_plans.huggingface.sharding.sharding import Sharding

Pair = tuple[Tensor, Tensor]

NO_INDEX = (
    "layers whose index chooses the keys of each token are not served from a pool, whose blocks "
    "keep no keys of an index; call generate"
)


class PooledForward:
    """A model and the keys and values of its sequences.

    Args:
        model: a causal language model under a plan.
        sharding: how the plan shards it.
        pool: the pool of its sequences.
        axis: the ranks of the pool, if they are not all of the plan's; then nothing is compared
            here.

    Attributes:
        memory: the keys and values on this rank.
        states: the states on this rank; `None` if no layer has one.

    Raises:
        ValueError: if the model cannot run over pooled sequences.
    """

    def __init__(
        self, model: Any, sharding: Sharding, pool: BlockPool, axis: SequenceAxis | None = None
    ) -> None:
        from parallel_plans.huggingface.generation.context_parallel_cache import pooled_cache

        check_servable(model)
        if axis is None:
            with torch.no_grad():
                sharding.agree(model, {})  # on the weights
        self._model, self._sharding = model, sharding
        self.memory = PooledMemory(axis or sharding.axis, pool, sharding.cache_dtype)
        cache, self.memory.numbers = pooled_cache(model, self.memory)
        self._inputs = tuple(PooledInputs(self.memory, i) for i in range(len(cache.layers)))
        self._cache = {cache_name(model): cache}
        self.states: PooledStates | None = None
        if sharding.passing is not None:
            mesh = self.memory.axis.mesh
            self.states = PooledStates(sharding.passing, mesh, pool, model.device)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of keys, values and states on this rank."""
        cache, states = self.memory.cache, self.states
        found = 0 if cache is None else cache.num_bytes
        return found if states is None else found + states.num_bytes

    def run(
        self, chunks: Sequence[tuple[PooledSequence, int]], decoding: Sequence[PooledSequence]
    ) -> Tensor:
        """Compute and write the next tokens of sequences, in one run of the model.

        Args:
            chunks: prompts, and the number of tokens of each; they are sharded over the ranks.
            decoding: sequences whose last tokens, one or more of each, are new: not committed.

        Returns:
            The logits of these tokens of `decoding`, sequence by sequence, `(T, V)`.
        """
        # A forward's row: tokens of prompts on the ranks that keep them, then last tokens on all.
        #     rank 0    a0 a1 b0    c9 d4
        #     rank 1    a2 a3 b1    c9 d4
        device, steps, num_decoded = self._model.device, list[PooledStep](), 0
        if chunks:
            steps.append(PrefilledTokens(self.memory, chunks, device))
        if decoding:
            steps.append(DecodedTokens(self.memory, decoding, device))
            num_decoded = len(steps[-1].tokens)
        step = steps[0] if len(steps) == 1 else MixedTokens(steps)
        # Without `decoding` no logits: the last token of a prompt is decoded.
        none = torch.empty(0, dtype=torch.int64, device=device)
        lengths, states = [len(x.tokens) for x in steps], self.states
        with nullcontext() if states is None else states.running(chunks, decoding, lengths):
            return self._run(step, num_decoded or none)[0]

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks that sequences do not share from now on."""
        if self.memory.cache is not None:
            self.memory.cache.copy(copies)

    @torch.no_grad()
    def _run(self, step: PooledStep, kept: Tensor | int) -> Tensor:
        tokens, positions = step.tokens.unsqueeze(0), step.positions.unsqueeze(0)
        ring = RingInputs(self._inputs, step.positions, self._sharding.layer_masks)
        batch = ModelBatch("input_ids", tokens, positions, others={LOGITS_TO_KEEP: kept})
        how = keywords(batch, ring, use_cache=True)
        if hasattr(self._model.config, ROUTER_LOGITS):
            how[ROUTER_LOGITS] = False  # the config may ask for a loss
        self.memory.step = step
        try:
            # The module is called, not its forward: hooks gather the weights of FSDP2. Each step
            # has another number of tokens, so a compiled model would compile each anew.
            with torch.compiler.set_stance("force_eager"):
                return self._model(**how, **self._cache).logits
        finally:
            self.memory.step = self.memory.last = None


class PooledMemory:
    """The keys and values of all layers of a model on this rank, allocated by the first forward.

    Args:
        axis: the axis that shards the pool.
        pool: the pool.
        kv_dtype: the eight bits of full blocks; `None` to round nothing.

    Attributes:
        numbers: for each layer of the model, the number of the layer whose keys it attends to,
            among those that keep keys.
        cache: the memory; `None` before the first forward.
        kept: the number of key heads and the head dim of what is kept.
        expands: whether the model makes other keys of those that it keeps, as of latents. Until a
            layer has shown its keys, it is taken to.
        seq_len: the number of tokens before a forward, as models ask for it: positions are given.
        is_running: whether the model is running on new tokens.
        kind: the number of heads, the head dims of keys and values, and the dtype of what is kept;
            `None` before the first forward.
        last: the number of the layer that wrote its new tokens, and has not attended yet: layers
            may share an attention, which does not know which of them it is.
        written: called with the number of each layer, among those that keep keys, once it has
            written its new tokens; `None` if nobody asks.
    """

    seq_len, is_running = 0, True

    def __init__(self, axis: SequenceAxis, pool: BlockPool, kv_dtype: str | None = None) -> None:
        self.axis, self.pool, self.kv_dtype = axis, pool, kv_dtype
        self.numbers: Sequence[int] = ()
        self.cache: PagedCache | None = None
        self.kept, self.expands = (0, 0), True
        self.kind: tuple[int, int, int, torch.dtype] | None = None
        self.last: int | None = None
        self.written: Callable[[int], None] | None = None
        self.step: PooledStep | None = None
        self.key_runs = torch.empty(0)

    def append(self, layer: int, key: Tensor, value: Tensor) -> Pair:
        """Write new tokens of a layer; return what the layer makes its keys and values of."""
        assert self.step is not None, "outside of a forward"
        if self.cache is None:
            self.allocate((key.shape[1], key.shape[3], value.shape[3], key.dtype), key.device)
        assert self.cache is not None
        self.last = self.numbers[layer]
        found = self.step.append(self.cache, self.last, key, value)
        if self.written is not None:
            self.written(self.last)
        return found

    def append_index(self, layer: int, keys: Tensor) -> Tensor:
        """Refuse layers whose index chooses keys: blocks of the pool keep no keys of an index."""
        raise ValueError(NO_INDEX)

    @property
    def num_layers(self) -> int:
        """Return the number of layers that keep keys."""
        return max(self.numbers, default=-1) + 1

    def allocate(self, kind: tuple[int, int, int, torch.dtype], device: torch.device) -> None:
        """Allocate the memory for keys and values of a `kind`."""
        heads, head_dim, value_dim, dtype = self.kind = kind
        rank, self.kept = self.axis.mesh.get_local_rank(), (heads, head_dim)
        self.cache = PagedCache(
            self.pool,
            heads,
            head_dim,
            self.num_layers,
            rank,
            value_dim,
            dtype=dtype,
            device=device,
            kv_dtype=self.kv_dtype,
        )


class PooledStep(ABC):
    """The new tokens of one forward, in a row.

    Attributes:
        tokens: ids of this rank's tokens, `(L,)`.
        positions: their positions in their sequences, `(L,)`.
    """

    tokens: Tensor
    positions: Tensor

    @abstractmethod
    def append(self, cache: PagedCache, number: int, key: Tensor, value: Tensor) -> Pair:
        """Write keys and values `(1, Nkv, L, H)`; return what attention is given in their place."""

    @abstractmethod
    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **scores: Any
    ) -> Tensor:
        """Return the outputs of queries `(1, N, L, H)`."""


class DecodedTokens(PooledStep):
    """The last tokens of each sequence, on all ranks: one message for each layer.

    Args:
        memory: the keys and values of all sequences.
        sequences: the sequences, whose last tokens, one or more of each, are not committed yet.
        device: the device of the model.
    """

    def __init__(
        self, memory: PooledMemory, sequences: Sequence[PooledSequence], device: torch.device
    ) -> None:
        self._memory, self._sequences = memory, list(sequences)
        places = [range(x.num_written, len(x)) for x in sequences]
        new = [x.tokens[y] for x, each in zip(sequences, places, strict=True) for y in each]
        self.tokens = torch.tensor(new, device=device)
        self.positions = torch.tensor([y for each in places for y in each], device=device)
        counts = [*map(len, places)]
        self._num_tokens: int | list[int] = 1 if max(counts) == 1 else counts
        self._batch: PagedBatch | None = None

    def append(self, cache: PagedCache, number: int, key: Tensor, value: Tensor) -> Pair:
        batch = self._batch
        if batch is None:
            batch = self._batch = PagedBatch(cache, self._sequences, self._num_tokens)
        batch.write(number, _by_row(key), _by_row(value))
        if not self._memory.expands:
            return key, value  # attention reads the blocks in place
        # A layer that expands what is kept, as latents, does so for all of its blocks at once.
        keys, values = (x.flatten(0, 1).transpose(0, 1) for x in batch.blocks(number))
        return keys.unsqueeze(0), values.unsqueeze(0)

    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **scores: Any
    ) -> Tensor:
        batch, blocks = self._batch, None
        assert batch is not None, "attention before the cache"
        if self._memory.expands:
            block = self._memory.pool.dealing.block
            keys, values = (
                x[0].transpose(0, 1).unflatten(0, (-1, block)).contiguous() for x in (key, value)
            )
            blocks = keys, values
        mesh = self._memory.axis.mesh
        out, _ = batch.decode(number, _by_row(query), mesh=mesh, mask=mask, blocks=blocks, **scores)
        return out.squeeze(2).transpose(0, 1).unsqueeze(0)


class PrefilledTokens(PooledStep):
    """Tokens of prompts, each on the rank that keeps it: one ring for each layer.

    Args:
        memory: the keys and values of all sequences.
        chunks: the sequences, and the number of tokens of each.
        device: the device of the model.
    """

    def __init__(
        self,
        memory: PooledMemory,
        chunks: Sequence[tuple[PooledSequence, int]],
        device: torch.device,
    ) -> None:
        self._memory, self._chunks = memory, chunks
        self._prefill: PagedPrefill | None = None
        dealing, rank = memory.pool.dealing, memory.axis.mesh.get_local_rank()
        positions = [
            dealing.columns(x.num_written, x.num_written + n, rank)[0] + x.num_written
            for x, n in chunks
        ]
        tokens = [
            x.tokens[p] for (x, _), places in zip(chunks, positions, strict=True) for p in places
        ]
        self._length = len(tokens)
        # Models cannot run on no token: a rank without any has one that nobody sees.
        padding = [0] * (not tokens)
        flat = [p for places in positions for p in places.tolist()]
        self.tokens = torch.tensor(tokens + padding, device=device)
        self.positions = torch.tensor(flat + padding, device=device)

    def append(self, cache: PagedCache, number: int, key: Tensor, value: Tensor) -> Pair:
        prefill = self._prefill = self._prefill or PagedPrefill(cache, self._chunks)
        new_keys, new_values = (x.narrow(2, 0, self._length) for x in (key, value))
        prefill.write(number, new_keys, new_values)
        keys, values = prefill.gather(number, new_keys, new_values)
        if keys.shape[2]:
            return keys, values
        # Models that expand latents cannot view an empty tensor; attention ignores this column.
        return torch.zeros_like(key[:, :, :1]), torch.zeros_like(value[:, :, :1])

    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **scores: Any
    ) -> Tensor:
        prefill = self._prefill
        assert prefill is not None, "attention before the cache"
        # The token that stands in for none is no query.
        query, padding = query.split((self._length, query.shape[2] - self._length), 2)
        keys, values = (x.narrow(2, 0, prefill.num_columns) for x in (key, value))
        seen = {"slices": prefill.slices(mask), "runs": prefill.runs, "key_runs": prefill.key_runs}
        out = self._memory.axis.attention(query, keys, values, **seen, **scores)
        if not padding.shape[2]:
            return out
        return torch.cat([out, value.new_zeros((*padding.shape[:3], value.shape[3]))], 2)


class MixedTokens(PooledStep):
    """Tokens of prompts and last tokens of other sequences, in one run of the model.

    Args:
        steps: the parts, in the order of their tokens.
    """

    def __init__(self, steps: Sequence[PooledStep]) -> None:
        self._steps, self._num_keys = steps, [0]
        self._lengths = [len(x.tokens) for x in steps]
        self.tokens = torch.cat([x.tokens for x in steps])
        self.positions = torch.cat([x.positions for x in steps])

    def append(self, cache: PagedCache, number: int, key: Tensor, value: Tensor) -> Pair:
        new_keys, new_values = (x.split(self._lengths, 2) for x in (key, value))
        new = zip(self._steps, new_keys, new_values, strict=True)
        pairs = [step.append(cache, number, k, v) for step, k, v in new]
        keys, values = [keys for keys, _ in pairs], [values for _, values in pairs]
        self._num_keys = [x.shape[2] for x in keys]
        return torch.cat(keys, 2), torch.cat(values, 2)

    def attend(
        self, number: int, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **scores: Any
    ) -> Tensor:
        # The layer has seen the keys of both parts in one tensor.
        keys, values = (x.split(self._num_keys, 2) for x in (key, value))
        parts = zip(self._steps, query.split(self._lengths, 2), keys, values, strict=True)
        found = [step.attend(number, q, k, v, mask, **scores) for step, q, k, v in parts]
        return torch.cat(found, 2)


@dataclass(frozen=True)
class PooledInputs:
    """How a layer attends in a forward over pooled sequences, see `LayerInputs`.

    Attributes:
        memory: the memory of all layers, with the step that runs.
        layer: the index of the layer in the model.
        documents: none: sequences are taken apart.
        begin: the position from which documents count.
    """

    memory: PooledMemory
    layer: int
    documents: DocumentBounds = field(default_factory=DocumentBounds)
    begin: int = 0

    @property
    def key_runs(self) -> Tensor:
        """Return anything but `None`: a layer attends to other keys than those of its queries."""
        return self.memory.key_runs

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None = None,
        strategy: str | None = None,
        **scores: Any,
    ) -> Tensor:
        """Return the outputs of this rank's queries, `(1, N, L, H)`.

        There are no documents, and keys stay where they are: `cu_seqlens` and `strategy` are
        ignored.

        Raises:
            ValueError: if the model made a mask of its own for these tokens, or adds a bias.
        """
        if scores.get("relative_bias") is not None:
            raise ValueError(
                "layers that add a bias by distance are not served from a pool, whose kernels take "
                "none; call generate"
            )
        if "slices" in scores:
            raise ValueError(
                "the model makes a mask of its own for each batch, which generate_batch over a "
                "sharded pool does not support; call generate"
            )
        memory = self.memory
        assert memory.step is not None and memory.cache is not None, "outside of a forward"
        # Known after the first call only: the layer gets what is kept, and may make more heads of
        # it.
        memory.expands = (key.shape[1], key.shape[3]) != memory.kept
        number, memory.last = memory.last, None
        if number is None:  # the keys are those of an earlier layer
            number = memory.numbers[self.layer]
        return memory.step.attend(number, query, key, value, **scores)

    def select(self, index: KeyIndex, strategy: str | None = None, **seen: Any) -> Tensor:
        """Refuse layers whose index chooses keys: blocks of the pool keep no keys of an index."""
        raise ValueError(NO_INDEX)

    def attend_with_lse(self, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Refuse layers that see pools beside tokens, as `select` refuses an index."""
        raise ValueError(NO_INDEX)

    def attend_selected(
        self, query: Tensor, key: Tensor, value: Tensor | int, chosen: Tensor, **scores: Any
    ) -> Tensor:
        """Refuse layers whose index chooses keys, as `select` does."""
        raise ValueError(NO_INDEX)


def _by_row(x: Tensor) -> Tensor:
    """Turn the tokens of a row into rows: `(1, N, L, H)` to `(L, N, 1, H)`."""
    return x[0].transpose(0, 1).unsqueeze(2)


def check_servable(model: Any) -> None:
    """Refuse models whose layers need more than keys, values and positions.

    Raises:
        ValueError: naming what the model has.
    """
    reason = None
    if any(True for _ in length_dependent(model)):
        reason = "a rotary embedding whose factors depend on the longest sequence of a batch"
    elif model.config.get_text_config(decoder=True) is not model.config:
        reason = "a model around its language model, as for images"
    elif counter_of(model) is not None and not hasattr(model.config, "max_position_embeddings"):
        reason = "positions that it counts by itself"
    if reason is not None:
        raise ValueError(
            f"{type(model).__name__} has {reason}, which generate_batch over a sharded pool does "
            "not support; call generate"
        )


def check_whole_weights(model: Any) -> None:
    """Refuse weights that ranks of both groups would have to gather together.

    Raises:
        ValueError: if a weight is a DTensor.
    """
    sharded = next((name for name, x in model.named_parameters() if isinstance(x, DTensor)), None)
    if sharded is not None:
        raise ValueError(
            f"{sharded} is sharded over ranks (FSDP2, tensor parallelism), and two groups run the "
            "model at different times; keep whole weights on each rank, or leave prefill and "
            "decode out"
        )
