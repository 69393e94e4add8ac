"""The options of a continuous batch, as transformers' config has them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch

# Fields of transformers' ContinuousBatchingConfig that mean the same here.
KNOWN = ("page_size", "num_blocks", "max_batch_tokens", "max_requests_per_batch")
KNOWN += ("return_logprobs", "seed")
# Fields about other devices, drivers or a thread, of which there is none here.
IGNORED = ("auto_switch_to_flash", "disable_nccl_graph_mixing", "cpu_group_timeout")
IGNORED += ("max_memory_percent", "cpu_offload_space_safety_threshold", "max_queue_size")
IGNORED += ("drop_unsupported_processors",)


@dataclass(frozen=True)
class ServingOptions:
    """The options of a continuous batch.

    Attributes:
        page_size: tokens of a block; 256 on a GPU, as some of its kernels need, else 64.
        num_blocks: the number of blocks of each rank; `None` for what all requests need.
        max_batch_tokens: the largest number of tokens of a step.
        max_requests_per_batch: the largest number of requests that hold blocks.
        return_logprobs: whether outputs have the log-probabilities of their tokens.
        seed: the seed of the first request; `None` to draw one from PyTorch's random state.
    """

    page_size: int = 64
    num_blocks: int | None = None
    max_batch_tokens: int = 2048
    max_requests_per_batch: int = 64
    return_logprobs: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ValueError: naming the one that does not fit.
        """
        if not 1 <= self.max_requests_per_batch <= self.max_batch_tokens:
            raise ValueError(
                "each request needs a token of a step: max_requests_per_batch must be from 1 to "
                f"max_batch_tokens={self.max_batch_tokens}, got {self.max_requests_per_batch}"
            )

    @classmethod
    def of(cls, config: Any, device: torch.device) -> ServingOptions:
        """Return the options in a `ContinuousBatchingConfig`, or the defaults for `None`.

        Raises:
            ValueError: if the config asks for something else.
        """
        if config is None:
            return cls(page_size=64 if device.type == "cpu" else 256)
        for field in fields(config):
            value, default = getattr(config, field.name), field.default
            is_asked = value != default and (value or default)  # None and False ask for nothing
            if field.name not in KNOWN + IGNORED and is_asked:
                raise ValueError(
                    f"{field.name}={value!r} of continuous_batching_config is not supported over a "
                    f"sharded pool, which knows {', '.join(KNOWN)}; leave it out"
                )
        given = {name: getattr(config, name) for name in KNOWN}
        return cls(**{name: x for name, x in given.items() if x is not None})
