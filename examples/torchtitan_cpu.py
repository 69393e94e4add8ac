"""torchtitan on CPUs over gloo, to try and to test configs where there is no GPU.

    torchrun --nproc-per-node 2 -m examples.torchtitan_cpu --module ... --config ...

Takes what `torchtitan.train` takes. Nobody with a GPU needs this file.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor


def use_cpu() -> None:
    """Let torchtitan take the CPU for its device; before anything of it is imported.

    Raises:
        RuntimeError: if torchtitan has taken another device already.
    """
    with (
        patch("torch._utils._get_available_device_type", lambda: "cpu"),
        patch("torch._utils._get_device_module", lambda _: _device_module()),
    ):
        from torchtitan.tools.utils import device_type
    if device_type != "cpu":
        raise RuntimeError(f"torchtitan was imported before, and took {device_type} for its device")


def _device_module() -> Any:
    """`torch.cpu`, with what torchtitan asks of an accelerator."""
    asked = {
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "empty_cache": lambda: None,
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=1),
        "memory_stats": lambda *_: {},
        "reset_peak_memory_stats": lambda *_: None,
    }
    return SimpleNamespace(**vars(torch.cpu) | asked)


def sum_over_gloo(config: Any) -> Any:
    """The config, its gradients summed up in a way that gloo knows."""
    config.model_spec.parallelize_fn = _summing(config.model_spec.parallelize_fn)
    return config


def _summing(parallelize: Callable[..., Any]) -> Callable[..., Any]:
    from torch.distributed.fsdp import FSDPModule

    def run(*args: Any, **kwargs: Any) -> Any:
        model = parallelize(*args, **kwargs)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return run


def all_to_all_over_gloo(outputs: list[Tensor], inputs: list[Tensor], group: Any = None) -> None:
    """`dist.all_to_all` of tokens to experts, whose lists gloo takes only if all are as long."""
    sizes = ([len(x) for x in given] for given in (outputs, inputs))
    received = torch.cat(outputs)
    dist.all_to_all_single(received, torch.cat(inputs), *sizes, group=group)
    for output, part in zip(outputs, received.split([len(x) for x in outputs]), strict=True):
        output.copy_(part)


def install() -> None:
    """Let torchtitan's own entry point run on the CPU."""
    use_cpu()
    dist.all_to_all = all_to_all_over_gloo
    from torchtitan.config import ConfigManager

    parse = ConfigManager.parse_args
    setattr(ConfigManager, "parse_args", lambda *args: sum_over_gloo(parse(*args)))  # noqa: B010


def main() -> None:
    """`torchtitan.train` on the CPU."""
    install()
    from torchtitan import train

    train.main()


if __name__ == "__main__":
    main()
