"""Shards the inputs of a model along the sequence and joins its outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from inspect import signature
from types import MethodType
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import Tensor, nn

from dtensor_ring import Balanced, Mask, SequenceAxis, sequence_runs
from dtensor_ring.extension import (
    Layout,
    NotPickled,
    axis_group,
    checked_barrier,
    draw_seed,
    positions_of,
)
from parallel_plans.huggingface.core.attention_function import RingInputs, check_implementation
from parallel_plans.huggingface.core.documents import (
    DocumentBounds,
    Starts,
    find_documents,
    has_content,
)
from parallel_plans.huggingface.core.layer_inputs import ShardedInputs, own_padding
from parallel_plans.huggingface.core.model_masks import largest
from parallel_plans.huggingface.core.modules import NO_PICKLE
from parallel_plans.huggingface.core.patterns import LayerMask, LayerMasks
from parallel_plans.huggingface.core.positions import LargestPosition, LastTokens, counter_of
from parallel_plans.huggingface.losses.loss import (
    LossFunction,
    LossHead,
    loss_head,
    router_spec,
    uses_router_logits,
)
from parallel_plans.huggingface.probing.probe import ROUTER_LOGITS
from parallel_plans.huggingface.probing.tokenwise import TokenwiseCheck
from parallel_plans.huggingface.sharding.agreement import Agreement, described
from parallel_plans.huggingface.sharding.batch import (
    LOGITS_TO_KEEP,
    BatchPlan,
    ModelBatch,
    check_places,
    keywords,
    num_labels,
    parse,
    shard,
)
from parallel_plans.huggingface.sharding.local_batch import IN_GRAPH, LocalBatches, is_local
from parallel_plans.huggingface.sharding.outputs import Outputs, OutputSpec, pops_logits
from parallel_plans.huggingface.states.state_passing import AxisStatePassing


class Sharding:
    """Shards a batch over the ranks of the axis, and joins their outputs.

    A batch goes through four steps: `parse` checks it and names its parts, `plan` decides where its
    tokens go, `shard` takes this rank's tokens, and `call` makes the keywords of the forward. A
    batch that comes sharded goes through `local` instead of the first three.
    """

    def __init__(
        self,
        model: Any,
        axis: SequenceAxis,
        layer_masks: LayerMasks,
        loss: LossFunction,
        unshard_outputs: bool,
        passing: AxisStatePassing | None = None,
        cache_dtype: str | None = None,
        local_batch: bool = False,
        why_whole: str | None = None,
        drops: bool = False,
        counts_places: str | None = None,
    ) -> None:
        self._not_pickled = NotPickled(NO_PICKLE)  # first: pickle reads attributes in order
        self.cache_dtype, self.local_batch, self.drops = cache_dtype, local_batch, drops
        self.axis, self.layer_masks, self.loss, self.passing = axis, layer_masks, loss, passing
        self.counts_places = counts_places
        self.outputs = Outputs(axis, unshard_outputs, is_even=passing is not None)
        self.agreement = Agreement(axis, model)
        self.largest, self.tokenwise = LargestPosition(model), TokenwiseCheck(nn.Linear, LossHead)
        self.returns_logits = False  # together with a loss, even if the call does not request them
        self.generates = False  # in a call of `generate`
        self.replaced: WeakSet[Any] = WeakSet()  # stock caches that our caches replace
        known = [x for x in layer_masks.values() if isinstance(x, LayerMask)]
        self.chunks = frozenset(x.mask.chunk for x in known if x.mask.chunk)
        self._known_masks, self._counts = known, counter_of(model)
        self._local_batches = LocalBatches(
            axis,
            self.agreement,
            loss,
            why_whole,
            counts_from_zero=self._counts is None,
            is_stateless=passing is None,
            ignores_largest=not self.largest.is_read,
            counts_places=counts_places,
        )
        self._names = list(signature(model.forward).parameters)
        self._spec: OutputSpec | None = None

    @property
    def rank(self) -> int:
        """This rank on the axis."""
        # Of the mesh, which is a constant of a graph: a number here may become a symbol of it.
        return self.axis.mesh.get_local_rank()

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharding:
        """Return itself: copies of a model share the forward that calls it."""
        return self

    def arguments(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a call that are not `None`, by name."""
        named = named_arguments(self._names, args, kwargs)
        if "cache_position" not in self._names:
            named.pop("cache_position", None)  # of transformers 4
        if "labels" not in self._names and model.get_output_embeddings() is None:
            named.pop("labels", None)  # the outer model of a base model takes them
        check_implementation(model.config)
        return named

    def inputs(self, model: Any, arguments: dict[str, Any]) -> tuple[dict[str, Any], OutputSpec]:
        """Return the keywords of the forward on this rank, and what joining its outputs needs."""
        has_logits = pops_logits(model, arguments) or self.returns_logits
        self.tokenwise.begin(model)
        if self.local_batch or is_local(arguments):
            batch, plan = self.local(model, arguments)
            return self.call(model, batch, plan, has_logits)
        agreed = self.agree(model, arguments)
        batch = parse(model, arguments, self.loss)
        if batch.labels is not None and batch.num_items is None:
            batch = replace(batch, num_items=num_labels(batch))
        plan = self.plan(batch)
        if agreed is not None:
            # It is zero: in a graph, what depends on the tokens comes after the check.
            plan = replace(plan, indices=plan.indices + agreed)
        batch = replace(batch, positions=self.positions(batch))
        self.set_largest(batch.positions, plan.indices, plan.seq_len)
        local = shard(batch, plan.indices, plan.sharded_length)
        return self.call(model, local, plan, has_logits)

    @torch.compiler.disable(reason=IN_GRAPH)
    def local(self, model: Any, arguments: dict[str, Any]) -> tuple[ModelBatch, BatchPlan]:
        """Return a batch whose tokens on this rank are given, and how it is sharded.

        Raises:
            ValueError: on every rank, if one got arguments that are refused, or shards differ in
                more than their tokens.
        """
        batch, shared = self._local_batches.receive(model, arguments)
        seq_len, layout = shared.seq_len, self.axis.layout
        indices = self._indices(layout, seq_len, batch)
        self.set_largest(shared.largest, indices, seq_len)
        documents = self._documents(batch, seq_len, shared.starts)
        chunks = None
        if self.passing is not None:
            paddings = shared.padding, None if shared.padding is None else batch.mask
            bounds = self._boundaries(batch, documents)
            chunks = self.passing.begin(bounds, seq_len, paddings, shared.checksums)
        if batch.positions is None:
            batch = replace(batch, positions=indices.unsqueeze(0))
        return batch, BatchPlan(seq_len, seq_len, layout, documents, indices, chunks)

    def _documents(
        self, batch: ModelBatch, seq_len: int, starts: Starts | None = None
    ) -> DocumentBounds:
        """Return the documents of a batch; `starts` are those that the ranks found together."""
        return find_documents(
            seq_len,
            self.chunks,
            attention_mask=batch.mask,
            position_ids=batch.positions,
            cu_seq_lens_q=batch.cu_seq_lens_q,
            cu_seq_lens_k=batch.cu_seq_lens_k,
            seq_idx=batch.seq_idx,
            starts=starts,
            for_all=self.passing is not None,
        )

    def _indices(self, layout: Layout, length: int, batch: ModelBatch) -> Tensor:
        """Return which tokens of a row of `length` tokens this rank has, `(L,)`."""
        runs = layout.runs(self.rank, self.axis.mesh.size(), length)
        return positions_of(runs, batch.tokens.device)

    def set_largest(
        self, positions: Tensor | None, indices: Tensor, seq_len: int, past: int = 0
    ) -> None:
        """Set the largest position of a batch, which by default ends at `past + seq_len`."""
        if self.largest.is_read:
            last = indices.new_full((), past + seq_len - 1)
            self.largest.set(last if positions is None else positions.to(indices.device))

    def plan(self, batch: ModelBatch) -> BatchPlan:
        """Decide how a batch is sharded, and find its documents."""
        mesh, seq_len = self.axis.mesh, batch.tokens.shape[1]
        if self.counts_places:
            check_places(batch, self.counts_places)
        documents, layout = self._documents(batch, seq_len), self.axis.layout
        if self.passing is None:
            length, scan_chunks = layout.dealt_length(seq_len, mesh.size()), None
        else:
            # Stateful layers ignore a state for a single token, so each rank gets at least two.
            length = layout.padded_length(max(seq_len, 2 * mesh.size()), mesh.size())
            orders = (self._indices(x, length, batch) for x in (self.passing.order, layout))
            before, after = (own_padding(batch.mask, x) for x in orders)
            bounds = self._boundaries(batch, documents)
            scan_chunks = self.passing.begin(bounds, length, (before, after), batch.mask)
        if length > seq_len:
            documents = documents.bounded(seq_len)
        if layout.per_batch:
            layout = self._balanced(documents, length, batch.seen)
            documents = replace(documents, runs=sequence_runs(layout))
        indices = self._indices(layout, length, batch)
        return BatchPlan(seq_len, length, layout, documents, indices, scan_chunks)

    def _boundaries(self, batch: ModelBatch, documents: DocumentBounds) -> Tensor | None:
        """Return the document boundaries for stateful layers, which mask padding themselves."""
        is_marked = batch.cu_seq_lens_q is not None or batch.seq_idx is not None
        return documents.packed if batch.mask is None or is_marked else None

    def _balanced(self, documents: DocumentBounds, seq_len: int, seen: Any) -> Balanced:
        """Return a layout with equal work for the documents and the most frequent mask."""
        if torch.compiler.is_compiling():
            refuse_graph()
        # One layout serves all layers: of precomputed masks the largest decides, else the most
        # frequent.
        if seen is not None:
            return Balanced(None, seq_len, self.axis.mesh.size(), slices=largest(seen))
        masks = [x.mask for x in self._known_masks]
        mask = max(masks, key=masks.count, default=Mask.causal())
        return Balanced(mask, seq_len, self.axis.mesh.size(), documents.packed)

    def positions(
        self, batch: ModelBatch, past: int = 0, mask: Tensor | None = None
    ) -> Tensor | None:
        """Return the given positions, or count them as the model does; `None` if from zero.

        Args:
            batch: the batch of new tokens.
            past: number of cached tokens before them.
            mask: the attention mask of all tokens, if it is not in the batch.
        """
        tokens, num_tokens = batch.tokens, batch.tokens.shape[1]
        if batch.positions is not None or self._counts is None:
            return batch.positions
        mask = batch.mask if mask is None else mask
        # A model counts positions by a mask, which must have the cached tokens, too.
        if past and mask is None:
            mask = tokens.new_ones(len(tokens), past + num_tokens)
        found = self._counts(tokens, mask)
        return found[:, -num_tokens:] + (past if found.shape[1] == num_tokens else 0)

    def call(
        self, model: Any, batch: ModelBatch, plan: BatchPlan, has_logits: bool
    ) -> tuple[dict[str, Any], OutputSpec]:
        """Return the keywords of the forward, and what joining its outputs needs.

        The model does not get the labels: the plan takes the loss, or a head that has them.
        """
        inputs = ShardedInputs(self.axis, plan.sharded_length, plan.documents, plan.documents.runs)
        seed = draw_seed(plan.indices.device) if self.drops and model.training else None
        ring = RingInputs(
            (inputs,), plan.indices, self.layer_masks, scan_chunks=plan.scan_chunks, seed=seed
        )
        # Layers with a state mask their own padding.
        how = keywords(batch, ring, None if self.passing is None else batch.mask)
        kept = self.keep_logits(how, plan.layout, plan.seq_len, plan.sharded_length)
        router = None
        if uses_router_logits(model, batch.others, self.loss.why_no_balance):
            is_token = plan.indices < plan.seq_len
            weights = is_token.expand(batch.tokens.shape[:2]) if batch.mask is None else batch.mask
            router, how[ROUTER_LOGITS] = router_spec(model, weights), True
        # If logits are asked for, or the head is not what it was, the loss is made of logits.
        in_head = not has_logits and loss_head(model) is not None
        own, of_head = (None, batch.labels) if in_head else (batch.labels, None)
        return how, OutputSpec(plan, own, of_head, batch.num_items, has_logits, router, kept)

    def keep_logits(
        self, how: dict[str, Any], layout: Layout, seq_len: int, sharded_length: int
    ) -> LastTokens | None:
        """Return the tokens whose logits are requested, if not all; set them in the keywords."""
        if not how.get(LOGITS_TO_KEEP):
            return None
        kept = LastTokens.of(self.axis, layout, seq_len, sharded_length, how[LOGITS_TO_KEEP])
        how[LOGITS_TO_KEEP] = kept.local_indices(how["ring"].indices.device)
        return kept

    def agree(self, model: nn.Module, batch: dict[str, Any]) -> Tensor | None:
        """Check that all ranks have the same batch, and in some forwards the same model.

        Returns:
            In a compiled graph, a zero that the rest of it must depend on: then the check is made
            before, when the graph runs.

        Raises:
            ValueError: on every rank, if they differ.
        """
        if has_content(*batch.values()):
            self.agreement.check(model, batch)
        elif torch.compiler.is_compiling() and self.axis.mesh.size() > 1:
            return self.agreement.check_in_graph(batch)
        return None

    def check_same_batch(self, batch: dict[str, Any], what: str) -> None:
        """Check in every forward that all ranks have the same batch; `what` names it in errors.

        Raises:
            RingError: on every rank, if they differ.
        """
        if has_content(*batch.values()):
            with checked_barrier(axis_group(self.axis.mesh), what, described(batch)):
                pass

    def joined(self, output: Any, spec: OutputSpec, losses: Tensor | None = None) -> Any:
        """Join the outputs of a batch; `losses` come from a head that computes them."""
        self.finish(spec)
        if self.passing is not None:
            self.passing.keep(output)
        return self.outputs.joined(output, spec, losses)

    def finish(self, spec: OutputSpec) -> None:
        """Forget a batch after the model has run, except what joins its outputs."""
        if self.largest.is_read:
            self.largest.clear()
        self._spec = spec

    def join(self, local: Tensor) -> Tensor:
        """Gather what a head computed for each of this rank's tokens of the last batch."""
        assert self._spec is not None, "nothing was sharded yet"
        return self.outputs.join(local, self._spec.plan)


BALANCED_IN_GRAPH = (
    "the balanced layout shards each batch by its documents, which a graph cannot: compile the "
    "model with another layout"
)


@torch.compiler.disable(reason=BALANCED_IN_GRAPH)
def refuse_graph() -> NoReturn:
    """Refuse a layout of a batch in a graph, from eager code.

    The compiler catches an error that is raised while it traces. It then runs the function eagerly,
    where nothing says that the model was compiled.
    """
    raise ValueError(BALANCED_IN_GRAPH)


def forward_by_name(model: nn.Module, arguments_of: Callable[..., Any], run: Any) -> MethodType:
    """Return a method to replace a model's forward, which calls `run(model, arguments)`.

    This is a method of the instance, not a hook: torch.compile runs the hooks of the module that it
    compiles outside the graph.

    Args:
        model: the model.
        arguments_of: returns the arguments of a call by name, see `Sharding.arguments`.
        run: returns the output with named fields.
    """
    plain = type(model).forward

    @wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments = arguments_of(self, args, kwargs)
        is_tuple = arguments.pop("return_dict", None) is False
        if is_tuple:  # it is read by index, so it always includes logits
            arguments["output_logits"] = True
        output = run(self, arguments)
        return output.to_tuple() if is_tuple else output

    return own_method(model, forward)


def own_method(model: nn.Module, forward: Any) -> MethodType:
    """Bind a forward in place of the model's own, with its signature."""
    forward.__signature__ = signature(type(model).forward)
    del forward.__wrapped__  # else accelerate's unwrap_model would restore the plain forward
    return MethodType(forward, model)


def named_arguments(
    names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call that are not `None`, by the names of the parameters."""
    found = dict(zip(names, args, strict=False)) | kwargs
    return {name: x for name, x in found.items() if x is not None}


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
    before = [(x.outputs.unshards, x.returns_logits) for x in shardings]
    for sharding in shardings:
        sharding.outputs.unshards = sharding.returns_logits = True
    try:
        yield
    finally:
        for sharding, were in zip(shardings, before, strict=True):
            sharding.outputs.unshards, sharding.returns_logits = were
