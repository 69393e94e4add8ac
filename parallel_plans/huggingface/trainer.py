"""`transformers.Trainer` for models under a context-parallel plan."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer_utils import seed_worker

from dtensor_ring.dtensor.sequence import unshard_sequence

AXES = ("dp_replicate", "cp")


class ContextParallelTrainer(Trainer):
    """A `Trainer` whose ranks along an axis share each batch, and its sequence.

    The ranks of `dp_replicate` get different batches, those of `cp` the same one. Loss, evaluation,
    predictions and gradients are those of a `Trainer` on the ranks of `dp_replicate` alone, whose
    model takes `num_items_in_batch`: batches that are accumulated are weighted by their labels.

    Args:
        mesh: all ranks, 2-D, with the axes `dp_replicate` and `cp`; the model is under
            `context_parallel_plan` over `mesh["cp"]`.
        args, kwargs: those of `Trainer`.

    Raises:
        ValueError: if the mesh has other axes, the model is not under the plan, tokens are not
            averaged across devices, the loss is another than the model's own, or an option deals
            batches or the model to ranks differently.

    Example:
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "cp"))
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model = parallelize_module(model, mesh["cp"], context_parallel_plan(model))
        >>> arguments = TrainingArguments(use_cpu=True, report_to=[])
        >>> ContextParallelTrainer(model, arguments, mesh=mesh).get_tp_size()
        1
    """

    def __init__(self, *args: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"the mesh of a trainer is a DeviceMesh, got {type(mesh).__name__}")
        if mesh.mesh_dim_names != AXES:
            raise ValueError(
                f"the mesh of a trainer has the axes {AXES}, got {mesh.mesh_dim_names}; see "
                "init_device_mesh(..., mesh_dim_names=...)"
            )
        self._mesh = mesh
        super().__init__(*args, **kwargs)
        self._refuse()
        self._check_plan(self.model)
        self.model_accepts_loss_kwargs = True  # the plan's loss takes num_items_in_batch

    def _refuse(self) -> None:
        args: Any = self.args
        for is_given, why in (
            (
                not args.average_tokens_across_devices,
                "average_tokens_across_devices=False would weight tokens by the batch they are in; "
                "leave it True",
            ),
            (
                args.label_smoothing_factor or self.compute_loss_func is not None,
                "a rank has the logits of its own tokens, so the loss is the model's own; leave "
                "label_smoothing_factor and compute_loss_func out",
            ),
            (
                args.eval_use_gather_object,
                "eval_use_gather_object=True would gather from every rank, and those of cp share a "
                "batch; leave it False, predictions are gathered as tensors",
            ),
            (
                args.accelerator_config.dispatch_batches
                or args.train_sampling_strategy == "batch_rebalance",
                "dispatch_batches=True and train_sampling_strategy='batch_rebalance' deal rows to "
                "every rank, and those of cp share a batch; leave them out",
            ),
            (
                args.neftune_noise_alpha is not None or args.use_liger_kernel,
                "neftune_noise_alpha scales noise by the tokens that a rank holds, and "
                "use_liger_kernel replaces the forward that the plan wraps; leave them out",
            ),
            (
                any(getattr(x, "alora_invocation_tokens", None) for x in self._adapters()),
                "adapters that begin at a token of the sequence, aLoRA, would begin on every rank; "
                "leave alora_invocation_tokens out",
            ),
            (
                args.fsdp
                or self.is_fsdp_enabled
                or args.deepspeed
                or self.is_deepspeed_enabled
                or args.parallelism_config is not None,
                "fsdp, deepspeed and parallelism_config deal the model or batches to ranks in ways "
                "of their own; leave them out, or train with fully_shard in a loop of yours",
            ),
        ):
            if is_given:
                raise ValueError(why)

    def _check_plan(self, model: Any) -> None:
        """Without the plan, gradients would be `cp` times too large: its ranks share a batch."""
        meshes = [getattr(module, "context_parallel_mesh", None) for module in model.modules()]
        if self._mesh["cp"].mesh.tolist() not in [x.mesh.tolist() for x in meshes if x]:
            raise ValueError(
                'the model is not under a context_parallel_plan over mesh["cp"]: apply it before '
                "the trainer is made, or in the model_init that you give it"
            )

    def call_model_init(self, trial: Any = None) -> nn.Module:
        model = super().call_model_init(trial)
        self._check_plan(model)
        return model

    def _adapters(self) -> list[Any]:
        """Configs of what peft added to the model."""
        model: Any = self.model
        return list(getattr(model, "peft_config", {}).values())

    def create_accelerator_and_postprocess(self) -> None:
        config: Any = self.args.accelerator_config
        if config.dispatch_batches is None:  # which for iterable datasets would mean True
            config.dispatch_batches = False
        super().create_accelerator_and_postprocess()
        self.accelerator.state.device_mesh = self._mesh  # says which ranks share a batch
        accelerator: Any = self.accelerator
        self.gather_function: Any = self._gather_batches
        accelerator.gather_for_metrics = self._gather_batches

    def get_tp_size(self) -> int:
        """Ranks that share a batch and its loss: to `Trainer` the axis is one of those."""
        return self._mesh["cp"].size()

    def get_train_dataloader(self) -> DataLoader:
        loader = super().get_train_dataloader()
        inner: Any = getattr(loader, "base_dataloader", loader)
        if inner.worker_init_fn is not None:  # workers of ranks that share a batch draw alike
            rank = self._mesh["dp_replicate"].get_local_rank()
            num_workers = self.args.dataloader_num_workers
            inner.worker_init_fn = partial(seed_worker, num_workers=num_workers, rank=rank)
        return loader

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> Any:
        """The outputs whole, in the order of the tokens, if more than the loss is asked for."""
        if not prediction_loss_only:
            inputs = inputs | {"output_logits": True}
        loss, outputs, labels = super().prediction_step(
            model, inputs, prediction_loss_only, ignore_keys
        )
        tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
        prompts = (getattr(x, "num_virtual_tokens", None) or 0 for x in self._adapters())
        seq_len = tokens.shape[1] + sum(prompts)
        outputs = tree_map_only(DTensor, lambda x: unshard_sequence(x, 1)[:, :seq_len], outputs)
        return loss, outputs, labels

    def _track_num_input_tokens(self, inputs: Any) -> None:
        before = self.state.num_input_tokens_seen
        super()._track_num_input_tokens(inputs)  # those of all ranks
        counted = self.state.num_input_tokens_seen - before
        self.state.num_input_tokens_seen = before + counted // self.get_tp_size()

    def _gather_batches(self, data: Any) -> Any:
        """The accelerator's `gather_for_metrics`, from one of the ranks that share a batch."""
        group, state = self._mesh["dp_replicate"].get_group(), self.accelerator.gradient_state
        is_cut = state.end_of_dataloader and state.remainder > 0  # samples repeat at the end

        def gather(x: Tensor) -> Tensor:
            x = torch.atleast_1d(x).contiguous()
            parts = [torch.empty_like(x) for _ in range(group.size())]
            dist.all_gather(parts, x, group)
            return torch.cat(parts)[: state.remainder if is_cut else None]

        return recursively_apply(gather, data, error_on_other_type=True)
