"""Multi-token prediction of torchtitan over a ring: tokens and labels ahead of each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import spmd_types as spmd
import torch
from spmd_types.runtime import get_local_type, get_partition_spec
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.distributed.utils import get_spmd_backend
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.deepseek_v3.mtp import MTPDecoder, MTPLoss, roll_mtp_sequence
from torchtitan.protocols.module import Module

from parallel_plans.torchtitan.inner_attention import Documents, OwnTokens, RingAttention


# Note [Ahead of the whole batch]: head number k reads the token k ahead, and predicts the one after
# it. torchtitan shifts the tokens and labels that a rank has, where the next token may be on
# another rank, so it refuses context parallelism. Here the trainer shifts them while the batch is
# whole, by torchtitan's own function, never across documents, and each rank takes those of its
# tokens.
@dataclass(frozen=True)
class Ahead:
    """Tokens and labels ahead of a rank's tokens, `(B, L)` of each head.

    Attributes:
        tokens: 0 where there is none in the document.
        is_token: whether there is one, bool.
        labels: `IGNORE_INDEX` where there is none.
    """

    tokens: tuple[Tensor, ...]
    is_token: tuple[Tensor, ...]
    labels: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, batch: dict[str, Tensor], labels: Tensor, own: OwnTokens, num_heads: int
    ) -> Ahead | None:
        """Return what is ahead of a rank's tokens in a whole batch; `None` without heads.

        Args:
            batch: `input` and `positions`, both `(B, S)`.
            labels: `(B, S)`.
            own: which tokens this rank has.
            num_heads: number of heads beside the main one, fewer than tokens of a row.

        Raises:
            ValueError: if there are more heads than tokens.
        """
        if not num_heads:
            return None
        tokens, positions = batch["input"], batch["positions"]
        all_tokens, all_places, all_labels = [], [], []
        # Two documents, and what the first head beside the main one reads and predicts:
        #     tokens      a b c d | e f
        #     reads       b c d . | f .
        #     predicts    c d . . | . .
        for shift in range(1, num_heads + 1):
            how: dict[str, Any] = {"shift": shift, "positions": positions}
            how["return_valid_mask"] = True
            ahead, is_token = roll_mtp_sequence(tokens, fill_value=0, **how)
            of_labels, _ = roll_mtp_sequence(labels, fill_value=IGNORE_INDEX, **how)
            all_tokens.append(own.of(ahead))
            all_places.append(own.of(is_token))
            all_labels.append(own.of(of_labels))
        return cls(tuple(all_tokens), tuple(all_places), tuple(all_labels))

    def to(self, device: torch.device) -> Ahead:
        """Return the same on a device."""
        sides = {"tokens": self.tokens, "is_token": self.is_token, "labels": self.labels}
        return Ahead(**{name: tuple(x.to(device) for x in side) for name, side in sides.items()})


@dataclass(frozen=True)
class DocumentsAhead(Documents):
    """What a model with several heads needs to know of a batch, passed as `attention_masks`."""

    ahead: Ahead | None = None


def give_ahead(documents: Documents, ahead: Ahead | None, labels: Tensor, loss: Any) -> Documents:
    """Give a model and its loss what is ahead of this rank's tokens.

    Args:
        documents: what attention needs to know of the batch.
        ahead: what is ahead; `None` for a model of one head.
        labels: the labels of the batch, on their device.
        loss: the loss that the trainer calls next.

    Raises:
        ValueError: if the loss is none of several heads.
    """
    if ahead is None:
        return documents
    if not isinstance(loss, RingMTPLoss):
        raise ValueError(
            f"a model with {len(ahead.tokens)} heads of multi-token prediction needs the loss "
            f"RingMTPLoss, into which with_ring turns MTPLoss, got {type(loss).__name__}"
        )
    ahead = ahead.to(labels.device)
    loss.ahead = ahead.labels
    return DocumentsAhead(documents.cu_seqlens, documents.runs, ahead)


def num_heads_of(config: Any) -> int:
    """Return the number of heads of a model's config beside the main one."""
    return len(getattr(config, "mtp_layers", []))


def check_heads(config: Any, tp: int) -> None:
    """Refuse heads beside the main one under tensor parallelism.

    Args:
        config: of the model, `None` without one.
        tp: the number of ranks of tensor parallelism.

    Raises:
        ValueError: says what to leave out.
    """
    if tp > 1 and num_heads_of(config):
        raise ValueError(
            f"multi-token prediction over a ring is not served with tensor parallelism over {tp} "
            "ranks, where a head gets the tokens that a rank of tensor parallelism has: set "
            "--parallelism.tensor_parallel_degree 1, or take a config without MTP"
        )


NOT_AHEAD = (
    "multi-token prediction over a ring reads tokens ahead, which lie on other ranks, and only "
    "RingTrainer and RingValidator take them from the whole batch: start from a config of "
    "parallel_plans.torchtitan, or put the ring into yours by with_ring"
)


class PredictsAhead(Module):
    """A decoder whose heads of multi-token prediction read tokens that the trainer shifted."""

    layers: nn.ModuleDict
    norm: Any
    lm_head: Any
    mtp_layers: Any
    tok_embeddings: Any

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor | None = None,
        attention_masks: Any = None,
    ) -> Any:
        if self.mtp_layers is None or not isinstance(attention_masks, DocumentsAhead):
            self._check_whole()
            return super().forward(tokens, positions, attention_masks)
        # As `MTPDecoder.forward`, but for the tokens ahead.
        ahead: Any = attention_masks.ahead
        hidden = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            hidden = layer(hidden, attention_masks, positions)
        outputs = [hidden if self.norm is None else self.norm(hidden)]
        for layer, of_head, is_token in zip(
            self.mtp_layers, ahead.tokens, ahead.is_token, strict=True
        ):
            embedded = self.tok_embeddings(typed_like(tokens, of_head))
            valid = typed_like(tokens, is_token)
            hidden = layer(embedded, hidden, valid, attention_masks, positions)
            outputs.append(hidden)
        return outputs if self.lm_head is None else [self.lm_head(x) for x in outputs]

    def _check_whole(self) -> None:
        """Refuse heads of multi-token prediction without what is ahead, unless a rank is alone."""
        if self.mtp_layers is None:
            return
        rings = [x.axis for x in self.modules() if isinstance(x, RingAttention)]
        if any(axis is not None and axis.mesh.size() > 1 for axis in rings):
            raise ValueError(NOT_AHEAD)


def typed_like(x: Tensor, local: Tensor) -> Tensor:
    """Return a rank's tensor as torchtitan has another one, `(B, L)`, of the same tokens."""
    if isinstance(x, DTensor):
        return DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)
    if get_spmd_backend() == "spmd_types" and spmd.is_type_checking():
        spmd.assert_type(local, get_local_type(x), get_partition_spec(x))
    return local


def updated_alone(update: Callable[..., None]) -> Callable[..., None]:
    """Return a config's `update_from_config` that does not refuse context parallelism."""

    def update_from_config(self: Decoder.Config, *, config: Any, **others: Any) -> None:
        if num_heads_of(self):
            alone = replace(config.parallelism, context_parallel_degree=1)
            config = replace(config, parallelism=alone)
        update(self, config=config, **others)

    return update_from_config


class RingMTPLoss(MTPLoss):
    """The loss of torchtitan's multi-token prediction, whose labels the trainer shifted.

    Attributes:
        ahead: labels of each head, `(B, L)`, of the batch that runs; `None` where they are those of
            a whole batch.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(MTPLoss.Config):
        """Config of `RingMTPLoss`."""

    ahead: tuple[Tensor, ...] | None = None

    def __call__(
        self,
        pred: list[Tensor],
        labels: Tensor,
        global_valid_tokens: Tensor | None = None,
        **others: Any,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of all heads, weighted as by torchtitan."""
        if self.ahead is None:
            return super().__call__(pred, labels, global_valid_tokens, **others)
        how = {"global_vocab_size": self.global_vocab_size}
        loss = self.fn(pred[0], labels, **how)
        of_heads = [
            self.fn(x, typed_like(labels, own), **how)
            for x, own in zip(pred[1:], self.ahead, strict=True)
        ]
        # For this call only: the next batch brings its own.
        self.ahead = None
        with spmd.no_typecheck():
            loss = loss + torch.stack(of_heads).sum() / len(of_heads) * self.mtp_scale
            if global_valid_tokens is not None:
                loss = loss / global_valid_tokens
        return loss, {}


def is_several_headed(owner: type) -> bool:
    """Return whether a model may have heads of multi-token prediction."""
    return issubclass(owner, MTPDecoder)
