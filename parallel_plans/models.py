"""Load the model that a command line names, on the meta device."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

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
