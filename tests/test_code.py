"""How the code is laid out: layers, adapters of optional packages, lengths, no hidden state."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import dtensor_ring
from dtensor_ring import extension
from tests.test_public import ROOT

PICTURE = (ROOT / "ARCHITECTURE.md").read_text().partition("```\n")[2].partition("```")[0]
LAYERS = [
    name
    for line in reversed(PICTURE.splitlines())
    for name in re.findall(r"\b(\w+)(?:/|\.py\b)", line)
    if name != "parallel_plans"
]
"""Folders in the order of their imports, as ARCHITECTURE.md draws them, and two files beside them.

A module imports from its own folder and those below it, and never in a circle.
"""
WITHOUT_TORCH = re.compile(r"dtensor_ring\.((planning|balanced)\b|\w+\.plan$)")
"""These modules, and all that they import, need no torch."""
TO_LABORATORY = "dtensor_ring.dtensor.laboratory"
"""Stands below the laboratory, and imports it in functions and for types only."""
FOLDERS = ("core", "states", "selecting", "probing", "activations", "losses", "sharding")
FOLDERS += ("generation", "serving", "vision", "trainers")
"""Of `huggingface/`, in the order of their imports; its other files, and `server/`, stand above."""
DOOR = {"dtensor_ring": dtensor_ring.__all__, "dtensor_ring.extension": extension.__all__}
"""What plans may import of the package: modules, and the names of each."""
# Two packages install into the folder flash_attn: the longest of these names is the one imported.
OPTIONAL = {"flash_attn", "flash_attn.cute", "flash_attn_interface", "torchtitan", "transformers"}
OPTIONAL |= {"cudnn.flex_attention", "cudnn.sdpa", "flashinfer"}
OPTIONAL |= {"fastapi", "prometheus_client", "pydantic", "starlette", "uvicorn"}
OPTIONAL |= {"diffusers", "kernels", "matplotlib", "plotly", "rich", "triton", "trl"}
SUBCLASSES = (
    "parallel_plans.huggingface.grpo",
    "parallel_plans.huggingface.trainer",
    "parallel_plans.huggingface.trainers.trainer_options",
    "parallel_plans.huggingface.trl",
    "parallel_plans.torchtitan",
)
"""Of classes of an optional package, which they import first: nobody imports them but users."""
ON_FIRST_USE = {
    "dtensor_ring.compute.merge_triton",
    "dtensor_ring.paged.paged_triton",
    "dtensor_ring.quantised.quantise_triton",
    "parallel_plans.huggingface.generation.context_parallel_cache",
    "parallel_plans.huggingface.server.app",
    "parallel_plans.huggingface.server.asked",
    "parallel_plans.huggingface.server.http_thread",
    "parallel_plans.huggingface.server.metrics",
}
"""Need an optional package, and are imported in functions only."""
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for package in ("dtensor_ring", "parallel_plans")
    for path in sorted((ROOT / package).rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in SOURCES.items()}


def _layer(module: str) -> int:
    package, _, name = module.partition(".")
    if package == "parallel_plans" or name in ("", "__main__"):
        return len(LAYERS)
    return LAYERS.index(name.partition(".")[0])


@cache
def _imports(node: ast.AST, late: bool = True) -> list[str]:
    """Names of the modules that are imported under a node, in functions or for types (late) too."""
    found: list[str] = []
    if isinstance(node, ast.Import):
        found += [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        assert not node.level, "imports are absolute"
        parts = [f"{node.module}.{alias.name}" for alias in node.names]
        found += [part if part in SOURCES else str(node.module) for part in parts]
    for child in ast.iter_child_nodes(node):
        is_late = isinstance(child, ast.FunctionDef) or (
            isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        )
        # Expressions import nothing.
        if not isinstance(child, ast.expr) and (late or not is_late):
            found += _imports(child, late)
    return found


def test_imports_go_down() -> None:
    graph: dict[str, list[str]] = {}
    for name, tree in TREES.items():
        found = _imports(tree, late=name != TO_LABORATORY)
        ours = [x for x in found if x.startswith(("dtensor_ring", "parallel_plans"))]
        assert all(_layer(imported) <= _layer(name) for imported in ours), (name, ours)
        graph[name] = ours
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_planning_needs_no_torch() -> None:
    found = {name for name in TREES if WITHOUT_TORCH.match(name)}
    assert len({name.split(".")[1] for name in found}) > 5  # also plans of features
    for name in (todo := list(found)):
        imported = set(_imports(TREES[name]))
        others = {x for x in imported if x.partition(".")[0] != "dtensor_ring"}
        assert {x.partition(".")[0] for x in others} <= {"numpy", *sys.stdlib_module_names}, name
        todo += imported - others - found
        found |= imported


def _past_the_door(tree: ast.AST) -> list[str]:
    """What a source takes of the package that `DOOR` does not have, in functions and for types too.

    Ops are reached by `torch.ops`, and `import dtensor_ring` registers them.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name != "dtensor_ring"]
        elif isinstance(node, ast.ImportFrom):
            known = DOOR.get(str(node.module), ())
            found += [f"{node.module}.{x.name}" for x in node.names if x.name not in known]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "dtensor_ring":
            found += [f"dtensor_ring.{node.attr}"] * (node.attr not in dtensor_ring.__all__)
        elif isinstance(node, ast.Constant) and str(node.value).startswith("dtensor_ring."):
            found.append(str(node.value))  # for `import_module`
    return [name for name in found if name.partition(".")[0] == "dtensor_ring"]


def test_plans_import_by_the_door() -> None:
    plans = {name: x for name, x in TREES.items() if name.partition(".")[0] == "parallel_plans"}
    found = {name: _past_the_door(tree) for name, tree in plans.items()}
    assert not {name: taken for name, taken in found.items() if taken}


def test_the_door_is_the_only_way() -> None:
    for source in (
        "from dtensor_ring.ops.axis_ops import gather_parts_op",
        "from dtensor_ring.dtensor import gather",
        "from dtensor_ring import dtensor",
        "from dtensor_ring.extension import CALLER",
        "import dtensor_ring.extension",
        "import dtensor_ring\ndtensor_ring.ring.ring_forward",
        "def late():\n    from dtensor_ring.ring import ring_forward",
        "if TYPE_CHECKING:\n    from dtensor_ring.planning.plan import Plan",
        "import_module('dtensor_ring.command.main')",
    ):
        assert _past_the_door(ast.parse(source)), source


def test_nobody_below_imports_what_is_above() -> None:
    """Importing `dtensor_ring` loads neither what plans need nor the command line."""
    for target in ("dtensor_ring.extension", "dtensor_ring.command"):
        for name, tree in TREES.items():
            if name.startswith("dtensor_ring") and not name.startswith(target):
                found = {x for x in _imports(tree) if x.startswith(target)}
                # They ask whether this is a process of the command, and import nothing else.
                is_main = name == "dtensor_ring.__main__"
                assert is_main or not found - {"dtensor_ring.command.first"}, name


def _part(module: str) -> str:
    """A folder within a layer, or a module that lies in no such folder."""
    return ".".join(module.split(".")[:3])


def test_folders_within_layers_import_one_way() -> None:
    graph: dict[str, set[str]] = {}
    for name, tree in TREES.items():
        ours = {_part(x) for x in _imports(tree, late=False) if x.startswith("dtensor_ring.")}
        if name.startswith("dtensor_ring."):
            graph.setdefault(_part(name), set()).update(ours - {_part(name)})
    TopologicalSorter(graph).prepare()  # raises CycleError


def _floor(module: str) -> int:
    """The place of a module of `huggingface/` among its folders."""
    folder = module.split(".")[2]
    return FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)


def test_folders_of_huggingface_import_one_way() -> None:
    package = "parallel_plans.huggingface."
    for name, tree in TREES.items():
        if name.startswith(package):
            ours = [x for x in _imports(tree) if x.startswith(package)]
            assert all(_floor(imported) <= _floor(name) for imported in ours), (name, ours)
    assert {x.split(".")[2] for x in TREES if x.startswith(package)} >= set(FOLDERS)


def _subclasses(module: str) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in SUBCLASSES)


def _optional(module: str) -> str | None:
    """The optional package that a module belongs to."""
    names = [x for x in OPTIONAL if module == x or module.startswith(f"{x}.")]
    return max(names, key=len, default=None)


def test_optional_packages_have_one_adapter_each() -> None:
    adapters: dict[str, set[str]] = {package: set() for package in OPTIONAL}
    for name, tree in TREES.items():
        late_only = set(_imports(tree, late=False)) & ON_FIRST_USE
        assert not late_only or name in ON_FIRST_USE, f"{name} needs {late_only}"
        early = {_optional(imported) for imported in _imports(tree, late=False)} - {None}
        if not _subclasses(name) and name not in ON_FIRST_USE:
            assert not early, f"{name} needs {early}"
            assert not any(_subclasses(imported) for imported in _imports(tree)), name
        adapter = "kernels" if name.endswith("_triton") else name
        if _layer(name) == len(LAYERS):
            adapter = ".".join(name.split(".")[:2]).removesuffix("_cpu")
        for imported in _imports(tree):
            if package := _optional(imported):
                adapters[package].add(adapter)
    # The plan trains models of transformers; the laboratory runs their modules without content.
    adapters["transformers"].discard("dtensor_ring.lab.training.model_source")
    assert all(len(files) <= 1 for files in adapters.values()), adapters
    assert adapters["flash_attn"] != adapters["flash_attn.cute"]


def test_no_hidden_state() -> None:
    for name, tree in TREES.items():
        assert SOURCES[name].stem not in ("utils", "common", "config")
        for node in ast.walk(tree):
            assert not isinstance(node, ast.Global), name
            assert getattr(node, "attr", getattr(node, "id", "")) not in ("environ", "getenv"), name


CONSTRUCTORS = {"AxisConfig", "Arguments", "Effort", "LatentLists", "Place", "TransferPolicy"}
CONSTRUCTORS |= {"TypeVar", "attrgetter", "compile", "nullcontext", "_Nothing"}
CONSTRUCTORS |= {"place_of_sinks", "causal", "full", "index", "join", "register_op", "tuple"}
"""Functions that modules call at import for a value that nothing changes."""
TABLES = {"INDEXING", "RESULTS", "GRADIENTS", "_REDUCTIONS", "_RULES", "LAYOUTS", "ROUTES"}
TABLES |= {"PRESETS", "_SCHEMA_TYPES", "_TENSORS", "TENSORS_OF_BATCH", "__all__"}
TABLES |= {"FILLED", "LATE", "SAME", "SHAPED", "SHAPES", "TOKENS_TO_BATCH", "BATCH_TO_TOKENS"}
TABLES |= {"BATCH_TO_LSE", "LSE_TO_BATCH", "NAMES", "UNUSED", "KINDS", "TESTED", "HEADS"}
TABLES |= {"HEAD_DIM", "MATRIX", "ADDED", "FORMATS", "BY_DTYPE", "STAND_INS", "SCANS"}
TABLES |= {"_LABORATORY", "_PASSES"}
# Options of the command line.
TABLES |= {"JSON", "STRATEGY", "ATTENTION", "SCHEDULE", "COMPARE", "STEP", "ESTIMATE", "SIMULATE"}
TABLES |= {"CALIBRATE", "SERVE", "DOCTOR", "COMMANDS"}
"""Module-level dicts, sets and lists that are read only."""


def _state(tree: ast.Module) -> Iterator[str]:
    """Module-level names whose value may change, cached functions among them."""
    displays = (ast.Dict, ast.DictComp, ast.List, ast.ListComp, ast.Set, ast.SetComp)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            decorators = map(ast.unparse, node.decorator_list)
            if any(re.match(r"(functools\.)?(lru_)?cache", found) for found in decorators):
                yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            called = getattr(node.value, "func", None)
            function = getattr(called, "attr", getattr(called, "id", None))
            is_call = isinstance(node.value, ast.Call) and function not in CONSTRUCTORS
            borrows = ast.unparse(node).endswith("_custom_op_handlers")
            if is_call or borrows or isinstance(node.value, displays):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from map(ast.unparse, targets)


def test_module_level_state_is_listed_with_its_reason() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    table = page.partition("## Module-level state")[2].partition("\n## ")[0]
    rows = [row.split("|") for row in table.splitlines() if row.startswith("| `")]
    listed = {(name, file) for row in rows for name in _quoted(row[1]) for file in _quoted(row[2])}
    for name, tree in TREES.items():
        for found in {*_state(tree)} - TABLES:
            files = [file for of, file in listed if of == found]
            path = SOURCES[name].as_posix()
            assert any(path.endswith(f"/{file}") for file in files), f"{found} in {path}"
    kept = {found for tree in TREES.values() for found in _state(tree)}
    assert {of for of, _ in listed} <= kept, "listed, but no longer there"


def _quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_a_class_has_a_name_of_its_own() -> None:
    """But for that of torchtitan's plans, which is public."""
    counts = Counter(
        node.name for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in counts.items() if count > 1] == ["Documents"]


NAMING = ("dtensor_ring", "dtensor_ring.planning.layout", "dtensor_ring.balanced.balanced")
"""Modules that name layouts: `Balanced` tries two of them."""
NAMED = re.compile(r"(?i)\b(contiguous|striped|zigzag)\b")


def _named_layouts(tree: ast.Module) -> Iterator[int]:
    """Lines that name a layout otherwise than as a default."""
    spared: set[int] = set()
    for node in ast.walk(tree):
        defaults: list[Any] = []
        if isinstance(node, ast.arguments):
            defaults = [*node.defaults, *node.kw_defaults]
        elif isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or):
            defaults = node.values[1:]  # the fallback
        elif isinstance(node, ast.AnnAssign):
            defaults = [node.value]  # of a field
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            defaults = [node.value]  # a docstring
        spared |= {id(part) for default in defaults if default for part in ast.walk(default)}
    for node in ast.walk(tree):
        said = str(getattr(node, "id", "") or getattr(node, "value", ""))
        if id(node) not in spared and NAMED.search(said):
            yield node.lineno


def test_layouts_are_named_as_defaults_only() -> None:
    found = [
        f"{SOURCES[name]}:{line}"
        for name, tree in TREES.items()
        if name not in NAMING and NAMED.search(SOURCES[name].read_text())
        for line in _named_layouts(tree)
    ]
    assert not found


SCRIPTS = [
    path
    for folder in ("tests", "examples", "benchmarks", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def _too_long(path: Path, tree: ast.AST | None = None) -> Iterator[str]:
    """The file, if it has more than 500 lines, and functions with more than 60 of code."""
    text = path.read_text()
    if len(text.splitlines()) > 500:
        yield f"{path}: {len(text.splitlines())} lines"
    # In most scripts all that stands at the margin is shorter than the longest function may be.
    parts = re.split(r"^(?=def |class )", text, flags=re.MULTILINE)
    has_long = any(part.count("\n") > 60 for part in parts)
    for node in ast.walk(tree or ast.parse(text if has_long else "")):
        if isinstance(node, ast.FunctionDef):
            first = node.body[0]
            documented = ast.get_docstring(node) is not None
            docstring = first.end_lineno - first.lineno + 1 if documented else 0
            length = node.end_lineno - node.lineno + 1 - docstring
            if length > 60:
                yield f"{path}:{node.lineno} {node.name}: {length} lines"


def test_size() -> None:
    found = [x for name, tree in TREES.items() for x in _too_long(SOURCES[name], tree)]
    assert not [*found, *(x for path in SCRIPTS for x in _too_long(path))]
