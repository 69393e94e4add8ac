"""Joins the outputs of the ranks of an axis: the loss, and sequences that know their order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import Balanced, SequenceAxis, unshard_sequence
from dtensor_ring.extension import Layout, Padded, from_local_tokens, output_mesh
from parallel_plans.huggingface.activations.token_tiles import join_tiles
from parallel_plans.huggingface.core.positions import LastTokens
from parallel_plans.huggingface.losses.loss import (
    OF_ROUTERS,
    RouterSpec,
    load_balancing_loss,
    token_loss,
)
from parallel_plans.huggingface.sharding.batch import BatchPlan


class OutputSpec(NamedTuple):
    """What joining the outputs of a batch needs.

    Attributes:
        plan: how the batch is sharded.
        labels: labels that the plan takes the loss of.
        head_labels: labels that the head computes losses from, see `LossHead`.
        num_items: divisor of the loss, the number of labelled tokens.
        has_logits: whether the outputs include logits.
        router: what the load-balancing loss needs, if it is requested.
        kept: the tokens that have logits; `None` for all.
        of_tokens: names of the outputs that are sharded; `None` for all.
    """

    plan: BatchPlan
    labels: Tensor | None
    head_labels: Tensor | None
    num_items: Any
    has_logits: bool
    router: RouterSpec | None
    kept: LastTokens | None = None
    of_tokens: frozenset[str] | None = None


def pops_logits(model: Any, arguments: dict[str, Any]) -> bool:
    """Pop `output_logits` from the arguments; return whether to return logits.

    With labels, a language model returns them on request only: they are the largest tensor.
    """
    is_asked = arguments.pop("output_logits", None)
    is_large = arguments.get("labels") is not None and model.get_output_embeddings() is not None
    return bool(is_asked) or not is_large


Made = list[tuple[Tensor, Any]]
"""Outputs that were joined already: a graph cannot give two DTensors of one tensor."""


class Outputs:
    """Joins the outputs of the ranks of an axis.

    Note [Gradients of compiled outputs]: the backward of a compiled graph needs a gradient for each
    output that is a DTensor, but autograd has none for unused outputs. A caller that requests a
    loss uses the loss, so the other outputs are detached then.
    """

    def __init__(self, axis: SequenceAxis, unshard_outputs: bool, is_even: bool) -> None:
        self.axis, self.unshards = axis, unshard_outputs
        self._padded = None if axis.layout.per_batch else Padded(axis.layout, is_even)
        # A graph takes the mesh as a constant.
        self._padded_mesh = None if self._padded is None else output_mesh(axis, self._padded)
        self._own_mesh = None if axis.layout.per_batch else output_mesh(axis, axis.layout)

    def joined(self, output: Any, spec: OutputSpec, losses: Tensor | None = None) -> Any:
        """Return the loss over all ranks, and other outputs as sharded DTensors or whole.

        A head that computes the loss of each token passes these as `losses`.
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
        results: dict[str, Any] = {}
        made: Made = []
        for name, x in parts.items():
            if name == "loss":
                results[name] = self.axis.sum(x)
            elif spec.of_tokens is not None and name not in spec.of_tokens:
                results[name] = x  # computed from the whole batch on every rank
            elif spec.router is None or name not in OF_ROUTERS:
                results[name] = self._output(name, x, spec, detaches, made)
        if spec.router is not None:
            results |= self._of_routers(parts, spec.router, spec, detaches)
            if {"loss", "aux_loss"} <= results.keys():
                # Whole on every rank, so it is added once, after the sum.
                results["loss"] = results["loss"] + spec.router.coefficient * results["aux_loss"]
        return type(output)(**results)

    def _of_routers(
        self, parts: dict[str, Any], router: RouterSpec, spec: OutputSpec, detaches: bool
    ) -> dict[str, Any]:
        """Return the load-balancing loss over all ranks, and the router logits by token."""
        results: dict[str, Any] = {}
        by_layer = join_tiles(parts.get("router_logits", ()), router.weights.numel())
        if "aux_loss" in parts:
            results["aux_loss"] = load_balancing_loss(by_layer, router, self.axis.sum)
        if "router_logits" in parts:
            by_token = tuple(router.by_token(x) for x in by_layer)
            logits = self._output("router_logits", by_token, spec, detaches, [])
            # Whole router logits have the shape of the model, (B * S, E).
            whole = tuple(x.flatten(0, 1) for x in logits) if self.unshards else logits
            results["router_logits"] = whole
        return results

    def _output(self, name: str, x: Any, spec: OutputSpec, detaches: bool, made: Made) -> Any:
        """Return an output of the model, or several; equal ones, such as the last states, once."""
        if isinstance(x, tuple):
            return tuple(self._output(name, part, spec, detaches, made) for part in x)
        if not isinstance(x, Tensor):
            return x
        # By identity: a model may name its last states twice, and a gather is a message.
        for given, result in made:
            if given is x:
                return result
        made.append((x, self._joined(name, x, spec, detaches)))
        return made[-1][1]

    def _joined(self, name: str, x: Tensor, spec: OutputSpec, detaches: bool) -> Any:
        if name == "logits" and spec.kept is not None:
            return spec.kept.join(x, 1)
        num_tokens = len(spec.plan.indices)
        if x.ndim < 3 or x.shape[1] != num_tokens:
            raise ValueError(
                f"the model's output {name}, {tuple(x.shape)}, has no token for each of the "
                f"{num_tokens} of this rank: outputs for the whole sequence are not supported; "
                "leave it out"
            )
        local = x.detach() if detaches else x
        if self.unshards:
            return self.whole(local, spec.plan)
        own = self._num_own(spec.plan)
        return self._placed(local if own == num_tokens else local.narrow(1, 0, own), spec.plan)

    def _num_own(self, plan: BatchPlan) -> int:
        """Return how many tokens of a row this rank has, without padding, which is at the end."""
        if plan.sharded_length == plan.seq_len:
            return len(plan.indices)
        padded, mesh = self._padded or Padded(plan.layout), self.axis.mesh
        return padded.num_tokens(mesh.get_local_rank(), mesh.size(), plan.seq_len)

    def _placed(self, local: Tensor, plan: BatchPlan) -> Tensor:
        """Make a sharded sequence of this rank's tokens `(B, L, ...)`, without padding."""
        if plan.sharded_length == plan.seq_len:
            on = self._mesh(plan.layout)
        else:
            on = self._padded_mesh or output_mesh(self.axis, Padded(plan.layout))
        return from_local_tokens(local, on, 1, plan.seq_len)

    def _mesh(self, layout: Layout) -> DeviceMesh:
        """Return the mesh of sequences in the layout of a batch."""
        return self._own_mesh or output_mesh(self.axis, layout)

    def whole(self, local: Tensor, plan: BatchPlan) -> Tensor:
        """Gather the local tokens `(B, L, ...)` of all ranks, in the order of the batch."""
        sharded = from_local_tokens(local, self._mesh(plan.layout), 1, plan.sharded_length)
        return self._unsharded(sharded, plan)[:, : plan.seq_len]

    def join(self, local: Tensor, plan: BatchPlan) -> Tensor:
        """Gather the local tokens of all ranks, which have no padding.

        Raises:
            RuntimeError: if they are those of another batch.
        """
        if local.shape[1] != self._num_own(plan):
            raise RuntimeError(
                f"a head ran on {local.shape[1]} tokens of another batch than the last, whose part "
                f"on this rank has {self._num_own(plan)}; run it once, right after its backbone"
            )
        return self._unsharded(self._placed(local, plan), plan)

    def _unsharded(self, sharded: Any, plan: BatchPlan) -> Tensor:
        # A single rank has no token mesh.
        layout = plan.layout if self.axis.mesh.size() == 1 else None
        return unshard_sequence(sharded, 1, layout if isinstance(layout, Balanced) else None)
