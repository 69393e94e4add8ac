"""Parses the command line before torch is imported, in a process of `python -m dtensor_ring`."""

from __future__ import annotations

import sys


# Note [Parsed first]: torch takes seconds to import, and `python -m dtensor_ring` imports the
# package before its `__main__`. So the package parses the command line first, in that process and
# in no other: `--help`, `--version` and mistakes end there. What is right is parsed again by
# `main`.
def parse_first() -> None:
    """Parse the command line if this process runs the command, see Note [Parsed first].

    Raises:
        SystemExit: after help, and where the command line is wrong.
    """
    given = sys.orig_argv
    module = given[given.index("-m") + 1 :] if "-m" in given else []
    # While Python looks for the module of -m, that stands for its path.
    if sys.argv[:1] == ["-m"] and module[:1] == ["dtensor_ring"]:
        from dtensor_ring.command.parser import parse

        parse(module[1:])
