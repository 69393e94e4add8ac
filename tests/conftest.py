"""The pool of worker processes, skipping what needs a GPU, and counts of what was tried."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import randrange
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from torch._inductor import config as inductor

from tests.pool import Pool, start_server
from tests.samples import SAMPLES, sampled, without_repeats

SIGNATURES = re.compile(r"^def test_\w+\((.*?)\) ->", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Up to four ranks: `pool.run(world_size, function, *args)`."""
    pool = Pool(4)
    yield pool
    pool.close()


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # until tests run: what is imported and collected stays
    torch.set_num_threads(1)  # the workers use the other cores, and small tensors want no threads
    # All processes of this run share what inductor compiles: what it finds out of the compiler
    # alone takes one 8 seconds. What earlier runs left on disk is not used.
    folder = TemporaryDirectory()
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(gc.unfreeze)  # what is frozen at the end looks like a leak to nanobind
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder.name
    # For interpreters that tests start, and for this one and its forks, which have read them.
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # no further processes, which import torch
    inductor.compile_threads = 1
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"  # else each process compiles for 7 s to find out
    inductor.cpp.vec_isa_ok = True
    if not config.option.all_cases:  # they are others in each run
        # A machine that has other work draws slowly, which is no fault of a test.
        slow = [HealthCheck.too_slow]
        settings.register_profile("few", max_examples=30, suppress_health_check=slow)
        settings.load_profile("few")
    if config.option.decode_cases is None:
        config.option.decode_cases = 2000 if config.option.all_cases else 400
    if config.option.fuzz_cases is None:
        # The same in every run.
        config.option.fuzz_cases = 30 if config.option.all_cases else 4
    elif config.option.fuzz_seed is None:
        config.option.fuzz_seed = randrange(2**32)


def pytest_report_header(config: pytest.Config) -> list[str]:
    seed, lines = config.option.fuzz_seed, []
    if not torch.cuda.is_available():
        lines.append("no CUDA device: what needs one is deselected")
    return lines if seed is None else [*lines, f"random attentions: again by --fuzz-seed {seed}"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fuzz-cases",
        type=int,
        help="by layout and ranks, 25 times: 4, 30 of all cases, or drawn again",
    )
    parser.addoption("--fuzz-seed", type=int, help="draws the cases of an earlier run again")
    parser.addoption("--bad-calls", type=int, default=200, help="calls with strange arguments")
    parser.addoption(
        "--decode-cases", type=int, help="random decode calls: 400, or 2000 of all cases"
    )
    parser.addoption("--pool-steps", type=int, default=900, help="of random walks over pools")
    parser.addoption("--all-generations", action="store_true", help="of all families, in all ways")
    parser.addoption(
        "--all-hybrids", action="store_true", help="all models whose layers have states"
    )
    parser.addoption("--all-images", action="store_true", help="of all models that see images")
    parser.addoption("--processes", choices=["one", "many"], help="only tests with so many")
    parser.addoption("--all-cases", action="store_true", help="also those that repeat others")
    parser.addoption("--sample", choices=list(SAMPLES), help="only tests of tests/samples.py")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """How much was tried, where a test says so."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("passed", []):
        counts.update(dict(report.user_properties))
    for what, count in counts.items():
        terminalreporter.write_line(f"{what}: {count:,}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Whether a file has nothing that is asked for: it need not be imported."""
    sample, processes = config.getoption("--sample"), config.getoption("--processes")
    if not (sample or processes) or collection_path.suffix != ".py":
        return None
    file = collection_path.relative_to(Path(__file__).parent).as_posix()
    if sample and file not in SAMPLES[sample]:
        return True
    return True if processes and _is_without(collection_path.read_text(), processes) else None


def _is_without(code: str, processes: str) -> bool:
    """Whether none of the tests in a file can have so many processes."""
    if processes == "many":
        return "pool" not in code
    tests = SIGNATURES.findall(code)
    return sum("pool: Pool" in given for given in tests) + code.count("\n@on_ranks(") == len(tests)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept = [item for item in items if _is_asked_for(item, config)]
    if not config.getoption("--all-cases"):
        kept = without_repeats(kept)
    if sample := config.getoption("--sample"):
        kept = sampled(kept, sample)
    if processes := config.getoption("--processes"):
        kept = [item for item in kept if _has_workers(item) == (processes == "many")]
    left = {id(item) for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in left])
    items[:] = kept
    for item in items:
        if _is_marked(item, "gpu"):
            item.add_marker(pytest.mark.filterwarnings("default"))  # packages have theirs


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> Iterator[None]:
    """Fork what starts worker processes before any test runs, if there are tests with some."""
    starts = {"tests.scripts", "tests.faults.worlds"} & sys.modules.keys()
    if (starts or any(map(_has_workers, session.items))) and not session.config.option.collectonly:
        capture: Any = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()  # of what workers print, too
        start_server()
        capture.suspend_global_capture()
    return (yield)


def pytest_collection_finish() -> None:
    """Whoever collects garbage looks at what tests made, not at all that was imported: a second."""
    gc.freeze()
    gc.enable()


def _is_asked_for(item: pytest.Item, config: pytest.Config) -> bool:
    """Whether the machine has the device of a test, and the options ask for its case."""
    if _is_marked(item, "gpu") and not torch.cuda.is_available():
        return False
    needs = item.get_closest_marker("needs")
    if needs is None or any(map(config.getoption, needs.args)):
        return True
    always, case = needs.kwargs.get("but"), getattr(item, "callspec", None)
    return always is not None and always(**case.params)


def _is_marked(item: pytest.Item, mark: str) -> bool:
    # Not by `item.keywords`, where the folders above a test are, too.
    return item.get_closest_marker(mark) is not None


def _has_workers(item: pytest.Item) -> bool:
    """Whether the workers of the pool run the test; worlds have few, which mostly wait."""
    return "pool" in getattr(item, "fixturenames", ())
