"""The layouts that tests run over: a new one needs a row here."""

from __future__ import annotations

from dtensor_ring import BlockCyclic, Contiguous, Striped, ZigZag
from dtensor_ring.planning.layout import Layout

LAYOUTS: tuple[Layout, ...] = (Contiguous(), Striped(), ZigZag(), BlockCyclic(2), BlockCyclic(5))
