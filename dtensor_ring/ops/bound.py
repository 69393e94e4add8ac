"""Calls of the ring op whose options, shapes and group are known: what is left are their tensors.

Note [Bound calls]: layers of a model make the same call again and again. What follows from the
options, the shapes and the group of a call is found at its first time and kept: the checks of its
inputs, the arguments of its plan, and whether one launch is all of it. Plans have a cache of their
own, bounded by bytes. Calls with tensors beside query, key and value, such as boundaries of
documents, are bound each time: their content may differ.
"""

from __future__ import annotations

from typing import Any
from weakref import ref

from torch import Tensor

from dtensor_ring.agreement.call_record import CallRecord
from dtensor_ring.compute.kernels import Kernel, kernel_for
from dtensor_ring.compute.lags import is_biased
from dtensor_ring.compute.sole import Sole, sole_launch
from dtensor_ring.ops.checks import check_inputs, warn_of_boundaries, warn_of_tiles
from dtensor_ring.ops.options import LEAVES, unflatten
from dtensor_ring.planning.plan import Plan
from dtensor_ring.transport.transport import QUANTISED

# Places of tensors among the arguments of the op.
TENSORS = tuple(i for i, leaf in enumerate(LEAVES) if leaf.schema_type == "Tensor?")


class BoundCall:
    """A call of the ring op on this rank.

    Attributes:
        options: the arguments of the op after query, key and value.
        call: the same options as one value.
        request: the arguments of the planner.
        rank: this rank in the ring.
        is_shared: whether the ring has several ranks.
        records: those of its directions, as ranks compare them.
    """

    def __init__(
        self,
        options: tuple[Any, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        is_kept: bool = False,
    ) -> None:
        self.options, self.call = options, unflatten(options)
        check_inputs(query, key, value, self.call.scores.sinks, may_be_biased=True)
        self.request = self.call.request(query.shape[0])
        self.rank, self.is_shared = self.request.rank, self.request.world_size > 1
        self._group = ref(self.call.group) if is_kept else None
        # A call that is not kept owns its plan; plans of others are in their own cache.
        self._plan: Plan | None = None
        self._planned: ref[Plan] | None = None
        # Sinks and dropout are tensors, too; a bias by distance is in the query. Eight bits round
        # this rank's own keys and values, as they are rounded on other ranks.
        is_rounded = self.call.place.policy.kv_dtype in QUANTISED
        self._may_be_sole = is_kept and not is_rounded and not is_biased(query, key)
        self.records: dict[str, CallRecord] = {}
        self._soles: dict[str, Sole | None] = {}
        self._facts: dict[bool, tuple[Any, ...]] = {}

    @property
    def is_alive(self) -> bool:
        """Whether its group is still the one of its name."""
        return self._group is not None and self._group() is self.call.group

    def plan(self, query: Tensor, key: Tensor) -> Plan:
        """Return this rank's plan.

        Raises:
            ValueError: as `PlanRequest.plan`; call it where other ranks hear of it.
        """
        found = self._plan if self._planned is None else self._planned()
        if found is not None:
            return found
        planned = self.request.plan(query, key)
        if self._group is None:
            self._plan = planned
        if self._planned is None:
            if self.call.scores.dropout_p:
                self.call.place.policy.refuse_order("dropout")
            if is_biased(query, key):
                self.call.place.policy.refuse_order("relative_bias")
            warn_of_tiles(planned, self.request)
            if self.request.documents is not None:
                warn_of_boundaries(self.request)
        self._planned = ref(planned)
        return planned

    def kernel(
        self, query: Tensor, key: Tensor, value: Tensor, differentiable_lse: bool = False
    ) -> Kernel:
        """Return the named kernel, or the first one that supports the call.

        Kernels may be registered at any time, so only what decides is kept.
        """
        facts = self._facts.get(differentiable_lse)
        if facts is None:
            slices = self.request.slices
            facts = self.call.facts(query, key, value, slices, differentiable_lse)
            self._facts[differentiable_lse] = facts
        return kernel_for(*facts)

    def sole(self, kernel: Kernel, query: Tensor, key: Tensor) -> Sole | None:
        """Return the launch that is all of a call that is kept, `None` if there is more to do."""
        if not self._may_be_sole:
            return None
        if kernel.name not in self._soles:
            self._soles[kernel.name] = sole_launch(self.plan(query, key), query, key, kernel)
        return self._soles[kernel.name]


# By options, shapes and dtypes. Each call knows whether its group is still there.
_BOUND: dict[Any, BoundCall] = {}


# The most calls that are kept; a model has a few.
MAX_BOUND = 256


def bound_call(
    options: tuple[Any, ...] | list[Any], query: Tensor, key: Tensor, value: Tensor
) -> BoundCall:
    """Return the bound call of the op's arguments.

    Raises:
        ValueError: if the op does not take such inputs.
    """
    for i in TENSORS:
        if options[i] is not None:
            return BoundCall(tuple(options), query, key, value)
    shapes = query.shape, key.shape, value.shape, query.device, key.device, value.device
    asked = *options, *shapes, query.dtype, key.dtype, value.dtype
    # Of another memory layout there is no bound call, as the checks refuse it.
    asked = *asked, query.layout, key.layout, value.layout
    found = _BOUND.get(asked)
    if found is not None and found.is_alive:
        return found
    found = BoundCall(tuple(options), query, key, value, is_kept=True)
    if len(_BOUND) >= MAX_BOUND:
        _BOUND.clear()
    _BOUND[asked] = found
    return found
