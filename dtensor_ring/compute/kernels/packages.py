"""Why a package of kernels cannot be used: it is absent, too old, or does not load."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version


def missing_package(name: str, lacks: Callable[[str], str | None]) -> str | None:
    """Return why a package cannot be used, or `None`.

    Args:
        name: of the package.
        lacks: returns what an installed version lacks, or `None`; it may load the package.
    """
    try:
        return lacks(version(name))
    except PackageNotFoundError:
        return f"the {name} package is not installed"
    except Exception as error:  # a broken package may raise anything
        return f"the {name} package does not load: {error}"


def too_old(name: str, oldest: tuple[int, int], found: str) -> str | None:
    """Return why a version of a package is too old, or `None`.

    >>> too_old("triton", (3, 2), "3.1.0"), too_old("triton", (3, 2), "3.10.0")
    ('it needs triton 3.2 or later, found 3.1.0', None)
    """
    if tuple(map(int, re.findall(r"\d+", found)[:2])) >= oldest:
        return None
    return f"it needs {name} {'.'.join(map(str, oldest))} or later, found {found}"
