"""A model of transformers without content: made of the entries of a config, run by layer.

Note [Own modules]: no size of a layer is written here. A layer is what transformers' own classes
make of a config, on the meta device; its forward gets what the forward of its model gives it. For a
rank of tensor parallelism the config has its part of the heads and of the inner sizes, which is
what that rank computes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from dtensor_ring.lab.problem import text_entries

# Under this name the attentions of a model are those of a run.
RECORDED = "dtensor_ring_recorded"


class NotSimulated(ValueError):
    """A model has a part that is not simulated."""


# What configs without a model type are taken for, what reports call that, and what they must have.
DEFAULT_TYPE, DEFAULT_NAME = "llama", "Llama by its sizes"
NEEDED = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
)


class ModelSource(NamedTuple):
    """What a model is made of.

    Attributes:
        name: what reports call it.
        entries: those of its config, in JSON.
    """

    name: str
    entries: str

    @classmethod
    def of(cls, config: Any) -> ModelSource:
        """Read a config, see `ModelShape.of`.

        Raises:
            TypeError: if it is no mapping, no path and no config of transformers.
            ValueError: if it cannot be read.
        """
        entries = dict(text_entries(config))
        name = entries.setdefault("model_type", None) or DEFAULT_NAME
        return cls(str(name), json.dumps(entries, sort_keys=True, default=str))

    def config(self) -> Any:
        """Return the config of transformers.

        Raises:
            ImportError: if transformers is not installed.
            ValueError: if transformers has no such config, or a size is out of range.
        """
        try:
            from transformers import CONFIG_MAPPING, LlamaConfig
        except ModuleNotFoundError as error:
            raise ImportError(
                "a step is simulated by the modules of transformers, which is not installed: "
                "pip install transformers"
            ) from error
        entries = json.loads(self.entries)
        check_sizes(entries)
        kind = entries.pop("model_type") or DEFAULT_TYPE
        if kind not in CONFIG_MAPPING:
            raise ValueError(f"transformers has no models of the type {kind!r}")
        if self.name == DEFAULT_NAME:
            _check_llama(entries, LlamaConfig().to_dict())
        with one_sentence(f"transformers reads no config of {self.name}"):
            return CONFIG_MAPPING[kind].from_dict(entries).get_text_config(decoder=True)


# The largest size, as kernels count in int32, and number of layers: a time line has spans of each.
MAX_SIZE, MAX_LAYERS = 2**31 - 1, 4096


def check_sizes(entries: Mapping[str, Any]) -> None:
    """Check the sizes of a config that decide how long it takes to make a model of it.

    Raises:
        ValueError: if one is no whole number, or out of range.

    >>> check_sizes({"hidden_size": None})
    Traceback (most recent call last):
        ...
    ValueError: hidden_size of model must be a whole number from 1 to 2,147,483,647, got None
    """
    for name in (*NEEDED, "n_layer", "num_layers", "num_key_value_heads", "head_dim"):
        size, most = entries.get(name, 1), MAX_LAYERS if "layer" in name else MAX_SIZE
        may_lack = name in ("num_attention_heads", "num_key_value_heads", "head_dim")
        if isinstance(size, list) or (size is None and may_lack):
            continue  # by layer; or what a model without attention lacks
        if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= most:
            raise ValueError(
                f"{name} of {entries.get('model_type') or 'model'} must be a whole number from 1 "
                f"to {most:,}, got {size!r}"
            )


def _check_llama(entries: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Refuse a config without a model type that lacks a size, or has what a Llama has not."""
    for what, names in (
        ("needs", [x for x in NEEDED if x not in entries]),
        ("cannot have", sorted(entries.keys() - known.keys())),
    ):
        if names:
            raise ValueError(
                f"a config without a model_type is taken for that of a Llama, which {what} "
                f"{', '.join(names)}: add its model_type"
            )


@contextmanager
def one_sentence(what: str) -> Iterator[None]:
    """Make whatever the code of a model raises a ValueError of one sentence."""
    try:
        yield
    except Exception as error:
        if isinstance(error, NotSimulated):
            raise
        text = " ".join(str(error).split()) or "no reason given"
        raise ValueError(f"{what} ({type(error).__name__}: {text[:300]})") from error


@lru_cache(maxsize=16)
def meta_module(source: ModelSource, dtype: str, tp: int = 1) -> Any:
    """Return a model on the meta device, as a rank of tensor parallelism has it.

    Raises:
        ImportError: if transformers is not installed.
        ValueError: if transformers makes none, or it cannot be divided.
    """
    config = source.config() if tp == 1 else _divided(source, tp)
    from transformers import AttentionInterface, AutoModel

    # The name has to be known while a model is made; a run has its own function under it.
    AttentionInterface.register(RECORDED, _no_attention)
    config._attn_implementation = RECORDED
    what = f"transformers makes no model of {source.name}"
    with one_sentence(what), torch.device("meta"):
        module = AutoModel.from_config(config, dtype=getattr(torch, dtype))
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(dropped)
    return module


def _no_attention(*_: Any, **__: Any) -> Any:
    raise RuntimeError("an attention runs outside of a run")


def dropped(parameter: torch.Tensor) -> None:
    """Free a gradient, as FSDP2 does after it has reduced it."""
    parameter.grad = None


# Entries that tensor parallelism divides.
DIVIDED = (
    *("num_attention_heads", "num_key_value_heads", "n_head"),
    *("intermediate_size", "ffn_dim", "n_inner", "shared_intermediate_size"),
    *("intermediate_size_mlp", "moe_intermediate_size", "moe_shared_expert_intermediate_size"),
    "shared_expert_intermediate_size",
)


def _divided(source: ModelSource, tp: int) -> Any:
    """Return the config that a rank of tensor parallelism has a model of.

    Raises:
        ValueError: if a size is no multiple of the number of ranks.
    """
    whole = source.config()
    heads = getattr(whole, "num_attention_heads", 0)
    if heads and not getattr(whole, "head_dim", None):
        whole.head_dim = whole.hidden_size // heads
    entries = whole.to_dict()
    for name in DIVIDED:
        size = entries.get(name)
        sizes = size if isinstance(size, list) else [size] if size else []
        for each in sizes:
            if each % tp:
                raise ValueError(
                    f"{name} of {source.name} is {each}, which cannot be divided over the {tp} "
                    "ranks of tp"
                )
        if sizes:
            entries[name] = [x // tp for x in size] if isinstance(size, list) else size // tp
    return source._replace(entries=json.dumps(entries, sort_keys=True, default=str)).config()


def layers_of(module: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost module lists and module dicts.

    >>> len(layers_of(nn.ModuleDict({"0": nn.Linear(2, 2), "1": nn.Linear(2, 2)})))
    2
    """
    lists = [x for x in module.modules() if isinstance(x, (nn.ModuleList, nn.ModuleDict))]
    inner = {id(part) for x in lists for part in x.modules() if part is not x}
    return [layer for x in lists if id(x) not in inner for layer in x.children()]


@contextmanager
def forwards(changes: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Give modules other forwards."""
    for module, forward in changes.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in changes:
            del module.__dict__["forward"]


# Runs an attention in place of a model's own.
Attend = Callable[..., Any]


def run_module(source: ModelSource, module: Any, tokens: int, attend: Attend) -> None:
    """Run a forward on tokens without content.

    Raises:
        ValueError: if the code of the model needs the content of tensors.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(RECORDED, attend)
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    try:
        with one_sentence(f"{source.name} does not run without content"), torch.no_grad():
            module(input_ids=ids, use_cache=False)
    finally:
        AttentionInterface.register(RECORDED, _no_attention)


def first_of(output: Any, rest: list[tuple[Any, ...]]) -> torch.Tensor:
    """Return the tensor of tokens that a module returns; if it is in a tuple, put others aside."""
    if not isinstance(output, tuple):
        return output
    rest[:] = [output[1:]]
    return output[0]


def kind_of(config: Any, index: int) -> str | None:
    """Return the kind of a layer, if the config lists kinds."""
    listed = getattr(config, "layer_types", None)
    return listed[index] if listed and index < len(listed) else None
