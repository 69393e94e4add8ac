"""What users and readers see: the surface, its examples, and how the code is laid out."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import io
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import redirect_stdout
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import dtensor_ring
import parallel_plans
from tests.pool import Pool

ROOT = Path(__file__).parent.parent
PUBLIC = {name: getattr(dtensor_ring, name) for name in dtensor_ring.__all__}


class TestSurface(expecttest.TestCase):
    def test_signatures(self) -> None:
        lines = []
        for name, thing in PUBLIC.items():
            lines.append(f"{name}{inspect.signature(thing)}")
            lines += [f"    .{member}{shown}" for member, shown in _members(thing)]
        wrapped = [textwrap.fill(line, 96, subsequent_indent=" " * 8) for line in lines]
        self.assertExpectedInline(
            "\n".join(wrapped),
            """\
Balanced(mask: 'Mask', seq_len: 'int', world_size: 'int', cu_seqlens: 'Any' = None, block: 'int'
        = 256) -> None
    .block
    .cu_seqlens
    .max_runs
    .name
    .runs(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'tuple[Run, ...]'
ContextParallel(layout: 'Layout | str' = 'zigzag', *, inputs: 'tuple[str, ...]' = ('query',
        'key', 'value')) -> 'None'
Contiguous() -> None
    .name
    .runs(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'tuple[Run, ...]'
Mask(left: 'int | None', right: 'int | None', chunk: 'int | None' = None, prefix: 'int | None' =
        None) -> None
    .causal() -> 'Mask'
    .chunk
    .chunked(chunk: 'int') -> 'Mask'
    .full() -> 'Mask'
    .left
    .local(left: 'int | None', right: 'int | None') -> 'Mask'
    .prefix
    .prefix_causal(prefix: 'int') -> 'Mask'
    .right
    .sees(self, query: 'int', key: 'int') -> 'bool'
    .sliding(window: 'int') -> 'Mask'
Striped() -> None
    .name
    .runs(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'tuple[Run, ...]'
ZigZag() -> None
    .name
    .padded_length(self, seq_len: 'int', world_size: 'int') -> 'int'
    .runs(self, rank: 'int', world_size: 'int', seq_len: 'int') -> 'tuple[Run, ...]'
available_kernels() -> 'dict[str, str | None]'
describe_schedule(layout: 'Layout | str', mask: 'Mask', seq_len: 'int', world_size: 'int',
        cu_seqlens: 'Any' = None) -> 'Schedule'
ring_attention(query: 'Any', key: 'Any', value: 'Any', *, mask: 'Mask' = Mask(left=None,
        right=0, chunk=None, prefix=None), cu_seqlens: 'Tensor | None' = None, sinks: 'Any' =
        None, scale: 'float | None' = None, softcap: 'float' = 0.0, kernel: 'str | None' = None,
        mesh: 'DeviceMesh | None' = None, return_lse: 'bool' = False, key_cu_seqlens: 'Tensor |
        None' = None, runs: 'Tensor | None' = None, validate: 'bool' = False) -> 'Any'
sequence_layout(mesh: 'DeviceMesh') -> 'Layout | None'
sequence_runs(layout: 'Balanced') -> 'Tensor'
set_sequence_layout(mesh: 'DeviceMesh', layout: 'Layout | str') -> 'None'
shard_sequence(tensor: 'Tensor', mesh: 'DeviceMesh', dim: 'int', layout: 'Layout | str | None' =
        None) -> 'DTensor'
unshard_sequence(dtensor: 'DTensor', dim: 'int', layout: 'Balanced | None' = None) -> 'Tensor'""",
        )


def _members(thing: Any) -> list[tuple[str, str]]:
    """Public attributes of a class of ours, with signatures of those that are called."""
    if not inspect.isclass(thing):
        return []
    found = []
    for name in sorted(vars(thing)):
        if not name.startswith("_"):
            member = getattr(thing, name)
            found.append((name, str(inspect.signature(member)) if callable(member) else ""))
    return found


def test_docstrings() -> None:
    for name, thing in PUBLIC.items():
        assert inspect.getdoc(thing), name
        for member, shown in _members(thing):
            assert not shown or inspect.getdoc(getattr(thing, member)), f"{name}.{member}"
    for module in _modules():
        assert module.__doc__, module.__name__


def _modules() -> list[ModuleType]:
    names = [
        info.name
        for package in (dtensor_ring, parallel_plans)
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    ]
    return [importlib.import_module(name) for name in ("dtensor_ring", *names)]


def _examples() -> dict[str, doctest.DocTest]:
    """Docstrings with examples, by name."""
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = [test for module in _modules() for test in finder.find(module)]
    return {test.name: test for test in found if test.examples}


def test_examples_are_where_they_help() -> None:
    documented = {name.rpartition(".")[2] for name in _examples()}
    assert set(PUBLIC) - documented == {"sequence_layout", "unshard_sequence"}


@pytest.mark.parametrize("name", _examples())
def test_example(pool: Pool, name: str) -> None:
    pool.run(1, _check_example, name)


def _check_example(name: str) -> None:
    test = _examples()[name]
    test.globs.update(_namespace())
    output = io.StringIO()
    results = doctest.DocTestRunner().run(test, out=output.write)
    assert results.attempted
    assert not results.failed, output.getvalue()


def _namespace() -> dict[str, Any]:
    """What the examples do not import."""
    from transformers import LlamaConfig, LlamaForCausalLM

    helpers = (init_device_mesh, parallelize_module, LlamaConfig, LlamaForCausalLM)
    named = {helper.__name__: helper for helper in helpers}
    return {"torch": torch, "nn": nn, "F": F, **named, **PUBLIC}


PAGES = [page for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))) if page.exists()]
CODE = re.compile(r"^```python\n(.*?)^```$(?:\n\n```\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page(pool: Pool, page: Path) -> None:
    """The code of a page runs from top to bottom, and prints what the page says."""
    pool.run(2, _check_page, page)


def _check_page(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": page.stem}
    for code, printed in CODE.findall(page.read_text()):
        output = io.StringIO()
        with redirect_stdout(output):
            exec(compile(code, page.name, "exec"), namespace)
        assert not printed or output.getvalue() == printed


def test_quickstart() -> None:
    script = str(ROOT / "examples" / "quickstart.py")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    runs = [
        subprocess.Popen([sys.executable, *prefix, script], cwd=ROOT, env=environment, **pipes)
        for prefix in (launcher, ())
    ]
    for run, world_size in zip(runs, (2, 1), strict=True):
        printed, errors = run.communicate(timeout=120)
        assert run.returncode == 0, errors
        assert not errors
        checked = r"world size (\d), .*: causal and sliding match one device\n"
        assert re.fullmatch(checked, printed).group(1) == str(world_size)  # pyrefly: ignore


IMPORTS = """
import sys, torch.distributed.tensor.parallel, torch.utils.flop_counter
before = set(sys.modules)
import dtensor_ring
packages = {name.partition(".")[0] for name in set(sys.modules) - before}
print(*sorted(packages - set(sys.stdlib_module_names) - {"torch"}))
"""


def test_import_loads_nothing_else() -> None:
    command = [sys.executable, "-W", "error", "-c", IMPORTS]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["dtensor_ring"]
    assert not run.stderr


# Layers 0 to 5: a module imports from its own layer and those below, and never in a circle.
LAYERS = (
    {"layout", "mask", "tile", "plan", "balanced", "schedule"},
    {"order", "kernels", "merge", "execute"},
    {"buffer", "comm", "ring"},
    {"check", "op"},
    {"annotation", "agreement", "dtensor", "sdpa", "sequence", "attention", "style"},
)
OPTIONAL = {"flash_attn", "flash_attn_interface", "torchtitan", "transformers", "triton"}
OPTIONAL |= {"matplotlib", "rich"}
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("dtensor_ring", "parallel_plans")
    for path in sorted((ROOT / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def _layer(module: str) -> int:
    package, _, name = module.partition(".")
    if package == "parallel_plans" or not name:
        return len(LAYERS)
    layers = [i for i, names in enumerate(LAYERS) if name.partition(".")[0] in names]
    assert layers, f"{module} has no layer in this table"
    return layers[0]


def _imports(node: ast.AST, late: bool = True) -> Iterator[str]:
    """Names of the modules that are imported under a node, in functions (late) or not."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        parts = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (part if part in SOURCES else str(node.module) for part in parts)
    for child in ast.iter_child_nodes(node):
        if late or not isinstance(child, ast.FunctionDef):
            yield from _imports(child, late)


def test_imports_go_down() -> None:
    graph: dict[str, list[str]] = {}
    for name, tree in TREES.items():
        ours = [x for x in _imports(tree) if x.startswith(("dtensor_ring", "parallel_plans"))]
        assert all(_layer(imported) <= _layer(name) for imported in ours), (name, ours)
        graph[name] = ours
        if _layer(name) == 0:
            others = {imported.partition(".")[0] for imported in _imports(tree)} - {"dtensor_ring"}
            assert others <= set(sys.stdlib_module_names), f"{name} is pure Python"
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_optional_packages_have_one_adapter_each() -> None:
    adapters: dict[str, set[str]] = {package: set() for package in OPTIONAL}
    for name, tree in TREES.items():
        early = {imported.partition(".")[0] for imported in _imports(tree, late=False)}
        assert not early & OPTIONAL, f"importing {name} needs {early & OPTIONAL}"
        for imported in _imports(tree):
            adapters.get(imported.partition(".")[0], set()).add(name)
    assert all(len(files) <= 1 for files in adapters.values()), adapters


def test_no_hidden_state() -> None:
    for name, tree in TREES.items():
        assert SOURCES[name].stem not in ("utils", "common", "config")
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Global), name
            assert getattr(node, "attr", getattr(node, "id", "")) not in ("environ", "getenv"), name


@pytest.mark.parametrize("name", [x for x in TREES if _layer(x) and x != "dtensor_ring"])
def test_layouts_are_named_as_defaults_only(name: str) -> None:
    spared: set[int] = set()
    for node in ast.walk(TREES[name]):
        defaults: list[Any] = []
        if isinstance(node, ast.arguments):
            defaults = [*node.defaults, *node.kw_defaults]
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            defaults = node.values[1:]  # the fallback
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            defaults = [node.value]  # a docstring
        spared |= {id(part) for default in defaults if default for part in ast.walk(default)}
    for node in ast.walk(TREES[name]):
        if id(node) not in spared:
            said = str(getattr(node, "id", "") or getattr(node, "value", ""))
            assert not re.search(r"(?i)\b(contiguous|striped|zigzag)\b", said), node.lineno


@pytest.mark.parametrize("name", TREES)
def test_size(name: str) -> None:
    assert len(SOURCES[name].read_text().splitlines()) <= 300
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node) is not None
            docstring = first.end_lineno - first.lineno + 1 if documented else 0
            assert node.end_lineno - node.lineno + 1 - docstring <= 60, node.name
