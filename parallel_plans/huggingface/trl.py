"""Adapts TRL's trainers to models under a context-parallel plan."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from types import MethodType
from typing import Any

import torch
import trl
from accelerate.utils import is_peft_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from parallel_plans.huggingface.plan import context_parallel_plan
from parallel_plans.huggingface.sharding.sharding import Sharding, shardings_of
from parallel_plans.huggingface.trainer import ContextParallelTrainer, base_of
from parallel_plans.tested import warn_untested

SERVED = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "RewardTrainer")
PER_TOKEN = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


class ContextParallelMixin(ContextParallelTrainer):
    """Context parallelism for TRL's `SFTTrainer`, `DPOTrainer`, `KTOTrainer` and `RewardTrainer`.

    List it before TRL's trainer among the base classes. Losses, metrics and gradients equal those
    of that trainer on the ranks of `dp_replicate` alone. Each rank projects only its own tokens
    through the LM head: TRL computes every loss from per-token log-probabilities, and these are
    gathered, `(B, S)` numbers.

    Args:
        *args: positional arguments of TRL's trainer.
        **kwargs: keyword arguments of TRL's trainer; `mesh` and `plan` as in
            `ContextParallelTrainer`. The plan of the model is also applied to `ref_model`.

    Raises:
        TypeError: if it is mixed into another trainer.
        ValueError: see `ContextParallelTrainer`; also if TRL would load a reference model itself,
            or a load-balancing loss is requested.

    Example:
        >>> class Trainer(ContextParallelMixin, trl.SFTTrainer):
        ...     pass
        >>> trainer = Trainer(model, config, train_dataset=rows, mesh=mesh)  # doctest: +SKIP
    """

    _served: tuple[str, ...] = SERVED
    _shards_tokens = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warn_untested("trl")
        if not isinstance(self, tuple(getattr(trl, name) for name in self._served)):
            raise TypeError(
                f"{_mixin(self)} is for TRL's {', '.join(self._served)}, got "
                f"{type(self).__name__}; write class X({_mixin(self)}, trl.{self._served[0]})"
            )
        second = args[1] if len(args) > 1 else None
        self._reference: Any = kwargs.get("ref_model", second) if self._has_reference() else None
        super().__init__(*args, **kwargs)
        if getattr(self, "aux_loss_enabled", False):
            raise ValueError(
                "router_aux_loss_coef asks for a load-balancing loss, a statistic of all tokens, "
                "of which a rank sees its own only; set router_aux_loss_coef=0.0"
            )
        self._shard_tokens()

    def _has_reference(self) -> bool:
        return isinstance(self, (trl.DPOTrainer, trl.KTOTrainer))

    def _makes_reference(self) -> bool:
        """Return whether TRL would load a reference model itself, to which no plan is applied."""
        if not self._has_reference() or self._reference is not None or is_peft_model(self.model):
            return False
        args: Any = self.args
        return not args.precompute_ref_log_probs or self.is_fsdp_enabled

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self._makes_reference():
            raise ValueError(
                "TRL would make a reference model that is not under a plan; give ref_model=... "
                "(the plan of the model is applied to it) where the trainer takes one, or train an "
                "adapter, which needs none"
            )
        if self._reference is not None and not shardings_of(self._reference):
            # A model that came under its plan has its options of attention on the axis.
            options = (self._plan or {}) | {"layout": shardings_of(self.model)[0].axis.layout}
            plan = context_parallel_plan(self._reference, **options)
            parallelize_module(self._reference, self._mesh["cp"], plan)

    def compute_ref_log_probs(self, *args: Any, **kwargs: Any) -> Any:
        """Return the reference log-probabilities. TRL may call this before our `__init__` ends."""
        self._shard_tokens()
        parent: Any = super()
        return parent.compute_ref_log_probs(*args, **kwargs)

    def _shard_tokens(self) -> None:
        """Wrap TRL's forwards once, after TRL has put them over those of the plan."""
        if self._shards_tokens:
            return
        self._shards_tokens = True
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                _shard_tokens(model)


def _mixin(trainer: Any) -> str:
    """Return the name of the mixin of a trainer."""
    return next(x.__name__ for x in type(trainer).__mro__ if "_served" in vars(x))


def _shard_tokens(model: Any) -> None:
    """Shard the batch where TRL's fused head calls the backbone, which has no plan of its own."""
    causal = base_of(model)
    sharding = getattr(causal, "context_parallel_sharding", None)
    if sharding is not None:  # else an inner module is under the plan, with whole outputs
        causal.forward = MethodType(_local_forward(causal.forward, sharding), causal)


def _local_forward(inner: Callable[..., Any], sharding: Sharding) -> Callable[..., Any]:
    """Run TRL's forward on this rank's tokens, and gather its per-token results."""

    def forward(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if not fused_lm_head:
            return inner(*args, **kwargs)
        # Request logits, so that TRL's head gets the labels, not the head of the plan.
        arguments = sharding.arguments(self, args, kwargs | {"output_logits": True})
        batch, spec = sharding.inputs(self, arguments)
        output = inner(**batch, shift_labels=spec.labels, fused_lm_head=True)
        _check_head(self)
        sharding.finish(spec)
        # Keep only tokens that predict one: the last does if labels came shifted.
        length = spec.plan.seq_len - (kwargs.get("shift_labels") is None)
        fields = {name: x for name in PER_TOKEN if (x := getattr(output, name)) is not None}
        for name, x in _gathered(fields, sharding, spec).items():
            setattr(output, name, x[:, :length])
        # The log-probabilities are gathered already, so the sum needs no message.
        output.loss = -output.log_probs.sum() / torch.as_tensor(spec.num_items).clamp(min=1)
        return output

    wrapper: Any = forward
    wrapper.__signature__ = signature(inner)  # generation and column selection read it
    return wrapper


def _check_head(model: Any) -> None:
    """Refuse a head that is sharded by itself: TRL reads its weight without the hooks of FSDP2."""
    # By default the head shares an FSDP2 group with the last norm, which has gathered its weight.
    weight = model.get_output_embeddings().weight
    if isinstance(weight, DTensor) and weight.requires_grad:
        raise ValueError(
            "the LM head is sharded by itself, and TRL's losses read its weight without calling "
            "it, so its gradient would not be averaged; leave it in a group with other modules, as "
            "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP does"
        )


def _gathered(fields: dict[str, Tensor], sharding: Sharding, spec: Any) -> dict[str, Tensor]:
    """Gather per-token values `(B, L)` in one message, in the order of the tokens, `(B, S)`."""
    local = torch.stack([x.float() for x in fields.values()], -1)
    whole = sharding.outputs.whole(local, spec.plan).unbind(-1)
    return {name: y.to(x.dtype) for (name, x), y in zip(fields.items(), whole, strict=True)}
