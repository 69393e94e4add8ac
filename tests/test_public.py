"""What users see: the surface and its docstrings, and what importing it loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dtensor_ring
from tests.surface import FILES, check_surface

ROOT = Path(__file__).parent.parent
PUBLIC = {name: getattr(dtensor_ring, name) for name in dtensor_ring.__all__}


@pytest.mark.parametrize("module", FILES)
def test_signatures(module: str) -> None:
    check_surface(module)


IMPORTS = """
import sys, torch.distributed.tensor.parallel, torch.utils.flop_counter
before = set(sys.modules)
import dtensor_ring
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(packages - set(sys.stdlib_module_names) - {"torch"}))
print(*{"torch._dynamo"} & set(sys.modules))  # which takes twice the time of all of ours
print(*(name for name in sys.modules if name.startswith("dtensor_ring.lab")))
"""


def test_import_loads_nothing_else() -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORTS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["dtensor_ring"]
    assert not run.stderr
