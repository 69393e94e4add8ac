"""Finds a model's language model and head, and puts back what a plan replaced in its modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from inspect import signature
from types import MethodType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

AnyModule = TypeVar("AnyModule", bound=nn.Module)

# Rotary option of configs whose positions have several axes, such as time, height and width.
SECTIONS = "mrope_section"


def language_model_of(model: Any) -> Any:
    """Return the stack of layers over one sequence: the model itself, or one of its parts.

    Returns:
        `None` if the model has several parts, but the stack is not one of them.
    """
    if not parts_beside_text(model) and model.config.get_text_config() is model.config:
        return model
    decoder = model.get_decoder()
    if "labels" in signature(decoder.forward).parameters:  # it has a head of its own
        decoder = next(filter(_is_model, decoder.children()), decoder)
    parts = [x for x in model.modules() if x is not model and _is_model(x)]
    return decoder if any(x is decoder for x in parts) else None


def parts_beside_text(model: Any) -> list[str]:
    """Return the names of models in `model` with another config type, language model included."""
    own = type(model.config)
    return [name for name, x in model.named_modules() if _is_model(x) and type(x.config) is not own]


def _is_model(x: Any) -> bool:
    return hasattr(x, "set_attn_implementation")


def takes_labels(model: Any) -> bool:
    """Return whether the model computes a loss from labels."""
    takes = "labels" in signature(model.forward).parameters
    # An outer model without a head may accept `labels` without computing a loss.
    return takes and (language_model_of(model) is model or bool(model.get_output_embeddings()))


def has_axes(model: Any) -> bool:
    """Return whether the model takes positions of several axes, `(3, B, S)` or `(4, B, S)`."""
    config = model.config.get_text_config()
    options = [getattr(config, name, None) for name in ("rope_parameters", "rope_scaling")]
    return bool([x for x in options if isinstance(x, dict) and SECTIONS in x])


WHOLE_HEADS = ("ForSequenceClassification",)

# Gathers this rank's tokens, `(B, L, ...)`, to those of the whole batch, `(B, S, ...)`.
Join = Callable[[Tensor], Tensor]


def backbone_of(model: Any) -> Any:
    """Return the part of a model whose sequence is sharded: all of it, or the backbone."""
    if not type(model).__name__.endswith(WHOLE_HEADS):
        return model
    return model.base_model


def linear_head(model: nn.Module, backbone: nn.Module) -> nn.Linear | None:
    """Return the head that reads the whole sequence, if it is one linear layer; else `None`."""
    if backbone is model:
        return None
    parts = [part for part in model.children() if part is not backbone]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], nn.Linear) else None


# Note [Heads under a plan]: a head may read the sequence as a whole. The plan shards the backbone
# under it. The model's own forward then runs on the whole batch, with its own labels and its own
# loss, and reads gathered outputs. A linear head runs on the tokens of a rank, as its logits are a
# few numbers per token. Other heads get the gathered hidden states, for example one that runs a
# linear layer on the first token.
def join_behind(head: nn.Linear, join: Join) -> None:
    """Run the head on the tokens of this rank, and gather its outputs from all ranks."""
    plain: Any = type(head).forward

    def forward(self: nn.Module, hidden: Tensor) -> Tensor:
        if not isinstance(hidden, DTensor):
            return plain(self, hidden)
        return join(plain(self, hidden.to_local()))

    head.forward = MethodType(forward, head)


# The attribute in which modules keep their `Stock`, so that copies of a model keep it too.
STOCK = "context_parallel_stock"

NO_CROSS_ATTENTION = (
    "cross attention of Hugging Face models is not supported over a sharded sequence"
)
NO_PICKLE = (
    "a model under context_parallel_plan cannot be pickled, as by torch.save(model): save "
    "model.state_dict() or call model.save_pretrained(folder), whose weights are those of the "
    "stock model, or restore_model(model) before; apply the plan after loading"
)


class Absent:
    """Stands for an attribute that a module does not have."""


class Stock(NamedTuple):
    """The inactive state of a module: without the plan, or with it while the plan is off.

    Attributes:
        cls: the class of the module.
        values: values of the attributes that the plan changes, by name.
        config: the config that the module had before the plan.
        implementation: the attention implementation of that config.
        forward: the forward that the plan put into the module.
    """

    cls: type
    values: dict[str, Any]
    config: Any
    implementation: str | None
    forward: Any = None


@contextmanager
def changing(model: nn.Module) -> Iterator[None]:
    """Open a context in which a plan changes a model; an error restores the model."""
    before = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        # A shallow copy: parameters stay those of the module, only names are compared.
        before[module] = Stock(type(module), dict(vars(module)), config, implementation)
    try:
        yield
    except BaseException:
        modules = _changed(before)
        _swap(modules)
        for module in modules:
            del vars(module)[STOCK]
        raise
    _changed(before)


def restore_model(model: AnyModule) -> AnyModule:
    """Remove the plan from a model: forward, attention, config and generation are as before it.

    Weights keep their current values. Remove first what was applied over the plan, and compile a
    compiled model again.

    Args:
        model: the model that the plan was applied to, or one that contains it.

    Returns:
        The model, which is changed in place.

    Raises:
        ValueError: if no part of it is under a plan, or something was applied over the plan.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model = parallelize_module(model, mesh, context_parallel_plan(model))
        >>> model = restore_model(model)
        >>> model.config._attn_implementation
        'sdpa'
    """
    for module in _restored(model):
        del vars(module)[STOCK]
    return model


@contextmanager
def stock_model(model: nn.Module) -> Iterator[None]:
    """Open a context in which a model is without its plan, for example to evaluate it elsewhere.

    Args:
        model: the model that the plan was applied to, or one that contains it.

    Raises:
        ValueError: if no part of it is under a plan, or something was applied over the plan.
    """
    modules = _restored(model)
    try:
        yield
    finally:
        _swap(modules)


def _changed(before: dict[nn.Module, Stock]) -> list[nn.Module]:
    """Return the modules that have changed, and store in each what it was before."""
    changed = []
    for module, stock in before.items():
        had, now = stock.values, vars(module)
        names = [
            name for name in {**had, **now} if had.get(name, Absent) is not now.get(name, Absent)
        ]
        if names or type(module) is not stock.cls:
            values = {name: had.get(name, Absent) for name in names}
            now[STOCK] = stock._replace(values=values, forward=now.get("forward"))
            changed.append(module)
    return changed


def _restored(model: nn.Module) -> list[nn.Module]:
    """Remove the plan from the modules that it has changed, and return them."""
    modules = [module for module in model.modules() if STOCK in vars(module)]
    if not modules:
        raise ValueError(f"{type(model).__name__} is under no context_parallel_plan")
    if any(isinstance(part, FSDPModule) for part in model.modules()):
        raise ValueError(
            "fully_shard was applied over the plan; restore the model before, or generate and "
            "evaluate under the plan"
        )
    for module in modules:
        forward = vars(module).get("forward")
        if forward is not vars(module)[STOCK].forward:
            # Another library wrapped it since, and would call the plan's forward after it was
            # removed.
            raise ValueError(
                f"{origin(forward)} was put over the plan's forward; take it off first"
            )
    _swap(modules)
    return modules


def origin(forward: Any) -> str:
    """Return the qualified name of the function with which a library replaced a forward."""
    function = getattr(forward, "__func__", getattr(forward, "func", forward))
    module = getattr(function, "__module__", type(function).__module__)
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def _swap(modules: list[nn.Module]) -> None:
    """Swap the current state of each module with its `Stock`."""
    # An outer model may have set the ring in their config, to make masks for it. Modules share
    # configs, so read all implementations before any is set.
    stocks = [vars(module)[STOCK] for module in modules]
    implementations = [getattr(stock.config, "_attn_implementation", None) for stock in stocks]
    for module, stock, implementation in zip(modules, stocks, implementations, strict=True):
        now = vars(module)
        values = {name: now.get(name, Absent) for name in stock.values}
        _carry(values.get("config"), stock.values.get("config"))
        # A swap, not a copy: the same call puts the plan back, with what has changed meanwhile.
        now[STOCK] = stock._replace(cls=type(module), values=values, implementation=implementation)
        now.update({name: x for name, x in stock.values.items() if x is not Absent})
        # What the plan added goes, else it would hide a method of the class.
        for name in [name for name, x in stock.values.items() if x is Absent]:
            del now[name]
        module.__class__ = stock.cls
        if implementation != stock.implementation:
            stock.config._attn_implementation = stock.implementation


def _carry(config: Any, other: Any) -> None:
    """Copy to the other config what a user has changed in this one since they were equal."""
    if not (hasattr(config, "to_dict") and hasattr(other, "to_dict")) or config is other:
        return
    for name, value in list(vars(config).items()):
        known = vars(other).get(name, Absent)
        if hasattr(value, "to_dict"):
            _carry(value, known)
        # The implementation is put back by the caller.
        elif not name.startswith("_attn_implementation") and value != known:
            vars(other)[name] = deepcopy(value)
