"""`transformers.Trainer` for models under a context-parallel plan."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import Trainer

from dtensor_ring.sequence import unshard_sequence

AXES = ("dp_replicate", "cp")


class ContextParallelTrainer(Trainer):
    """A `Trainer` whose ranks along an axis share each batch, and its sequence.

    The ranks of `dp_replicate` get different batches, those of `cp` the same one. Loss, evaluation
    and gradients are those of one process that sees all batches.

    Args:
        mesh: all ranks, 2-D, with the axes `dp_replicate` and `cp`; the model is under
            `context_parallel_plan` over `mesh["cp"]`.
        args, kwargs: those of `Trainer`.

    Raises:
        ValueError: if the mesh has other axes, tokens are not averaged across devices, or the loss
            is to be another than the model's own.

    Example:
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp_replicate", "cp"))
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model = parallelize_module(model, mesh["cp"], context_parallel_plan(model))
        >>> arguments = TrainingArguments(use_cpu=True, report_to=[])
        >>> ContextParallelTrainer(model, arguments, mesh=mesh).get_cp_size()
        1
    """

    def __init__(self, *args: Any, mesh: DeviceMesh, **kwargs: Any) -> None:
        if mesh.mesh_dim_names != AXES:
            raise ValueError(
                f"the mesh of a trainer has the axes {AXES}, got {mesh.mesh_dim_names}; see "
                "init_device_mesh(..., mesh_dim_names=...)"
            )
        self._mesh = mesh
        super().__init__(*args, **kwargs)
        if not self.args.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices=False would weight tokens by the batch they are in; "
                "leave it True"
            )
        if self.args.label_smoothing_factor or self.compute_loss_func is not None:
            raise ValueError(
                "a rank has the logits of its own tokens, so the loss is the model's own; leave "
                "label_smoothing_factor and compute_loss_func out"
            )

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        self.accelerator.state.device_mesh = self._mesh  # says which ranks share a batch

    def get_cp_size(self) -> int:
        return self._mesh["cp"].size()

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        # Each rank of the axis has the loss of all of them, and the gradient of its own tokens.
        return super().training_step(*args, **kwargs) / self.get_cp_size()

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        result: Any = super().compute_loss(model, inputs, True, num_items_in_batch)
        loss, outputs = result
        if not model.training:
            loss = loss / self.get_cp_size()
        if not return_outputs:
            return loss
        whole = {
            name: unshard_sequence(x, 1) if isinstance(x, DTensor) and x.ndim > 1 else x
            for name, x in outputs.items()
        }
        return loss, type(outputs)(**whole)
