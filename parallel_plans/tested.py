"""Warn about versions of other libraries that the plans were not tested with."""

from __future__ import annotations

import re
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple


class Tested(NamedTuple):
    """The oldest and newest minor release of a library, as (major, minor)."""

    oldest: tuple[int, int]
    newest: tuple[int, int]


# The versions that the extras of pyproject.toml allow; others may be installed.
TESTED = {
    "accelerate": Tested((1, 15), (1, 15)),
    "diffusers": Tested((0, 42), (0, 42)),
    "torchtitan": Tested((0, 3), (0, 3)),
    "transformers": Tested((5, 23), (5, 24)),
    "trl": Tested((1, 16), (1, 16)),
}


def too_old(library: str) -> str | None:
    """Return why a library is absent, or older than all that the plans were tested with, or `None`.

    >>> too_old("transformers")
    """
    oldest = TESTED[library].oldest
    needed = f"it needs {library} {_spelled(oldest)} or later"
    try:
        installed = version(library)
    except PackageNotFoundError:
        return f"{needed}, which is not installed"
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    is_old = numbers is not None and (int(numbers[1]), int(numbers[2])) < oldest
    return f"{needed}, found {installed}: pip install -U {library}" if is_old else None


@cache
def warn_untested(library: str) -> None:
    """Warn once per process if the plans were not tested with the version of a library."""
    try:
        installed = version(library)
    except PackageNotFoundError:  # imported from a folder, not installed
        return
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None:
        return
    minor = int(numbers[1]), int(numbers[2])
    oldest, newest = TESTED[library]
    if minor < oldest or minor > newest:
        than = f"newer than {_spelled(newest)}, the newest"
        if minor < oldest:
            than = f"older than {_spelled(oldest)}, the oldest"
        known = f"{library}>={_spelled(oldest)},<{_spelled((newest[0], newest[1] + 1))}"
        warnings.warn(
            f"{library} {installed} is {than} that dtensor_ring was tested with: what differs "
            f"between them may end in errors or wrong numbers; pip install '{known}' gets a tested "
            "one",
            stacklevel=3,
        )


def _spelled(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
