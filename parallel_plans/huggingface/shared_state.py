"""Accelerate's state, which all trainers of a process share: each begins as the first one does."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

FSDP = "ACCELERATE_USE_FSDP"
"""What `accelerate launch` sets, and each `Accelerator` that shards, for all that come after it."""


def forget_earlier(args: Any, config: type) -> None:
    """Drop what an earlier trainer told accelerate, if these arguments are older than it.

    Newer arguments have done so themselves.

    Args:
        args: the training arguments.
        config: of parallelism, the type that only our trainers tell.
    """
    from accelerate.state import AcceleratorState

    if isinstance(AcceleratorState._shared_state.get("parallelism_config"), config):
        vars(args).pop("_setup_devices", None)
        assert args.device is not None, "looks for it once more, and resets the state"


def as_launched() -> AbstractContextManager[None]:
    """A context after which the environment says of FSDP what the launcher said."""
    from accelerate.utils import parse_flag_from_env, patch_environment

    return patch_environment(**{FSDP: parse_flag_from_env(FSDP)})


def fsdp_plugin(args: Any, state: Any) -> Any:
    """Accelerate's options of FSDP, `None` without it; accelerate drops them on a CPU."""
    from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env

    found = getattr(state, "fsdp_plugin", None)
    if found is not None:
        return found
    if args.fsdp_plugin_args is not None:
        return FullyShardedDataParallelPlugin(**args.fsdp_plugin_args)
    # What `accelerate launch` was told, the plugin reads itself.
    return FullyShardedDataParallelPlugin() if parse_flag_from_env(FSDP) else None
