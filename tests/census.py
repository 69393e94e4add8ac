"""Every type of model that transformers has, under its plan: equal to the stock model, or refused.

``python -m tests.census`` from the root of the repository tries all of them on two ranks and prints
a page in Markdown; with ``--write`` it replaces docs/models.md. It takes some minutes.
"""

from __future__ import annotations

import argparse
import gc
import re
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from docs.marked import table_row
from parallel_plans.huggingface import context_parallel_plan
from parallel_plans.huggingface.core.patterns import LayerMask
from parallel_plans.huggingface.probing.eligibility import check_model
from parallel_plans.huggingface.sharding.sharding import shardings_of
from parallel_plans.huggingface.states.stateful import stateful_layers
from tests.model_images import images_of
from tests.model_types import KINDS, Batches, auto, batches, default_config, small_model, types_of
from tests.pool import Pool
from tests.results import Results, difference, results_alone, results_of

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
VERDICTS = ("equal", "refused", "not built", "wrong", "error")
ABOUT = """\
# Models

Every causal, masked and image-text model type of transformers {version}, made small, with random
weights and without dropout, on two ranks: plain, padded and packed batches are compared with the
stock model, in loss and all gradients. `make census` writes this page.

- *Equal*: no difference but rounding; the number is the largest relative error. *With images*: one
  in each row; the other image-text models got text alone. *Text*: of a model of several parts, with
  the plan on the part that is named.
  *Documents alone*: packed documents are compared with each of them alone, as layers that carry a
  state go on over the beginning of a document in the stock model on a CPU.
- *Refused*: an error that says why, when the plan is made or at the first forward.
- *Not built*: the census does not make a small model of that type.
"""
COUNTS = [
    "| kind | types | equal | only unpacked | refused | not built | wrong | raw errors |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
]


class Verdict(NamedTuple):
    """What became of a type: "equal", "refused", "not built", "wrong" or "error", and why."""

    what: str
    why: str = ""
    error: float = 0.0
    """The largest of loss and gradients, relative."""


def verdict(kind: str, name: str) -> Verdict:
    """Of a type, on each of two ranks."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        stock, ring = small_model(kind, name), small_model(kind, name)
    except Exception as error:  # whatever its code raises
        return _unbuilt(kind, name, error)
    try:
        check_model(ring)
    except ValueError as error:
        if _advised(error) is None:
            return _refusal(error)
    images = images_of(stock) if kind == "image-text" else None
    given = batches(images)
    expected, left_out = _of_stock(stock, given)
    if images is not None and "plain" not in expected:
        images, given = None, batches()
        expected, left_out = _of_stock(stock, given)
    if not expected:
        return Verdict("not built", f"the small stock model fails: {left_out['plain']}")
    try:
        planned = _planned(ring)
    except Exception as error:
        return _refusal(error)
    worst, notes = 0.0, ["with images" if images else "", planned]
    if "packed" in expected and _begins_anew(ring):
        given["packed"] = batches()["packed"]  # without images, which belong to one document
        expected["packed"] = results_alone(stock, **given["packed"])
        notes.append("documents alone")
    for case, results in expected.items():
        try:
            found = results_of(ring, given[case])
        except Exception as error:
            refusal = _refusal(error, f"{case}: ")
            if case == "plain" or refusal.what != "refused":
                return refusal
            notes.append(f"{case} batches refused: {refusal.why.removeprefix(f'{case}: ')}")
            continue
        error, what = difference(found, results)
        if what:
            return Verdict("wrong", f"{case}: {what} differs by {error:.1e}", error)
        worst = max(worst, error)
    notes += [f"the stock model fails on {case} batches" for case in left_out]
    return Verdict("equal", "; ".join(filter(None, notes)), worst)


def _of_stock(model: Any, given: Batches) -> tuple[dict[str, Results], dict[str, str]]:
    """What the stock model makes of the batches, and why it takes no others."""
    results, refused = {}, {}
    for case, batch in given.items():
        try:
            results[case] = results_of(model, batch)
            if not results[case][0].isfinite():
                raise ValueError("its loss is not finite")
        except Exception as error:  # whatever its code raises
            results.pop(case, None)
            refused[case] = _line(f"{type(error).__name__}: {error}")
    return results, refused


def _planned(model: Any) -> str:
    """Applies the plan to a model, as its refusals advise; returns what that was."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))
    path, options, notes = "", {}, []
    while True:
        part = model.get_submodule(path)
        try:
            parallelize_module(part, mesh, context_parallel_plan(part, **options))
            break
        except ValueError as error:
            layout, advised = re.search(r"layout='(\w+)'", str(error)), _advised(error)
            if layout and "layout" not in options:
                options["layout"] = layout[1]
                notes.append(f"{layout[1]} layout")
            elif advised and not path:
                path, options["unshard_outputs"] = advised, True
                notes.append(f"text, by a plan on its {path}")
            else:
                raise
    if path:
        model.config.get_text_config()._attn_implementation = "ring"
    return ", ".join(notes)


def _advised(error: ValueError) -> str | None:
    """The part of a model that has a plan, where the whole has none."""
    found = re.search(r"to its (\S+) alone", str(error))
    return None if found is None else found[1]


def _unbuilt(kind: str, name: str, error: Exception) -> Verdict:
    """Of a type that has no small proxy: its refusal, if its default config has one."""
    why = f"{type(error).__name__}: {error}"
    try:
        with torch.device("meta"):
            model = auto(kind).from_config(default_config(name))
        check_model(model)
    except ValueError as refusal:
        if _is_ours(refusal) and _advised(refusal) is None:
            return _refusal(refusal)
    except Exception as by_default:
        why = f"{type(by_default).__name__}: {by_default}"
    return Verdict("not built", _line(why))


def _refusal(error: Exception, case: str = "") -> Verdict:
    if isinstance(error, ValueError) and _is_ours(error):
        text = str(error).partition("no context-parallel plan for ")
        return Verdict("refused", case + _line(text[2].partition(": ")[2] or text[0]))
    return Verdict("error", case + _line(f"{type(error).__name__}: {error}"))


def _is_ours(error: BaseException) -> bool:
    """Whether this library raised it, and no code of the model."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return "parallel_plans" in last or "dtensor_ring" in last


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")[:400]


def _begins_anew(model: Any) -> bool:
    """Whether layers with a state begin again in each document under the plan."""
    masks = [x for x in shardings_of(model)[0].layer_masks.values() if isinstance(x, LayerMask)]
    by_positions = not masks or any(mask.by_positions for mask in masks)
    return bool(stateful_layers(model)) and by_positions


def census(pool: Pool, kind: str, names: list[str]) -> Iterator[tuple[str, Verdict]]:
    """The verdict of each type, which all ranks have to agree in."""
    for name in names:
        try:
            verdicts = pool.run(2, _cleaned, kind, name, timeout=180)
        except AssertionError as error:  # a rank died, or waits for ever
            yield name, Verdict("error", _line(str(error)[-200:]))
            continue
        ours = max(verdicts, key=lambda x: ("equal", "not built", "refused").count(x.what) == 0)
        if len({x.what for x in verdicts}) > 1:
            ours = Verdict("error", f"ranks differ: {', '.join(x.what for x in verdicts)}")
        yield name, ours


def _cleaned(kind: str, name: str) -> Verdict:
    found = verdict(kind, name)
    gc.collect()
    return found


Rows = dict[str, dict[str, tuple[str, str]]]
"""What became of each type of each kind, and what there is to say of it."""


def rows_of(text: str) -> Rows:
    """Those of a page."""
    found: Rows = {}
    for kind in KINDS:
        section = text.partition(f"\n## {kind.capitalize()}\n")[2].partition("\n## ")[0]
        rows = re.findall(r"^\| (.+?) \| (\w[\w ]*) \| (.*) \|$", section, re.MULTILINE)
        found[kind] = {name: (what, note) for name, what, note in rows if name != "type"}
    return found


def page(found: Rows) -> str:
    """What docs/models.md says."""
    lines = [ABOUT.format(version=transformers.__version__), *COUNTS]
    for kind, rows in found.items():
        of_types = {name: row for name, row in rows.items() if "," not in name}
        counts = Counter(what for what, _ in of_types.values())
        cells = [counts.total(), *(counts[what] for what in VERDICTS)]
        cells.insert(2, sum("packed batches refused" in note for _, note in of_types.values()))
        lines.append(table_row(kind, *cells))
    for kind, rows in found.items():
        lines += [
            "",
            f"## {kind.capitalize()}",
            "",
            "| type | verdict | note |",
            "| --- | --- | --- |",
        ]
        lines += [f"| {name} | {what} | {note} |" for name, (what, note) in rows.items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the page, or replace it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace docs/models.md")
    parser.add_argument("--only", nargs="+", help="model types; others stay as on the page")
    options = parser.parse_args()
    pool, rows = Pool(2), rows_of(PAGE.read_text() if options.only else "")
    for kind in KINDS:
        begin, names = time.monotonic(), types_of(kind)
        asked = [name for name in names if not options.only or name in options.only]
        for name, x in census(pool, kind, asked):
            error = f"{x.error:.1e}" if x.what == "equal" else ""
            rows[kind][name] = x.what, "; ".join(filter(None, (error, x.why)))
            print(f"{kind} {name}: {x.what} {rows[kind][name][1]}", flush=True)
        rows[kind] = {name: rows[kind][name] for name in names if name in rows[kind]}
        print(f"{kind}: {time.monotonic() - begin:.0f} s", flush=True)
    pool.close()
    if options.write:
        PAGE.write_text(page(rows))
    else:
        print(page(rows), end="")


if __name__ == "__main__":
    main()
