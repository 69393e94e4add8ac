"""Define a trainer and a validator that find documents, and shard tokens in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import torch.distributed as dist
import tyro
from torch import Tensor, nn
from torchtitan.components.validate import Validator
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.tools.utils import device_type
from torchtitan.trainer import Trainer

from parallel_plans.torchtitan.inner_attention import (
    CUDA_GRAPHS,
    OwnTokens,
    RingAttention,
    RingSelectiveAC,
    own_tokens,
)
from parallel_plans.torchtitan.multi_token import Ahead, check_heads, give_ahead, num_heads_of


def ring_layout(config: Any) -> str:
    """Return the layout of the ring attention in a model's config.

    Raises:
        ValueError: if there is no ring, or if layers have different layouts.
    """
    layouts = {ring.layout for _, ring, _, _ in config.traverse(RingAttention.Config)}
    if len(layouts) != 1:
        raise ValueError(
            "all layers of a model share one layout of its tokens, got "
            f"{sorted(layouts) or 'no ring'}"
        )
    return layouts.pop()


def check_experts(config: Any, ep: int) -> None:
    """Refuse experts that the ranks of expert parallelism do not divide.

    Args:
        config: of the model, `None` without one.
        ep: the degree of expert parallelism.

    Raises:
        ValueError: with both numbers.
    """
    if config is None or ep == 1:
        return
    for name, experts, _, _ in config.traverse(GroupedExperts.Config):
        if experts.num_experts % ep:
            raise ValueError(
                f"expert_parallel_degree={ep} does not divide the {experts.num_experts} experts of "
                f"{name}: each rank has as many; take a divisor"
            )


class RingValidator(Validator):
    """A validator for models with ring attention."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        """Config of `RingValidator`."""

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor, model_parts: list[nn.Module]
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        layout = ring_layout(model_parts[0].config)
        rank, world_size = _place(self.parallel_dims)
        own = own_tokens(input_dict, layout, rank, world_size)
        ahead = Ahead.of(input_dict, labels, own, num_heads_of(model_parts[0].config))
        batch = {name: own.of(x) for name, x in input_dict.items()}
        with _sharded_already(self):
            found = super().post_dataloading_process(batch, own.of(labels), model_parts)
        inputs, labels, extra = found
        documents = give_ahead(own.documents, ahead, labels, self.loss_fn)
        return inputs, labels, extra | {"attention_masks": documents}


OWN_TOKENS, AHEAD = "own_tokens", "ahead"
PARTIAL = "partial_dtensor"


# Note [Shards before torchtitan's]: torchtitan cuts a batch into equal slices, so a batch would
# have to be ordered as a whole, copied. Instead each rank takes its own tokens, and torchtitan sees
# a context-parallel axis of this rank alone, which leaves them as they are.
class RingTrainer(Trainer):
    """torchtitan's trainer for models with ring attention.

    Each rank takes its tokens by the layout of the model's config, see
    Note [Shards before torchtitan's]. The load balancer of the config is ignored.

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
            raise ValueError(f"a step is to be a CUDA graph, and {'; '.join(CUDA_GRAPHS)}")
        spec, num_ranks = config.model_spec, config.parallelism.tensor_parallel_degree
        model = None if spec is None else spec.model
        check_heads(model, num_ranks)
        check_experts(model, config.parallelism.expert_parallel_degree)
        # torchtitan would permute the tokens a second time.
        parallelism = replace(config.parallelism, context_parallel_load_balancer=None)
        if spec is not None and parallelism.spmd_backend == PARTIAL:
            whole = partial(_parallelize_partially, spec.parallelize_fn)
            spec = replace(spec, parallelize_fn=whole)
        super().__init__(replace(config, parallelism=parallelism, model_spec=spec))
        self.layout = ring_layout(self.model_config)

    def batch_generator(
        self, data_iterable: Iterable[tuple[dict[str, Tensor], Tensor]]
    ) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Yield this rank's tokens, which are taken on the CPU, and the labels of all.

        torchtitan counts the labels of whole batches.
        """
        rank, world_size = _place(self.parallel_dims)
        for batch, labels in super().batch_generator(data_iterable):
            own = own_tokens(batch, self.layout, rank, world_size)
            ahead = Ahead.of(batch, labels, own, num_heads_of(self.model_config))
            beside = {OWN_TOKENS: own, AHEAD: ahead}
            yield {name: own.of(x) for name, x in batch.items()} | beside, labels

    def post_dataloading_process(
        self, input_dict: dict[str, Any], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        own: OwnTokens = input_dict.pop(OWN_TOKENS)
        ahead: Ahead | None = input_dict.pop(AHEAD)
        with _sharded_already(self):
            found = super().post_dataloading_process(input_dict, own.of(labels))
        inputs, labels, extra = found
        documents = give_ahead(own.documents, ahead, labels, self.loss_fn)
        return inputs, labels, extra | {"attention_masks": documents}


def _place(dims: ParallelDims) -> tuple[int, int]:
    """Return the index of this rank in its ring, and the ranks of the ring."""
    mesh = dims.get_optional_mesh("cp", include_singleton_axes=True)
    return (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())


@contextmanager
def _sharded_already(trainer: Any) -> Iterator[None]:
    """Open a context in which torchtitan does not shard a batch over the ranks of a ring."""
    dims = trainer.parallel_dims
    trainer.parallel_dims = _AloneOnRing(dims)
    try:
        yield
    finally:
        trainer.parallel_dims = dims


class _AloneOnRing:
    """A view of `ParallelDims` whose context-parallel mesh has this rank alone."""

    def __init__(self, dims: ParallelDims) -> None:
        self._dims = dims

    def get_mesh(self, dims: str | list[str]) -> dist.DeviceMesh:
        if dims != "cp":
            return self._dims.get_mesh(dims)
        # No message is sent over it, so it needs no group.
        return dist.DeviceMesh(device_type, [dist.get_rank()], _init_backend=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dims, name)


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
