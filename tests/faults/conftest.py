"""The worlds of the fault suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.worlds import Worlds


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    """Up to four ranks, of which some may die."""
    worlds = Worlds()
    yield worlds
    worlds.close()
