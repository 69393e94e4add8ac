"""Batches that come sharded: each rank has its own tokens, in the order of the axis's layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from dtensor_ring import SequenceAxis
from dtensor_ring.extension import (
    IGNORE_INDEX,
    Layout,
    axis_group,
    axis_mesh,
    check_agreement,
    tokens_of,
)
from parallel_plans.huggingface.core import documents
from parallel_plans.huggingface.core.modules import backbone_of, language_model_of
from parallel_plans.huggingface.core.whole_rows import WHOLE_ROWS, are_whole
from parallel_plans.huggingface.losses.loss import LossFunction
from parallel_plans.huggingface.sharding.agreement import (
    SAME_WEIGHTS,
    Agreement,
    checksum_of,
    described,
    facts,
)
from parallel_plans.huggingface.sharding.batch import (
    BOUNDARIES,
    POSITIONS,
    ModelBatch,
    check_undivided,
    num_labels,
    parse,
)
from parallel_plans.sequences import SequenceOrder

SAME_SHARDS = f"get shards of one batch {SAME_WEIGHTS}"
IN_GRAPH = (
    "ranks compare the shards of a batch, and tell one another where documents start, which a "
    "graph cannot: this part runs eager"
)


def is_local(arguments: dict[str, Any]) -> bool:
    """Return whether the tokens or other inputs of a call are sharded already."""
    return any(isinstance(x, DTensor) for x in arguments.values())


def why_whole(model: Any) -> str | None:
    """Return why a model needs the whole batch on every rank, or `None` if it does not."""
    backbone = backbone_of(model)
    if backbone is not model:
        return f"the head of {type(model).__name__} reads the sequence as a whole"
    if language_model_of(backbone) is not backbone:
        return f"{type(model).__name__} merges images into the whole batch"
    return None


def refuse_local(why: str | None, layout: Layout) -> None:
    """Refuse batches that come sharded for a model or a layout that needs the whole batch.

    Raises:
        ValueError: saying what needs the whole batch.
    """
    if why is None and layout.per_batch:
        why = f"the layout {layout.spec!r} is made of the documents of the whole batch"
    if why is not None:
        raise ValueError(
            f"a batch that comes sharded (local_batch=True, or DTensors) is not supported: {why}; "
            "give every rank the whole batch"
        )


def local_parts(arguments: dict[str, Any], axis: SequenceAxis) -> dict[str, Any]:
    """Return the arguments with the local shards of DTensors.

    Raises:
        ValueError: if a DTensor is not sharded along its sequence over the axis.
    """
    return {name: _local(name, x, axis) for name, x in arguments.items()}


def _local(name: str, x: Any, axis: SequenceAxis) -> Any:
    if not isinstance(x, DTensor):
        return x
    dim = x.ndim - 1 if name == POSITIONS else 1
    axes = [i for i, where in enumerate(x.placements) if where == Shard(dim)]
    over = [dist.get_process_group_ranks(axis_mesh(x.device_mesh).get_group(i)) for i in axes]
    if over != [dist.get_process_group_ranks(axis_group(axis.mesh))]:
        raise ValueError(
            f"{name} must be Shard({dim}) over the axis of the plan, {axis.mesh}, got "
            f"{tuple(x.placements)} on {x.device_mesh}; shard_sequence({name}, mesh, {dim}) shards "
            "so, or give the whole tensor"
        )
    tokens = tokens_of(x.device_mesh)
    if tokens is not None and tokens.layout != axis.layout:
        raise ValueError(
            f"{name} must be in the order of the plan, {axis.layout.spec}, got "
            f"{tokens.layout.spec}; shard it by the axis of the plan, or give the whole tensor"
        )
    return x.to_local()


def described_shards(arguments: dict[str, Any]) -> dict[str, str]:
    """Describe what shards of one batch have in common, so that ranks can compare it."""
    return {name: _described(name, x) for name, x in arguments.items()}


def _described(name: str, x: Any) -> str:
    if not isinstance(x, Tensor) or name in BOUNDARIES or x.ndim < 2:
        return described({name: x})[name]
    shape = [str(size) for size in x.shape]
    shape[-1 if name == POSITIONS else 1] = "L"
    return f"{x.dtype} ({', '.join(shape)})"


class Shared(NamedTuple):
    """What the ranks found together about a batch.

    Attributes:
        seq_len: tokens of a row on all ranks.
        starts: where documents start; `None` if the batch does not say.
        largest: the largest given position, `()`; `None` if none are given, or no layer reads it.
        padding: the mask of this rank's tokens in contiguous order, `(B, L)`.
        checksums: a checksum of the mask of each rank, `(W,)`.
    """

    seq_len: int
    starts: documents.Starts | None = None
    largest: Tensor | None = None
    padding: Tensor | None = None
    checksums: Tensor | None = None


# Note [Found in contiguous order]: no rank has the whole batch. What depends on the token before or
# after another one, where documents start and what a token should predict, is found in contiguous
# order: there only the first and the last tokens of a rank have their neighbours elsewhere. An
# exchange brings tokens into this order.
#
# Eight tokens on two ranks, where each token is to predict the next one:
#
#     as sharded, zigzag    rank 0: 0 1 6 7    rank 1: 2 3 4 5    1, 5 have theirs elsewhere
#     contiguous            rank 0: 0 1 2 3    rank 1: 4 5 6 7    3 has its next one elsewhere
class LocalBatches:
    """Receives the shards of batches, compares them, and finds what one shard does not show.

    Args:
        axis: the axis that shards the batches.
        agreement: counts the forwards of the model, in some of which weights are compared.
        loss: the loss function of the model.
        why_whole: why the model needs whole batches, `None` if it does not.
        counts_from_zero: whether positions that are not given count from zero in each row.
        is_stateless: whether no layer passes a state on, which takes shards of one length.
        ignores_largest: whether no layer reads the largest position.
        counts_places: whether layers need rows that are one document each.
    """

    def __init__(
        self,
        axis: SequenceAxis,
        agreement: Agreement,
        loss: LossFunction,
        why_whole: str | None,
        counts_from_zero: bool,
        is_stateless: bool,
        ignores_largest: bool,
        counts_places: str | None = None,
    ) -> None:
        self._axis, self._agreement, self._loss = axis, agreement, loss
        self._why_whole, self._counts_from_zero = why_whole, counts_from_zero
        self._is_stateless, self._ignores_largest = is_stateless, ignores_largest
        self._counts_places = counts_places

    def receive(self, model: Any, arguments: dict[str, Any]) -> tuple[ModelBatch, Shared]:
        """Return this rank's batch with its labels shifted, and what the ranks find together.

        Raises:
            ValueError: on every rank, if one got arguments that are refused, shards differ in more
                than their tokens, or the layout shards other lengths.
        """
        refuse_local(self._why_whole, self._axis.layout)
        group, here = axis_group(self._axis.mesh), {"error": "none"}
        trains = torch.is_grad_enabled()
        if self._agreement.is_due(trains):
            here |= facts(model, group)
        try:
            arguments = local_parts(arguments, self._axis)
            here |= described_shards(arguments)
            batch = self._parse(model, arguments)
        except Exception as error:  # whatever it is, the other ranks must not wait
            here["error"] = f"{type(error).__name__}: {error}"
            check_agreement(group, here, SAME_SHARDS)
            raise
        lengths = check_agreement(group, here, SAME_SHARDS, told=batch.tokens.shape[1])
        self._agreement.passed(trains)
        self._check_lengths(lengths)
        return self._share(batch, sum(lengths))

    def _parse(self, model: Any, arguments: dict[str, Any]) -> ModelBatch:
        batch = parse(model, arguments, self._loss)
        if batch.seen is not None:
            raise ValueError("attention_mask must be (B, L), of this rank's tokens")
        if self._counts_places:
            check_undivided(batch)
        if batch.seq_idx is not None and batch.mask is not None:
            raise ValueError(
                "seq_idx and an attention_mask both say where documents of a sharded batch are; "
                "leave one of them out"
            )
        if batch.positions is None and not self._counts_from_zero:
            raise ValueError(
                f"{type(model).__name__} counts positions in the whole batch, and no rank has it; "
                "give position_ids"
            )
        return batch

    def _check_lengths(self, lengths: list[int]) -> None:
        """Refuse numbers of tokens that are not those of the layout."""
        seq_len, size, layout = sum(lengths), self._axis.mesh.size(), self._axis.layout
        if self._is_stateless:
            needed = layout.dealt_length(seq_len, size)
        else:  # at least two tokens for each rank, see `Sharding.plan`
            needed = layout.padded_length(max(seq_len, 2 * size), size)
        came = f"the ranks hold {lengths} tokens of a row, {seq_len} together"
        if needed != seq_len:
            raise ValueError(
                f"{came}, and the layout {layout.spec!r} over {size} ranks needs {needed}: fill "
                f"rows up to {needed} tokens, with labels of -100, before they are sharded"
            )
        expected = [layout.num_tokens(rank, size, seq_len) for rank in range(size)]
        if lengths != expected:
            raise ValueError(
                f"{came}, of which the layout {layout.spec!r} gives them {expected}; "
                "shard_sequence(tokens, mesh, 1) shards so"
            )

    def _share(self, batch: ModelBatch, seq_len: int) -> tuple[ModelBatch, Shared]:
        order = SequenceOrder(self._axis.mesh, self._axis.layout, seq_len)
        # The label of a token is the next token, which another rank may hold.
        if batch.label_shift:
            assert batch.labels is not None
            batch = replace(batch, labels=_next_labels(batch.labels, order), label_shift=0)
        padding = None if batch.mask is None else order.contiguous(batch.mask.bool().long())
        told = self._found(batch, order, padding)
        if not told:
            return batch, Shared(seq_len)
        group = axis_group(self._axis.mesh)
        every = check_agreement(group, {"facts": str(list(told))}, SAME_SHARDS, told=told)
        if not all(x.get("whole rows", True) for x in every):
            raise ValueError(WHOLE_ROWS)
        if "labels" in told:
            batch = replace(batch, num_items=sum(x["labels"] for x in every))
        return batch, _joined(seq_len, every, padding)

    def _found(
        self, batch: ModelBatch, order: SequenceOrder, padding: Tensor | None
    ) -> dict[str, Any]:
        """Return the facts of this rank's tokens that the other ranks need."""
        told: dict[str, Any] = {}
        values, by_positions = padding, padding is None
        if by_positions and batch.cu_seq_lens_q is None:
            positions, _ = documents.text_positions(batch.positions)
            values = None if positions is None else order.contiguous(positions.long())
            if batch.seq_idx is not None:
                values = documents.numbered_positions(
                    values, order.contiguous(batch.seq_idx.long()), order.begin
                )
        if values is not None:
            # Whether the first token of a shard begins a document depends on the token before it.
            before = order.of_neighbour(values[:, -1:], -1)
            told["starts"] = documents.find_starts(values, by_positions, order.begin, before)
        if padding is not None:
            told["checksum"] = checksum_of(padding)
        if self._counts_places and values is not None:
            positions = None if batch.positions is None else order.contiguous(batch.positions)
            told["whole rows"] = bool(are_whole(padding, positions, order.begin))
        if batch.labels is not None and batch.num_items is None:
            told["labels"] = int(num_labels(batch))
        if batch.positions is not None and not self._ignores_largest:
            told["largest"] = int(batch.positions.max())
        return told


def _next_labels(labels: Tensor, order: SequenceOrder) -> Tensor:
    """Return the label of the next token of each of this rank's tokens, `(B, L)`."""
    x = order.contiguous(labels)
    after = order.of_neighbour(x[:, :1], 1)
    if after is None:
        after = torch.full_like(x[:, :1], IGNORE_INDEX)
    return order.as_sharded(torch.cat([x[:, 1:], after], 1))


def _joined(seq_len: int, every: list[dict[str, Any]], padding: Tensor | None) -> Shared:
    """Join what the ranks have told, all of them the same kinds of facts."""
    starts, found = None, every[0]
    if "starts" in found:
        first: documents.Starts = found["starts"]
        starts = documents.joined(
            [x["starts"].table for x in every], first.num_rows, first.by_positions
        )
    largest = torch.tensor(max(x["largest"] for x in every)) if "largest" in found else None
    checksums = torch.tensor([x["checksum"] for x in every]) if "checksum" in found else None
    return Shared(seq_len, starts, largest, padding, checksums)
