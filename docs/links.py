"""A hook of mkdocs: what pages say of files outside of docs/, which are no part of the site.

On GitHub such links lead to the file. On the site a picture comes along, and any other file is
named by its path.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PICTURE = re.compile(r"\]\(\.\./(\S+\.png)\)")
SUBSCRIPTS = re.compile(r"\](?=\[)")
LINK = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pictures of the benchmarks."""
    for path in sorted(ROOT.glob("benchmarks/results/*/*.png")):
        name = path.relative_to(ROOT).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace the links of a page, and let no two subscripts in a quoted error look like one."""
    linked = LINK.sub(_named, PICTURE.sub(r"](\1)", markdown))
    return "\n".join(_quoted(x) if x.startswith("|") else x for x in linked.split("\n"))


def _quoted(row: str) -> str:
    """A row of a table; what stands between backticks is code, and stays."""
    parts = row.split("`")
    return "`".join(x if i % 2 else SUBSCRIPTS.sub(r"]\\", x) for i, x in enumerate(parts))


def _named(link: re.Match[str]) -> str:
    """The words of the link, and the path unless it is in them."""
    text, path, _ = link.groups()
    if not (ROOT / path).exists():
        raise PluginError(f"a page links to ../{path}, which is not there")
    return f"`{path}`" if path.endswith(text) else f"{text} (`{path}`)"
