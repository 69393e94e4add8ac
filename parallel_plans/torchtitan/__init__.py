"""Ring attention in the training configs of torchtitan, without editing it."""

from __future__ import annotations

from torchtitan.config.override import derive, override
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.decoder import Decoder

from parallel_plans.torchtitan.attention import RingAttention
from parallel_plans.torchtitan.checkpoint import RingSelectiveAC
from parallel_plans.torchtitan.decoder import use_ring
from parallel_plans.torchtitan.documents import Documents
from parallel_plans.torchtitan.kernel import ring_kernel, ring_strategy
from parallel_plans.torchtitan.trainer import RingTrainer, RingValidator

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
) -> Decoder.Config:
    """Override: ring attention in all layers, see `use_ring`.

    From the command line, with any config of torchtitan for text:

        --override.imports 'parallel_plans.torchtitan.ring_attention={"layout":"zigzag"}'

    and with `"strategy":"ulysses:4"`, or `"strategy":{"sliding":"ring","full":"ulysses:4"}`, tokens
    are traded for heads, see `use_ring`.

    torchtitan's own trainers deal tokens zigzag, or contiguous with
    `--parallelism.context_parallel_load_balancer None`; those of `parallel_plans.torchtitan` in
    any layout.
    """
    use_ring(config, layout, kernel, grad_dtype, strategy)
    return config


@override(target=SelectiveAC.Config, description="keep what rings return")
def ring_checkpointing(config: SelectiveAC.Config) -> RingSelectiveAC.Config:
    """Override: selective checkpointing runs ring attention only once, see `RingSelectiveAC`."""
    return derive(config, RingSelectiveAC.Config)
