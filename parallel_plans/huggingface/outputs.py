"""The outputs of a model whose sequence is sharded, joined."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from dtensor_ring import Balanced, SequenceAxis, unshard_sequence
from dtensor_ring.extension import Layout, from_local_tokens
from parallel_plans.huggingface.last_tokens import LastTokens
from parallel_plans.huggingface.loss import token_loss
from parallel_plans.huggingface.router import OF_ROUTERS, RouterSpec, load_balancing_loss


class OutputSpec(NamedTuple):
    """What the outputs need of a batch: lengths, layout, and labels that the model does not see."""

    seq_len: int
    dealt_length: int
    layout: Layout
    local_length: int
    labels: Tensor | None
    num_items: Any
    head_labels: Tensor | None
    """Those of which the head makes losses, see `LossHead`."""
    has_logits: bool
    router: RouterSpec | None
    kept: LastTokens | None = None
    """Those that have logits, if not all have."""
    of_tokens: frozenset[str] | None = None
    """Names of the outputs that are dealt, if not all are."""


def takes_tuple(given: dict[str, Any]) -> bool:
    """Whether a call asks for a tuple; takes that out of its arguments.

    What a tuple has is known by its place, so logits are in it, asked for or not.
    """
    is_tuple = given.pop("return_dict", None) is False
    if is_tuple:
        given["output_logits"] = True
    return is_tuple


class Outputs:
    """Joins what the ranks of an axis make of a batch.

    Note [Gradients of compiled outputs]: the backward of a compiled graph needs a gradient for each
    of its outputs that is a DTensor, and autograd has none for those that nobody used. Who asks for
    a loss uses the loss, so the other outputs are detached then.
    """

    def __init__(self, axis: SequenceAxis, unshard_outputs: bool) -> None:
        self.axis, self.unshards_outputs = axis, unshard_outputs

    def joined(self, output: Any, spec: OutputSpec, losses: Tensor | None = None) -> Any:
        """The loss of all ranks, and the rest as sharded DTensors or whole.

        Those of a head that makes the losses of its tokens come with them.
        """
        parts = dict(output.items())
        if losses is not None:
            parts = {"loss": losses.sum() / spec.num_items} | parts
        elif spec.labels is not None:
            loss = token_loss(output.logits, spec.labels, spec.num_items)
            parts = {"loss": loss} | parts
        if not spec.has_logits:
            del parts["logits"]
        # See Note [Gradients of compiled outputs].
        detaches = "loss" in parts and torch.compiler.is_compiling()
        results = {}
        for name, x in parts.items():
            if name == "loss":
                results[name] = self.axis.sum(x)
            elif spec.of_tokens is not None and name not in spec.of_tokens:
                results[name] = x  # made of the whole batch, on every rank
            elif spec.router is None or name not in OF_ROUTERS:
                results[name] = self._output(name, x, spec, detaches)
        if spec.router is not None:
            results |= self._of_routers(parts, spec.router, spec, detaches)
            if {"loss", "aux_loss"} <= results.keys():
                # Whole on every rank, so it is added once, after the sum.
                results["loss"] = results["loss"] + spec.router.coefficient * results["aux_loss"]
        return type(output)(**results)

    def _of_routers(
        self, parts: dict[str, Any], router: RouterSpec, spec: OutputSpec, detaches: bool
    ) -> dict[str, Any]:
        """The load-balancing loss of all ranks, and the logits of routers by token."""
        results: dict[str, Any] = {}
        if "aux_loss" in parts:
            results["aux_loss"] = load_balancing_loss(parts["router_logits"], router, self.axis.sum)
        if "router_logits" in parts:
            by_token = tuple(router.by_token(x) for x in parts["router_logits"])
            logits = self._output("router_logits", by_token, spec, detaches)
            # Whole ones are those of the model, (B * S, E).
            whole = tuple(x.flatten(0, 1) for x in logits) if self.unshards_outputs else logits
            results["router_logits"] = whole
        return results

    def _output(self, name: str, x: Any, spec: OutputSpec, detaches: bool) -> Any:
        if isinstance(x, tuple):
            return tuple(self._output(name, part, spec, detaches) for part in x)
        if not isinstance(x, Tensor):
            return x
        if name == "logits" and spec.kept is not None:
            return spec.kept.join(x, 1)
        if x.ndim < 3 or x.shape[1] != spec.local_length:
            raise ValueError(
                f"the model's output {name}, {tuple(x.shape)}, has no token for each of the "
                f"{spec.local_length} of this rank: what is made of the whole sequence is "
                "not supported; leave it out"
            )
        local = x.detach() if detaches else x
        if self.unshards_outputs:
            return self.whole(local, spec)
        return from_local_tokens(local, self.axis.mesh, 1, spec.dealt_length)

    def whole(self, local: Tensor, spec: OutputSpec) -> Tensor:
        """What all ranks have of their tokens, `(B, L, ...)`, in the order of the batch."""
        layout = spec.layout if isinstance(spec.layout, Balanced) else None
        sharded = from_local_tokens(local, self.axis.mesh, 1, spec.dealt_length)
        return unshard_sequence(sharded, 1, layout)[:, : spec.seq_len]
