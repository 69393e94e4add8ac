"""The attentions of PyTorch that become ring attention on DTensors of an annotated axis."""

from __future__ import annotations

from dtensor_ring.dtensor import varlen as _varlen  # noqa: F401 - registers its rules
from dtensor_ring.dtensor.flex.flex_attention import install_flex
from dtensor_ring.dtensor.sdpa import install_sdpa


def install_handlers() -> None:
    """Let PyTorch ask us first about attention on DTensors; what is not ours goes on as before."""
    install_sdpa()
    install_flex()
