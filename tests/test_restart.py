"""A training that fails once goes on from its checkpoint, under torchrun, as the page says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pool import DROPPED
from tests.test_public import CODE, ROOT

pytestmark = pytest.mark.slow

LIMIT = "timeout=timedelta(seconds=30)"
"""Of the page; here a meeting that hangs is over sooner."""
UNMET = DROPPED, "_create_gloo_process_group"
FAILS_ONCE = """
import os
replace = os.replace
def fail(source, target):
    replace(source, target)
    if torch.load(target)["step"] == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("after the second checkpoint")
os.replace = fail
"""


def printed_steps(folder: Path, before: str = "") -> dict[str, float]:
    """The losses that rank 0 prints, by step; a step that is made again is an error."""
    folder.mkdir()
    script = folder / "train.py"
    code = CODE.findall((ROOT / "docs/failures.md").read_text())[-1][0]
    assert LIMIT in code
    script.write_text(before + code.replace(LIMIT, "timeout=timedelta(seconds=6)"))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [sys.executable, *launch, "--max-restarts", "3", str(script)]
    run = subprocess.run(command, cwd=folder, timeout=200, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    steps = re.findall(r"^step (\d): loss (.*)$", run.stdout, re.MULTILINE)
    assert len(steps) == len(dict(steps)), run.stdout
    assert ("after the second checkpoint" in run.stderr) == bool(before), run.stderr
    return {step: float(loss) for step, loss in steps}


def steps_of_a_restart(folder: Path) -> dict[str, float]:
    try:
        return printed_steps(folder / "restarted", FAILS_ONCE)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        # The workers did not meet, more often than restarts are allowed: see tests/pool.py.
        if isinstance(error, AssertionError) and not any(x in str(error) for x in UNMET):
            raise
        return printed_steps(folder / "once more", FAILS_ONCE)


def test_restart(tmp_path: Path) -> None:
    whole = printed_steps(tmp_path / "whole")
    assert list(whole) == ["0", "1", "2", "3"]
    assert steps_of_a_restart(tmp_path) == pytest.approx(whole, rel=1e-5)
