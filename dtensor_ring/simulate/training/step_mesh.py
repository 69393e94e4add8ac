"""The mesh of a simulated training step: which ranks share what."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from dtensor_ring.planning.ranges import MAX_RANKS, as_count
from dtensor_ring.simulate.machine import Machine
from dtensor_ring.simulate.training.collectives import RankGroup, rank_group
from dtensor_ring.simulate.training.model_shape import ModelShape

# Names as in torchtitan; "dp" is short for "dp_shard".
MESH_AXES = ("dp_replicate", "dp_shard", "cp", "tp")


class StepMesh(NamedTuple):
    """Ranks by axis, from the outermost to the innermost.

    Attributes:
        dp_replicate: copies of the parameters.
        dp_shard: batches of one copy; FSDP2 shards parameters over them and `cp` together.
        cp: ranks that share sequences.
        tp: ranks that share heads and weights; neighbours.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1

    @classmethod
    def of(cls, axes: Mapping[str, int], world_size: int | None = None) -> StepMesh:
        """Check the axes of a mesh.

        Args:
            axes: ranks by name; "dp" is "dp_shard".
            world_size: what they must multiply to, if it is given.

        Raises:
            TypeError: if it is no mapping, or a number is not an integer.
            ValueError: if a name is unknown or there twice, a number is out of range, or the
                product is another one.

        >>> StepMesh.of({"dp": 4, "cp": 8}).world_size
        32
        """
        if not isinstance(axes, Mapping):
            raise TypeError(f"mesh must be ranks by axis, such as {{'cp': 8}}, got {axes!r}")
        named = {"dp_shard" if name == "dp" else name: size for name, size in axes.items()}
        if not set(named) <= set(MESH_AXES) or len(named) < len(axes):
            raise ValueError(
                f"a mesh has axes of {', '.join(MESH_AXES)} and dp, which is dp_shard, each once; "
                f"got {', '.join(map(str, axes))}"
            )
        mesh = cls(
            **{name: as_count(f"{name} of mesh", x, 1, MAX_RANKS) for name, x in named.items()}
        )
        if world_size is not None and mesh.world_size != as_count("world_size", world_size):
            spelled = " x ".join(f"{name} {size}" for name, size in axes.items())
            raise ValueError(
                f"mesh {spelled} has {mesh.world_size} ranks, and world_size is {world_size}"
            )
        return mesh

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return prod(self)

    def shards(self, machine: Machine) -> RankGroup:
        """Return the ranks that FSDP2 shards parameters over."""
        return rank_group(machine, self.dp_shard * self.cp, self.tp)

    def replicas(self, machine: Machine) -> RankGroup:
        """Return the ranks that have the same shard."""
        return rank_group(machine, self.dp_replicate, self.dp_shard * self.cp * self.tp)

    def check(self, model: ModelShape, seq_len: int) -> None:
        """Refuse a model or length that this mesh does not divide.

        Raises:
            ValueError: if heads, inner sizes or tokens do not divide.
        """
        for layer in model.layers:
            for count, what in zip(layer.heads, ("heads", "key heads"), strict=True):
                self._divide(f"{count} {what} of {model.name}", count, "tp")
            for product in layer.mlp:
                if product.divided:
                    inner = min(product[:2], key=lambda size: size == model.hidden)
                    self._divide(f"the inner size {inner} of {model.name}", inner, "tp")
        self._divide(f"seq_len of {seq_len} tokens", seq_len, "cp")

    def _divide(self, what: str, size: int, axis: str) -> None:
        ranks = getattr(self, axis)
        if size % ranks:
            raise ValueError(f"{what} cannot be divided over the {ranks} ranks of {axis}")
