"""Logs how attention over an axis runs, once for each axis."""

from __future__ import annotations

import logging

from torch import Tensor

from dtensor_ring.agreement.session import session_of
from dtensor_ring.ops.options import Call, Question
from dtensor_ring.planning.plan import Plan

_LOG = logging.getLogger("dtensor_ring")


def announce(
    call: Call, question: Question, plan: Plan, kernel: str, key: Tensor, value: Tensor
) -> None:
    """Log the first attention of a group at level INFO, and all of them at DEBUG.

    Args:
        call: the call's options.
        question: the planner's arguments.
        plan: this rank's plan.
        kernel: name of the kernel that was chosen.
        key: `(B, Nkv, L, H)`.
        value: `(B, Nkv, L, Hv)`.
    """
    if not _LOG.isEnabledFor(logging.INFO):
        return
    session = session_of(call.group)
    level = logging.DEBUG if session.is_announced else logging.INFO
    session.is_announced = True
    if not _LOG.isEnabledFor(level):
        return
    per_token = sum(x.shape[0] * x.shape[1] * x.shape[3] * x.itemsize for x in (key, value))
    ranks = list(session.ranks)
    rank = ranks[question.rank]
    _LOG.log(
        level,
        "ring attention on rank %d of %s: kernel %s, layout %s, strategy %s, %s tokens, "
        "%d steps, receives %s tokens (%.1f MiB) forward",
        *(rank, ranks, kernel, question.layout.name, question.strategy.spec),
        *(f"{question.seq_len:,}", plan.num_steps, f"{plan.num_received:,}"),
        plan.num_received * per_token / 2**20,
    )
