"""Define a trainer and a validator that find documents, and shard tokens in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import tyro
from torch import Tensor, nn
from torchtitan.components.validate import Validator
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from parallel_plans.torchtitan.inner_attention import RingAttention, RingSelectiveAC
from parallel_plans.torchtitan.packed_batch import CUDA_GRAPHS, reorder

DOCUMENTS = "documents"
PARTIAL = "partial_dtensor"


def ring_layout(config: Any) -> str:
    """Return the layout of the ring attention in a model's config.

    Raises:
        ValueError: if there is no ring, or if layers have different layouts.
    """
    found = {ring.layout for _, ring, _, _ in config.traverse(RingAttention.Config)}
    if len(found) != 1:
        raise ValueError(
            "all layers of a model share one layout of its tokens, got "
            f"{sorted(found) or 'no ring'}"
        )
    return found.pop()


class RingValidator(Validator):
    """A validator for models with ring attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """Config of `RingValidator`."""

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor, model_parts: list[nn.Module]
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        layout = ring_layout(model_parts[0].config)
        batch, labels, documents = reorder(input_dict, labels, layout, self.parallel_dims.cp)
        inputs, labels, extra = super().post_dataloading_process(batch, labels, model_parts)
        return inputs, labels, extra | {"attention_masks": documents}


class RingTrainer(Trainer):
    """torchtitan's trainer for models with ring attention.

    It orders tokens by the layout of the model's config before torchtitan cuts them into slices.
    The load balancer of the config is ignored.

    Raises:
        ValueError: with CUDA graphs, which would replay the documents of one batch for all others.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Config of `RingTrainer`."""

        activation_checkpoint: (
            Annotated[RingSelectiveAC.Config, tyro.conf.subcommand("ring-selective")]
            | ActivationCheckpointingConfig
        ) = field(default_factory=RingSelectiveAC.Config)
        validator: Validator.Config = field(default_factory=RingValidator.Config)

    def __init__(self, config: Config) -> None:
        if device_type == "cuda" and not config.training.disable_cuda_graphs:
            raise ValueError(CUDA_GRAPHS)
        # torchtitan would permute the tokens a second time.
        parallelism = replace(config.parallelism, context_parallel_load_balancer=None)
        spec = config.model_spec
        if spec is not None and parallelism.spmd_backend == PARTIAL:
            whole = partial(_parallelize_partially, spec.parallelize_fn)
            spec = replace(spec, parallelize_fn=whole)
        super().__init__(replace(config, parallelism=parallelism, model_spec=spec))
        self.layout = ring_layout(self.model_config)

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, Tensor], Tensor]]
    ) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield batches in the order of the layout; they are reordered on the CPU."""
        for batch, labels in super().batch_generator(data_iterable):
            ordered, labels, documents = reorder(batch, labels, self.layout, self.parallel_dims.cp)
            yield ordered | {DOCUMENTS: documents}, labels

    def post_dataloading_process(
        self, input_dict: dict[str, Any], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        documents = input_dict.pop(DOCUMENTS)
        inputs, labels, extra = super().post_dataloading_process(input_dict, labels)
        return inputs, labels, extra | {"attention_masks": documents}


class _WithoutContext:
    """A view of `ParallelDims` that reports no context parallelism."""

    cp_enabled = False

    def __init__(self, dims: ParallelDims) -> None:
        self._dims = dims

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


def _parallelize_partially(
    parallelize: Callable[..., nn.Module],
    model: nn.Module,
    *,
    parallel_dims: ParallelDims,
    **others: Any,
) -> nn.Module:
    """Parallelize a model with the partial_dtensor backend, which knows no ring attention."""
    # torchtitan does not call `parallelize` on attention that it does not know.
    for module in model.modules():
        if isinstance(module, RingAttention):
            module.join(parallel_dims)
    return parallelize(model, parallel_dims=_WithoutContext(parallel_dims), **others)
