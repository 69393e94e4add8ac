"""Takes a plan off a model, and puts it back: what modules had before it is kept in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule

STOCK = "context_parallel_stock"
"""Where modules keep it, so that copies of a model have it, too."""

NO_PICKLE = (
    "a model under context_parallel_plan cannot be pickled, as by torch.save(model): save "
    "model.state_dict() or call model.save_pretrained(folder), whose weights are those of the "
    "stock model, or restore_model(model) before; apply the plan after loading"
)


class Absent:
    """In place of an attribute that a module does not have."""


class Stock(NamedTuple):
    """What a module was before the plan changed it, or under the plan while that is off."""

    cls: type
    values: dict[str, Any]
    """By name, of the attributes that the plan sets."""
    config: Any
    """That which it had before the plan."""
    implementation: str | None
    """The attention of that config."""
    forward: Any = None
    """That which the plan put into the module."""


@contextmanager
def changing(model: nn.Module) -> Iterator[None]:
    """A context in which a plan changes a model; after an error the model is as it was."""
    before = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
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


def restore_model(model: nn.Module) -> None:
    """Take the plan off a model: forward, attention, config and generation are as before it.

    Weights stay, as they are by now. What was put over the plan has to be taken off first, and a
    model that was compiled be compiled again.

    Args:
        model: the model that the plan was applied to, or one around it.

    Raises:
        ValueError: if nothing in it is under a plan, or something was put over the plan.

    Example:
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model = parallelize_module(model, mesh, context_parallel_plan(model))
        >>> restore_model(model)
        >>> model.config._attn_implementation
        'sdpa'
    """
    for module in _restored(model):
        del vars(module)[STOCK]


@contextmanager
def stock_model(model: nn.Module) -> Iterator[None]:
    """A context in which a model is without its plan, as for an evaluation by other code.

    Args:
        model: the model that the plan was applied to, or one around it.

    Raises:
        ValueError: if nothing in it is under a plan, or something was put over the plan.
    """
    modules = _restored(model)
    try:
        yield
    finally:
        _swap(modules)


def _changed(before: dict[nn.Module, Stock]) -> list[nn.Module]:
    """The modules that are not as before; each keeps what it had then in the place of that."""
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
    """The modules that a plan has changed, without it."""
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
            raise ValueError(
                f"{origin(forward)} was put over the plan's forward; take it off first"
            )
    _swap(modules)
    return modules


def origin(forward: Any) -> str:
    """Where the function was written that another library put over a forward."""
    function = getattr(forward, "__func__", getattr(forward, "func", forward))
    module = getattr(function, "__module__", type(function).__module__)
    return f"{module}.{getattr(function, '__qualname__', type(function).__name__)}"


def _swap(modules: list[nn.Module]) -> None:
    """Exchange what modules have and what they keep."""
    # A model around them may have told their config of the ring, to make masks for it. Read of all
    # before any is set, as they share it.
    stocks = [vars(module)[STOCK] for module in modules]
    implementations = [getattr(stock.config, "_attn_implementation", None) for stock in stocks]
    for module, stock, implementation in zip(modules, stocks, implementations, strict=True):
        now = vars(module)
        values = {name: now.get(name, Absent) for name in stock.values}
        now[STOCK] = stock._replace(cls=type(module), values=values, implementation=implementation)
        now.update({name: x for name, x in stock.values.items() if x is not Absent})
        for name in [name for name, x in stock.values.items() if x is Absent]:
            del now[name]
        module.__class__ = stock.cls
        if implementation != stock.implementation:
            stock.config._attn_implementation = stock.implementation
