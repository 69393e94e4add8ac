"""The loss of a model whose sequence is sharded: cross-entropy, of which each rank has a share."""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from parallel_plans.huggingface.probe import NUM_TOKENS, ask, undisturbed

IGNORE_INDEX = -100
NUM_ITEMS = 5
"""That a probe's loss is divided by: not the number of its labels."""


def predicts_next(model: Any) -> bool:
    """Whether its labels are the tokens themselves, to be shifted by one."""
    return type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def token_loss(logits: Tensor, labels: Tensor, count: Any) -> Tensor:
    """This rank's share of the mean cross-entropy of the tokens that have a label."""
    total = nn.functional.cross_entropy(
        logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )
    return total / count


def check_loss(model: Any) -> None:
    """Refuse a model whose loss is another, by that of a few tokens.

    A rank has the logits of its own tokens, and labels that are shifted already.

    Raises:
        ValueError: if it is not the cross-entropy of the labels given.
    """
    if "labels" not in signature(model.forward).parameters:
        return
    with undisturbed(model):
        logits = ask(model, tuple(range(NUM_TOKENS))).logits
        labels = torch.arange(NUM_TOKENS, device=logits.device).unsqueeze(0) * 3 % logits.shape[-1]
        given: dict[str, Any] = {"labels": labels}
        if predicts_next(model):
            given |= {"shift_labels": labels.flip(1), "num_items_in_batch": NUM_ITEMS}
        found = ask(model, tuple(range(NUM_TOKENS)), **given).loss
    count = given.get("num_items_in_batch", NUM_TOKENS)
    expected = token_loss(logits, given.get("shift_labels", labels), count)
    if not torch.allclose(found.float(), expected, rtol=0.01):
        raise ValueError(
            f"no context-parallel plan for {type(model).__name__}: its loss is not the "
            f"cross-entropy of tokens and labels, {expected:.4f} for a few of them, but "
            f"{found:.4f}; call it without labels, and make the loss of its logits, or unset "
            "loss_function"
        )
