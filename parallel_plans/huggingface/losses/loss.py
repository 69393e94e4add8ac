"""Losses of a sharded sequence, of which each rank has a part, and the head that makes them."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose, isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import is_parametrized

from dtensor_ring.extension import IGNORE_INDEX
from parallel_plans.huggingface.core.modules import language_model_of, takes_labels
from parallel_plans.huggingface.core.patterns import frozen
from parallel_plans.huggingface.losses.cross_entropy import projected_cross_entropy
from parallel_plans.huggingface.probing.probe import NUM_TOKENS, ROUTER_LOGITS, probe


class LossFunction(NamedTuple):
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
                "call it without labels, and compute the loss from its logits"
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


# Divisor of a probe's loss. It differs from the number of labels, to tell the two apart.
NUM_ITEMS = 5


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
        inputs: dict[str, Any] = {"labels": labels}
        if predicts_next(model):
            inputs |= {"shift_labels": labels.flip(1), "num_items_in_batch": NUM_ITEMS}
        try:
            own_loss = float(probe(model, everything, **inputs).loss)
        except Exception as error:  # a custom loss may raise anything
            return f"its loss takes no labels that are shifted already ({error})"
    count = inputs.get("num_items_in_batch", NUM_TOKENS)
    expected = float(token_loss(logits, inputs.get("shift_labels", labels), count))
    if not isfinite(expected) or isclose(own_loss, expected, rel_tol=0.01, abs_tol=1e-6):
        return None
    return (
        f"its loss of a few tokens is {own_loss:.4f}, where their cross-entropy is {expected:.4f}"
    )


# Outputs that a model adds when router logits are requested.
OF_ROUTERS = ("aux_loss", "router_logits")


class RouterSpec(NamedTuple):
    """What the load-balancing loss of a batch needs.

    Attributes:
        weights: 1 for this rank's tokens and 0 for padding, `(B, L)`.
        top_k: number of experts of each token.
        coefficient: weight of the load-balancing loss in the loss.
    """

    weights: Tensor
    top_k: int
    coefficient: float

    def by_token(self, logits: Tensor) -> Tensor:
        """Reshape the logits of a router from `(B * L, E)` to `(B, L, E)`."""
        return logits.view((*self.weights.shape, logits.shape[-1]))


def uses_router_logits(model: Any, batch: dict[str, Any], why_not: str | None) -> bool:
    """Return whether the call, or by default the config, requests router logits.

    Raises:
        ValueError: if the model has no routers, or `why_not` says that shards cannot compute its
            load-balancing loss.
    """
    default = getattr(model.config.get_text_config(), ROUTER_LOGITS, None)
    asks = bool(batch.get(ROUTER_LOGITS, default))
    if asks and default is None:
        why_not = "it has no routers"
    if asks and why_not:
        raise ValueError(
            f"{type(model).__name__} cannot take {ROUTER_LOGITS}=True over a sharded sequence: "
            f"{why_not}; leave it out, also in the config"
        )
    return asks


def router_spec(model: Any, weights: Tensor) -> RouterSpec:
    """Return what the load-balancing loss needs; a base model returns only router logits."""
    coefficient = getattr(model, "router_aux_loss_coef", 0.0)
    return RouterSpec(weights, getattr(model, "num_experts_per_tok", 1), coefficient)


def load_balancing_loss(
    router_logits: tuple[Tensor, ...], spec: RouterSpec, total: Callable[[Tensor], Tensor]
) -> Tensor:
    """Return the load-balancing loss over all layers and ranks (Fedus et al., 2021, eq. 4 to 6).

    For each expert, the share of tokens that it gets is multiplied by its mean probability. The
    loss is the sum of these products times the number of experts.

    Args:
        router_logits: the router logits of each layer, `(B * L, E)`.
        spec: which tokens count, and how many experts each gets.
        total: sums a tensor over the ranks.
    """
    num_experts, weights = router_logits[0].shape[-1], spec.weights.flatten().float()
    of_choices = weights.repeat_interleave(spec.top_k)
    # f and P of equations 5 and 6, as sums; padding weighs nothing in both.
    assigned = weights.new_zeros(num_experts)
    probability = weights.new_zeros(num_experts)
    for logits in router_logits:
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(spec.top_k, -1).indices.flatten()
        assigned = assigned.scatter_add(0, chosen, of_choices)
        probability = probability + weights @ probabilities.float()
    count = weights.sum().unsqueeze(0) * len(router_logits)
    # Both are means over tokens, so the ranks add what they sum, in one message.
    sums = total(torch.cat([assigned, probability, count]))
    assigned, probability, count = sums.split([num_experts, num_experts, 1])
    return num_experts * (assigned / count * (probability / count)).sum()


def other_balance(model: Any) -> str | None:
    """Return why shards cannot compute a model's load-balancing loss, or `None` if they can.

    The loss of a few tokens decides, because transformers has several definitions.
    """
    if language_model_of(model) is not model:
        return (
            "the outer model would take the router logits of a rank's tokens for those of the "
            "whole batch"
        )
    if not hasattr(model.config, ROUTER_LOGITS) or not hasattr(model, "router_aux_loss_coef"):
        return None
    labels = torch.arange(NUM_TOKENS, device=next(model.parameters()).device).unsqueeze(0)
    inputs = {"labels": labels % model.config.vocab_size}
    if predicts_next(model):
        inputs["shift_labels"] = inputs["labels"].flip(1)
    with frozen(model):
        plain = probe(model, tuple(range(NUM_TOKENS)), **inputs)
        try:
            routed = probe(model, tuple(range(NUM_TOKENS)), **inputs | {ROUTER_LOGITS: True})
        except Exception as error:  # for example, the model has no layer of experts
            return f"the stock model fails with it ({type(error).__name__}: {error})"
    if getattr(routed, "aux_loss", None) is None:
        return None
    spec = router_spec(model, labels.new_ones(routed.router_logits[0].shape[0], 1))
    expected = float(load_balancing_loss(routed.router_logits, spec, lambda x: x))
    found, added = float(routed.aux_loss), float(routed.loss - plain.loss)
    term = spec.coefficient * found
    if not isfinite(expected) or (
        isclose(found, expected, rel_tol=0.01) and isclose(added, term, rel_tol=0.05, abs_tol=1e-5)
    ):
        return None
    return (
        f"the load-balancing loss of a few tokens is {found:.4f} and adds {added:.6f} to the loss, "
        f"where that of the Switch Transformer is {expected:.4f} and would add {term:.6f}"
    )


# The largest logit that is probed, beyond the softcaps of models, where tanh is not linear.
LADDER = 60.0


class LogitsTransform(NamedTuple):
    """What a model does to the logits of its head."""

    scale: float = 1.0
    softcap: float = 0.0

    def __call__(self, logits: Tensor) -> Tensor:
        scaled = logits * self.scale
        return (scaled / self.softcap).tanh() * self.softcap if self.softcap else scaled


# Numbers of a model, its config and its text config: whose of these, the name, and the number.
KnownNumbers = tuple[tuple[int, str, int | float | None], ...]
# What `save_pretrained` writes into a config, on the ranks that save.
SAVED = "dtype", "architectures"


class LossHead(nn.Linear):
    """A projection that returns a loss for each token instead of its logits, if it has labels.

    Note [Losses in place of logits]: the loss is computed inside the head, where FSDP2 has gathered
    the weight. The head returns it, so FSDP2 gathers the weight again in backward. The model treats
    the losses as logits of a vocabulary of one entry, and nothing uses what it makes of them.
    """

    transform: LogitsTransform
    known: KnownNumbers
    labels: Tensor | None
    losses: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if self.labels is None:
            return super().forward(input)
        hidden, labels = input.flatten(0, -2), self.labels.flatten()
        scale, softcap = self.transform
        found = projected_cross_entropy(
            hidden, self.weight, self.bias, labels, scale=scale, softcap=softcap
        )
        # A copy, as FSDP2 warns of views.
        self.losses = found.view((*input.shape[:-1], 1)).clone()
        return self.losses


def install_head(model: Any, transform: LogitsTransform) -> None:
    """Let the model's head compute losses; see `find_logits_transform`."""
    head, known = model.get_output_embeddings(), _numbers_of(model)
    # Set the class, not a method: then copies of the model and wrappers of the head work.
    head.__class__ = _of_class(LossHead, head)
    head.transform, head.known, head.labels, head.losses = transform, known, None, None


def _of_class(new: type[nn.Module], module: nn.Module) -> type[nn.Module]:
    """Return the class that a module is to have: FSDP2 adds its own to the bases, and so do we."""
    if not isinstance(module, FSDPModule):
        return new
    return type(f"FSDP{new.__name__}", (FSDPModule, new), {})


def _numbers_of(model: Any) -> KnownNumbers:
    """Return the current numbers of a model that may change its logits."""
    return tuple(
        (i, name, x)
        for i, owner in enumerate(_owners(model))
        for name, x in vars(owner).items()
        # Token ids and private numbers do not change logits.
        if (x is None or type(x) in (int, float)) and not name.endswith("_id") and name[0] != "_"
        if name not in SAVED
    )


def _owners(model: Any) -> tuple[Any, ...]:
    return model, model.config, model.config.get_text_config()


def _are_changed(model: Any, known: KnownNumbers) -> bool:
    """Return whether one of these numbers is another one now."""
    owners = _owners(model)
    for i, name, before in known:
        now = vars(owners[i]).get(name)
        if type(now) is not type(before) or now != before:
            return True
    return False


def loss_head(model: Any) -> LossHead | None:
    """Return the model's head, if it computes what it did when the plan was applied.

    If something was put around or into it since, or numbers such as a softcap were changed, the
    loss is that of the logits.
    """
    head = model.get_output_embeddings()
    # Adapters replace the head.
    if not isinstance(head, LossHead) or _is_changed(head) or _are_changed(model, head.known):
        return None
    return head if isinstance(head.weight, DTensor) or _is_plain(head) else None


def _is_changed(head: nn.Module) -> bool:
    """Return whether libraries other than FSDP2 have put something around or into a module."""
    own = vars(head)
    if "forward" in own or "parametrizations" in own or is_parametrized(head):
        return True
    forward = head._forward_pre_hooks, head._forward_hooks
    backward = head._backward_pre_hooks, head._backward_hooks
    for hooks in forward + backward:
        for hook in hooks.values():
            # A function that `exec` made has no module.
            if not (hook.__module__ or "").startswith("torch.distributed.fsdp"):
                return True
    return False


def _is_plain(head: nn.Linear) -> bool:
    """Return whether the head's tensors are plain, not of tensor parallelism or quantization."""
    tensors = [head.weight] if head.bias is None else [head.weight, head.bias]
    return {*map(type, tensors)} <= {Tensor, nn.Parameter}


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
        # A ladder in place of logits shows what follows the head, whatever the weights are.
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
    # Least squares for a line through 0.
    scale = float(x.dot(y) / x.dot(x))
    return LogitsTransform(1.0 if isclose(scale, 1, rel_tol=1e-6) else scale, softcap)
