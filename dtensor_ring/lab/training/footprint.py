"""Count what a training step allocates and sends on one rank, by a run on the meta device.

Note [Dry run]: the step runs unchanged, on tensors without content, in a group without other
ranks. What ops allocate is counted while it is alive. An attention is one op, so the count sees
its results only. Therefore its loop runs once more, with a kernel that computes nothing and a
transport that sends nothing. What this loop allocates is added for the duration of the op.

Where queries choose their keys, tensors without content do not say which. So all keys that a rank
sees are taken to be chosen, and memory is that of all keys of all ranks. Chunks of queries are
alike: one of them runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from dtensor_ring.all_to_all.op import all_to_all_op, run_exchange, unflatten_all_to_all
from dtensor_ring.compute.kernels import Saved
from dtensor_ring.compute.memory import empty, order_of, region
from dtensor_ring.lab.chosen_keys import SEEN, moved_costs
from dtensor_ring.lab.recorded import Cost, Recorder, ShapeKernel, by_field
from dtensor_ring.ops.axis_ops import parts_of_ranks, sum_ranks_op
from dtensor_ring.ops.checks import unit_stride
from dtensor_ring.ops.options import Call, group_named, unflatten
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import Plan, Step, plan
from dtensor_ring.planning.ranges import length
from dtensor_ring.planning.slices import Slices
from dtensor_ring.planning.strategy import as_strategy
from dtensor_ring.planning.tile import FULL, Tile
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.selected import listed_attention
from dtensor_ring.selected.moved_keys import Moved, SelectedKeys
from dtensor_ring.selected.op import (
    Listed,
    positions_of_keys,
    request_of_keys,
    select_op,
    selected_backward_op,
    selected_op,
)
from dtensor_ring.selected.plan import ALL, KeyPositions
from dtensor_ring.selected.run import IndexQueries, KeyChoice, ring_select, rows_at_once
from dtensor_ring.states.op import scan_op
from dtensor_ring.states.run import Maps, scan
from dtensor_ring.transport.transport import NullTransport


class Storages(TorchDispatchMode):
    """A context that counts the storages that ops make; meta tensors count as if they were real.

    Attributes:
        alive: bytes of the storages that are still referenced.
        peak: the most bytes that were alive at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._held: dict[int, ref[UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count(result, {x._cdata for x in storages_of([args, kwargs])})
        return result

    def count(self, tree: Any, given: Collection[int] = ()) -> None:
        """Count the storages of these tensors, each once, until they are freed.

        Args:
            tree: nested lists and tuples of tensors.
            given: `_cdata` of the inputs' storages; they are not counted, as a view makes none.
        """
        for storage in storages_of(tree):
            key, size = storage._cdata, storage.nbytes()
            if key in self._held or key in given:
                continue

            def gone(_: object, key: int = key, size: int = size) -> None:
                del self._held[key]
                self.alive -= size

            self._held[key] = ref(storage, gone)
            self.alive += size
        self.peak = max(self.peak, self.alive)

    def keep(self, num_bytes: int) -> None:
        """Count bytes that no op makes, and that stay."""
        self.alive += num_bytes
        self.peak = max(self.peak, self.alive)

    def held(self, tree: Any) -> dict[int, ref[UntypedStorage]]:
        """Return references to the counted storages of these tensors, keyed by their `id`.

        A `_cdata` is an address, which another storage may get once this one is freed.
        """
        found = [self._held.get(storage._cdata) for storage in storages_of(tree)]
        return {id(x): x for x in found if x is not None}


def storages_of(tree: Any) -> Iterator[UntypedStorage]:
    """Yield the storages of tensors in nested lists and tuples; a DTensor has that of its shard."""
    for x in tree_leaves(tree):
        if is_traceable_wrapper_subclass(x):
            names, _ = x.__tensor_flatten__()
            yield from storages_of([getattr(x, name) for name in names])
        elif isinstance(x, Tensor):
            yield x.untyped_storage()


class Attention(NamedTuple):
    """A kind of attention: what equal attentions of a model have in common.

    Attributes:
        heads: number of query heads, and of key and value heads, on this rank in the attention.
        head_dims: head dim of queries and keys, and of values.
        mask: which keys a query sees.
        steps: number of steps of the ring; where queries choose, of that of the index keys.
        chosen: keys that a query chooses; `None` if it attends to all that it sees.
    """

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    mask: Mask
    steps: int
    chosen: int | None = None


# What a checkpoint of kind "attention" keeps the results of.
RESULTS = ring_op, select_op, selected_op


class Footprint(Storages):
    """A context around a training step that counts its memory and messages.

    Attributes:
        attentions: number of calls of each kind of attention.
        messages: cost of all messages of the step; `held` is the maximum over its calls.
        working: the most bytes that an attention needs besides its inputs: messages in flight or
            resident, partial results and gradients.
        results: bytes that attentions and selections have returned so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attentions = Counter[Attention]()
        self.messages = Cost()
        self.working = self.results = 0
        self._runs = 1
        self._kept: dict[int, ref[UntypedStorage]] = {}
        # Peak and messages by arguments, as layers are alike.
        self._loops: dict[tuple[Any, ...], tuple[int, Cost]] = {}
        self._choices: dict[int, Choice] = {}  # by the `_cdata` of what was chosen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._runs = self.runs(func)
        # Before `count`: a loop allocates its results too, so they would count twice in the peak.
        if func is ring_op:
            self._attend(args)
        elif func is ring_backward_op:
            self._attend_backward(args)
        elif func is all_to_all_op:
            self._send(_all_to_all(args))
        elif func is sum_ranks_op:
            self._send(_sum(args))
        elif func is scan_op:
            self._send(_scan(args))
        elif func is select_op:
            self._select(result, args)
        elif func is selected_op:
            self._attend_selected(args)
        elif func is selected_backward_op:
            self._attend_selected_backward(args)
        self.count(result, {x._cdata for x in storages_of([args, kwargs])})
        if func in (ring_op, selected_op):
            self._kept |= self.held([args[:3], result])
        if func in RESULTS:
            self.results += sum(x.nbytes for x in tree_leaves(result))
        return result

    def runs(self, op: Any) -> int:
        """Return how often an op runs that is called now: its messages count as often."""
        return 1

    @property
    def kept(self) -> int:
        """Bytes that attentions so far keep for their backward: inputs, outputs and lse."""
        found = [storage() for storage in self._kept.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)

    # What follows gets the arguments of an op, in the order of its schema.

    def _attend(self, args: tuple[Any, ...]) -> None:
        (query, key, value), call = args[:3], unflatten(args[3:])
        plan = call.request(query.shape[0]).plan(query, key)
        heads, dims = (query.shape[1], key.shape[1]), (key.shape[3], value.shape[3])
        self.attentions[Attention(heads, dims, call.scores.mask, plan.num_steps)] += 1
        self._add(args, partial(_forward, call, plan, query, key, value))

    def _attend_backward(self, args: tuple[Any, ...]) -> None:
        grad_out, grad_lse, query, key, value, out, lse = args[:7]
        call = unflatten(args[7:])
        plan = call.request(query.shape[0]).plan(query, key)
        saved = Saved(grad_out, out, lse, grad_lse)
        self._add(args, partial(_backward, call, plan, saved, query, key, value))

    def _select(self, result: Tensor, args: tuple[Any, ...]) -> None:
        choice = Choice.of(args)
        self._choices[result.untyped_storage()._cdata] = choice
        self._add(args, partial(choice.loop, args))

    def _choice(self, query: Tensor, rows: Tensor, listed: Listed, call: Call) -> Choice:
        """Return which keys an attention may choose."""
        if listed.pool_size > 1:
            return Choice.of_pools(query, rows, call, listed.pool_size)
        return self._choices[listed.selected.untyped_storage()._cdata]

    def _attend_selected(self, args: tuple[Any, ...]) -> None:
        (query, rows), listed, call = args[:2], Listed._make(args[2:7]), unflatten(args[7:])
        choice = self._choice(query, rows, listed, call)
        heads, value_dim = (query.shape[1], rows.shape[1]), listed.value_end - listed.value_begin
        mask, width = choice.call.scores.mask, listed.selected.shape[3]
        kind = Attention(heads, (query.shape[3], value_dim), mask, choice.plan.num_steps, width)
        self.attentions[kind] += 1
        forward, _ = choice.moved(rows, listed, call)
        self._send(forward)
        self._add(args, partial(_forward_loop, query, rows, listed, call))

    def _attend_selected_backward(self, args: tuple[Any, ...]) -> None:
        grad_out, grad_lse, query, rows = args[:4]
        listed, (out, lse), call = Listed._make(args[4:9]), args[9:11], unflatten(args[11:])
        _, backward = self._choice(query, rows, listed, call).moved(rows, listed, call)
        self._send(backward)
        saved = Saved(grad_out, out, lse, grad_lse)
        self._add(args, partial(_backward_loop, saved, query, rows, listed, call))

    def _send(self, cost: Cost) -> None:
        """Add messages; `held` is a maximum, as a call frees its buffers before the next one."""
        held = max(self.messages.held, cost.held)
        messages = by_field(sum, [self.messages, *[cost] * self._runs])
        self.messages = replace(messages, held=held)

    def _add(self, arguments: tuple[Any, ...], run: Callable[[], Cost]) -> None:
        """Add what the loop of an attention sends, and allocates to what is alive.

        Equal loops run once.
        """
        key = tuple(map(_described, arguments))
        if key not in self._loops:
            with Storages() as loop:
                cost = run()
            self._loops[key] = loop.peak, cost
        peak, cost = self._loops[key]
        self._send(cost)
        self.working = max(self.working, peak)
        self.peak = max(self.peak, self.alive + peak)


def _described(x: Any) -> Any:
    """Return what decides how much of an argument a loop sends and allocates."""
    if isinstance(x, Tensor) and x.is_meta:
        return x.shape, x.stride(), x.dtype
    return tuple(x) if isinstance(x, list) else x


def _forward(call: Call, plan: Plan, query: Tensor, key: Tensor, value: Tensor) -> Cost:
    query, key, value = unit_stride(query, key, value)
    transport, policy = Recorder(), call.place.policy
    ring_forward(
        query, (key, value), plan, ShapeKernel(), call.scores, transport, policy, call.rounded
    )
    return transport.cost


def _backward(
    call: Call, plan: Plan, saved: Saved, query: Tensor, key: Tensor, value: Tensor
) -> Cost:
    grad_out, query, key, value = unit_stride(saved.grad_out, query, key, value)
    saved, transport = replace(saved, grad_out=grad_out), Recorder()
    kernel, scores, policy = ShapeKernel(), call.scores, call.place.policy
    ring_backward(saved, query, (key, value), plan, kernel, scores, transport, policy, call.rounded)
    return transport.cost


def _all_to_all(args: tuple[Any, ...]) -> Cost:
    """Run an all-to-all, and return its messages."""
    tensors, exchange, transport = args[0], unflatten_all_to_all(args[1:]), Recorder()
    run_exchange(tensors, exchange, exchange.layouts(), transport)
    return transport.cost


def _sum(args: tuple[Any, ...]) -> Cost:
    """Run a sum over ranks, and return its messages."""
    local, group_name = args[:2]
    group, transport = group_named(group_name), Recorder()
    parts_of_ranks(local, group.rank(), group.size(), transport)
    return transport.cost


def _scan(args: tuple[Any, ...]) -> Cost:
    """Run a scan over ranks, and return its messages."""
    state, decay, matrix, owners, is_back, group_name = args
    group, transport = group_named(group_name), Recorder()
    scan(transport, group.rank(), owners, Maps(state, decay, matrix), is_back)
    return transport.cost


class Choice(NamedTuple):
    """Which keys queries may choose, by an index, or of pools by their numbers.

    Attributes:
        call: the options of the op.
        plan: the plan of the index keys; of pools that have none, that of `seen`.
        seen: the plan of the route that brings what queries see and no more.
        index: the index keys of all ranks.
        positions: the keys of all ranks.
    """

    call: Call
    plan: Plan
    seen: Plan
    index: KeyPositions
    positions: KeyPositions

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> Choice:
        """Return the choice of a call of the selection op, given its arguments."""
        (query, key), pool_size, call = args[:2], args[6], unflatten(args[7:])
        request = call.request(query.shape[0])
        indexed = request_of_keys(request, pool_size)
        seen = plan(*request._replace(strategy=as_strategy(SEEN, request.world_size)))
        index = positions_of_keys(indexed)
        return cls(call, indexed.plan(query, key), seen, index, positions_of_keys(request))

    @classmethod
    def of_pools(cls, query: Tensor, rows: Tensor, call: Call, pool_size: int) -> Choice:
        """Return the choice of pools that end before a query."""
        request = call.request(query.shape[0])
        ended = Slices.pools(request.seq_len, pool_size)
        strategy = as_strategy(SEEN, request.world_size)
        request = request_of_keys(request, pool_size)._replace(strategy=strategy, slices=ended)
        seen, positions = request.plan(query, rows), positions_of_keys(request)
        return cls(call, seen, seen, positions, positions)

    def moved(self, rows: Tensor, listed: Listed, call: Call) -> tuple[Cost, Cost]:
        """Return the messages of chosen keys, forward and backward.

        Args:
            rows: this rank's keys and values, `(B, Nkv, C, D)`.
            listed: the keys of a query.
            call: the options of the op.
        """
        num_chosen, sum_dtype = listed.selected.shape[3], call.place.policy.sum_dtype(rows.dtype)
        return moved_costs(self.seen, self.positions, num_chosen, rows, sum_dtype, listed.route)

    def loop(self, args: tuple[Any, ...]) -> Cost:
        """Run the loop of the selection op, with one chunk of queries for each tile."""
        query, key, weights, k, block_size, local_blocks, pool_size = args[:7]
        choice = KeyChoice(k, self.call.scores.scale, block_size, local_blocks, pool_size)
        of_rows = query.new_empty(query.shape[2], dtype=torch.int32)
        own = IndexQueries(query, weights, of_rows)
        steps = tuple(_one_chunk(step, query) for step in self.plan.steps)
        shorter, transport = replace(self.plan, steps=steps), Recorder()
        ring_select(own, key, shorter, choice, self.index, transport)
        return transport.cost


def _one_chunk(step: Step, query: Tensor) -> Step:
    """Return a step whose tiles have the rows of one chunk, and see all of their columns."""

    def cut(tile: Tile) -> Tile:
        begin, end = tile.rows
        size = rows_at_once(query, length(tile.cols))
        return replace(tile, rows=(begin, min(end, begin + size)), mask=FULL)

    return replace(step, tiles=tuple(map(cut, step.tiles)))


def _forward_loop(query: Tensor, rows: Tensor, listed: Listed, call: Call) -> Cost:
    """Bring all keys, and attend to them with a chunk of queries; messages are those of `moved`."""
    keys, moved = _all_keys(query, rows, listed, call, "forward")
    residents, selected, scores = moved.residents, listed.selected, call.scores
    few = slice(min(query.shape[2], listed_attention.queries_at_once(selected, residents.rows)))
    value_dim = listed.value_end - listed.value_begin
    results = empty(query, (*query.shape[:3], value_dim), order_of(query))
    some, lists = query[:, :, few], selected[:, :, few]
    listed_attention.gathered_forward(some, residents, lists, scores.scale, scores.sinks)
    del results, keys
    return Cost()


def _backward_loop(saved: Saved, query: Tensor, rows: Tensor, listed: Listed, call: Call) -> Cost:
    """Bring all keys, and send their gradients home; messages are those of `moved`."""
    keys, moved = _all_keys(query, rows, listed, call, "backward")
    residents, selected = moved.residents, listed.selected
    few = slice(min(query.shape[2], listed_attention.queries_at_once(selected, residents.rows)))
    grad_query = empty(query, query.shape, order_of(query))
    some = saved.region(region(None, (0, few.stop)))
    lists, scale = selected[:, :, few], call.scores.scale
    _, grad = listed_attention.gathered_backward(some, query[:, :, few], residents, lists, scale)
    keys.summed(moved, grad, call.place.policy.sum_dtype(rows.dtype))
    del grad_query
    return Cost()


def _all_keys(
    query: Tensor, rows: Tensor, listed: Listed, call: Call, ring: str
) -> tuple[SelectedKeys, Moved]:
    """Return what moves keys, and the keys of all ranks, whose places no content decides."""
    request = request_of_keys(call.request(query.shape[0]), listed.pool_size)
    shape = query.shape[3], (listed.value_begin, listed.value_end)
    positions = positions_of_keys(request)
    keys = SelectedKeys(rows, shape, positions, request.rank, NullTransport(), ring)
    return keys, keys.moved(query.new_empty(0, dtype=torch.int32), ALL)
