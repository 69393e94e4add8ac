"""What every test of kernels leaves as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.compute.kernels.registry import unregister_kernel


@pytest.fixture(autouse=True)
def only_ours() -> Iterator[None]:
    """Takes out again what a test registers."""
    before = list(KERNELS)
    yield
    for name in [name for name in KERNELS if name not in before]:
        unregister_kernel(name)
    assert list(KERNELS) == before
