"""Transfers a `ContextParallelCache`: all that its layers keep goes to other ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dtensor_ring import hand_over
from dtensor_ring.extension import axis_group, check_agreement, copy_whole, format_named, no_tokens
from parallel_plans.huggingface.generation.cache_memory import CacheMemory

if TYPE_CHECKING:
    from parallel_plans.huggingface.generation.context_parallel_cache import ContextParallelCache

SAME_CACHE = "hand over caches of the same model"


class _Layers(NamedTuple):
    """What decides which tensors a cache has, and their order.

    Attributes:
        parts: names of its sharded caches, and how many layers each has.
        windows: the layers with a window, and its size.
        kv_dtype: the format of full blocks.
    """

    parts: tuple[tuple[str, int], ...]
    windows: tuple[tuple[int, int], ...]
    kv_dtype: str | None

    @classmethod
    def of(cls, memory: CacheMemory) -> _Layers:
        """Return that of a cache."""
        parts = tuple((name, len(x)) for name, x in memory._parts().items())
        windows = tuple((number, x.size) for number, x in memory._windows.items())
        return cls(parts, windows, memory._kv_dtype)


class _Content(NamedTuple):
    """What a cache holds beside its sharded tokens: which windows and states it has.

    Attributes:
        seq_len, batch: tokens and rows.
        windows: the number of tensors of keys, and of values, of each window; none if it is empty.
        states: the module, kind and index of each state.
        padding: the number of padding tokens before each row; none if no row has any.
    """

    seq_len: int
    batch: int
    windows: tuple[tuple[int, ...], ...]
    states: tuple[tuple[int, str, int], ...]
    padding: tuple[int, ...] = ()

    @classmethod
    def of(cls, memory: CacheMemory) -> _Content:
        """Return that of a cache."""
        held = [x.appended() or () for x in memory._windows.values()]
        windows = tuple(tuple(len(x.tensors()) for x in pair) for pair in held)
        states = tuple((n, *key) for n, layer in memory.states.items() for key in layer)
        padding = () if memory.left_padding is None else tuple(memory.left_padding.tolist())
        return cls(memory.seq_len, memory.batch, windows, states, padding)


def hand_over_cache(
    source: ContextParallelCache | None, target: ContextParallelCache | None, mesh: DeviceMesh
) -> None:
    """Give all that a cache holds to a cache on other ranks, which goes on from there.

    A prompt can be prefilled by the ring of many ranks, and decoded by few. Sharded tokens go over
    the wire once, see `dtensor_ring.hand_over`; the last tokens of windows, and the states of
    layers, go once to each rank that lacks them. Eight bits stay eight bits. The source keeps what
    it has; `reset` frees it.

        hand_over_cache(prefilled, None, mesh)  # on ranks that prefill
        hand_over_cache(None, chat, mesh)  # on ranks that decode
        answer = model.generate(prompt, cache=chat)

    Args:
        source: the cache on the ranks that give; `None` on others.
        target: an empty cache on the ranks that get, of the same model under a plan over their
            axis; `None` on others. A rank on both sides has a model for each.
        mesh: a 1-D mesh of all these ranks. All of them must call it.

    Raises:
        ValueError: on every rank, if caches do not fit each other, a rank of one is missing, or
            eight bits would be cut out of their blocks: then give both plans the layout
            `"whole_blocks:64"`.
        RingError: on every rank, if a rank ended, raised, or did not answer in time.
    """
    memories = [None if x is None else x.memory for x in (source, target)]
    given, taken = memories
    told = check_agreement(
        axis_group(mesh),
        {},
        SAME_CACHE,
        (
            [_Layers.of(x) for x in memories if x is not None],
            None if given is None else _Content.of(given),
            0 if taken is None else taken.seq_len,
        ),
    )
    layers, content = _agreed(told)
    # A rank without a source or a target takes part: all ranks make the same calls.
    for name, _ in layers.parts:
        here, there = (None if x is None else x._parts()[name] for x in memories)
        hand_over(here, there, mesh)
    # Windows and states are whole on every rank, so they are copied and not split.
    if any(content.windows) or content.states:
        found = copy_whole(None if given is None else _tensors(given), taken is not None, mesh)
        if taken is not None and found is not None:
            _fill(taken, content, found)
    if taken is not None:
        taken.seq_len, taken.batch = content.seq_len, content.batch
        taken.left_padding = torch.tensor(content.padding) if content.padding else None


def _agreed(told: Sequence[Any]) -> tuple[_Layers, _Content]:
    """Return what all ranks told alike.

    Raises:
        ValueError: on every rank, if they differ, or a target has tokens.
    """
    layers = [x for found, _, _ in told for x in found]
    contents = [x for _, x, _ in told if x is not None]
    for found in (layers, contents):
        if any(x != found[0] for x in found):
            other = next(x for x in found if x != found[0])
            raise ValueError(
                f"all ranks must {SAME_CACHE}, after the same tokens, they have {found[0]} and "
                f"{other}"
            )
    filled = max(x for _, _, x in told)
    if not contents or filled:
        found = f"a target has {filled} tokens; reset it" if contents else "no rank has a source"
        raise ValueError(f"a cache changes hands to an empty one: {found}")
    return layers[0], contents[0]


def _tensors(memory: CacheMemory) -> list[Tensor]:
    """Return what all ranks of a cache have alike."""
    pairs = [x.appended() or () for x in memory._windows.values()]
    windows = [x for pair in pairs for kept in pair for x in kept.tensors()]
    return windows + [x for layer in memory.states.values() for x in layer.values()]


def _fill(memory: CacheMemory, content: _Content, tensors: Sequence[Tensor]) -> None:
    """Let a cache hold the tensors that `_tensors` found in another one."""
    rest, format = list(tensors), format_named(memory._kv_dtype)
    for window, numbers in zip(memory._windows.values(), content.windows, strict=True):
        pair = []
        for number, kind in zip(numbers, ("keys", "values"), strict=False):
            own, rest = rest[:number], rest[number:]
            # The last tensor has tokens as they are, and so the dtype of all.
            pair.append(no_tokens(own[-1], format, kind).of_tensors(own))
        window.hold((pair[0], pair[1]) if pair else None)
    states: dict[int, dict[tuple[str, int], torch.Tensor]] = {}
    for number, kind, index in content.states:
        states.setdefault(number, {})[kind, index] = rest.pop(0)
    memory.states = states
