"""The command line of the programs that draw pictures of pages."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path


def run(doc: str | None, path: Path, picture: Callable[[], str], texts: Iterable[str]) -> None:
    """Write the picture with `--write`, else print the texts.

    Args:
        doc: of the program, whose first line is its help.
        path: of the picture.
        picture: draws it, as SVG.
        texts: what it shows.
    """
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="replace the picture")
    if parser.parse_args().write:
        path.write_text(picture())
        return
    for text in texts:
        print(text)
