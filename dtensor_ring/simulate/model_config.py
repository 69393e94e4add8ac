"""The entries of a model's config: of a file, a mapping or a config of transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def text_entries(config: Any) -> Mapping[str, Any]:
    """Return the entries of a config; those of the text model, where there are others too.

    Raises:
        TypeError: if it is no mapping, no path and no config of transformers.
        ValueError: if there is no such file.
    """
    if isinstance(config, str | Path):
        config = read_json(Path(config))
    elif not isinstance(config, Mapping) and callable(getattr(config, "to_dict", None)):
        config = config.to_dict()
    config = config.get("text_config", config) if isinstance(config, Mapping) else config
    if not isinstance(config, Mapping):
        raise TypeError(
            f"config must be a mapping, a config.json or its folder, got {type(config).__name__}"
        )
    return config


def read_json(path: Path) -> Any:
    """Return what a `config.json` has, given its path or that of its folder.

    Raises:
        ValueError: if it cannot be read or is not JSON.
    """
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"config {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"config {path} is not JSON: {error}") from None
