"""Builds a transformers model without weights and applies the plan to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_ring import TransferPolicy
from dtensor_ring.extension import MetaModel, ModelRequest
from parallel_plans.huggingface.core.versions import cache_name
from parallel_plans.huggingface.plan import context_parallel_plan


def model_of_config(path: Path, mesh: DeviceMesh, asked: ModelRequest) -> MetaModel:
    """Return the model of a `config.json`, with its sequence sharded over a mesh.

    Raises:
        ImportError: if transformers is not installed.
        ValueError: if the file is not the config of a model with labels that has a plan.
    """
    config = _config(path)
    if asked.dtype is not None:
        config.dtype = asked.dtype
    try:
        with torch.device("meta"):
            model = _model(config)
    except Exception as error:  # whatever its code meets: it trusts a config
        raise ValueError(
            f"transformers makes no model of {path} ({type(error).__name__}: {error})"
        ) from error
    plan = context_parallel_plan(
        model,
        asked.layout,
        strategy=asked.strategy,
        machine=asked.machine,
        policy=TransferPolicy(kv_dtype=asked.kv_dtype),
        cache_dtype=None if asked.cache_dtype == "own" else asked.cache_dtype,
    )
    module: Any = parallelize_module(model, mesh, plan)
    tokens = torch.zeros(asked.batch, asked.seq_len, dtype=torch.long, device="meta")
    return MetaModel(
        type(model).__name__,
        module,
        lambda: module(input_ids=tokens, labels=tokens, use_cache=False).loss,
        (lambda: _cached(module, tokens)) if model.can_generate() else None,
    )


@torch.no_grad()
def _cached(module: Any, tokens: torch.Tensor) -> Sequence[int]:
    """Return the bytes that each rank keeps of a prompt."""
    module.eval()
    output = module(input_ids=tokens, use_cache=True, logits_to_keep=1)
    return output[cache_name(module)].usage().held


def config_entries(spec: Path | str) -> dict[str, Any]:
    """Return all entries of a config, with defaults.

    Args:
        spec: the path of a `config.json`; or the name of a model in the local cache, or a model
            type, whose defaults are meant. Nothing is downloaded.

    Raises:
        ImportError: if transformers is not installed.
        ValueError: if there is no such config.
    """
    if isinstance(spec, Path):
        return _config(spec).to_dict()
    from transformers import CONFIG_MAPPING, AutoConfig

    if spec in CONFIG_MAPPING:
        return CONFIG_MAPPING[spec]().to_dict()
    try:
        return AutoConfig.from_pretrained(spec, local_files_only=True).to_dict()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{spec} is neither a file or folder, nor a model type of transformers, nor the name "
            "of a model in the local cache"
        ) from error


def _config(path: Path) -> Any:
    """Return the config in the file.

    Raises:
        ValueError: if the file has none.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    try:
        # Its own reader: some floats are not written as JSON has them.
        options, _ = PretrainedConfig.get_config_dict(str(path), local_files_only=True)
        name = options.pop("model_type")
        return CONFIG_MAPPING[name].from_dict(options)
    except Exception as error:  # whatever its code meets: it trusts a config
        raise ValueError(
            f"{path} is not the config.json of a model of transformers "
            f"({type(error).__name__}: {error})"
        ) from error


# Auto classes; the first one that knows the config builds the model.
KINDS = ("AutoModelForCausalLM", "AutoModelForMaskedLM")


def _model(config: Any) -> Any:
    """Return the model of a config, with the head whose labels are tokens.

    Raises:
        ValueError: if no class in `KINDS` has a model for this config.
    """
    import transformers

    for kind in KINDS:
        auto = getattr(transformers, kind)
        if type(config) in auto._model_mapping:
            return auto.from_config(config, dtype=config.dtype or torch.float32)
    raise ValueError(
        f"{type(config).__name__} has no model {' or '.join(x.removeprefix('Auto') for x in KINDS)}"
        "; what is estimated is a training step of a language model"
    )
