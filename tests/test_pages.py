"""The code of pages runs, and prints what they say."""

from __future__ import annotations

import io
import re
from contextlib import chdir, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from dtensor_ring.compute.kernels import KERNELS
from dtensor_ring.compute.kernels.registry import unregister_kernel
from tests.huggingface.trainers.test_trainer import under_torchrun
from tests.huggingface.trainers.trl_runs import harmless
from tests.pool import Pool
from tests.test_public import ROOT

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))
    if page.exists() and (page.stem != "torchtitan" or find_spec("torchtitan"))
]
CODE = re.compile(r"^```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(pool: Pool, tmp_path: Path, page: Path) -> None:
    """The code of a page runs, and prints what the page says."""
    pool.run(2, under_torchrun, _check_page, page, tmp_path)


def _check_page(page: Path, folder: Path) -> None:
    before = list(KERNELS)
    with chdir(folder), harmless():
        _run_page(page)
    for name in [name for name in KERNELS if name not in before]:
        unregister_kernel(name)  # this process runs other tests


def _run_page(page: Path) -> None:
    """Run the blocks of a page one after another; those of the README each alone."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    for code, printed in CODE.findall(page.read_text()):
        output = io.StringIO()
        if page.stem == "README":
            namespace = {"__name__": "__main__"}
        with redirect_stdout(output):
            exec(compile(code, page.name, "exec"), namespace)
        assert not printed or output.getvalue() == printed
