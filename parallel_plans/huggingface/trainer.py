"""Defines a `transformers.Trainer` for models under a context-parallel plan."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from math import ceil
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType, recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import seed_worker

from parallel_plans.huggingface.core.adapters import adapters_of
from parallel_plans.huggingface.core.modules import backbone_of
from parallel_plans.huggingface.distributed import reduce_by_sums
from parallel_plans.huggingface.plan import context_parallel_plan
from parallel_plans.huggingface.sharding.sharding import shardings_of, whole_outputs
from parallel_plans.huggingface.trainers import trainer_options
from parallel_plans.huggingface.trainers.trainer_options import (
    DATA_AXES,
    MeshConfig,
    flattened,
    mesh_config,
    trainer_mesh,
)
from parallel_plans.tested import warn_untested


class ContextParallelTrainer(Trainer):
    """A `Trainer` whose ranks along an axis share each batch and shard its sequence.

    The ranks of `dp_replicate` and `dp_shard` get different batches; the ranks of `cp` get the same
    one. Loss, evaluation, predictions and gradients equal those of a `Trainer` on the data-parallel
    ranks alone whose model takes `num_items_in_batch`: accumulated batches are weighted by their
    number of labels.

    With `TrainingArguments(fsdp=True)`, FSDP2 shards the model over the ranks of `dp_shard` and
    `cp`, and replicates it over `dp_replicate`; `Trainer` and accelerate do clipping, checkpoints
    and `save_model`. Without it, the model is whole on every rank, under DDP.

    Args:
        mesh: a mesh of all ranks, with the axis `cp`, any of `dp_replicate` and `dp_shard` before
            it, and optionally `tp` after it. `None` builds it from
            `TrainingArguments(parallelism_config=...)` or the config of `accelerate launch`.
        plan: keywords of `context_parallel_plan`, for a model that is not under a plan yet: the
            trainer then applies one before the model is sharded. If you have a head of your own
            behind whole outputs, apply the plan to its backbone yourself.
        *args: positional arguments of `Trainer`.
        **kwargs: keyword arguments of `Trainer`.

    Raises:
        ValueError: if the mesh has other axes or ranks, the model is under the plan of another
            mesh or cannot be under one, tokens are not averaged across devices, the loss is not the
            model's own, or an option distributes batches or the model differently.

    Example:
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "cp"))
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> arguments = TrainingArguments(use_cpu=True, report_to=[])
        >>> plan = {"layout": "striped"}
        >>> ContextParallelTrainer(model, arguments, mesh=mesh, plan=plan).get_tp_size()
        1
    """

    def __init__(
        self,
        *args: Any,
        mesh: DeviceMesh | None = None,
        plan: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        warn_untested("accelerate")
        self._user_mesh, self._plan = mesh, plan
        self._evaluated: tuple[str, int] = "", 0
        super().__init__(*args, **kwargs)
        adapters = adapters_of(self.model)
        trainer_options.check_options(self.args, self.compute_loss_func is not None, adapters)
        if self._plan_makes_loss():
            self.model_accepts_loss_kwargs = True  # the plan's loss takes num_items_in_batch
        self.add_callback(GlooReduction)

    def create_accelerator_and_postprocess(self) -> None:
        args: Any = self.args
        if args.accelerator_config.dispatch_batches is None:  # None is True for iterable datasets
            args.accelerator_config.dispatch_batches = False
        trainer_options.forget_earlier(args, MeshConfig)
        device = args.device  # starts the process group, which a mesh needs
        self._mesh = trainer_mesh(self._user_mesh, args.parallelism_config, device.type)
        self._data_mesh = flattened(self._mesh, DATA_AXES, "dp")
        with trainer_options.as_launched():
            super().create_accelerator_and_postprocess()
        self._configure_accelerate()
        if self.model is not None:
            self._apply_plan(self.model)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        built = super()._build_accelerator_args(**kwargs)
        return built | {"parallelism_config": mesh_config(self._mesh, is_sharded=False)}

    def _configure_accelerate(self) -> None:
        """Set in accelerate which ranks share a batch and shard the model; allow FSDP2 on CPUs."""
        accelerator: Any = self.accelerator
        state = accelerator.state
        plugin = trainer_options.fsdp_plugin(self.args, state)
        trainer_options.check_launch(self.args, state, plugin, self._mesh)
        state.device_mesh = self._mesh
        state.parallelism_config = mesh_config(self._mesh, plugin is not None)
        if plugin is not None and state.distributed_type != DistributedType.FSDP:
            if state.mixed_precision != "no":
                plugin.set_mixed_precision(state.mixed_precision)
            state.fsdp_plugin = plugin
            # Set both: each new view of accelerate's state copies the type from `PartialState`.
            state.distributed_type = PartialState().distributed_type = DistributedType.FSDP
            self.is_fsdp_enabled = True
        self.gather_function: Any = self._gather_batches
        accelerator.gather_for_metrics = self._gather_batches

    def _apply_plan(self, model: Any) -> None:
        """Apply the plan to a model, or check the plan that it is under already."""
        if getattr(model, "is_distributed_loading_by_transformers", False):
            raise ValueError(
                "the model was sharded when it was loaded, by distributed_config, and the trainer "
                "shards it itself; leave it out, and say TrainingArguments(fsdp=True), or train in "
                "a loop of your own what context_parallel_model returns"
            )
        if self.is_fsdp_enabled:  # DDP broadcasts the weights of one rank
            trainer_options.check_weights(model)
        planned = [x.axis.mesh.mesh.flatten().tolist() for x in shardings_of(model)]
        ranks = self._mesh["cp"].mesh.flatten().tolist()
        if not planned:
            base = base_of(model)
            plan = context_parallel_plan(base, **self._plan or {})
            parallelize_module(base, self._mesh["cp"], plan)
        elif self._plan is not None:
            raise ValueError(
                "the model is under a context_parallel_plan already, so plan= would have no "
                "effect; leave one of them out"
            )
        elif ranks not in planned:
            raise ValueError(
                f"the model is under a context_parallel_plan over the ranks {planned[0]}, and the "
                f"cp axis of the trainer's mesh has {ranks}; apply the plan over mesh['cp']"
            )
        if any(x.local_batch for x in shardings_of(model)):
            raise ValueError(
                "the plan has local_batch=True, and the data loader of a trainer gives every rank "
                "of cp the whole batch; leave it out, or train in a loop of your own"
            )

    def _plan_makes_loss(self) -> bool:
        """Return whether the plan computes the loss, not a head of the user on whole outputs."""
        base = base_of(self.model)
        return hasattr(base, "context_parallel_sharding") and backbone_of(base) is base

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = super().call_model_init(trial)
        self._apply_plan(model)
        return model

    def get_tp_size(self) -> int:
        """Return the number of ranks that share a batch; `Trainer` calls this method."""
        return self._mesh.size() // self._num_replicas()

    def _num_replicas(self) -> int:
        """Return the number of groups of ranks that share a batch."""
        return self._data_mesh.size() if self._data_mesh else 1

    def _replica(self) -> int:
        """Return the index of this rank's group among them."""
        return self._data_mesh.get_local_rank() if self._data_mesh else 0

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        inner: Any = getattr(loader, "base_dataloader", loader)
        if inner.worker_init_fn is not None:  # ranks that share a batch share random seeds
            num_workers = self.args.dataloader_num_workers
            of_replica = {"num_workers": num_workers, "rank": self._replica()}
            inner.worker_init_fn = partial(seed_worker, **of_replica)
        return loader

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """Return whole outputs in the order of the tokens, if more than the loss is requested."""
        with nullcontext() if prediction_loss_only else whole_outputs(model):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _track_num_input_tokens(self, inputs: Any) -> None:
        with self._counting_batches_once("num_input_tokens_seen"):
            super()._track_num_input_tokens(inputs)

    def store_flos(self) -> None:
        with self._counting_batches_once("total_flos"):
            super().store_flos()

    @contextmanager
    def _counting_batches_once(self, name: str) -> Iterator[None]:
        """Divide what `Trainer` sums over all ranks by the number of ranks that share a batch."""
        before = getattr(self.state, name)
        yield
        counted = getattr(self.state, name) - before
        setattr(self.state, name, before + type(counted)(counted / self.get_tp_size()))

    def _shard_unless_trained(self) -> None:
        """Shard a model before the first training: accelerate does it beside an optimizer only."""
        if not self.is_fsdp_enabled or self.accelerator._models:
            return
        model: Any = self.model
        # An optimizer that moves nothing, and is forgotten below.
        given = torch.optim.SGD(model.parameters(), lr=0.0)
        self.model, optimizer = self.accelerator.prepare(model, given)
        self.accelerator._optimizers.remove(optimizer)
        self.model_wrapped = self.model

    def _forget_evaluation(self) -> None:
        """Let accelerate prepare a model for training that it has prepared for an evaluation."""
        # It would take it for prepared, and train without DDP, each rank by its own gradients.
        model: Any = self.model
        model._is_accelerate_prepared = False
        self.accelerator._models.clear()
        self.model_wrapped = model

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self.model, FSDPModule):
            if not isinstance(self.model_wrapped, DistributedDataParallel):
                self._forget_evaluation()
            return super()._prepare_for_training(*args, **kwargs)
        model: Any = self.model
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # the optimizer must get shards, also before transformers 5.24
        # An evaluation or training before this one has done it, and layers have other classes now.
        plugin: Any = self.accelerator.state.fsdp_plugin
        before, plugin.activation_checkpointing = plugin.activation_checkpointing, False
        try:
            return super()._prepare_for_training(*args, **kwargs)
        finally:
            plugin.activation_checkpointing = before

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        self._shard_unless_trained()
        output = super().evaluation_loop(
            dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
        )
        self._evaluated = metric_key_prefix, output.num_samples or 0
        return output

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        super().log(self._with_steps(logs), start_time)

    def predict(self, *args: Any, **kwargs: Any) -> Any:
        output = super().predict(*args, **kwargs)
        self._with_steps(output.metrics or {})
        return output

    def _with_steps(self, metrics: dict[str, float]) -> dict[str, float]:
        """Correct the steps per second in place: `Trainer` counts as if no ranks shared a batch."""
        prefix, num_samples = self._evaluated
        rate, runtime = f"{prefix}_steps_per_second", metrics.get(f"{prefix}_runtime")
        if rate in metrics and runtime:
            steps = ceil(num_samples / (self.args.eval_batch_size * self._num_replicas()))
            metrics[rate] = round(steps / runtime, 3)
        return metrics

    def _gather_batches(self, data: Any) -> Any:
        """Gather like `gather_for_metrics`, but once for each group of ranks that share a batch."""
        state = self.accelerator.gradient_state
        is_cut = state.end_of_dataloader and state.remainder > 0  # samples repeat at the end
        return self._gather_replicas(data, state.remainder if is_cut else None)

    def _gather_replicas(self, data: Any, keep: int | None = None) -> Any:
        """Gather the rows of all groups that share a batch, and return the first `keep` or all."""
        group = self._data_mesh.get_group() if self._data_mesh else None

        def gather(x: Tensor) -> Tensor:
            # A scalar, such as a loss, gathers as one row.
            x = torch.atleast_1d(x).contiguous()
            parts = [torch.empty_like(x) for _ in range(group.size())] if group else [x]
            if group:
                dist.all_gather(parts, x, group)
            return torch.cat(parts)[:keep]

        return recursively_apply(gather, data, error_on_other_type=True)


def base_of(model: Any) -> Any:
    """Return the model below adapters of peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class GlooReduction(TrainerCallback):
    """Calls `reduce_by_sums` on CPUs, once FSDP2 has sharded the model."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.device.type == "cpu":
            reduce_by_sums(kwargs["model"])
