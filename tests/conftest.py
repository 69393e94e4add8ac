"""Fixtures: the pool of worker processes, and skipping what needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to four ranks: `pool.run(world_size, function, *args)`."""
    pool = Pool(4)
    yield pool
    pool.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
