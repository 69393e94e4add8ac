"""Computes the pieces of a step, and adds them up in a fixed order, see Note [Fixed order].

A number of a sum is computed with elementwise sums, products and quotients only, so its bits do not
depend on what else is in a tensor. Kernels are asked for the same, see `Kernel.bitwise_by_block`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from dtensor_ring.compute.exact import exact_exp, exact_log, tree_sum
from dtensor_ring.compute.execute import Pair
from dtensor_ring.compute.kernels.kernel import Kernel, Launch, Saved, Scores
from dtensor_ring.compute.memory import (
    TOKEN_MAJOR,
    Region,
    cols_of,
    columns,
    empty,
    order_of,
    part_of,
    region,
    rows_of,
    unpack,
)
from dtensor_ring.compute.trace import Label
from dtensor_ring.planning.block_order import BlockOrder, BlockPair, Node, Tree
from dtensor_ring.planning.demand import Cols
from dtensor_ring.planning.plan import Step
from dtensor_ring.planning.ranges import Span, length, moved
from dtensor_ring.planning.tile import Tile


class Mean(NamedTuple):
    """Outputs of some rows over some keys: `out / total`, and `lse = top + log(total)`.

    Attributes:
        out: `(B, N, R, Hv)`, in the kernel's dtype if it is the result of a launch, else wide.
        top: the largest lse of the launches in it, `(B, N, R)`, wide.
        total: the sum of their weights, `exp(lse - top)`.
    """

    out: Tensor
    top: Tensor
    total: Tensor

    @classmethod
    def of(cls, out: Tensor, lse: Tensor) -> Mean:
        """Return the result of a launch."""
        return cls(out, lse, torch.ones_like(lse))

    def region(self, where: Region) -> Mean:
        """Return views of a region."""
        return Mean._make(part_of(x, where) for x in self)

    def joined(self, other: Mean) -> Mean:
        """Return the outputs over the keys of both; it may overwrite both."""
        # Weights are relative to the larger top: none exceeds 1, and sums of them do not overflow.
        # Rows that neither side has seen, and rows of infinite scores, have no difference.
        lag = torch.where(self.top == other.top, 0.0, self.top - other.top)
        smaller = exact_exp(-lag.abs())
        # One of both weights is 1.
        ours, theirs = torch.where(lag < 0, smaller, 1.0), torch.where(lag > 0, smaller, 1.0)
        # No comparison with a nan is true, so both weights would be 1, and hide it.
        ours, theirs = (torch.where(lag.isnan(), lag, x) for x in (ours, theirs))
        # A fused product and sum would round once in vectors, and twice elsewhere.
        out = self.out.to(lag.dtype).mul_(ours.unsqueeze(-1))
        out.add_(other.out.to(lag.dtype).mul_(theirs.unsqueeze(-1)))
        total = (self.total * ours).add_(other.total * theirs)
        return Mean(out, torch.maximum(self.top, other.top), total)


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Return a sum in float32 or wider; it may overwrite the first."""
    return first.to(torch.promote_types(first.dtype, torch.float32)).add_(second)


def _pair_sum(first: Pair, second: Pair) -> Pair:
    return _sum(first[0], second[0]), _sum(first[1], second[1])


class OrderedOutput:
    """The output and lse of the local queries, merged in a fixed order.

    Args:
        query: the local queries `(B, N, L, H)`.
        value_head_dim: head dim of the outputs.
        sinks: one logit for each head `(N,)`, or `None`.
        order: the order of the plan.
    """

    def __init__(
        self, query: Tensor, value_head_dim: int, sinks: Tensor | None, order: BlockOrder
    ) -> None:
        self._query, self._head_dim, self._sinks, self._order = query, value_head_dim, sinks, order
        self._trees = {x: Tree(keys, Mean.joined) for x, keys in order.keys_of.items() if keys}

    def step(
        self, step: Step, kv: Pair, kernel: Kernel, scores: Scores, label: Label, in_flight: bool
    ) -> None:
        """Compute the pieces of a step.

        Args:
            step: the step.
            kv: resident keys and values.
            kernel: the block kernel.
            scores: how a query scores a key.
            label: names this step in a profile.
            in_flight: whether messages are in flight.
        """
        for piece in self._order.pieces[step.number]:
            with label("tile"):
                results = []
                for tile, launch in _launches(piece, in_flight):
                    q, k, v = _inputs(tile, self._query, kv)
                    results.append(kernel.forward(q, k, v, launch, scores))
            # A leaf is merged at once, so its partial results need not be kept.
            with label("merge"):
                number, key_block = piece.blocks
                self._trees[number].add((0, key_block), self._leaf(piece, results))

    def nodes(self, number: int) -> dict[Node, Mean]:
        """Return the nodes that are added up so far for a block of queries that sees keys."""
        return self._trees[number].kept

    def add(self, number: int, node: Node, mean: Mean) -> None:
        """Add a node that another rank added up for a block of queries; it may be overwritten."""
        self._trees[number].add(node, mean)

    def message(self, num_nodes: int) -> Tensor:
        """Return memory for nodes: out, top and total of queries, `(nodes, B, N, L, Hv + 2)`."""
        query = self._query
        wide = torch.promote_types(query.dtype, torch.float32)
        return query.new_empty((num_nodes, *query.shape[:3], self._head_dim + 2), dtype=wide)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return `out` `(B, N, L, Hv)`, in the query's memory order, and `lse` `(B, N, L)`."""
        query = self._query
        wide = torch.promote_types(query.dtype, torch.float32)
        out = empty(query, (*query.shape[:3], self._head_dim), order_of(query))
        lse = query.new_empty(query.shape[:3], dtype=wide)
        for number, span in self._order.rows.items():
            tree = self._trees.get(number)
            mean = self._nothing(length(span)) if tree is None else tree.result
            if self._sinks is not None:  # a sink is one more key, whose value is 0
                sinks = self._sinks.to(wide).view(1, -1, 1).expand_as(mean.top)
                mean = mean.joined(Mean.of(torch.zeros_like(mean.out), sinks))
            columns(out, span).copy_(mean.out.to(wide).div_(mean.total.unsqueeze(-1)))
            columns(lse, span).copy_(exact_log(mean.total).add_(mean.top))
        return out, lse

    def _leaf(self, piece: BlockPair, results: list[tuple[Tensor, Tensor]]) -> Mean:
        """Return the merged results of the tiles of a piece, for all rows of its block."""
        # The one tile of a whole piece has all rows: there is nothing to fill up.
        if piece.is_whole[0]:
            out, lse = results[0]
            return Mean.of(out, lse)
        rows = self._order.rows[piece.blocks[0]]
        whole = self._nothing(length(rows))
        for tile, (out, lse) in zip(piece.tiles, results, strict=True):
            here = whole.region(region(tile.batch, moved(tile.rows, -rows[0])))
            for x, merged in zip(here, here.joined(Mean.of(out, lse)), strict=True):
                x.copy_(merged)
        return whole

    def _nothing(self, num_rows: int) -> Mean:
        """Return the outputs of rows that see nothing."""
        query = self._query
        wide = torch.promote_types(query.dtype, torch.float32)
        shape = *query.shape[:2], num_rows
        out = empty(query, (*shape, self._head_dim), TOKEN_MAJOR, wide).zero_()
        return Mean.of(out, query.new_full(shape, -torch.inf, dtype=wide))


class OrderedGradients:
    """The gradients of the local query, key and value, summed in a fixed order.

    Args:
        query: the local queries `(B, N, L, H)`.
        shard: the local keys and values.
        order: the order of the plan.
    """

    def __init__(self, query: Tensor, shard: Pair, order: BlockOrder) -> None:
        self._query, self._shard, self._order = query, shard, order
        self._of_queries = {x: Tree(keys, _sum) for x, keys in order.keys_of.items() if keys}
        self._own = self._trees(order.cols)
        self._of_others: dict[int, Tree[Pair]] = {}

    def step(
        self, step: Step, saved: Saved, kv: Pair, kernel: Kernel, scores: Scores, label: Label
    ) -> None:
        """Compute the pieces of a step.

        Args:
            step: the step.
            saved: outputs of the local queries, and the gradients of these outputs.
            kv: resident keys and values.
            kernel: the block kernel.
            scores: how a query scored a key.
            label: names this step in a profile.
        """
        of_keys = self._own
        # Sums of another rank's keys leave after the step, so each step begins new trees.
        if step.number:
            of_keys = self._of_others = self._trees(self._order.sizes[step.number])
        for piece in self._order.pieces[step.number]:
            with label("tile"):
                results = []
                for tile, launch in _launches(piece):
                    q, k, v = _inputs(tile, self._query, kv)
                    of_rows = saved.region(rows_of(tile))
                    results.append(kernel.backward(of_rows, q, k, v, launch, scores))
            with label("merge"):
                query_block, key_block = piece.blocks
                of_query, of_key = self._leaves(step, piece, results)
                self._of_queries[query_block].add((0, key_block), of_query)
                of_keys[key_block].add((0, query_block), of_key)

    def depart(self, step: Step, packet: Pair) -> None:
        """Write the nodes of a step into the message to the owner of its keys."""
        for part in self._order.departing[step.number].parts:
            sums = self._of_others[part.block].kept[part.node]
            for x, total in zip(packet, sums, strict=True):
                columns(x, part.span).copy_(total)

    def arrive(self, number: int, packet: Pair) -> None:
        """Add the nodes of a message that came after a step to the gradients of the own keys."""
        for part in self._order.arriving[number].parts:
            span = self._order.cols[part.block]
            within = _moved_cols(part.cols, -span[0])
            sums = []
            for x in packet:
                # What the sender does not see adds a zero, as it would on the owner.
                total = _zeros(x, length(span))
                unpack(total, columns(x, part.span), within)
                sums.append(total)
            self._own[part.block].add(part.node, (sums[0], sums[1]))

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of query, key and value, in their dtypes, token-major."""
        order, of_keys = self._order, {x: tree.result for x, tree in self._own.items()}
        query = {number: tree.result for number, tree in self._of_queries.items()}
        keys, values = ({x: pair[i] for x, pair in of_keys.items()} for i in range(2))
        return (
            _assembled(self._query, query, order.rows),
            _assembled(self._shard[0], keys, order.cols),
            _assembled(self._shard[1], values, order.cols),
        )

    def _trees(self, blocks: dict[int, Span] | dict[int, int]) -> dict[int, Tree[Pair]]:
        leaves = ((x, self._order.queries_of.get(x, ())) for x in blocks)
        return {x: Tree(queries, _pair_sum) for x, queries in leaves if queries}

    def _leaves(
        self, step: Step, piece: BlockPair, results: list[tuple[Tensor, Tensor, Tensor]]
    ) -> tuple[Tensor, Pair]:
        """Return the summed gradients of a piece, for its block of queries and of keys."""
        rows = self._order.rows[piece.blocks[0]]
        num_cols = self._order.sizes[step.number][piece.blocks[1]]
        at_rows = [region(x.batch, moved(x.rows, -rows[0])) for x in piece.tiles]
        at_cols = [
            region(tile.batch, cols) for tile, cols in zip(piece.tiles, piece.cols, strict=True)
        ]
        (queries, keys, values), whole = zip(*results, strict=True), piece.is_whole
        of_keys = (
            queries[0] if whole[0] else _summed(self._query, length(rows), at_rows, queries),
            *(
                x[0] if whole[1] else _summed(like, num_cols, at_cols, x)
                for like, x in zip(self._shard, (keys, values), strict=True)
            ),
        )
        return of_keys[0], (of_keys[1], of_keys[2])


def sinks_by_block(saved: Saved, sinks: Tensor, order: BlockOrder) -> Tensor:
    """Return the gradient of sinks from each local block of queries, `(blocks, N)`, wide.

    The formula is that of `sinks_gradient`.

    Args:
        saved: outputs of the local rows; `out` and `lse` include the sinks.
        sinks: the logits `(N,)`.
        order: the order of the plan.
    """
    # A sink has no value: its gradient is its weight times minus the row's mean gradient.
    slope = -tree_sum(saved.grad_out.to(saved.lse.dtype) * saved.out, dim=3)
    if saved.grad_lse is not None:
        slope += saved.grad_lse
    weight = exact_exp(sinks.to(slope.dtype).view(1, -1, 1) - saved.lse)
    # A row that sees nothing has an lse of -inf, and the exponential of a sink less that is
    # infinite.
    of_rows = weight.masked_fill_(saved.lse == -torch.inf, 0.0).mul_(slope)
    # By block: ranks have whole blocks, and the sum over blocks does not ask which rank has them.
    sums = [tree_sum(tree_sum(columns(of_rows, x), 2), 0) for x in order.rows.values()]
    return torch.stack(sums) if sums else of_rows.new_empty(0, len(sinks))


def _launches(piece: BlockPair, in_flight: bool = False) -> Iterator[tuple[Tile, Launch]]:
    for tile in piece.tiles:
        yield (
            tile,
            Launch(rows_of(tile), cols_of(tile), tile.mask, in_flight=in_flight, by_block=True),
        )


def _inputs(tile: Tile, query: Tensor, kv: Pair) -> tuple[Tensor, Tensor, Tensor]:
    at = cols_of(tile)
    return part_of(query, rows_of(tile)), part_of(kv[0], at), part_of(kv[1], at)


def _moved_cols(cols: Cols, by: int) -> Cols:
    return Cols(tuple(moved(span, by) for span in cols.spans))


def _zeros(like: Tensor, num_tokens: int) -> Tensor:
    """Return zeros for a block of tokens, in float32 or wider."""
    batch, heads, _, head_dim = like.shape
    wide = torch.promote_types(like.dtype, torch.float32)
    return empty(like, (batch, heads, num_tokens, head_dim), TOKEN_MAJOR, wide).zero_()


def _summed(
    like: Tensor, num_tokens: int, regions: list[Region], grads: tuple[Tensor, ...]
) -> Tensor:
    """Return the sum of the gradients of some tiles of a block."""
    total = _zeros(like, num_tokens)
    for where, grad in zip(regions, grads, strict=True):
        part_of(total, where).add_(grad)
    return total


def _assembled(like: Tensor, of_blocks: dict[int, Tensor], spans: dict[int, Span]) -> Tensor:
    """Join the gradients of blocks; tokens without one get 0."""
    result = empty(like, like.shape, TOKEN_MAJOR)
    for number, span in spans.items():
        there = columns(result, span)
        # Queries that see nothing have no gradient here, nor have keys that nothing sees.
        if number in of_blocks:
            there.copy_(of_blocks[number])
        else:
            there.zero_()
    return result
