"""Versions of other libraries: those that were tested, and what is said of others."""

from __future__ import annotations

import re
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from parallel_plans import tested
from parallel_plans.tested import TESTED, warn_untested
from tests.samples import SAMPLES

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    warn_untested.cache_clear()
    yield
    warn_untested.cache_clear()


def test_the_extras_allow_what_was_tested() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for library, (oldest, newest) in TESTED.items():
        (allowed,) = (x for x in extras[library] if x.startswith(library))
        bounds = re.fullmatch(library + r">=(\d+)\.(\d+)(\.\d+)?,<(\d+)\.(\d+)", allowed)
        assert bounds is not None, allowed
        low, high = map(int, bounds.group(1, 2)), map(int, bounds.group(4, 5))
        assert (tuple(low), tuple(high)) == (oldest, (newest[0], newest[1] + 1)), library


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-oldest.txt"])
def test_what_is_pinned_was_tested(name: str) -> None:
    """Between them, the pins are the oldest and the newest of transformers."""
    pins = dict(re.findall(r"^([\w.-]+)==(\d+\.\d+)", (ROOT / name).read_text(), re.M))
    for library in TESTED.keys() & pins:
        major, minor = map(int, pins[library].split("."))
        assert TESTED[library].oldest <= (major, minor) <= TESTED[library].newest, library
    extreme = TESTED["transformers"].oldest if "oldest" in name else TESTED["transformers"].newest
    assert pins["transformers"] == ".".join(map(str, extreme))


def test_the_oldest_torch_that_is_allowed_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (allowed,) = (x for x in project["dependencies"] if x.startswith("torch"))
    pins = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    assert f"{allowed.replace('>=', '==')}.0" in pins


def test_the_page_of_models_is_of_the_newest() -> None:
    page, pins = ((ROOT / x).read_text() for x in ("docs/models.md", "constraints.txt"))
    (pin,) = re.findall(r"(?m)^transformers==(.*)", pins)
    assert re.findall(r"transformers (\d\S+),", page) == [pin]


SAID = {
    "5.25.0": r"transformers 5\.25\.0 is newer than 5\.24, the newest that dtensor_ring was tested",
    "6.0.0.dev0": r"6\.0\.0\.dev0 is newer than 5\.24, .*'transformers>=5\.23,<5\.25'",
    "5.22.2": r"transformers 5\.22\.2 is older than 5\.23, the oldest that dtensor_ring was tested",
    "5.23.0": None,
    "5.24.7": None,
    "unknown": None,
}


@pytest.mark.parametrize(("installed", "match"), SAID.items())
def test_a_version_that_was_not_tested_warns_once(installed: str, match: str | None) -> None:
    with mock.patch.object(tested, "version", return_value=installed):
        said = _said("transformers", times=2)
    assert len(said) == (match is not None)
    assert match is None or re.search(match, said[0])


def _said(library: str, times: int = 1) -> list[str]:
    """Warnings, also those that pyproject.toml ignores."""
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        for _ in range(times):
            warn_untested(library)
    return [str(x.message) for x in record]


@pytest.mark.parametrize("sample", SAMPLES)
def test_samples_are_there(sample: str) -> None:
    for file, names in SAMPLES[sample].items():
        code = (ROOT / "tests" / file).read_text()
        assert all(f"\ndef {name.partition('[')[0]}(" in code for name in names), file


def test_nothing_is_said_of_what_has_no_version() -> None:
    with mock.patch.dict(TESTED, {"no_such_library": TESTED["trl"]}):
        assert not _said("no_such_library")
