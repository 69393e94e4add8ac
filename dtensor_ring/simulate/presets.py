"""Machines by name, from data sheets."""

from __future__ import annotations

from collections.abc import Mapping

from dtensor_ring.simulate.machine import Machine

PRESETS: Mapping[str, Machine] = {}
