"""What happens to the inputs and outputs of a model whose sequence is sharded."""

from __future__ import annotations

from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial

from dtensor_ring.agreement import check_agreement
from dtensor_ring.annotation import axis_group
from dtensor_ring.layout import Layout
from dtensor_ring.op import Options
from dtensor_ring.sequence import from_local_tokens, local_tokens, unshard_sequence
from parallel_plans.huggingface.attention import IMPLEMENTATION, Dealt
from parallel_plans.huggingface.batch import (
    BOUNDARIES,
    SAME_BATCH,
    check_batch,
    described,
    local_batch,
    next_tokens,
    num_items,
    pad,
    padded_length,
)
from parallel_plans.huggingface.documents import find_documents
from parallel_plans.huggingface.loss import Loss, predicts_next, token_loss
from parallel_plans.huggingface.patterns import Reading, Readings


class Remainder(NamedTuple):
    """What the outputs need of a batch: its length, and labels that the model does not see."""

    seq_len: int
    dealt_length: int
    local_length: int
    labels: Tensor | None
    num_items: Any


class Sharding:
    """Deals a batch to the ranks of the axis, and puts their outputs together.

    Note [A mask of ones]: without an attention mask, transformers looks for packed documents in the
    positions, and those of a shard jump. We have found the documents in the whole batch.

    Note [Gradients of compiled outputs]: the backward of a compiled graph needs a gradient for each
    of its outputs that is a DTensor, and autograd has none for those that nobody used. Who asks for
    a loss uses the loss, so the other outputs are detached then.
    """

    def __init__(
        self,
        model: Any,
        mesh: DeviceMesh,
        layout: Layout,
        options: Options,
        readings: Readings,
        loss: Loss,
        unshard_outputs: bool,
    ) -> None:
        self._names = list(signature(model.forward).parameters)
        self._predicts_next = predicts_next(model)
        self.mesh, self._layout, self._unshards = mesh, layout, unshard_outputs
        group_name = axis_group(mesh).group_name
        self._options = options._replace(layout=layout.name, group_name=group_name)
        self._readings, self._loss = readings, loss
        self._agreed: set[bool] = set()  # with gradients, without
        masks = [reading.mask for reading in readings.values() if isinstance(reading, Reading)]
        self._chunks = {mask.chunk for mask in masks if mask.chunk}

    def inputs(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Any], Remainder]:
        """This rank's part of the batch, all by keyword."""
        _check_implementation(model.config)
        given = dict(zip(self._names, args, strict=False)) | kwargs
        batch = {name: x for name, x in given.items() if x is not None}
        self._check_agreement(batch)
        seq_len = check_batch(batch)
        if "labels" in batch:
            self._loss.check(model)
            batch |= next_tokens(batch) if self._predicts_next else {}
        count = num_items(batch)
        dealt = self._deal(batch, seq_len)
        positions = torch.arange(seq_len, device=_tokens(batch).device).unsqueeze(0)
        batch = pad({"position_ids": positions} | batch, dealt.options.seq_len - seq_len)
        batch = local_batch(batch, self.mesh, self._layout)
        labels = None if self._predicts_next else batch.pop("labels", None)
        for name in BOUNDARIES:
            batch.pop(name, None)
        ones = _tokens(batch).new_ones(_tokens(batch).shape[:2], dtype=torch.bool)
        batch |= {"attention_mask": ones, "use_cache": False, "ring": dealt}
        return batch, Remainder(seq_len, dealt.options.seq_len, len(dealt.indices), labels, count)

    def _check_agreement(self, batch: dict[str, Any]) -> None:
        """Once in training and once without gradients: whether all ranks got the same."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() in self._agreed:
            return
        tensors = [x for x in batch.values() if isinstance(x, Tensor)]
        if detect_fake_mode(tensors) is None and not any(x.is_meta for x in tensors):
            check_agreement(axis_group(self.mesh), described(batch), SAME_BATCH)
            self._agreed.add(torch.is_grad_enabled())

    def _deal(self, batch: dict[str, Any], seq_len: int) -> Dealt:
        """What attention has to know."""
        length = padded_length(self._layout, self.mesh.size(), seq_len)
        documents = find_documents(batch, seq_len, self._chunks)
        if length > seq_len:
            documents = documents.bounded(seq_len)
        indices = torch.arange(length, device=_tokens(batch).device)
        return Dealt(
            self._options._replace(seq_len=length, key_seq_len=length),
            local_tokens(indices, self.mesh, 0, self._layout),
            documents,
            self._readings,
        )

    def outputs(self, output: Any, remainder: Remainder) -> Any:
        """The loss of all ranks, and the rest as sharded DTensors or whole."""
        parts = dict(output.items())
        if remainder.labels is not None:
            loss = token_loss(output.logits, remainder.labels, remainder.num_items)
            parts = {"loss": loss} | parts
        detaches = "loss" in parts and torch.compiler.is_compiling()
        results = {}
        for name, x in parts.items():
            if name == "loss":
                partial = DTensor.from_local(x, self.mesh, [Partial()], run_check=False)
                # In memory of its own: `Trainer` scales the loss in place, which no view allows.
                results[name] = partial.full_tensor().clone()
            else:
                results[name] = self._output(name, x, remainder, detaches)
        return type(output)(**results)

    def _output(self, name: str, x: Any, remainder: Remainder, detaches: bool) -> Any:
        if isinstance(x, tuple):
            return tuple(self._output(name, part, remainder, detaches) for part in x)
        if not isinstance(x, Tensor):
            return x
        if x.ndim < 3 or x.shape[1] != remainder.local_length:
            raise ValueError(
                f"the model's output {name}, {tuple(x.shape)}, has no token for each of the "
                f"{remainder.local_length} of this rank: what is made of the whole sequence is "
                "not supported; leave it out"
            )
        local = x.detach() if detaches else x  # see Note [Gradients of compiled outputs]
        sharded = from_local_tokens(local, self.mesh, 1, remainder.dealt_length)
        if not self._unshards:
            return sharded
        return unshard_sequence(sharded, 1)[:, : remainder.seq_len]


def _check_implementation(config: Any) -> None:
    chosen = config._attn_implementation
    if chosen != IMPLEMENTATION:
        raise ValueError(
            f"attention was set to {chosen!r} after the plan, and would see this rank's tokens "
            f"only; model.set_attn_implementation({IMPLEMENTATION!r}) brings the ring back"
        )


def _tokens(batch: dict[str, Any]) -> Tensor:
    return batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
