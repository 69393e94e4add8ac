"""Put ring attention into the training configs of torchtitan, without changes to torchtitan."""

from __future__ import annotations

from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.decoder import Decoder

from parallel_plans.torchtitan.decoder import use_ring
from parallel_plans.torchtitan.inner_attention import Documents, RingAttention, RingSelectiveAC
from parallel_plans.torchtitan.training import RingTrainer, RingValidator
from parallel_plans.torchtitan.transform_kernel import ring_kernel, ring_strategy

__all__ = [
    "Documents",
    "RingAttention",
    "RingSelectiveAC",
    "RingTrainer",
    "RingValidator",
    "ring_attention",
    "ring_checkpointing",
    "ring_kernel",
    "ring_strategy",
    "use_ring",
]


@override(target=Decoder.Config, description="ring attention over the context-parallel axis")
def ring_attention(
    config: Decoder.Config,
    *,
    layout: str = "zigzag",
    kernel: str | None = None,
    grad_dtype: str | None = None,
    strategy: str | dict[str, str] | None = None,
    machine: str | None = None,
    kv_dtype: str | None = None,
) -> Decoder.Config:
    """Put ring attention into all layers of a config, as an override; see `use_ring`.

    Use it from the command line, with any text config of torchtitan:

        --override.imports 'parallel_plans.torchtitan.ring_attention={"layout":"zigzag"}'

    Strategies are `"strategy":"ulysses:4"`, or by kind of layer
    `"strategy":{"sliding":"ring","full":"ulysses:4"}`. `"strategy":"auto"` chooses for each layer,
    and `"machine":"machine.json"` says by what.

    torchtitan's own trainers shard tokens in the zigzag layout, or in the contiguous one with
    `--parallelism.context_parallel_load_balancer None`. The trainers of
    `parallel_plans.torchtitan` shard tokens in any layout.
    """
    use_ring(config, layout, kernel, grad_dtype, strategy, machine, kv_dtype)
    return config


@override(target=SelectiveAC.Config, description="keep what rings return")
def ring_checkpointing(config: SelectiveAC.Config) -> RingSelectiveAC.Config:
    """Make selective checkpointing keep the results of rings; see `RingSelectiveAC`."""
    return derive(config, RingSelectiveAC.Config)
