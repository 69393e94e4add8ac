"""The sizes of a layer that carries a state: what its scans send, and what its kernels compute."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from dtensor_ring.lab.training.model_source import NotSimulated
from dtensor_ring.states.run import Maps

# Tokens of a chunk of a gated delta rule.
CHUNK = 64


class StateShape(NamedTuple):
    """A convolution over few tokens, and the recurrence after it, if there is one.

    Attributes:
        channels: numbers of a token that go through the convolution.
        reach: earlier tokens that the convolution reads.
        gates: numbers of a token that others are multiplied by.
        groups: heads of keys, which may serve several heads.
        heads: heads of states; 0 for a convolution alone.
        head_dims: numbers of a key and of a value of a head; a state has their product.
        has_matrix: whether a delta rule leaves a matrix times the state before, for each head; else
            that is a factor, as in Mamba 2 (Dao and Gu, 2024, arXiv 2405.21060).
        chunk: tokens of a chunk of the kernels.
    """

    channels: int
    reach: int
    gates: int
    groups: int = 0
    heads: int = 0
    head_dims: tuple[int, int] = (0, 0)
    has_matrix: bool = False
    chunk: int = CHUNK

    @property
    def values(self) -> int:
        """Numbers of a token of all values, which is what the recurrence returns."""
        return self.heads * self.head_dims[1]

    @property
    def name(self) -> str:
        """What reports call it, such as "32 states of 128 x 128"."""
        if not self.heads:
            return f"convolution of {self.channels}"
        return f"{self.heads} states of {self.head_dims[0]} x {self.head_dims[1]}"

    def divided(self, ranks: int) -> StateShape:
        """Return what a rank of tensor parallelism has."""
        fields = "channels", "gates", "groups", "heads"
        return self._replace(**{name: getattr(self, name) // ranks for name in fields})

    def maps(self, num_runs: int, batch: int) -> list[Maps]:
        """Return the maps of a rank's runs, without content, in the order of the layer's scans."""

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(num_runs, batch, *shape, device="meta")

        found = [Maps(empty(self.reach, self.channels))]
        (key, value), heads = self.head_dims, self.heads
        if heads and self.has_matrix:
            found.append(Maps(empty(heads, key, value), matrix=empty(heads, key, key)))
        elif heads:
            found.append(Maps(empty(heads, key, value), decay=empty(heads)))
        return found

    def flops(self, is_sharded: bool) -> int:
        """Return the FLOPs of a forward by token, of kernels that compute chunk by chunk.

        Tokens of a chunk see one another, and the state before the chunk (Yang et al., 2024,
        arXiv 2412.06464).

        Args:
            is_sharded: whether a state comes from another rank: a delta rule then has further
                columns of values, and Mamba 2 reads that state.
        """
        key, value = self.head_dims
        if self.has_matrix:
            value += key if is_sharded else 0
            return 2 * self.heads * (self.chunk * (3 * key + 2 * value) + 3 * key * value)
        states = 3 if is_sharded else 2
        inside = self.groups * key + self.heads * value
        return 2 * (self.chunk * inside + states * self.heads * key * value)

    def passes(self, is_sharded: bool) -> int:
        """Return how many numbers of a token the kernels of a forward read and write."""
        convolution = 2 * self.channels + 3 * self.gates
        states = 2 * self.heads * self.head_dims[0] * self.head_dims[1] // self.chunk
        # What another rank's state adds is made, read, and added to an output.
        added = 4 * self.values if is_sharded else 0
        return convolution + self.channels + self.values + states + added

    def bytes(self, itemsize: int) -> tuple[int, int, int]:
        """Return the bytes by token that are kept, and that forward and backward need besides.

        They are those of flash-linear-attention's `chunk_gated_delta_rule`, which keeps its inputs
        and a triangle of each chunk, and computes states of chunks again in backward; without
        triangles in other layers.

        Args:
            itemsize: bytes of a number between layers.
        """
        triangles = self.heads * self.chunk * self.has_matrix
        # A convolution's input and output, the gates, and the result with its norm.
        kept = (2 * self.channels + self.gates + triangles + 2 * self.values) * itemsize
        kept += 2 * self.values * max(4, itemsize)
        states = self.heads * self.head_dims[0] * self.head_dims[1] // self.chunk
        # States of chunks, two tensors as large as values, and gradients of all inputs.
        backward = states + 4 * self.values + self.channels
        return kept, states * itemsize, backward * itemsize


def state_of(module: nn.Module) -> StateShape | None:
    """Return the state of a module that has a convolution over tokens; `None` for another one.

    It is read from the names that modules of transformers have for sizes of a state.

    Raises:
        ValueError: if it is a state of another kind.
    """
    convolutions = [x for x in module.modules() if isinstance(x, nn.Conv1d)]
    if not convolutions:
        return None
    channels = sum(x.out_channels for x in convolutions)
    reach = convolutions[0].kernel_size[0] - 1

    def size(*names: str) -> int:
        return next((x for x in (getattr(module, y, None) for y in names) if x), 0)

    heads = size("num_v_heads", "num_heads")
    value, states = size("head_v_dim", "head_dim"), size("ssm_state_size")
    if heads and value and states:
        dims, groups = (states, value), size("n_groups")
        chunk = size("chunk_size")
        return StateShape(channels, reach, heads * value, groups, heads, dims, False, chunk)
    if heads and value:
        dims, groups = (size("head_k_dim") or value, value), size("num_k_heads") or heads
        return StateShape(channels, reach, heads * value, groups, heads, dims, True)
    others = [x for x in module.modules() if not isinstance(x, (nn.Linear, nn.Conv1d))]
    if heads or states or any(next(x.parameters(recurse=False), None) is not None for x in others):
        raise NotSimulated(
            f"{type(module).__name__} is a layer with a state that is not simulated: only gated "
            "and Kimi delta rules, Mamba 2 and convolutions are"
        )
    return StateShape(channels, reach, 2 * channels)
