"""Losses and gradients of a model, and how much two of them differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TOLERANCE = {"loss": 2e-5, "gradients": 2e-4}
"""Relative: beyond what float32 rounds in models of random weights."""

Results = tuple[Tensor, dict[str, Tensor]]
"""A loss, and gradients by name."""


def of_first_rank(make: Callable[[], Any]) -> Any:
    """What is made on one rank, and sent to all: of a stock model it is the same on each.

    Random numbers go on everywhere as if nothing had been drawn.
    """
    made = [None]
    if dist.get_rank() == 0:
        with torch.random.fork_rng(devices=[]):
            made = [make()]
    dist.broadcast_object_list(made)
    return made[0]


def results_of(model: Any, batch: dict[str, Tensor]) -> Results:
    """The loss and the gradients of a process."""
    model.zero_grad()
    output = model(**batch, use_cache=False)
    output.loss.backward()
    return output.loss.detach(), _gradients(model)


def results_with_logits(
    model: Any, batch: dict[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, logits of what has labels, and gradients by parameter."""
    model.zero_grad()
    asked = {"output_logits": True} if hasattr(model, "context_parallel_sharding") else {}
    output = model(**batch, **asked, use_cache=False)  # with a cache, stock models see no documents
    output.loss.backward()
    logits = output.logits[batch["labels"] != -100].detach()
    return output.loss.detach(), logits, _gradients(model)


def results_alone(model: Any, input_ids: Tensor, position_ids: Tensor, labels: Tensor) -> Results:
    """The loss and the gradients of a process that sees each document alone."""
    model.zero_grad()
    rows = []
    for tokens, positions in zip(input_ids, position_ids, strict=True):
        starts = positions.eq(0).nonzero().flatten()[1:].tolist()
        documents = tokens.unsqueeze(0).tensor_split(starts, 1)
        rows.append(torch.cat([model(x, use_cache=False).logits for x in documents], 1))
    logits = torch.cat(rows)
    loss = model.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1])
    loss.backward()
    return loss.detach(), _gradients(model)


def _gradients(model: Any) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def difference(found: Results, expected: Results) -> tuple[float, str]:
    """The largest relative error, and what is off, if something is."""
    (loss, grads), (stock_loss, stock_grads) = found, expected
    errors = {"loss": float(((loss - stock_loss) / stock_loss).abs())}
    scale = torch.stack([x.norm() for x in stock_grads.values()]).max() * 1e-2
    for name, stock in stock_grads.items():
        grad = grads.get(name, torch.zeros_like(stock)).clone()
        dist.all_reduce(grad)
        difference = (grad / dist.get_world_size() - stock).norm()
        errors[name] = float(difference / stock.norm().clamp(min=scale))
    # Not by max, which may lose NaN.
    off = [
        name
        for name, x in errors.items()
        if not x <= TOLERANCE["loss" if name == "loss" else "gradients"]
    ]
    return max(errors.values()), off[0] if off else ""
