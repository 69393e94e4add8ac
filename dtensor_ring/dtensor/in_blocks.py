"""Runs layers that treat each token by itself in blocks: the same bits on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dtensor_ring.dtensor.axis import SequenceAxis
from dtensor_ring.ops.axis_ops import gather_rows_op
from dtensor_ring.ops.checks import canonical
from dtensor_ring.planning.block_order import (
    Node,
    Tree,
    block_of,
    blocks_of,
    has_whole_blocks,
    nodes_of,
)
from dtensor_ring.planning.layout import WholeBlocks
from dtensor_ring.planning.ranges import Span, as_count, as_int


class InBlocks(nn.Module):
    """A module that treats each token by itself, run on one block of the sequence at a time.

    A product of matrices adds in an order that fits their shape, so the bits of a layer depend on
    how many tokens a rank has, and the gradient of a weight on which ones. This module calls the
    other one with the blocks of a fixed order, see `TransferPolicy`, and sums the gradients of its
    parameters over the blocks of **all ranks** by a fixed tree: the same bits on every rank, and
    on any number of them. So nothing else may sum or average these gradients over the axis.
    Backward gathers them: a rank with its blocks side by side sends a few times what an all-reduce
    sends.

    Args:
        module: takes tensors and returns one, all with the tokens in one dimension. It must have no
            dropout, and no buffers that change.
        axis: the axis. Its policy has `order="fixed"`, and its layout must not cut blocks.
        dim: the dimension of the tokens.

    Raises:
        TypeError: if an argument has a wrong type.
        ValueError: if the policy of the axis has no fixed order.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> axis = SequenceAxis(mesh, "contiguous", policy=TransferPolicy(order="fixed"))
        >>> layer = InBlocks(torch.nn.Linear(4, 6), axis)
        >>> layer(torch.randn(2, 64, 4)).shape
        torch.Size([2, 64, 6])
    """

    def __init__(self, module: nn.Module, axis: SequenceAxis, dim: int = 1) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}")
        if not isinstance(axis, SequenceAxis):
            raise TypeError(f"axis must be a SequenceAxis, got {type(axis).__name__}")
        if axis.policy.order is None:
            raise ValueError(
                'InBlocks needs an axis with TransferPolicy(order="fixed"), got '
                f"{axis.policy}; without it layers need no blocks"
            )
        self.module, self.dim, self._axis = module, as_int("dim", dim), axis

    def forward(self, *tensors: Tensor, seq_len: int | None = None) -> Tensor:
        """Return what the module returns for the tokens of this rank.

        Args:
            tensors: local shards, with this rank's tokens in `dim`.
            seq_len: the global length, if ranks hold different numbers of tokens.

        Raises:
            ValueError: if the layout of the axis cuts a block, a rank has none, or the tensors do
                not have the tokens of this rank.
        """
        dim = canonical(self.dim, "tensor", tensors[0])
        length = tensors[0].shape[dim] * self._axis.mesh.size() if seq_len is None else seq_len
        blocks = _Blocks.of(self._axis, as_count("seq_len", length, 1))
        expected = sum(end - begin for begin, end in blocks.spans)
        if any(x.shape[dim] != expected for x in tensors):
            found = [x.shape[dim] for x in tensors]
            raise ValueError(f"this rank has {expected} of {length} tokens, got tensors of {found}")
        return torch.cat(self._outputs(tensors, blocks, dim), dim)

    def _outputs(self, tensors: Sequence[Tensor], blocks: _Blocks, dim: int) -> list[Tensor]:
        """Return the module's output for each block."""
        named, num = dict(self.module.named_parameters()), len(blocks.spans)
        copies: dict[str, Sequence[Any]] = {name: [x] * num for name, x in named.items()}
        if torch.is_grad_enabled():
            trained = {name: x for name, x in named.items() if x.requires_grad}
            copies |= {name: _Copies.apply(x, blocks) for name, x in trained.items()}
        outputs = []
        for number, (begin, end) in enumerate(blocks.spans):
            # Copy each block: where addresses are not aligned, products add in another order.
            parts = (x.narrow(dim, begin, end - begin) for x in tensors)
            own = tuple(x.clone(memory_format=torch.contiguous_format) for x in parts)
            of_block = {name: each[number] for name, each in copies.items()}
            outputs.append(functional_call(self.module, of_block, own))
        return outputs


class _Blocks(NamedTuple):
    """The blocks of this rank, and the nodes of gradients that each rank adds up.

    Attributes:
        numbers: numbers of the blocks of this rank.
        spans: their local tokens.
        count: number of blocks of the sequence.
        nodes: the nodes of each rank.
        rank: this rank.
        group_name: the process group of the axis.
    """

    numbers: tuple[int, ...]
    spans: tuple[Span, ...]
    count: int
    nodes: tuple[tuple[Node, ...], ...]
    rank: int
    group_name: str

    @classmethod
    def of(cls, axis: SequenceAxis, seq_len: int) -> _Blocks:
        """Return the blocks of this rank for a sequence.

        Raises:
            ValueError: if the layout of the axis cuts a block, or a rank has none.
        """
        block = axis.policy.block or block_of([seq_len])
        size, rank = axis.mesh.size(), axis.mesh.get_local_rank()
        if axis.layout.per_batch or not has_whole_blocks(axis.layout, size, seq_len, block):
            raise ValueError(
                f"InBlocks needs whole blocks of {block} tokens on each rank, and the "
                f"{axis.layout.spec} layout cuts {seq_len} tokens otherwise over {size} ranks; use "
                f"the layout {WholeBlocks(block).spec!r}"
            )
        by_rank = [blocks_of(axis.layout, x, size, seq_len, block) for x in range(size)]
        if not all(by_rank):
            raise ValueError(
                f"InBlocks needs a block for each rank, and {seq_len} tokens are fewer than {size} "
                f"blocks of {block}; pass TransferPolicy(block=) with fewer tokens"
            )
        count = -(-seq_len // block)
        nodes = tuple(tuple(nodes_of(own, range(count))) for own in by_rank)
        own, name = by_rank[rank], axis.mesh.get_group().group_name
        return cls(tuple(own), tuple(own.values()), count, nodes, rank, name)

    def summed(self, grads: Sequence[Tensor]) -> Tensor:
        """Return the sum of a gradient over the blocks of all ranks, by the tree."""
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        # The tree is that of the blocks, whatever the number of ranks, so the sum has the same
        # bits.
        own: Tree[Tensor] = Tree(range(self.count), torch.add)
        for number, grad in zip(self.numbers, grads, strict=True):
            own.add((0, number), grad.to(wide))
        # Four blocks, two on each rank: a rank adds up its two, and all add the gathered sums.
        #             (2, 0)
        #         (1, 0)    (1, 1)
        #         0    1    2    3
        #     rank  0            1
        if len(self.nodes) == 1:
            return own.result
        part = torch.stack([own.kept[node].reshape(-1) for node in self.nodes[self.rank]])
        rows = [len(nodes) for nodes in self.nodes]
        gathered = gather_rows_op(part, rows, self.rank, self.group_name)
        total: Tree[Tensor] = Tree(range(self.count), torch.add)
        every = [node for nodes in self.nodes for node in nodes]
        for node, row in zip(every, gathered, strict=True):
            total.add(node, row)
        return total.result.view(grads[0].shape)


class _Copies(torch.autograd.Function):
    """A parameter for each block; backward sums their gradients over the blocks of all ranks."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, blocks: _Blocks) -> tuple[Tensor, ...]:
        ctx.blocks = blocks
        return tuple(parameter.view_as(parameter) for _ in blocks.spans)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.blocks.summed(grads).to(grads[0].dtype), None
