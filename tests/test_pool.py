"""What the worker processes do with a run that fails."""

from __future__ import annotations

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
