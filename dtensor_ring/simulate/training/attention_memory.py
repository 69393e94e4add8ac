"""What an attention needs while it runs, beside its inputs and results, in bytes of a rank."""

from __future__ import annotations

from typing import NamedTuple

from dtensor_ring.all_to_all.plan import all_to_all_plan
from dtensor_ring.compute.accumulate import ON_GPUS
from dtensor_ring.planning.plan import plan
from dtensor_ring.planning.strategy import Strategy
from dtensor_ring.planning.tile import FULL
from dtensor_ring.simulate.message_costs import rank_costs
from dtensor_ring.simulate.problem import SimulatedProblem
from dtensor_ring.transport.transport import QUANTISED


class AttentionRoom(NamedTuple):
    """Bytes that an attention needs beside its inputs and results.

    Attributes:
        held: messages of other ranks in its backward, which has most.
        forward: all that its forward needs: messages and partial outputs.
        backward: all that its backward needs: messages, gradients of query, key and value, and
            what kernels on GPUs have inside.
    """

    held: int = 0
    forward: int = 0
    backward: int = 0


def attention_room(problem: SimulatedProblem, strategy: Strategy, on_gpu: bool) -> AttentionRoom:
    """Return what an attention needs on the last rank, which with a causal mask receives most.

    Note [Room of an attention]: a partial result stays in the dtype of the kernel until there are
    `num_parts` of them; then they are merged into one of float32, see Note [Partials at once]. On a
    GPU, backward kernels sum the gradient of a query in float32, too (Dao, 2023, arXiv 2307.08691,
    section 3.1), which no allocation outside of them shows. Keys and values in eight bits take less
    room in messages, and more beside them.

    Args:
        problem: the attention.
        strategy: how it is made parallel.
        on_gpu: whether it runs on GPUs.
    """
    size, rank = problem.world_size, problem.world_size - 1
    where = rank, size, problem.seq_len, problem.documents
    mask = FULL if problem.mask is None else problem.mask
    of_rank = plan(problem.layout, mask, *where, strategy=strategy)
    all_to_all = None
    if strategy.heads > 1:
        layouts = problem.layout, problem.layout
        all_to_all = all_to_all_plan(*layouts, strategy.heads, rank, size, problem.seq_len)
    sizes = problem.sizes
    forward, backward = (x.held for x in rank_costs(of_rank, all_to_all, sizes))
    heads, key_heads = sizes.heads_after(all_to_all)
    tokens = of_rank.num_local[0] * sizes.batch
    query, keys = (count * sizes.head_dims[0] * tokens for count in (heads, key_heads))
    inside = query * sizes.wide_itemsize if on_gpu else 0
    narrow, wide = sizes.itemsize, sizes.wide_itemsize
    # Shares of keys and values that travel in eight bits: this rank's own, rounded, those of a step
    # in the dtype of the kernel, and those that are made eight bits.
    copies = 3 * 2 * keys * narrow if sizes.kv_dtype in QUANTISED else 0
    if of_rank.num_steps == 1:
        # One launch: its results are the final ones.
        grads = (query + 2 * keys) * narrow
        return AttentionRoom(backward, forward + copies, backward + copies + grads + inside)
    # Half a partial more: one of half of the rows leaves room for another of all rows.
    running = query * wide + int(query * (_num_parts(problem, on_gpu) + 0.5) * narrow)
    # Rounded in the end, when no message is under way any more; what is wide already stays.
    rounded = query * narrow if narrow < wide else 0
    # The sum of this rank's own keys and values, and their gradients of a step.
    sums = 2 * keys * (wide + narrow)
    moving = max(backward + copies, rounded) + inside
    # The result of the forward is not counted here, and is there in the end only.
    out = query * narrow
    ahead = running + max(forward + copies, rounded) - out
    return AttentionRoom(backward, ahead, running + sums + moving)


def _num_parts(problem: SimulatedProblem, on_gpu: bool) -> int:
    """Return how many partial results of the kernel's dtype are kept, see `TransferPolicy`."""
    is_narrow = problem.sizes.itemsize < problem.sizes.wide_itemsize
    return problem.num_parts or (ON_GPUS if on_gpu and is_narrow else 1)
