"""What must be refused, all of it in one test."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

Refused = dict[type[Exception], dict[str, Any]]
"""By the type of an error and what it says, as it stands or as a regular expression: what raises
it, which may be a call."""


def check_refused(refused: Refused, run: Callable[[Any], Any] = lambda call: call()) -> None:
    """Run each of them; all must raise their errors."""
    wrong = {}
    for error, given in refused.items():
        for said, what in given.items():
            try:
                run(what)
                wrong[said] = "nothing was raised"
            except error as raised:
                if said not in str(raised) and not re.search(said, str(raised)):
                    wrong[said] = str(raised)
    assert not wrong
