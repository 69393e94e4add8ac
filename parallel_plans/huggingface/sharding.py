"""Shards the inputs of a model along the sequence and joins its outputs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from inspect import signature
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dtensor_ring import Balanced, Mask, SequenceAxis, sequence_runs
from dtensor_ring.extension import Layout, axis_group, local_tokens, meeting
from parallel_plans.huggingface.attention import RingInputs, check_implementation
from parallel_plans.huggingface.batch import (
    BOUNDARIES,
    LOGITS_TO_KEEP,
    check_batch,
    described,
    has_content,
    local_batch,
    next_tokens,
    num_items,
    pad,
    take_labels,
)
from parallel_plans.huggingface.deepstack import feature_rows, local_features
from parallel_plans.huggingface.documents import Documents, find_documents
from parallel_plans.huggingface.frames import Dealt
from parallel_plans.huggingface.given import given_masks, is_given, largest
from parallel_plans.huggingface.head import loss_head, pops_logits
from parallel_plans.huggingface.last_tokens import LastTokens
from parallel_plans.huggingface.loss import Loss, predicts_next
from parallel_plans.huggingface.outputs import Outputs, OutputSpec
from parallel_plans.huggingface.patterns import LayerMask, LayerMasks
from parallel_plans.huggingface.positions import LargestPosition, counter_of
from parallel_plans.huggingface.probe import ROUTER_LOGITS
from parallel_plans.huggingface.relay import AxisRelay
from parallel_plans.huggingface.restore import NO_PICKLE
from parallel_plans.huggingface.router import RouterSpec, asks_router_logits, router_spec
from parallel_plans.huggingface.weights import Agreement


class Sharding(Outputs):
    """Shards a batch over the ranks of the axis, and joins their outputs.

    Note [A mask of ones]: without an attention mask, transformers takes jumps in positions for
    packed documents, but the positions of a shard jump anyway. We pass a mask of ones, and find the
    documents in the whole batch.
    """

    def __init__(
        self,
        model: Any,
        axis: SequenceAxis,
        layer_masks: LayerMasks,
        loss: Loss,
        unshard_outputs: bool,
        relay: AxisRelay | None = None,
        around: Any = None,
    ) -> None:
        """Prepare the sharding of `model`, which may be the language model within `around`."""
        self._names = list(signature(model.forward).parameters)
        self._predicts_next = predicts_next(around or model)
        # A model around it is called with the whole batch, before its tokens are sharded.
        self._passes_labels = self._predicts_next and around is None
        super().__init__(axis, unshard_outputs)
        self.returns_logits = False  # together with a loss, even if the call does not request them
        self.generates = False  # in a call of `generate`
        self.replaced: WeakSet[Any] = WeakSet()  # stock caches that our caches replace
        self.layer_masks, self._loss, self._relay = layer_masks, loss, relay
        self._agreement = Agreement()
        self._masks = [x.mask for x in layer_masks.values() if isinstance(x, LayerMask)]
        self.chunks = frozenset(mask.chunk for mask in self._masks if mask.chunk)
        self._counts, self.largest = counter_of(model), LargestPosition(model)
        self._spec: OutputSpec | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """Return itself: copies of a model share the forward that calls it."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling: the plan put functions into the model that refer to process groups."""
        raise TypeError(NO_PICKLE)

    def given(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call that are not `None`, by name."""
        check_implementation(model.config)
        found = dict(zip(self._names, args, strict=False)) | kwargs
        unread = {"cache_position"} - {*self._names}  # of transformers 4
        if "labels" not in self._names and model.get_output_embeddings() is None:
            unread.add("labels")  # they belong to the model around a base model
        return {name: x for name, x in found.items() if x is not None and name not in unread}

    def inputs(self, model: Any, given: dict[str, Any]) -> tuple[dict[str, Any], OutputSpec]:
        """Return this rank's part of the batch as keywords, and what joining its outputs needs."""
        has_logits = pops_logits(model, given) or self.returns_logits
        batch = dict(given)
        self.agree(model, batch)
        masks = batch.pop("attention_mask") if is_given(batch.get("attention_mask")) else None
        seq_len = check_batch(model, batch)
        if "labels" in batch:
            self._loss.check(model)
            # Shift labels before sharding: the next token may be on another rank.
            batch |= next_tokens(batch) if self._predicts_next else {}
        # This counts the labels of all ranks, so it precedes the sharding of the batch.
        count = num_items(batch)
        if masks is not None and "cu_seq_lens_q" in batch:
            raise ValueError(
                "cu_seq_lens_q say where documents are, and the model has made its masks without "
                "them; give position_ids that start anew instead"
            )
        seen = None if masks is None else given_masks(masks, seq_len)
        ring, length, layout = self._deal(batch, seq_len, seen)
        positions = self.positions(batch, seq_len)
        self.largest.set(positions)
        batch |= {"position_ids": positions} | feature_rows(batch)
        batch = pad(batch, length - seq_len)
        batch = local_features(local_batch(batch, self.axis.mesh, layout))
        is_projected = not has_logits and loss_head(model) is not None
        routers = self._routers(model, batch, ring.indices < seq_len)
        # Given labels, the model would add the load-balancing loss of this rank's tokens.
        is_ours = is_projected or routers is not None or not self._passes_labels
        labels = take_labels(batch) if is_ours else None
        # Boundaries refer to the whole batch, and attention gets the documents from `ring`.
        for name in BOUNDARIES:
            batch.pop(name, None)
        ones = _tokens(batch).new_ones(_tokens(batch).shape[:2], dtype=torch.bool)
        if self._relay is not None:  # layers with a state mask their own padding
            ones = batch.get("attention_mask", ones)
        # A dict gives each layer type its mask; the model would take a single one for a tensor.
        by_type = seen if isinstance(seen, dict) else ones
        ring = ring._replace(given=seen if by_type is ones else None)
        batch |= {"attention_mask": by_type, "use_cache": False, "ring": ring}
        lengths = seq_len, length, layout, len(ring.indices)
        of_head = (None, count, labels) if is_projected else (labels, count, None)
        kept = self.keep_logits(batch, layout, seq_len, length)
        return batch, OutputSpec(*lengths, *of_head, has_logits, routers, kept)

    def keep_logits(
        self, batch: dict[str, Any], layout: Layout, seq_len: int, dealt_length: int
    ) -> LastTokens | None:
        """Return the tokens whose logits are requested, if not all, and set them in the batch."""
        if not batch.get(LOGITS_TO_KEEP):
            return None
        kept = LastTokens.of(self.axis, layout, seq_len, dealt_length, batch[LOGITS_TO_KEEP])
        batch[LOGITS_TO_KEEP] = kept.local_indices(_tokens(batch).device)
        return kept

    def _routers(self, model: Any, batch: dict[str, Any], is_token: Tensor) -> RouterSpec | None:
        """Return which tokens count in the load-balancing loss, if it is requested."""
        if not asks_router_logits(model, batch, self._loss.why_no_balance):
            return None
        batch[ROUTER_LOGITS] = True
        mask = batch.get("attention_mask")
        weights = is_token.expand(_tokens(batch).shape[:2]) if mask is None else mask
        return router_spec(model, weights)

    def positions(
        self, batch: dict[str, Any], num_tokens: int, past: int = 0, mask: Tensor | None = None
    ) -> Tensor:
        """Return the given positions, or count them as the model does, by default from zero.

        Args:
            batch: the batch of new tokens.
            num_tokens: number of new tokens of a row.
            past: number of cached tokens before them.
            mask: the attention mask of all tokens, if it is not in the batch.
        """
        given = batch.get("position_ids")
        if given is not None:
            return given
        if self._counts is None:
            index = torch.arange(past, past + num_tokens, device=_tokens(batch).device)
            return index.unsqueeze(0)
        if past and mask is None:
            mask = _tokens(batch).new_ones(len(_tokens(batch)), past + num_tokens)
        found = self._counts(batch if mask is None else batch | {"attention_mask": mask})
        return found[:, -num_tokens:] + (past if found.shape[1] == num_tokens else 0)

    def agree(self, model: nn.Module, batch: dict[str, Any]) -> None:
        """Check in some forwards that all ranks have the same batch and weights."""
        if has_content(batch):
            self._agreement.check(model, batch, self.axis.mesh)

    def meet(self, batch: dict[str, Any]) -> None:
        """Check that all ranks got the same new tokens, and all shard them; for each sharded turn.

        Raises:
            RingError: on every rank, if they differ.
        """
        if has_content(batch):
            with meeting(axis_group(self.axis.mesh), "a dealt turn", described(batch)):
                pass

    def _deal(
        self, batch: dict[str, Any], seq_len: int, given: Any
    ) -> tuple[RingInputs, int, Layout]:
        """Return what attention needs of this batch, its length with padding, and its layout."""
        axis = self.axis
        length = axis.layout.dealt_length(seq_len, axis.mesh.size())
        documents, pieces = find_documents(batch, seq_len, self.chunks), None
        if self._relay is not None:
            # Stateful layers ignore a state for a single token, so each rank gets at least two.
            length = axis.layout.padded_length(max(seq_len, 2 * axis.mesh.size()), axis.mesh.size())
            mask = batch.get("attention_mask")
            pieces = self._relay.begin(self._boundaries(batch, documents), length, mask)
        if length > seq_len:
            documents = documents.bounded(seq_len)
        layout = axis.layout
        if layout.per_batch:
            layout = self._balanced(documents, length, given)
            documents = replace(documents, runs=sequence_runs(layout))
        indices = torch.arange(length, device=_tokens(batch).device)
        local = local_tokens(indices, axis.mesh, 0, layout)
        frame = Dealt(axis, length, documents, documents.runs)
        ring = RingInputs((frame,), local, self.layer_masks, pieces=pieces)
        return ring, length, layout

    def _boundaries(self, batch: dict[str, Any], documents: Documents) -> Tensor | None:
        """Return the document boundaries for stateful layers, which mask padding themselves."""
        masks = [x for x in self.layer_masks.values() if isinstance(x, LayerMask)]
        starts_anew = not masks or any(x.starts_anew(documents.has_axes) for x in masks)
        is_packed = starts_anew and "attention_mask" not in batch
        return documents.packed if is_packed or "cu_seq_lens_q" in batch else None

    def _balanced(self, documents: Documents, seq_len: int, given: Any) -> Balanced:
        """Return a layout with equal work for the documents and the most frequent mask."""
        if torch.compiler.is_compiling():
            raise ValueError(
                "the balanced layout deals each batch by its documents, which a graph cannot: "
                "compile the model with another layout"
            )
        # One layout serves all layers: of given masks the largest decides, else the most frequent.
        if given is not None:
            return Balanced(None, seq_len, self.axis.mesh.size(), slices=largest(given))
        mask = max(self._masks, key=self._masks.count, default=Mask.causal())
        return Balanced(mask, seq_len, self.axis.mesh.size(), documents.packed)

    def outputs(self, output: Any, spec: OutputSpec, losses: Tensor | None = None) -> Any:
        """Join the outputs of a batch; `losses` come from a head that computes them."""
        self.finish(spec)
        if self._relay is not None:
            self._relay.keep(output)
        return self.joined(output, spec, losses)

    def finish(self, spec: OutputSpec) -> None:
        """Forget a batch after the model has run, except what joins its outputs."""
        self.largest.clear()
        self._spec = spec

    def join(self, local: Tensor) -> Tensor:
        """Gather what a head computed for each of this rank's tokens of the last batch."""
        assert self._spec is not None, "nothing was sharded yet"
        if local.shape[1] != self._spec.local_length:
            raise RuntimeError(
                f"a head ran on {local.shape[1]} tokens of another batch than the last, whose part "
                f"on this rank has {self._spec.local_length}; run it once, right after its backbone"
            )
        return self.whole(local, self._spec)


def shardings_of(model: Any) -> list[Sharding]:
    """Return all `Sharding` objects in a model, even if another library wrapped a forward."""
    found = [getattr(module, "context_parallel_sharding", None) for module in model.modules()]
    return [x for x in found if x is not None]


@contextmanager
def whole_outputs(model: nn.Module) -> Iterator[None]:
    """Make a model, or its parts under a plan, return all outputs whole on every rank.

    Only the plan knows the order of tokens in a layout that belongs to a batch.
    """
    shardings = shardings_of(model)
    before = [(x.unshards_outputs, x.returns_logits) for x in shardings]
    for sharding in shardings:
        sharding.unshards_outputs = sharding.returns_logits = True
    try:
        yield
    finally:
        for sharding, were in zip(shardings, before, strict=True):
            sharding.unshards_outputs, sharding.returns_logits = were


def _tokens(batch: dict[str, Any]) -> Tensor:
    return batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
