"""Computes the cross-entropy of a sharded sequence: each rank contributes a part of the sum."""

from __future__ import annotations

from math import isclose, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtensor_ring.extension import IGNORE_INDEX
from parallel_plans.huggingface.language_model import takes_labels
from parallel_plans.huggingface.probe import NUM_TOKENS, frozen, probe

# Divisor of a probe's loss. It differs from the number of labels, to tell the two apart.
NUM_ITEMS = 5


class Loss(NamedTuple):
    """The loss function of a model when the plan was applied.

    Attributes:
        function: the model's `_loss_function`.
        predicts_next: whether labels are tokens, which each predict the next one.
        why_not: why shards cannot compute the loss; `None` if they can.
        why_no_balance: why shards cannot compute the load-balancing loss of routers.
    """

    function: Any
    predicts_next: bool
    why_not: str | None
    why_no_balance: str | None

    def check(self, model: Any) -> None:
        """Refuse labels if the loss is not the cross-entropy of tokens."""
        changed = getattr(model, "_loss_function", None) is not self.function
        if reason := "loss_function was set after the plan" if changed else self.why_not:
            raise ValueError(
                f"{type(model).__name__} cannot take labels over a sharded sequence: {reason}; "
                "call it without labels, and make the loss of its logits"
            )


def predicts_next(model: Any) -> bool:
    """Return whether the model's labels are its tokens, which the loss shifts by one."""
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration"))


def token_loss(logits: Tensor, labels: Tensor, count: Any) -> Tensor:
    """Return this rank's part of the mean cross-entropy over all labelled tokens."""
    total = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return total / count


def other_loss(model: Any) -> str | None:
    """Return why shards cannot compute the loss of a model, or `None` if they can.

    The loss of a few tokens decides. A rank has the logits of its own tokens and shifted labels.
    """
    if not takes_labels(model):
        return None
    everything = tuple(range(NUM_TOKENS))
    with frozen(model):
        logits = probe(model, everything).logits
        labels = torch.arange(NUM_TOKENS, device=logits.device).unsqueeze(0) * 3 % logits.shape[-1]
        given: dict[str, Any] = {"labels": labels}
        if predicts_next(model):
            given |= {"shift_labels": labels.flip(1), "num_items_in_batch": NUM_ITEMS}
        try:
            found = float(probe(model, everything, **given).loss)
        except Exception as error:  # a custom loss may raise anything
            return f"its loss takes no labels that are shifted already ({error})"
    count = given.get("num_items_in_batch", NUM_TOKENS)
    expected = float(token_loss(logits, given.get("shift_labels", labels), count))
    if not isfinite(expected) or isclose(found, expected, rel_tol=0.01, abs_tol=1e-6):
        return None
    return f"its loss of a few tokens is {found:.4f}, where their cross-entropy is {expected:.4f}"
