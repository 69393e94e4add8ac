"""Runs our kernels for GPUs in Triton's interpreter: `python -m tests.interpreted`, or `... --all`.

All in one process, whose start takes longer than they do. `test_interpreted.py` starts it.
"""

from __future__ import annotations

import sys

from tests.compute import test_merge_triton
from tests.paged import test_paged_triton
from tests.quantised import test_quantise_triton


def main() -> None:
    for tests in (test_merge_triton, test_quantise_triton, test_paged_triton):
        tests.check_in_the_interpreter([*(tests.CASES if "--all" in sys.argv else tests.FEW)])


if __name__ == "__main__":
    main()
