"""Compare every family of models with the stock one, for the table in `huggingface.md`.

Run ``python -m benchmarks.huggingface`` in the root of the repository: it runs the comparison of
``tests/huggingface/test_families.py`` and prints a table in Markdown. With ``--write`` it replaces
the one in the page. It takes a minute on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from docs.marked import table_row, write_part
from dtensor_ring import Mask
from parallel_plans.huggingface.core.patterns import LayerMask, read_patterns
from tests.dense import largest
from tests.families import FAMILIES, small_model
from tests.huggingface.test_families import LAYOUTS, compare
from tests.pool import Pool

PAGE = Path(__file__).parent.parent / "docs" / "huggingface.md"
MARKERS = "<!-- table: written by huggingface.py -->\n", "<!-- end of table -->\n"
COLUMNS = ("loss", "logits", "gradients")


def rows(pool: Pool) -> Iterator[str]:
    """A line for each family: what its layers see, and the largest relative errors."""
    yield table_row("family", "layers see", *COLUMNS)
    yield table_row("---", "---", *["---:"] * len(COLUMNS))
    for family in FAMILIES:
        worst = dict.fromkeys(COLUMNS, 0.0)
        for world_size, layouts in LAYOUTS.items():
            for layout in layouts:
                for errors in pool.run(world_size, compare, family, layout):
                    for error in errors.values():
                        worst = {name: largest((worst[name], error[name])) for name in COLUMNS}
        cells = [f"{error:.1e}" for error in worst.values()]
        yield table_row(family, ", ".join(_patterns(family)), *cells)


def _patterns(family: str) -> list[str]:
    """What the plan reads from the masks of a model."""
    layer_masks = read_patterns(small_model(family)).values()
    return sorted({_named(x.mask) for x in layer_masks if isinstance(x, LayerMask)})


def _named(mask: Mask) -> str:
    if mask.chunk:
        return f"chunks of {mask.chunk}"
    if mask.left is None:
        return "everything" if mask.right is None else "causal"
    return f"window of {mask.left + 1}" if mask.right == 0 else f"{mask.left} on both sides"


def main() -> None:
    """Print the table, or replace that of the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the table in the page")
    write = parser.parse_args().write
    pool = Pool(4)
    lines = list(rows(pool))
    pool.close()
    if not write:
        print(*lines, sep="\n")
        return
    write_part(PAGE, *MARKERS, lines)


if __name__ == "__main__":
    main()
