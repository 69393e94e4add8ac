"""A training that fails once goes on from its checkpoint, under torchrun, as the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import run_launcher, run_script
from tests.test_examples import ALONE, TORCHRUN
from tests.test_pages import CODE
from tests.test_public import ROOT

# Workers that start again must not read the addresses of the old ones: see the page.
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
FAILS_ONCE = """
import os
replace = os.replace
def fail(source, target):
    replace(source, target)
    if torch.load(target)["step"] == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise RuntimeError("after the second checkpoint")
os.replace = fail
"""


def printed_steps(folder: Path, *launch: str, before: str = "") -> dict[str, float]:
    """The losses that rank 0 prints, by step; a step that is made again is an error."""
    folder.mkdir()
    script = folder / "train.py"
    page = (ROOT / "docs/failures.md").read_text()
    assert all(f"{name}={value}" in page for name, value in OWN_STORE.items())
    script.write_text(before + CODE.findall(page)[-1][0])
    printed, errors = run(script, *launch)
    steps = re.findall(r"^step (\d): loss (.*)$", printed, re.MULTILINE)
    assert len(steps) == len(dict(steps)), printed
    assert ("after the second checkpoint" in errors) == bool(before), errors
    return {step: float(loss) for step, loss in steps}


def run(script: Path, *launch: str) -> tuple[str, str]:
    """What a script prints and its errors, as it is or launched by a module."""
    # In processes that need not import torch again.
    if launch:
        done = run_launcher(*launch, script, cwd=script.parent, env=ALONE | OWN_STORE)
        assert done.code == 0, done
    else:
        (done,) = run_script(script, cwd=script.parent, env=ALONE | OWN_STORE)
    return done.printed, done.errors


def test_restart(tmp_path: Path) -> None:
    """Two ranks, one of which fails, against one process that does not."""
    whole = printed_steps(tmp_path / "whole")
    assert list(whole) == ["0", "1", "2", "3"]
    # As on the page: gloo itself fails to connect now and then, and torchrun tries again.
    restarts = "--max-restarts", "3"
    restarted = printed_steps(tmp_path / "restarted", *TORCHRUN[1:], *restarts, before=FAILS_ONCE)
    assert restarted == pytest.approx(whole, rel=1e-5)
