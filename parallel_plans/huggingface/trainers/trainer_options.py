"""The mesh of a trainer, and options that conflict with a sharded sequence, which are refused."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.extension import check_agreement
from parallel_plans.huggingface.core.adapters import check_adapters
from parallel_plans.huggingface.core.meshes import check_sizes, mesh_of_sizes
from parallel_plans.huggingface.sharding.agreement import checksum_of_weights

# The order of accelerate, whose data loaders assume that ranks that share a batch are adjacent.
AXES = ("dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")


class MeshConfig(ParallelismConfig):
    """Describes our mesh to accelerate, whose own context parallelism stays off.

    Accelerate treats the ranks of `cp` as data-parallel ranks, over which it shards the model. Its
    data loaders read from the mesh which ranks share a batch.
    """

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        """Skip accelerate's check, which refuses CPUs; we have compared the mesh with the ranks."""


def trainer_mesh(
    mesh: DeviceMesh | None, config: ParallelismConfig | None, device_type: str
) -> DeviceMesh:
    """Return the mesh of all ranks: the given one, or one from a config or the environment.

    Raises:
        TypeError: if the mesh is not a `DeviceMesh`.
        ValueError: if both a mesh and a config are given, the axes are not in `AXES`, or the size
            of the mesh is not the number of started ranks.
    """
    if mesh is not None and not isinstance(mesh, DeviceMesh):
        raise TypeError(f"the mesh of a trainer is a DeviceMesh, got {type(mesh).__name__}")
    config = config or ParallelismConfig()  # it reads the environment that `accelerate launch` sets
    if mesh is None:
        return _mesh_of(config, device_type)
    if config.total_size > 1:
        raise ValueError(
            f"a mesh and a parallelism config were given ({_sizes(config)}, from TrainingArguments("
            "parallelism_config=...) or accelerate launch); leave one of them out"
        )
    names = mesh.mesh_dim_names or ()
    if "cp" not in names or list(names) != [axis for axis in AXES if axis in names]:
        raise ValueError(
            f"the mesh of a trainer has the axis 'cp', and others of {AXES} in this order, got "
            f"{mesh.mesh_dim_names}; see init_device_mesh(..., mesh_dim_names=...)"
        )
    _check_ranks({name: mesh[name].size() for name in names}, "mesh")
    if mesh.device_type != device_type:
        raise ValueError(
            f"the mesh is one of {mesh.device_type!r} devices and the trainer runs on "
            f"{device_type!r}; make it by init_device_mesh({device_type!r}, ...)"
        )
    return mesh


def _sizes(config: ParallelismConfig) -> dict[str, int]:
    return {name: getattr(config, f"{name}_size") for name in AXES}


def _mesh_of(config: ParallelismConfig, device_type: str) -> DeviceMesh:
    if (config.sp_size or 1) > 1:
        raise ValueError(
            f"sp_size={config.sp_size} is the sequence parallelism of DeepSpeed; say "
            f"cp_size={config.sp_size}"
        )
    strategy = getattr(config.cp_handler, "cp_comm_strategy", "allgather")
    if strategy != "allgather":  # the default, which the user need not have set
        raise ValueError(
            f"cp_comm_strategy={strategy!r} is one of torch's own context parallelism; leave "
            "cp_handler out and give plan={'strategy': ...}, see SequenceAxis"
        )
    sizes = _sizes(config)
    _check_ranks(sizes, "parallelism config")
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "cp"}
    return mesh_of_sizes(device_type, kept)


def _check_ranks(sizes: dict[str, int], what: str) -> None:
    if not dist.is_initialized():
        raise ValueError(
            "a context-parallel trainer needs a process group; start the script by torchrun or "
            "accelerate launch, with one process for each device"
        )
    check_sizes(
        sizes,
        what,
        "as with cp_size=N for N ranks that share a sequence: TrainingArguments("
        "parallelism_config=ParallelismConfig(cp_size=N)), or a mesh=... of the trainer",
    )


def flattened(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh | None:
    """Flatten those of `axes` that the mesh has into one axis; `None` if it has none."""
    kept = tuple(axis for axis in axes if axis in (mesh.mesh_dim_names or ()))
    if len(kept) <= 1:
        return mesh[kept[0]] if kept else None
    return mesh[kept]._flatten(name)


# The axis over which accelerate shards a model: `dp_shard` and `cp`, flattened.
SHARDED = "dp_shard_cp"


def mesh_config(mesh: DeviceMesh, is_sharded: bool) -> MeshConfig:
    """Return the config that describes a mesh to accelerate, with or without sharding."""
    sizes = {name: mesh[name].size() for name in mesh.mesh_dim_names or ()}
    num_shards = 1
    if is_sharded:
        kept = tuple(axis for axis in ("dp_shard", "cp") if axis in sizes)
        num_shards = mesh[kept]._flatten(SHARDED).size()
    # Set each size: accelerate would read missing ones from the environment.
    config = MeshConfig(
        dp_replicate_size=sizes.get("dp_replicate", 1) if is_sharded else 1,
        dp_shard_size=num_shards,
        cp_size=1,
        tp_size=1,
        sp_size=1,
    )
    config.device_mesh = mesh
    return config


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
    ):
        if is_refused:
            raise ValueError(why)
    check_adapters(adapters)


def check_weights(model: nn.Module) -> None:
    """Refuse ranks with different weights, because FSDP2 would combine them into one model.

    Raises:
        ValueError: on every rank, if weights differ.
    """
    group = dist.distributed_c10d._get_default_group()
    check_agreement(
        group,
        {"weights": checksum_of_weights(model, group)},
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
