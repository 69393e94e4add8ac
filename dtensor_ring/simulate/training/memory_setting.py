"""What a training step may do to take less memory of a device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from dtensor_ring.planning.ranges import as_count
from dtensor_ring.transport.transport import DEFAULT_POLICY, TransferPolicy

# How much of a layer its backward computes again: nothing; all but its attention; all of it.
CHECKPOINTS = ("none", "attention", "full")

# What may live on the host: what layers with checkpoints keep until their backward; parameters,
# their gradients and the states of AdamW, as `CPUOffloadPolicy` of FSDP2 does it.
OFFLOADS = ("checkpoints", "optimizer")


class MemorySetting(NamedTuple):
    """What a training step does to take less memory.

    Attributes:
        checkpoint: one of `CHECKPOINTS`.
        mlp_tile: tokens of a rank that MLPs, experts and norms run on at once; they are computed
            again in backward. `None` for all tokens.
        offload: which of `OFFLOADS` live on the host.
        policy: in which dtype keys and values travel, and how many partial results a rank keeps.

    >>> print(MemorySetting("full", 4096, ("checkpoints",)))
    full checkpoints, MLP tiles of 4,096, checkpoints on the host
    """

    checkpoint: str = "none"
    mlp_tile: int | None = None
    offload: tuple[str, ...] = ()
    policy: TransferPolicy = DEFAULT_POLICY

    def __str__(self) -> str:
        named = [f"{self.checkpoint} checkpoints" if self.checkpoint != "none" else "nothing"]
        if self.mlp_tile is not None:
            named.append(f"MLP tiles of {self.mlp_tile:,}")
        if self.offload:
            named.append(f"{' and '.join(self.offload)} on the host")
        if self.policy.num_parts is not None:
            named.append(f"num_parts={self.policy.num_parts}")
        if self.policy.kv_dtype is not None:
            named.append(f"keys as {str(self.policy.kv_dtype).removeprefix('torch.')}")
        # Something else makes "nothing" wrong.
        return ", ".join(named[1:] if named[0] == "nothing" and len(named) > 1 else named)

    def as_json(self) -> dict[str, Any]:
        """Return its fields, as the command prints them in JSON."""
        kind = self.policy.kv_dtype
        return {
            "checkpoint": self.checkpoint,
            "mlp_tile": self.mlp_tile,
            "offload": list(self.offload),
            "kv_dtype": None if kind is None else str(kind).removeprefix("torch."),
            "num_parts": self.policy.num_parts,
        }


def memory_setting(
    checkpoint: Any = "none", mlp_tile: Any = None, offload: Any = (), policy: Any = None
) -> MemorySetting:
    """Check the fields of a `MemorySetting`.

    Raises:
        TypeError: if a field is of another type.
        ValueError: if a name is unknown or there twice, a number is out of range, or checkpoints
            go to the host where there are none.

    >>> memory_setting("full", offload=["checkpoints"]).offload
    ('checkpoints',)
    """
    if not isinstance(checkpoint, str) or checkpoint not in CHECKPOINTS:
        raise ValueError(f"checkpoint must be one of {', '.join(CHECKPOINTS)}, got {checkpoint!r}")
    if isinstance(offload, str) or not isinstance(offload, Iterable):
        raise TypeError(
            f"offload must be a list of names, such as ['checkpoints'], got {offload!r}"
        )
    names = tuple(offload)
    if not set(names) <= set(OFFLOADS) or len(set(names)) < len(names):
        raise ValueError(
            f"offload takes {' and '.join(OFFLOADS)}, each once, got {', '.join(map(str, names))}"
        )
    if "checkpoints" in names and checkpoint == "none":
        raise ValueError(
            "offload of checkpoints needs checkpoint 'full' or 'attention', got 'none': without "
            "checkpoints there is nothing to bring to the host"
        )
    policy = DEFAULT_POLICY if policy is None else policy
    if not isinstance(policy, TransferPolicy):
        raise TypeError(f"policy must be a TransferPolicy, got {policy!r}")
    tile = None if mlp_tile is None else as_count("mlp_tile", mlp_tile, 1)
    return MemorySetting(checkpoint, tile, names, policy)
