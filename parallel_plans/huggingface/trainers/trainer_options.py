"""Refuses options of a `Trainer` that conflict with a sharded sequence, and resets accelerate."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.extension import check_agreement
from parallel_plans.huggingface.sharding.batch import NO_ALORA, checksum, has_alora

DEEPSPEED = (
    "deepspeed shards the model and averages gradients in ways of its own, and knows no ranks that "
    "share a batch; leave it out, and shard with FSDP2: TrainingArguments(fsdp=True)"
)

LEFT = (
    ". TrainingArguments do not ask for FSDP: the environment does, by ACCELERATE_USE_FSDP; an "
    "Accelerator that shards sets it for all later ones of its process"
)


def check_launch(args: Any, state: Any, plugin: Any, mesh: DeviceMesh) -> None:
    """Refuse ways to distribute a model other than FSDP2 and DDP.

    Args:
        args: the training arguments.
        state: accelerate's state, which includes the options of its launcher.
        plugin: the result of `fsdp_plugin` for both.
        mesh: the mesh of the trainer.

    Raises:
        ValueError: naming the option and what to do.
    """
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names or ()}
    sharded = {name: size for name, size in sizes.items() if name in ("dp_shard", "tp")}
    for is_refused, why in (
        (args.deepspeed or getattr(state, "deepspeed_plugin", None) is not None, DEEPSPEED),
        (
            getattr(state, "megatron_lm_plugin", None) is not None,
            "Megatron-LM has a model and a loop of its own; leave it out, and shard with FSDP2: "
            "TrainingArguments(fsdp=True)",
        ),
        (
            args.fsdp and args.fsdp_config.get("xla"),
            "fsdp_config={'xla': True} shards by XLA, which has no context-parallel axis; leave "
            "it out",
        ),
        (
            plugin is not None and plugin.fsdp_version != 2,
            "FSDP1 flattens the parameters that the plan's forward reads; say "
            "fsdp_config={'version': 2}, or fsdp_version: 2 in the YAML of accelerate"
            + ("" if args.fsdp else LEFT),
        ),
        (
            plugin is None and any(size > 1 for size in sharded.values()),
            f"the sizes {sharded} shard the model, and DDP keeps it whole; say "
            "TrainingArguments(fsdp=True), or for DDP give a mesh with the axes "
            "('dp_replicate', 'cp')",
        ),
        (
            state.num_processes != mesh.size(),
            f"accelerate counts {state.num_processes} processes of the {mesh.size()} of the mesh; "
            "on CPUs say TrainingArguments(use_cpu=True), and start by torchrun or accelerate "
            "launch",
        ),
        (
            args.n_gpu > 1,
            f"one process drives {args.n_gpu} GPUs; start one for each, by torchrun or accelerate "
            "launch",
        ),
    ):
        if is_refused:
            raise ValueError(why)


def check_options(args: Any, has_loss: bool, adapters: list[Any]) -> None:
    """Refuse options that give other results over a sharded sequence.

    Args:
        args: the training arguments.
        has_loss: whether a loss function was given.
        adapters: the configs of the adapters that peft added to the model.

    Raises:
        ValueError: naming the option and what to do.
    """
    for is_refused, why in (
        (
            not args.average_tokens_across_devices,
            "average_tokens_across_devices=False would weight tokens by the batch they are in; "
            "leave it True",
        ),
        (
            args.label_smoothing_factor or has_loss,
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
            "dispatch_batches=True and train_sampling_strategy='batch_rebalance' shard rows to "
            "every rank, and those of cp share a batch; leave them out",
        ),
        (
            args.neftune_noise_alpha is not None,
            "neftune_noise_alpha scales noise by the tokens that a rank holds; leave it out",
        ),
        (
            args.use_liger_kernel,
            "use_liger_kernel replaces the forward that the plan wraps; leave it out, the plan "
            "makes the loss without whole logits itself",
        ),
        (
            getattr(args, "predict_with_generate", False),
            "predict_with_generate=True needs a cache of the whole sequence; leave it out, and "
            "generate with the stock model",
        ),
        (has_alora(adapters), NO_ALORA),
    ):
        if is_refused:
            raise ValueError(why)


def check_weights(model: nn.Module) -> None:
    """Refuse ranks with different weights, because FSDP2 would combine them into one model.

    Raises:
        ValueError: on every rank, if weights differ.
    """
    group = dist.distributed_c10d._get_default_group()
    check_agreement(
        group,
        {"weights": checksum(model, group)},
        "start from the same weights (set a seed before the model is made, or load them with "
        "fsdp_config={'cpu_ram_efficient_loading': False}, as the plan needs them on every rank)",
    )


# Set by `accelerate launch`, and by each `Accelerator` that shards, for all later ones.
FSDP = "ACCELERATE_USE_FSDP"


def forget_earlier(args: Any, config: type) -> None:
    """Reset what an earlier trainer set in accelerate, if it is newer than these arguments.

    Arguments that are newer than that trainer have reset it themselves.

    Args:
        args: the training arguments.
        config: the type of parallelism config that only our trainers set.
    """
    from accelerate.state import AcceleratorState

    if isinstance(AcceleratorState._shared_state.get("parallelism_config"), config):
        vars(args).pop("_setup_devices", None)
        assert args.device is not None, "looks for it once more, and resets the state"


def as_launched() -> AbstractContextManager[None]:
    """Return a context that restores the FSDP variable of the environment at its end."""
    from accelerate.utils import parse_flag_from_env, patch_environment

    return patch_environment(**{FSDP: parse_flag_from_env(FSDP)})


def fsdp_plugin(args: Any, state: Any) -> Any:
    """Return accelerate's FSDP options, `None` without FSDP. Accelerate drops them on a CPU."""
    from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env

    found = getattr(state, "fsdp_plugin", None)
    if found is not None:
        return found
    if args.fsdp_plugin_args is not None:
        return FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    # The plugin reads the options of `accelerate launch` itself.
    return FullyShardedDataParallelPlugin() if parse_flag_from_env(FSDP) else None
