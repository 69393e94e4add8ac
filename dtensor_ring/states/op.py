"""The op of a scan over ranks. Its gradient is the same op, from the last map to the first one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import _resolve_process_group

from dtensor_ring.agreement.call_record import CallRecord
from dtensor_ring.agreement.checked_transport import TransportContext, checked_transport
from dtensor_ring.ops.checks import CALLER
from dtensor_ring.ops.nodes import register_op
from dtensor_ring.states.run import Maps, factors, scan
from dtensor_ring.transport.transport import transport_of


def scan_states(
    state: Tensor,
    decay: Tensor | None,
    matrix: Tensor | None,
    owners: Sequence[int],
    is_back: bool,
    group_name: str,
) -> Tensor:
    """Return the state before the tokens of each of this rank's maps, in the shape of `state`.

    Args:
        state: the states of this rank's maps, `(M, ...)`, float32 or float64.
        decay: logarithms of their factors, `(M, ...)`, see `Maps`.
        matrix: their matrices, `(M, ..., K, K)`.
        owners: the rank of each place, see `plan.py`.
        is_back: whether states go from the last place to the first one.
        group_name: the process group.

    Raises:
        RingError: on every rank, if they differ in shapes, kinds, dtype or order.
    """
    group = _resolve_process_group(group_name)  # pyrefly: ignore[bad-argument-type]
    maps = Maps(state, decay, matrix)
    with _checked(group, maps, owners, is_back) as transport:
        return scan(transport, group.rank(), owners, maps, is_back)


def _checked(
    group: ProcessGroup, maps: Maps, owners: Sequence[int], is_back: bool
) -> TransportContext:
    """Return the transport of a call; it checks that all ranks make the same call."""
    if group.size() == 1:
        return nullcontext(transport_of(group))  # nobody to agree with
    direction = "backward" if is_back else "forward"
    facts: dict[str, Any] = {"direction": direction, "op": "scan_states"}
    facts |= {"dtype": maps.state.dtype, "device": maps.state.device.type}
    facts |= {name: "none" if x is None else [*x.shape] for name, x in maps._asdict().items()}
    record = CallRecord({name: str(x) for name, x in (facts | {"order": [*owners]}).items()})
    return checked_transport(group, record, direction, maps.state.device, call_site=CALLER.site)


def _fake_scan(
    state: Tensor,
    decay: Tensor | None,
    matrix: Tensor | None,
    owners: Sequence[int],
    is_back: bool,
    group_name: str,
) -> Tensor:
    return state.new_empty(state.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, decay, matrix, *ctx.place = inputs
    ctx.save_for_backward(decay, matrix, output)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of states, decays and matrices."""
    # The gradient of a state is what a scan in the other direction makes of the gradients of
    # results: a state reaches all results after it, through the maps between them.
    decay, matrix, before = ctx.saved_tensors
    owners, is_back, group_name = ctx.place
    of_state = scan_op(grad.contiguous(), decay, matrix, owners, not is_back, group_name)
    of_decay = of_matrix = None
    if decay is not None:
        # A map returns exp(decay) * before + state, so `of_state` is the gradient of that, too.
        each = of_state * before * factors(decay, before)
        # One decay is the factor of all numbers below its leading indices: their gradients add up.
        of_decay = each.flatten(decay.dim()).sum(-1) if each.dim() > decay.dim() else each
    if matrix is not None:
        # A transposed map was applied where states go back.
        left, right = (before, of_state) if is_back else (of_state, before)
        of_matrix = left @ right.mT
    return of_state, of_decay, of_matrix, None, None, None


scan_op = register_op(
    "scan_states",
    "(Tensor state, Tensor? decay, Tensor? matrix, int[] owners, bool is_back, str group_name) "
    "-> Tensor",
    scan_states,
    _fake_scan,
    gradient=(_gradient, _keep),
)
