"""Serve the model that a command line names over HTTP."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

NEEDED = ("transformers", "fastapi", "uvicorn", "prometheus_client")


def serve(model: str, mesh: Mapping[str, int], **options: Any) -> int:
    """Serve a model of transformers until a signal ends it, and return the exit status.

    Args:
        model: its folder, or its name in the cache of transformers.
        mesh: the axes of the mesh: `cp`, and no other.
        options: of `parallel_plans.huggingface.server.rank.ServerOptions`.
    """
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        print(
            f'serve needs {", ".join(missing)}: pip install "dtensor-ring[transformers,fastapi]"',
            file=sys.stderr,
        )
        return 2
    if mesh.keys() != {"cp"}:
        print(
            f"serve shards sequences over an axis cp and knows no other, got {', '.join(mesh)}; "
            "give --mesh cp=4, and start a server for each replica",
            file=sys.stderr,
        )
        return 2
    from parallel_plans.huggingface.server.launch import launch
    from parallel_plans.huggingface.server.rank import ServerOptions

    try:
        given = ServerOptions(model, mesh["cp"], **options)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return launch(given)
