"""An extension of griffe, which reads docstrings for the site: examples become a section there.

Ours stand under `Example:`, or alone. Of both griffe would make text, and `>>>` quotes of it.
"""

from __future__ import annotations

import re
from textwrap import indent
from typing import Any

from griffe import Extension, Object

SECTION = re.compile(r"^Example:$", re.MULTILINE)
ALONE = re.compile(r"^>>> .*\n?(?:^.+\n?)*", re.MULTILINE)


class Examples(Extension):
    """Puts the examples of each docstring under `Examples:`."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Called for each module, class, function and attribute."""
        if obj.docstring:
            named = SECTION.sub("Examples:", obj.docstring.value)
            obj.docstring.value = ALONE.sub(lambda x: f"Examples:\n{indent(x[0], '    ')}", named)
