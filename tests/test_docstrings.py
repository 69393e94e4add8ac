"""Everything public has a docstring, and the examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from functools import cache
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import dtensor_ring
import parallel_plans
from parallel_plans import huggingface
from tests.pool import Pool
from tests.surface import members
from tests.test_public import PUBLIC


def test_docstrings() -> None:
    for name, thing in PUBLIC.items():
        doc = inspect.getdoc(thing)
        assert doc, name
        assert not doc.startswith(f"{name}("), f"{name}: a dataclass writes this one itself"
        for member, shown in members(thing):
            assert not shown or inspect.getdoc(getattr(thing, member)), f"{name}.{member}"
    for module in _modules():
        assert module.__doc__, module.__name__


def _modules() -> list[ModuleType]:
    """All but what needs torchtitan or triton, which their own tests import."""
    found = [*pkgutil.walk_packages(dtensor_ring.__path__, "dtensor_ring.")]
    found += pkgutil.iter_modules(parallel_plans.__path__, "parallel_plans.")
    found += pkgutil.walk_packages(huggingface.__path__, "parallel_plans.huggingface.")
    names = [info.name for info in found if info.name != "parallel_plans.torchtitan"]
    names = [name for name in names if not name.endswith("_triton")]
    return [importlib.import_module(name) for name in ("dtensor_ring", *names)]


@cache
def _examples() -> dict[str, doctest.DocTest]:
    """Docstrings with examples, by name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for module in _modules() for test in finder.find(module)]
    return {test.name: test for test in found if test.examples}


def test_examples_are_where_they_help() -> None:
    documented = {name.rpartition(".")[2] for name in _examples()}
    assert set(PUBLIC) <= documented


def test_examples(pool: Pool) -> None:
    """Each in a process group of its own, as many make meshes."""
    failed = [name for name in _examples() if not all(pool.run(1, _is_right, name))]
    assert not failed, "what is printed above differs"


def _is_right(name: str) -> bool:
    test = _examples()[name]
    test.globs.update(_namespace())
    results = doctest.DocTestRunner().run(test)
    return bool(results.attempted) and not results.failed


def _namespace() -> dict[str, Any]:
    """What the examples do not import."""
    from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

    from parallel_plans.huggingface import (
        context_parallel_model,
        context_parallel_plan,
        restore_model,
    )

    models = LlamaConfig, LlamaForCausalLM, TrainingArguments
    plans = context_parallel_model, context_parallel_plan, restore_model
    helpers = (init_device_mesh, parallelize_module, TemporaryDirectory, *models, *plans)
    named = {helper.__name__: helper for helper in helpers}
    return {"torch": torch, "nn": nn, "F": F, **named, **PUBLIC}
