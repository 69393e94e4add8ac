"""Resets accelerate's process-wide state, so that each trainer begins like the first one."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

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
