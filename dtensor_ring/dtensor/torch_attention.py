"""Installs ring attention for PyTorch's attentions on DTensors of an annotated axis."""

from __future__ import annotations

from dtensor_ring.dtensor import varlen as _varlen  # noqa: F401 - registers its rules
from dtensor_ring.dtensor.flex.flex_attention import install_flex
from dtensor_ring.dtensor.sdpa import install_sdpa


def install_handlers() -> None:
    """Let PyTorch ask us first about attention on DTensors; other calls continue as before."""
    install_sdpa()
    install_flex()
