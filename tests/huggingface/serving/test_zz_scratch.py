from __future__ import annotations
import pytest
from tests.families import HYBRIDS, CHOOSES_POOLS
from tests.huggingface.serving.test_hybrids_served import check_mixed
from tests.pool import Pool

@pytest.mark.parametrize("family", [x for x in HYBRIDS|CHOOSES_POOLS])
def test_all(pool: Pool, family: str) -> None:
    pool.run(2, check_mixed, family)
