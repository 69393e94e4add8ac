"""What long commands show while they run."""

from __future__ import annotations

import pytest

from dtensor_ring.lab.report import tracked, untracked


def test_progress_is_shown_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On stderr, as stdout has the result; elsewhere nothing is shown."""
    for is_terminal in (False, True):
        if is_terminal:
            monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes any stream for a terminal then
        assert list(tracked(range(3), "steps")) == [0, 1, 2]
        found = capsys.readouterr()
        assert not found.out
        assert ("steps" in found.err) == is_terminal
        assert list(untracked(range(3), "steps")) == [0, 1, 2]
        assert not capsys.readouterr().err
