"""The model that a command line names: loaded without weights, read from its config, or served."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring.extension import MetaModel, ModelRequest


def load(spec: str, mesh: DeviceMesh, asked: ModelRequest) -> MetaModel:
    """Load a model of transformers by its config, or of torchtitan by a config function.

    Args:
        spec: a `config.json`, or the folder that has one; or `module:function`, as in
            `parallel_plans.torchtitan:llama3_debugmodel_ring`.
        mesh: mesh of the ranks that share the sequence.
        asked: what the model is to be run on.

    Raises:
        ImportError: if transformers or torchtitan is not installed.
        ValueError: if there is no such model, or one that has no context-parallel plan.
    """
    path = Path(spec)
    if path.exists():
        from parallel_plans.huggingface.meta import model_of_config

        return model_of_config(path / "config.json" if path.is_dir() else path, mesh, asked)
    name, colon, function = spec.partition(":")
    if not colon:
        raise ValueError(
            f"there is no file or folder {spec}; --model takes the config.json of a Hugging "
            "Face model, its folder, or module:function of a torchtitan config"
        )
    try:
        # Imported here, as it subclasses classes of torchtitan, which is optional.
        meta = import_module("parallel_plans.torchtitan.decoder")
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{spec} is a config of torchtitan, which is not installed ({error}): "
            'pip install "torchtitan>=0.3.0,<0.4"'
        ) from error
    return meta.model_of_function(name, function, mesh, asked)


def read_config(spec: str) -> Mapping[str, Any]:
    """Return the entries of a config, with the defaults of transformers where it is installed.

    Args:
        spec: a `config.json`, the folder that has one, the name of a model in the local cache, or
            a model type, such as "llama", which stands for its default sizes. Nothing is
            downloaded.

    Raises:
        ImportError: if transformers is not installed, which names need.
        ValueError: if there is no such config.
    """
    path = Path(spec)
    path = path / "config.json" if path.is_dir() else path
    given: Any = None
    if path.exists():
        try:
            given = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ValueError(f"{spec} is not a config.json: {error}") from error
        if not isinstance(given, dict) or "model_type" not in given:
            return given
    try:
        from parallel_plans.huggingface.meta import config_entries

        return config_entries(path if path.exists() else spec)
    except ModuleNotFoundError as error:
        if path.exists():
            return given
        raise ImportError(
            f"the name {spec} needs transformers: pip install transformers"
        ) from error


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
