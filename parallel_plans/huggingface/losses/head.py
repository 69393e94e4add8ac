"""The head of a language model, which makes the loss of its tokens without their logits."""

from __future__ import annotations

from math import isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from parallel_plans.huggingface.core.patterns import frozen
from parallel_plans.huggingface.losses.cross_entropy import projected_cross_entropy
from parallel_plans.huggingface.probing.probe import NUM_TOKENS, probe

# The largest logit that is probed, beyond the softcaps of models, where tanh is not linear.
LADDER = 60.0


class LogitsTransform(NamedTuple):
    """What a model does to the logits of its head."""

    scale: float = 1.0
    softcap: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return (scaled / self.softcap).tanh() * self.softcap if self.softcap else scaled


class LossHead(nn.Linear):
    """A projection that returns a loss for each token instead of its logits, if it has labels.

    Note [Losses in place of logits]: the loss is computed inside the head, where FSDP2 has gathered
    the weight. The head returns it, so FSDP2 gathers the weight again in backward. The model treats
    the losses as logits of a vocabulary of one entry, and nothing uses what it makes of them.
    """

    transform: LogitsTransform
    labels: Tensor | None
    losses: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if self.labels is None:
            return super().forward(input)
        hidden, labels = input.flatten(0, -2), self.labels.flatten()
        found = projected_cross_entropy(hidden, self.weight, self.bias, labels, *self.transform)
        # A copy, as FSDP2 warns of views.
        self.losses = found.view(*input.shape[:-1], 1).clone()
        return self.losses


def install_head(model: Any, transform: LogitsTransform) -> None:
    """Let the model's head compute losses; see `find_logits_transform`."""
    head = model.get_output_embeddings()
    # Set the class, not a method: then copies of the model and wrappers of the head work.
    head.__class__ = LossHead
    head.transform, head.labels, head.losses = transform, None, None


def loss_head(model: Any) -> LossHead | None:
    """Return the model's head, if nothing was put around or into it since the plan was applied."""
    head = model.get_output_embeddings()
    # Adapters replace the head.
    if not isinstance(head, LossHead) or _is_changed(head):
        return None
    return head if isinstance(head.weight, DTensor) or _is_plain(head) else None


def pops_logits(model: Any, arguments: dict[str, Any]) -> bool:
    """Pop `output_logits` from the arguments; return whether to return logits.

    With labels, a language model returns them on request only: they are the largest tensor.
    """
    is_asked = arguments.pop("output_logits", None)
    is_large = arguments.get("labels") is not None and model.get_output_embeddings() is not None
    return bool(is_asked) or not is_large


def _is_changed(head: nn.Module) -> bool:
    """Return whether libraries other than FSDP2 have put something around or into a module."""
    own = vars(head)
    if "forward" in own or "parametrizations" in own or is_parametrized(head):
        return True
    forward = head._forward_pre_hooks, head._forward_hooks
    backward = head._backward_pre_hooks, head._backward_hooks
    modules = [hook.__module__ for hooks in forward + backward for hook in hooks.values()]
    return any(not name.startswith("torch.distributed.fsdp") for name in modules)


def _is_plain(head: nn.Linear) -> bool:
    """Return whether the head's tensors are plain, not of tensor parallelism or quantization."""
    tensors = [head.weight] if head.bias is None else [head.weight, head.bias]
    return all(type(x) in (Tensor, nn.Parameter) for x in tensors)


def give_labels(model: Any, labels: Tensor | None) -> None:
    """Let the head of a model compute losses in its next call, if there are labels."""
    if labels is not None:
        model.get_output_embeddings().labels = labels


def take_losses(model: Any) -> Tensor | None:
    """Return the losses that the head has computed, if any; let it compute logits again."""
    head = model.get_output_embeddings()
    if not isinstance(head, LossHead):
        return None
    losses, head.labels, head.losses = head.losses, None, None
    return losses


def find_logits_transform(model: Any) -> LogitsTransform | None:
    """Find what the model does to the logits of its head, by a ladder of values in their place.

    Return `None` if it is not a `LogitsTransform`, or the head is not a plain projection.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear or not _is_plain(head) or _is_changed(head):
        return None
    ladders: list[Tensor] = []

    def replace(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        options = {"device": output.device, "dtype": torch.float64}
        ladder = torch.linspace(-LADDER, LADDER, output.numel(), **options)
        ladders.append(ladder.view(output.shape))
        return ladders[-1]

    hook = head.register_forward_hook(replace)
    try:
        with frozen(model):
            logits = probe(model, tuple(range(NUM_TOKENS))).logits.double()
    finally:
        hook.remove()
    if len(ladders) != 1 or logits.shape != ladders[0].shape:
        return None
    cap = getattr(model.config, "final_logit_softcapping", None) or 0.0
    transforms = (_fitted(ladders[0], logits, cap) for cap in (0.0, cap))
    return next((x for x in transforms if torch.allclose(x(ladders[0]), logits, rtol=1e-5)), None)


def _fitted(ladder: Tensor, logits: Tensor, softcap: float) -> LogitsTransform:
    """Fit the scale to the logits between -1 and 1, where a softcap can be undone."""
    is_small = ladder.abs() <= 1
    x, y = ladder[is_small], logits[is_small]
    if softcap:
        y = (y / softcap).atanh() * softcap
    scale = float(x.dot(y) / x.dot(x))
    return LogitsTransform(1.0 if isclose(scale, 1, rel_tol=1e-6) else scale, softcap)
