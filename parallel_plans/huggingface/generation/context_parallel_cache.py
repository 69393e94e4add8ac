"""A cache of transformers whose keys and values are sharded along the sequence."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy, deepcopy
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionLayer,
)

from dtensor_ring.extension import MAX_QUERIES, CacheUsage, NotPickled
from parallel_plans.huggingface.core.modules import NO_CROSS_ATTENTION
from parallel_plans.huggingface.core.versions import kept_whole
from parallel_plans.huggingface.generation.cache_memory import CacheMemory
from parallel_plans.huggingface.generation.saved_parts import Pair
from parallel_plans.huggingface.selecting.compressed import compressing_layers
from parallel_plans.huggingface.selecting.indexers import give_index, indexers_of, keeps_positions
from parallel_plans.huggingface.sharding.sharding import shardings_of
from parallel_plans.huggingface.states.state_sources import States
from parallel_plans.huggingface.states.stateful import (
    attention_layers,
    keeps_states,
    stateful_layers,
)

NO_PICKLE = (
    "a ContextParallelCache cannot be pickled, as by torch.save(cache): a file would have the "
    "tokens of one rank. Save cache.whole(), a DynamicCache for the stock model in one process, or "
    "cache.state_dict(), for load_state_dict of a cache on any number of ranks; all ranks must "
    "call them"
)


class ContextParallelCache(Cache):
    """Keys and values of a model under a `context_parallel_plan`, for several calls.

    In layers that see everything, each rank of the axis keeps 1/W of the tokens. In layers with a
    window or chunks, each rank keeps the last tokens. `generate` makes a cache by itself; pass your
    own to continue from what was generated:

        chat = ContextParallelCache(model)
        answer = model.generate(prompt, cache=chat)
        answer = model.generate(torch.cat([answer, question], 1), cache=chat)

    A forward by hand takes it as `cache=`, and `use_cache=True` returns a new one; then logits and
    hidden states are whole, plain tensors on every rank. Both also take the cache by its name in
    transformers before 5.24, `past_key_values=`. All ranks must make the same calls: they compare
    the tokens of each sharded forward, and the tokens of a decode step in the message of a layer,
    if some layer sees everything. The plan's `cache_dtype` says whether eight bits are kept.

    Args:
        model: the model that the plan was applied to.
        decode_tokens: the largest number of new tokens after cached ones that each rank computes
            whole; more tokens are sharded, and go through the ring.
        block: number of tokens that memory grows by, see `ShardedCache`.

    Raises:
        ValueError: if the model has no plan, a number is out of range, or a layer keeps anything
            other than keys and values, and keys of an index.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model = parallelize_module(model, mesh, context_parallel_plan(model))
        >>> chat = ContextParallelCache(model)
        >>> answer = model.generate(torch.ones(1, 5, dtype=int), cache=chat, max_length=8)
        >>> chat.get_seq_length()
        7
    """

    def __init__(self, model: Any, *, decode_tokens: int = MAX_QUERIES, block: int = 256) -> None:
        shardings = shardings_of(model)
        if len(shardings) != 1:
            raise ValueError(
                f"a cache is for one model under a context_parallel_plan, got {len(shardings)} in "
                f"{type(model).__name__}"
            )
        if type(decode_tokens) is not int or not 1 <= decode_tokens <= MAX_QUERIES:
            raise ValueError(
                f"decode_tokens must be from 1 to {MAX_QUERIES}, got {decode_tokens!r}"
            )
        self._not_pickled = NotPickled(NO_PICKLE)  # first: pickle reads attributes in order
        self.sharding, self._config = shardings[0], model.config
        self._stateful: list[Any] = stateful_layers(model)
        stock, owners, sizes, has_states = _stock_layers(model)
        kept = self._kept = sorted({x for x in owners if type(stock[x]) not in STATES})
        axis, chunks = self.sharding.axis, self.sharding.chunks
        self._indexers = {x.layer_idx: x for x in indexers_of(model)}
        indexed = [*self._indexers, *(x.layer_idx for x in compressing_layers(model))]
        self.memory = CacheMemory(
            axis,
            sizes,
            kept,
            chunks=chunks,
            decode_tokens=decode_tokens,
            block=block,
            kv_dtype=self.sharding.cache_dtype,
            indexed=indexed,
        )
        layers: list[Any] = [
            x if isinstance(x, DummyLayer) else KeptLayer(self.memory, i, sizes[i], has_states)
            for i, x in enumerate(stock)
        ]
        super().__init__(layers=layers)

    def whole(self) -> DynamicCache:
        """Return a cache of transformers with all tokens, on every rank; all ranks must call it.

        The stock model goes on from it in one process: after `restore_model`, within `stock_model`,
        or loaded there from a file. Eight bits are dequantised.
        """
        made = DynamicCache(config=self._config)
        layers: list[Any] = made.layers
        for number, layer in enumerate(layers):
            pair, index = self.memory.whole(number) if number in self._kept else (None, None)
            if pair is not None:
                keys, values = pair
                layer.update(keys, values)
            if index is not None:
                self._refuse_axes(self._indexers[number])
                padding = self.memory.left_padding
                give_index(self._indexers[number], layer, index, padding)
            for (kind, state_idx), x in self._states_of(number).items():
                if kind == "recurrent":
                    layer.update_recurrent_state(x, state_idx)
                else:  # stock layers keep another column, which the next token drops
                    layer.update_conv_state(torch.nn.functional.pad(x, (1, 0)), state_idx)
            if getattr(layer, "is_sliding", False):  # it counts tokens that it forgot, too
                layer.cumulative_length = self.memory.seq_len
        return made

    def _refuse_axes(self, indexer: Any) -> None:
        """Refuse to give the positions of images to a stock layer, which no rank has."""
        if keeps_positions(indexer) and hasattr(self._config, "vision_config"):
            raise ValueError(
                "the stock cache of this model keeps the positions of all tokens, by the axes of "
                "images, which a sharded cache does not have; go on with cache.state_dict()"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return what is cached, whole on every rank and on the CPU; all ranks must call it.

        It has plain tensors, numbers and names, for `torch.save` by one rank, or for
        `torch.distributed.checkpoint`. Eight bits are dequantised.
        """
        return self.memory.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace what is cached by a state that any number of ranks has saved.

        Args:
            state: what `state_dict` returned, the same on all ranks.

        Raises:
            ValueError: on every rank, if their states differ, or it is of a model with other
                layers, or of a plan with another `cache_dtype`.
        """
        self.memory.load_state_dict(state)

    def usage(self) -> CacheUsage:
        """Return the bytes on each rank; they are computed, and nothing is sent."""
        return self.memory.usage()

    def _states_of(self, layer_idx: int) -> States:
        """Return the states of the modules that a model calls by this index of a layer."""
        found: States = {}
        for number, module in enumerate(self._stateful):
            if module.layer_idx == layer_idx:
                found |= self.memory.states.get(number, {})
        return found

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Return whether layers with a state have seen tokens."""
        return self.memory.seq_len > 0

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Pair:
        """Append keys and values of a layer; return this rank's columns, past and new."""
        return self.memory.append(layer_idx, key_states, value_states)

    # Each token asks these of all layers, which never change.
    @cached_property
    def is_sliding(self) -> list[bool]:
        """Return which layers have a window."""
        return super().is_sliding

    @cached_property
    def is_linear(self) -> list[bool]:
        """Return which layers have states alone."""
        return super().is_linear

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the number of tokens on all ranks together, without those of a running forward."""
        return self.memory.seq_len

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the number of tokens after a forward, and the position of the first one."""
        return self.memory.seq_len + query_length, 0

    @property
    def is_initialized(self) -> bool:
        """Whether the cache holds tokens."""
        return self.memory.seq_len > 0

    @property
    def batch_size(self) -> int:
        """Number of rows; -1 before the first tokens."""
        return self.memory.batch

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last tokens.

        Args:
            tokens_to_remove: how many, as a negative number, as in caches of transformers.

        Raises:
            ValueError: if the cache has fewer tokens, or layers with a window have forgotten what
                they would see then. The cache stays as it was.
        """
        num_tokens = -tokens_to_remove
        if not 0 <= num_tokens <= self.memory.seq_len:
            raise ValueError(
                f"crop takes 0 to {self.memory.seq_len} tokens away, given as a negative number, "
                f"got {tokens_to_remove}"
            )
        self.memory.crop(num_tokens)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows; an empty cache has none."""
        if self.memory.batch >= 0:
            self.memory.select(torch.arange(self.memory.batch)[indices.cpu()])

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace the rows by the rows of these beams."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row of the batch; copies of a row are neighbours."""
        rows = torch.arange(max(0, self.memory.batch))
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget all tokens."""
        self.memory.reset()


# Stock layers of states, and of states beside keys.
STATES = (LinearAttentionLayer,)
STATES_BESIDE = (
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
)


class KeptLayer(CacheLayerMixin):
    """A layer of a `ContextParallelCache`, as models see it."""

    def __init__(
        self, memory: CacheMemory, number: int, size: int, has_states: bool = False
    ) -> None:
        super().__init__()
        self._memory, self._number = memory, number
        # Assisted decoding reads it. Windows keep the tokens that they see after a crop; states
        # cannot be taken back.
        self.is_croppable = not has_states
        self.is_sliding = bool(size)

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptLayer:
        if self._memory.is_running:
            raise ValueError(
                "the model copies layers of its cache in its forward, as those do that run a layer "
                "several times, which is not supported over a sharded sequence; generate with "
                "use_cache=False, or with the stock model"
            )
        made = memo[id(self)] = copy(self)
        vars(made).update(deepcopy(vars(self), memo))
        return made

    @property
    def indexer_position_ids(self) -> None:
        """Without the positions of all tokens, for which a model looks here: no rank has them."""

    @indexer_position_ids.setter
    def indexer_position_ids(self, positions: Tensor) -> None:
        """Keep no positions: what an index needs of them it keeps with its keys."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: memory is allocated with the first tokens."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> Pair:
        """Append keys and values; return this rank's columns, past and new."""
        return self._memory.append(self._number, key_states, value_states)

    def update_indexer(self, indexer_key_states: Tensor) -> Tensor:
        """Append keys of an index, `(B, L, D)`; return this rank's past and new ones."""
        return self._memory.append_index(self._number, indexer_key_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of tokens after a forward, and the position of the first one."""
        return self._memory.seq_len + query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens cached on all ranks together."""
        return self._memory.seq_len

    def get_max_length(self) -> int:
        """Return -1: there is no largest length."""
        return -1


def pooled_cache(model: Any, memory: Any) -> tuple[Cache, list[int]]:
    """Return a cache for memory that keeps all tokens of all layers alike.

    Args:
        model: the model.
        memory: what `KeptLayer` appends to.

    Returns:
        The cache, and for each layer the number of the layer whose keys it uses, among those that
        keep any; -1 if it has states alone.

    Raises:
        ValueError: if a layer keeps anything other than keys and values.
    """
    stock, owners, sizes, has_states = _stock_layers(model)
    kept = sorted({x for x in owners if type(stock[x]) not in STATES})
    layers: list[Any] = [
        x if isinstance(x, DummyLayer) else KeptLayer(memory, i, sizes[i], has_states)
        for i, x in enumerate(stock)
    ]
    return Cache(layers=layers), [kept.index(x) if x in kept else -1 for x in owners]


def _has_kept_states(model: Any) -> bool:
    """Return whether layers of a model have states, and a cache can keep all of them."""
    layers = stateful_layers(model)
    # Layers that share an attention tell it only in the call which of them it is.
    numbered = all(getattr(x, "layer_idx", 0) is not None for x in attention_layers(model))
    return bool(layers) and numbered and keeps_states(layers)


def _stock_layers(model: Any) -> tuple[list[Any], list[int], list[int], bool]:
    """Return the layers of a stock cache, whose keys each layer uses, and how many it sees.

    The last result is whether layers keep states, alone or beside keys.

    A layer without a cache of its own uses that of the last layer before it of its type. It sees
    the last tokens, as many as its window has; 0 stands for all tokens.
    """
    config = model.config.get_text_config(decoder=True)
    layers: list[Any] = DynamicCache(config=config).layers
    types: Sequence[str] = getattr(config, "layer_types", None) or ()
    indexed = {x.layer_idx for x in (*indexers_of(model), *compressing_layers(model))}
    owners: list[int] = []
    of_type: dict[str, int] = {}
    has_states = _has_kept_states(model)
    crossing: Sequence[int] = getattr(config, "cross_attention_layers", None) or ()
    if crossing:  # without images such a layer does not run, and appends nothing
        raise ValueError(
            f"layer {crossing[0]} attends to what an encoder makes, and {NO_CROSS_ATTENTION}; for "
            "text alone generate with use_cache=False, or with the stock model"
        )
    for number, layer in enumerate(layers):
        kind = types[number] if number < len(types) else ""
        known = (*kept_whole(), DynamicSlidingWindowLayer, DummyLayer)
        known += STATES + STATES_BESIDE if has_states else ()
        # A class of a model's own keeps the keys of an index beside keys and values.
        is_indexed = number in indexed and isinstance(layer, DynamicLayer)
        if type(layer) not in known and not is_indexed:
            raise ValueError(
                f"layer {number} keeps a {type(layer).__name__}, which is not supported over a "
                "sharded sequence; generate with use_cache=False, or with the stock model"
            )
        if not isinstance(layer, DummyLayer):
            of_type[kind] = number
        owners.append(of_type.get(kind, 0))
    sizes = [getattr(layers[x], "sliding_window", 0) for x in owners]
    return layers, owners, sizes, has_states
