"""What the worker processes do with a run that fails."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.pool import DROPPED, Pool, RankError


def _fail(marks: Path, num_failures: int, message: str) -> int:
    """The number of this attempt; rank 1 alone fails the first `num_failures` of them."""
    mark = marks / f"rank {dist.get_rank()}"
    attempt = len(mark.read_text()) if mark.exists() else 0
    mark.write_text("x" * (attempt + 1))
    if dist.get_rank() == 1 and attempt < num_failures:
        raise RuntimeError(message)
    return attempt


def test_runs_again_what_gloo_dropped(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, _fail, tmp_path, 1, f"{DROPPED} with: closed by peer") == [1, 1]


@pytest.mark.parametrize(("num_failures", "message"), [(2, DROPPED), (1, "another error")])
def test_raises(pool: Pool, tmp_path: Path, num_failures: int, message: str) -> None:
    with pytest.raises(RankError, match=f"rank 1:(.|\n)*{message}"):
        pool.run(2, _fail, tmp_path, num_failures, message)
    assert (tmp_path / "rank 0").read_text() == "x" * num_failures


def _wait_for_nothing() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def test_says_where_a_rank_hangs(pool: Pool) -> None:
    with pytest.raises(RankError) as caught:
        pool.run(2, _wait_for_nothing, timeout=2)
    reported, hangs = caught.value.tracebacks
    assert reported is None
    assert hangs is not None
    assert "gave no answer in time" in hangs
    assert "in _wait_for_nothing" in hangs
