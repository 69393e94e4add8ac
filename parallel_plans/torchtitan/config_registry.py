"""Training configs of torchtitan with ring attention.

`torchtitan.train --module parallel_plans.torchtitan --config ...` names these functions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from torchtitan.components.validate import Validator
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.decoder import Decoder
from torchtitan.models.common.rope import RoPE
from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
from torchtitan.models.deepseek_v3.mtp import MTPLoss
from torchtitan.models.gpt_oss import config_registry as gpt_oss
from torchtitan.models.llama3 import config_registry as llama3
from torchtitan.models.qwen3 import config_registry as qwen3
from torchtitan.trainer import Trainer

from parallel_plans.torchtitan.decoder import use_ring
from parallel_plans.torchtitan.inner_attention import RingSelectiveAC
from parallel_plans.torchtitan.multi_token import RingMTPLoss
from parallel_plans.torchtitan.training import RingTrainer, RingValidator


def with_ring(
    config: Trainer.Config,
    layout: str = "zigzag",
    kernel: str | None = None,
    grad_dtype: str | None = None,
    strategy: str | dict[str, str] | None = None,
    machine: str | None = None,
    kv_dtype: str | None = None,
) -> RingTrainer.Config:
    """Put ring attention and a trainer that shards tokens into any text config of torchtitan.

    Args:
        config: a training config; it is changed in place, so do not use it afterwards.
        layout: name of the layout.
        kernel: name of the block kernel, see `use_ring`.
        grad_dtype: name of the dtype in which sums of gradients travel, see `use_ring`.
        strategy: how attention is made parallel, see `use_ring`.
        machine: what the strategy "auto" simulates, see `use_ring`.
        kv_dtype: name of the dtype in which keys and values travel, see `use_ring`.

    Raises:
        ValueError: if the config has no model, a model that a ring cannot serve, see `use_ring`, or
            a trainer or validator that is not torchtitan's.

    Example:
        >>> config = with_ring(llama3.llama3_debugmodel(), "striped")
        >>> config.parallelism.context_parallel_degree = 4
    """
    spec = config.model_spec
    if spec is None:
        raise ValueError("the config has no model_spec, so no model to put a ring into")
    for part, kind in ((config, Trainer), (config.validator, Validator)):
        if type(part) is not kind.Config:
            raise ValueError(
                f"the ring brings a {kind.__name__} of its own, in place of torchtitan's, got "
                f"{type(part).__qualname__}; subclass RingTrainer and RingValidator, and put the "
                "ring into the model by use_ring"
            )
    use_ring(
        cast(Decoder.Config, spec.model),
        layout,
        kernel,
        grad_dtype=grad_dtype,
        strategy=strategy,
        machine=machine,
        kv_dtype=kv_dtype,
    )
    checkpointing = config.activation_checkpoint
    if type(checkpointing) is SelectiveAC.Config:
        checkpointing = derive(checkpointing, RingSelectiveAC.Config)
    if type(config.loss) is MTPLoss.Config:
        config.loss = derive(config.loss, RingMTPLoss.Config)
    config.training.disable_cuda_graphs = True  # the host plans each batch's documents
    return derive(
        config,
        RingTrainer.Config,
        activation_checkpoint=checkpointing,
        validator=derive(config.validator, RingValidator.Config),
    )


def llama3_debugmodel_ring() -> RingTrainer.Config:
    """Return a config of 6 layers over a ring of 2, for any multiple of 2 processes."""
    return _debug(llama3.llama3_debugmodel())


def qwen3_debugmodel_ring() -> RingTrainer.Config:
    """Return a config with grouped queries, and normalized queries and keys."""
    return _debug(qwen3.qwen3_debugmodel())


def gpt_oss_debugmodel_ring() -> RingTrainer.Config:
    """Return a config with sliding windows in every other layer, attention sinks and experts."""
    return _debug(gpt_oss.gpt_oss_debugmodel())


def deepseek_v3_debugmodel_ring() -> RingTrainer.Config:
    """Return a config with latent attention, whose values have another head dim, and experts."""
    return _debug(deepseek_v3.deepseek_v3_debugmodel())


def deepseek_v3_mtp_debugmodel_ring() -> RingTrainer.Config:
    """Return a config with a head of multi-token prediction beside the main one."""
    return _debug(deepseek_v3.deepseek_v3_debugmodel_mtp())


def llama3_8b_ring_128k() -> RingTrainer.Config:
    """Return a config of 131,072 tokens over a ring of 8."""
    return _long(llama3.llama3_8b(), seq_len=2**17, context=8)


def llama3_70b_ring_1m() -> RingTrainer.Config:
    """Return a config of 1,048,576 tokens: a ring of 32, and heads over 8, so 256 GPUs.

    Positions are extended to 8 times those of Llama 3.
    """
    config = llama3.llama3_70b()
    _extend(config, factor=8)
    return _long(config, seq_len=2**20, context=32, tensor=8)


def qwen3_32b_ring_32k() -> RingTrainer.Config:
    """Return a config of 32,768 tokens over a ring of 8."""
    return _long(qwen3.qwen3_32b(), seq_len=2**15, context=8)


def gpt_oss_20b_ring_128k() -> RingTrainer.Config:
    """Return a config of 131,072 tokens over a ring of 8."""
    return _long(gpt_oss.gpt_oss_20b(), seq_len=2**17, context=8)


def deepseek_v3_16b_ring_16k() -> RingTrainer.Config:
    """Return a config of 16,384 tokens over a ring of 8, with experts over the same ranks."""
    config = deepseek_v3.deepseek_v3_16b()
    config.parallelism.expert_parallel_degree = 8
    return _long(config, seq_len=2**14, context=8)


def _debug(config: Trainer.Config) -> RingTrainer.Config:
    config.parallelism.context_parallel_degree = 2
    return with_ring(config)


def _long(
    config: Trainer.Config, seq_len: int, context: int, tensor: int = 1
) -> RingTrainer.Config:
    """Set one sequence of `seq_len` tokens per step, over `context * tensor` ranks."""
    config.training.seq_len, config.training.local_batch_size = seq_len, 1
    config.parallelism.context_parallel_degree = context
    config.parallelism.tensor_parallel_degree = tensor
    config.activation_checkpoint = RingSelectiveAC.Config()
    return with_ring(config)


def _extend(config: Trainer.Config, factor: int) -> None:
    """Extend the positions of a model by a factor.

    The base grows by `factor ** (H / (H - 2))`, as in "NTK-aware" interpolation (Peng et al., 2023,
    arXiv 2309.00071, section 3.1).
    """
    assert config.model_spec is not None
    found: Any = config.model_spec.model.traverse(RoPE.Config)
    for _, rope, parent, name in found:
        longer = replace(
            rope,
            max_seq_len=rope.max_seq_len * factor,
            # NTK-aware: the lowest frequency turns as far over the longer sequence as before.
            theta=rope.theta * factor ** (rope.dim / (rope.dim - 2)),
        )
        setattr(parent, name, longer)
