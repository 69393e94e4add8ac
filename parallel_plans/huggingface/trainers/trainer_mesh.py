"""Makes the mesh of a trainer from a mesh or accelerate's `ParallelismConfig`."""

from __future__ import annotations

from math import prod

import torch.distributed as dist
from accelerate import Accelerator, ParallelismConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtensor_ring.extension import axis_group_options

# The order of accelerate, whose data loaders assume that ranks that share a batch are adjacent.
AXES = ("dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")
# The axis over which accelerate shards a model: `dp_shard` and `cp`, flattened.
SHARDED = "dp_shard_cp"


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
    options = axis_group_options(device_type)
    return init_device_mesh(
        device_type,
        tuple(kept.values()),
        mesh_dim_names=tuple(kept),
        backend_override=None if options is None else {"cp": options},
    )


def _check_ranks(sizes: dict[str, int], what: str) -> None:
    if not dist.is_initialized():
        raise ValueError(
            "a context-parallel trainer needs a process group; start the script by torchrun or "
            "accelerate launch, with one process for each device"
        )
    if prod(sizes.values()) != dist.get_world_size():
        listed = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise ValueError(
            f"the {what} has {prod(sizes.values())} ranks ({listed}), and the launcher started "
            f"{dist.get_world_size()}; their product must be that number, as with cp_size=N for N "
            "ranks that share a sequence: TrainingArguments(parallelism_config=ParallelismConfig("
            "cp_size=N)), or a mesh=... of the trainer"
        )


def flattened(mesh: DeviceMesh, axes: tuple[str, ...], name: str) -> DeviceMesh | None:
    """Flatten those of `axes` that the mesh has into one axis; `None` if it has none."""
    kept = tuple(axis for axis in axes if axis in (mesh.mesh_dim_names or ()))
    if len(kept) <= 1:
        return mesh[kept[0]] if kept else None
    return mesh[kept]._flatten(name)


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
