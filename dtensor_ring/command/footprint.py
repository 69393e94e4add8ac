"""Count what a training step allocates and sends on one rank, by a run on the meta device.

Note [Dry run]: the step runs unchanged, on tensors without content, in a group without other
ranks. What ops allocate is counted while it is alive. An attention is one op, so the count sees
its results only. Therefore its loop runs once more, with a kernel that computes nothing and a
transport that sends nothing. What this loop allocates is added for the duration of the op.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from dtensor_ring.all_to_all.op import all_to_all_op, unflatten_all_to_all
from dtensor_ring.command.chosen_footprint import Choice, backward_loop, forward_loop
from dtensor_ring.command.null_transport import NullTransport
from dtensor_ring.compute.kernels import Kernel, Launch, Problem, Saved, Scores
from dtensor_ring.compute.kernels.kernel import Gradients, Result
from dtensor_ring.compute.memory import TOKEN_MAJOR, empty
from dtensor_ring.ops.checks import unit_stride
from dtensor_ring.ops.options import Call, group_named, unflatten
from dtensor_ring.ops.ring_op import ring_backward_op, ring_op
from dtensor_ring.ops.rows_op import sum_ranks_op
from dtensor_ring.planning.mask import Mask
from dtensor_ring.planning.plan import Plan
from dtensor_ring.ring import ring_backward, ring_forward
from dtensor_ring.selected.op import select_op, selected_backward_op, selected_op
from dtensor_ring.simulate.message_costs import Cost, all_to_all_cost, ring_costs
from dtensor_ring.simulate.sizes import TensorSizes


class ShapeKernel(Kernel):
    """A kernel that computes nothing: it returns empty tensors of the right shapes."""

    name = "shapes"

    def missing(self) -> None:
        return None

    def supports(self, problem: Problem) -> None:
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores) -> Result:
        wide = torch.promote_types(q.dtype, torch.float32)
        shape = *q.shape[:3], v.shape[3]
        return empty(q, shape, TOKEN_MAJOR), q.new_empty(q.shape[:3], dtype=wide)

    def backward(
        self, saved: Saved, q: Tensor, k: Tensor, v: Tensor, launch: Launch, scores: Scores
    ) -> Gradients:
        grads = [empty(x, x.shape, TOKEN_MAJOR) for x in (q, k, v)]
        return grads[0], grads[1], grads[2]


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


class Footprint(Storages):
    """A context around a training step that counts its memory and messages.

    Attributes:
        attentions: number of calls of each kind of attention.
        messages: cost of all messages of the step; `held` is the maximum over its calls.
        working: the most bytes that an attention needs besides its inputs: messages in flight or
            resident, partial results and gradients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attentions = Counter[Attention]()
        self.messages = Cost()
        self.working = 0
        self._kept: dict[int, ref[UntypedStorage]] = {}
        self._loops: dict[tuple[Any, ...], int] = {}  # peak by arguments, as layers are alike
        self._choices: dict[int, Choice] = {}  # by the `_cdata` of what was chosen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # Before `count`: a loop allocates its results too, so they would count twice in the peak.
        if func is ring_op:
            self._attend(*args)
        elif func is ring_backward_op:
            self._attend_backward(*args)
        elif func is all_to_all_op:
            self._send(_all_to_all_cost(*args))
        elif func is sum_ranks_op:
            self._send(_sum_cost(*args))
        elif func is select_op:
            self._select(result, *args)
        elif func is selected_op:
            self._attend_selected(*args)
        elif func is selected_backward_op:
            self._attend_selected_backward(*args)
        self.count(result, {x._cdata for x in storages_of([args, kwargs])})
        if func in (ring_op, selected_op):
            self._kept |= self.held([args[:3], result])
        return result

    @property
    def kept(self) -> int:
        """Bytes that attentions so far keep for their backward: inputs, outputs and lse."""
        found = [storage() for storage in self._kept.values()]
        return sum(storage.nbytes() for storage in found if storage is not None)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *options: Any) -> None:
        call = unflatten(options)
        plan = call.request(query.shape[0]).plan(query, key)
        heads, dims = (query.shape[1], key.shape[1]), (key.shape[3], value.shape[3])
        self.attentions[Attention(heads, dims, call.scores.mask, plan.num_steps)] += 1
        self._send(_message_cost(plan, call, key, value, is_forward=True))
        self._add((query, key, value, *options), lambda: _forward(call, plan, query, key, value))

    def _attend_backward(
        self, grad_out: Tensor, grad_lse: Tensor | None, query: Tensor, key: Tensor, *rest: Any
    ) -> None:
        value, out, lse, *options = rest
        call = unflatten(tuple(options))
        plan = call.request(query.shape[0]).plan(query, key)
        self._send(_message_cost(plan, call, key, value, is_forward=False))
        saved = Saved(grad_out, out, lse, grad_lse)
        self._add(
            (grad_out, grad_lse, query, key, *rest),
            lambda: _backward(call, plan, saved, query, key, value),
        )

    def _select(self, result: Tensor, query: Tensor, key: Tensor, *rest: Any) -> None:
        choice = Choice.of(query, key, *rest)
        self._choices[result.untyped_storage()._cdata] = choice
        self._send(choice.cost(key))
        self._add((query, key, *rest), lambda: choice.loop(query, key, *rest))

    def _attend_selected(self, query: Tensor, rows: Tensor, selected: Tensor, *rest: Any) -> None:
        choice = self._choices[selected.untyped_storage()._cdata]
        heads, dims = (query.shape[1], rows.shape[1]), (query.shape[3], rest[1] - rest[0])
        mask, width = choice.call.scores.mask, selected.shape[3]
        self.attentions[Attention(heads, dims, mask, choice.plan.num_steps, width)] += 1
        self._send(choice.moved(rows, width, rest)[0])
        self._add((query, rows, selected, *rest), lambda: forward_loop(query, rows, selected, rest))

    def _attend_selected_backward(
        self, grad_out: Tensor, grad_lse: Any, query: Tensor, rows: Tensor, *rest: Any
    ) -> None:
        selected, begin, end, route, out, lse, *options = rest
        choice = self._choices[selected.untyped_storage()._cdata]
        how = begin, end, route, *options
        self._send(choice.moved(rows, selected.shape[3], how)[1])
        saved = Saved(grad_out, out, lse, grad_lse)
        self._add(
            (grad_out, grad_lse, query, rows, *rest),
            lambda: backward_loop(saved, query, rows, selected, how),
        )

    def _send(self, cost: Cost) -> None:
        """Add messages; `held` is a maximum, as a call frees its buffers before the next one."""
        held = max(self.messages.held, cost.held)
        self.messages = replace(self.messages + cost, held=held)

    def _add(self, arguments: tuple[Any, ...], run: Callable[[], None]) -> None:
        """Add what the loop of an attention allocates to what is alive; equal loops run once."""
        key = tuple(
            (x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) and x.is_meta else x
            for x in arguments
        )
        if key not in self._loops:
            with Storages() as loop:
                run()
            self._loops[key] = loop.peak
        self.working = max(self.working, self._loops[key])
        self.peak = max(self.peak, self.alive + self._loops[key])


def _forward(call: Call, plan: Plan, query: Tensor, key: Tensor, value: Tensor) -> None:
    query, key, value = unit_stride(query, key, value)
    how = plan, ShapeKernel(), call.scores, NullTransport(), call.place.policy, call.rounded
    ring_forward(query, (key, value), *how)


def _backward(
    call: Call, plan: Plan, saved: Saved, query: Tensor, key: Tensor, value: Tensor
) -> None:
    grad_out, query, key, value = unit_stride(saved.grad_out, query, key, value)
    saved = replace(saved, grad_out=grad_out)
    how = plan, ShapeKernel(), call.scores, NullTransport(), call.place.policy, call.rounded
    ring_backward(saved, query, (key, value), *how)


def _message_cost(plan: Plan, call: Call, key: Tensor, value: Tensor, is_forward: bool) -> Cost:
    """Return the messages of one loop: backward sends keys and values again, and gradients."""
    policy, num_heads, dims = call.place.policy, key.shape[1], (key.shape[3], value.shape[3])
    dtypes = policy.dtype_of_keys(key.dtype), policy.sum_dtype(key.dtype)
    sizes = TensorSizes((0, num_heads), dims, key.shape[0], key.dtype, *dtypes)
    shards, sums = ring_costs(plan, sizes, num_heads, call.rounded is not None)
    return shards if is_forward else shards + sums


def _all_to_all_cost(tensors: list[Tensor], *options: Any) -> Cost:
    """Return the messages of one all-to-all."""
    args = unflatten_all_to_all(options)
    plan, x = args.plan(tensors, args.layouts()), tensors[0]
    heads = 0, args.num_key_heads
    sizes = TensorSizes(heads, (0, 0), x.shape[0], *[x.dtype] * 3)
    shapes = [(count, x.shape[3]) for count, x in zip(args.num_heads, tensors, strict=True)]
    return all_to_all_cost(plan, sizes, shapes, args.is_back, args.kv_dtype)


def _sum_cost(local: Tensor, group_name: str, *_: Any) -> Cost:
    """Return the messages of a sum over ranks: each rank sends its tensor to all others."""
    peers = group_named(group_name).size() - 1
    num_bytes = peers * local.nbytes
    return Cost(sent=num_bytes, received=num_bytes, messages=peers)
