"""Runs a model on the next tokens of pooled sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtensor_ring import BlockPool
from dtensor_ring.extension import BlockCopy, PooledSequence
from parallel_plans.huggingface.core.attention_function import RingInputs
from parallel_plans.huggingface.core.positions import counter_of, length_dependent
from parallel_plans.huggingface.core.versions import cache_name
from parallel_plans.huggingface.probing.probe import ROUTER_LOGITS
from parallel_plans.huggingface.serving.pooled_steps import (
    DecodedTokens,
    MixedTokens,
    PooledInputs,
    PooledMemory,
    PooledStep,
    PrefilledTokens,
)
from parallel_plans.huggingface.sharding.batch import LOGITS_TO_KEEP, ModelBatch, keywords
from parallel_plans.huggingface.sharding.sharding import Sharding


class PooledForward:
    """A model and the keys and values of its sequences.

    Args:
        model: a causal language model under a plan.
        sharding: how the plan shards it.
        pool: the pool of its sequences.

    Attributes:
        memory: the keys and values on this rank.

    Raises:
        ValueError: if the model cannot run over pooled sequences.
    """

    def __init__(self, model: Any, sharding: Sharding, pool: BlockPool) -> None:
        from parallel_plans.huggingface.generation.context_parallel_cache import pooled_cache

        check_servable(model)
        with torch.no_grad():
            sharding.agree(model, {})  # on the weights
        self._model, self._sharding = model, sharding
        self.memory = PooledMemory(sharding.axis, pool, sharding.cache_dtype)
        cache, self.memory.numbers = pooled_cache(model, self.memory)
        self._inputs = tuple(PooledInputs(self.memory, i) for i in range(len(cache.layers)))
        self._cache = {cache_name(model): cache}

    def run(
        self, chunks: Sequence[tuple[PooledSequence, int]], decoding: Sequence[PooledSequence]
    ) -> Tensor:
        """Compute and write the next tokens of sequences, in one run of the model.

        Args:
            chunks: prompts, and the number of tokens of each; they are sharded over the ranks.
            decoding: sequences whose last token is new.

        Returns:
            The logits of the last tokens of `decoding`, `(B, V)`.
        """
        device, steps = self._model.device, list[PooledStep]()
        if chunks:
            steps.append(PrefilledTokens(self.memory, chunks, device))
        if decoding:
            steps.append(DecodedTokens(self.memory, decoding, device))
        step = steps[0] if len(steps) == 1 else MixedTokens(*steps)
        # Without `decoding` no logits: the last token of a prompt is decoded.
        none = torch.empty(0, dtype=torch.int64, device=device)
        return self._run(step, len(decoding) or none)[0]

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
            self.memory.step = None


def check_servable(model: Any) -> None:
    """Refuse models whose layers need more than keys, values and positions.

    Raises:
        ValueError: naming what the model has.
    """
    found = None
    if any(True for _ in length_dependent(model)):
        found = "a rotary embedding whose factors depend on the longest sequence of a batch"
    elif model.config.get_text_config(decoder=True) is not model.config:
        found = "a model around its language model, as for images"
    elif counter_of(model) is not None and not hasattr(model.config, "max_position_embeddings"):
        found = "positions that it counts by itself"
    if found is not None:
        raise ValueError(
            f"{type(model).__name__} has {found}, which generate_batch over a sharded pool does "
            "not support; call generate"
        )
