"""Run a layer on the meta device, forward and backward, and record what it launches and keeps.

Note [Run, not counted]: a layer is the model's own, see Note [Own modules]. It runs once, without
content, on what one rank has of it. Launches, bytes that backward needs, and the most bytes at once
are those of this run. An attention and a state are one op each, as their kernels are; the first is
simulated, the second counted by `StateShape`. With tensor parallelism tokens are sharded between
the children of a layer that have matrices: these run on all tokens (Korthikanti et al., 2022, arXiv
2205.05198).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dtensor_ring.lab.training.launches import ATTENTION, STATE, LaunchRecorder, OpLaunch
from dtensor_ring.lab.training.layer_seconds import Shard
from dtensor_ring.lab.training.model_source import (
    ModelSource,
    NotSimulated,
    dropped,
    first_of,
    forwards,
    layers_of,
    meta_module,
    run_module,
)
from dtensor_ring.lab.training.state_shape import StateShape, state_of


class LayerRun(NamedTuple):
    """What a run of a layer left.

    Attributes:
        forward: launches of the forward.
        backward: launches of the backward, with what tiles compute again.
        attention_kept: bytes of queries, keys, values, outputs and lse that backward needs.
        others_kept: all other bytes that it needs.
        results: bytes of the outputs and lse among what attentions keep.
        most: the most bytes at once beside the input of the layer, unless that is kept.
        keeps_input: whether the input is among what is kept.
        blocks: how many of its children have matrices, and tokens of all ranks of `tp`.
    """

    forward: tuple[OpLaunch, ...]
    backward: tuple[OpLaunch, ...]
    attention_kept: int
    others_kept: int
    results: int
    most: int
    keeps_input: bool
    blocks: int


@lru_cache(maxsize=256)
def layer_run(
    source: ModelSource,
    index: int,
    shard: Shard,
    room: tuple[int, int] = (0, 0),
    tile: int | None = None,
) -> LayerRun:
    """Run a layer, see `LayerRunner`; equal ones run once."""
    return LayerRunner(source, index, shard, room, tile).run()


class Attended(NamedTuple):
    """An attention that ran.

    Attributes:
        heads: number of query heads, and of key and value heads.
        head_dims: numbers of a head of queries and keys, and of values.
        window: tokens that a query sees, itself included; `None` for all before it.
    """

    heads: tuple[int, int]
    head_dims: tuple[int, int]
    window: int | None


class ModelRunner:
    """A model of which a part runs, with a recorder around it.

    Args:
        source: what the model is made of.
        shard: what the rank has of a batch.
        tile: tokens that norms and MLPs run on at once; `None` for all.
    """

    def __init__(self, source: ModelSource, shard: Shard, tile: int | None) -> None:
        self.source, self.shard, self.tile = source, shard, tile
        self.module = meta_module(source, shard.dtype, shard.tp)
        self.layers = layers_of(self.module)
        self.same = partial(_same, num_returned(source, shard.dtype, shard.tp))
        self.recorder = LaunchRecorder()

    def given(self, x: Tensor) -> Tensor:
        """Return the input of what runs: the tokens of this rank of tensor parallelism."""
        local = -(-self.shard.tokens // self.shard.tp)
        return x.new_empty(1, local, *x.shape[2:]).requires_grad_()

    def model(self, changes: Mapping[nn.Module, Callable[..., Any]]) -> None:
        """Run the model with other forwards of some modules; other layers return what they get."""
        with forwards(dict.fromkeys(self.layers, self.same) | {**changes}):
            run_module(self.source, self.module, self.shard.tokens, self.attend)

    def attend(self, *_: Any, **__: Any) -> Any:
        """Run an attention."""
        raise NotSimulated(f"{self.source.name} has an attention outside of its layers")


class LayerRunner(ModelRunner):
    """A layer with a recorder around it, by its number.

    `room` has the bytes that its attention needs while it runs, forward and backward.

    Attributes:
        attentions: those that ran.
    """

    def __init__(
        self,
        source: ModelSource,
        index: int,
        shard: Shard,
        room: tuple[int, int] = (0, 0),
        tile: int | None = None,
    ) -> None:
        super().__init__(source, shard, tile)
        self.index, self.room = index, room
        self.attentions: list[Attended] = []
        self.attended, self.results = set[int](), set[int]()  # storages of an attention
        self.blocks = 0

    def run(self) -> LayerRun:
        """Run the layer forward and backward; all others return what they are given."""
        found: list[LayerRun] = []
        layer = self.layers[self.index]
        own = layer.forward

        def recorded(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            def run(given: Tensor) -> Tensor:
                with forwards(self._children(layer)):
                    return first_of(own(given, *args, **kwargs), [])

            found.append(self._recorded(run, x))
            return self.same(x)

        self.model({layer: recorded})
        return found[0]

    def _recorded(self, run: Callable[[Tensor], Tensor], x: Tensor) -> LayerRun:
        given = self.given(x)
        with torch.enable_grad():
            ran = recorded_run(self.recorder, run, given)
        attended, results = (
            sum(size for x, size in ran.saved.items() if x in which)
            for which in (self.attended, self.results)
        )
        own = given.untyped_storage()._cdata in ran.saved
        return LayerRun(
            forward=ran.forward,
            backward=ran.backward,
            attention_kept=attended,
            others_kept=sum(ran.saved.values()) - attended,
            results=results,
            most=ran.most + own * given.nbytes,
            keeps_input=own,
            blocks=self.blocks,
        )

    def _children(self, layer: nn.Module) -> dict[nn.Module, Callable[..., Any]]:
        return {x: partial(self._child, x, x.forward) for x in layer.children()}

    def _child(
        self, child: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Run a child: one with matrices on all tokens, and one that mixes no tokens in tiles."""
        x, *rest = args or (kwargs.pop("hidden_states"),)
        is_block = any(y.dim() > 1 for y in child.parameters())
        self.blocks += is_block
        given, state = _resized(x, self.shard.tokens) if is_block else x, state_of(child)
        if state is not None:
            return _resized(self._with_state(child, state, given), x.shape[-2])
        beside: list[tuple[Any, ...]] = []

        def run(part: Tensor) -> Tensor:
            out = first_of(forward(part, *rest, **kwargs), beside)
            return out.view(part.shape) if out.numel() == part.numel() else out

        # What mixes tokens is given a mask.
        size = None if "attention_mask" in kwargs else self.tile
        found = _resized(tiled(run, given, size, self.recorder), x.shape[-2])
        return (found, *beside[0]) if beside else found

    def _with_state(self, child: nn.Module, state: StateShape, x: Tensor) -> Tensor:
        """Run the products of a layer with a state, and between them what its kernels do.

        The last product is the one that reads what the state returns. Products of low rank follow
        one another: the first one is not divided over the ranks of tensor parallelism.
        """
        linears = [y for y in child.modules() if isinstance(y, nn.Linear)]
        shapes = [(y.in_features, y.out_features) for y in linears]
        width, hidden, tp = state.values or state.channels, x.shape[-1], self.shard.tp
        last = len(shapes) - 1 - shapes[::-1].index((width, hidden))
        low = {inputs for inputs, _ in shapes if inputs != hidden} - {width}
        outputs: list[Tensor] = []
        for inputs, size in (y for i, y in enumerate(shapes) if i != last):
            source = outputs.pop() if inputs in low else x
            outputs.append(
                F.linear(source, self._weight(size if size in low else size // tp, inputs))
            )
        mixed = self._state(state, outputs, width // tp)
        return F.linear(mixed, self._weight(hidden, width // tp))

    def _weight(self, *shape: int) -> Tensor:
        with self.recorder.paused():
            weight = torch.empty(shape, dtype=getattr(torch, self.shard.dtype), device="meta")
        weight.requires_grad_().register_post_accumulate_grad_hook(dropped)
        return weight

    def _state(self, state: StateShape, outputs: Sequence[Tensor], width: int) -> Tensor:
        """Run a convolution and a recurrence, by kernels that go chunk by chunk."""
        shard, recorder = self.shard, self.recorder
        shapes, local = [x.shape for x in outputs], shard.tokens / shard.tp
        kept, ahead, back = (int(x * local) for x in state.bytes(shard.itemsize))
        flops, passes = (of(shard.is_sharded) * local for of in (state.flops, state.passes))
        launch = OpLaunch(STATE, int(flops), ((0, int(passes * shard.itemsize)),), ())

        def forward(*given: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            out = given[0].new_empty(1, shard.tokens, width)
            recorder.need(ahead)
            recorder.add(launch)
            return out, (out, out.new_empty(max(0, kept - out.nbytes) // out.itemsize))

        def backward(_: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
            recorder.need(back)
            recorder.add(launch._replace(times=2))
            return [grad.new_empty(shape) for shape in shapes]

        return opaque(forward, backward, outputs)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **how: Any
    ) -> tuple[Tensor, None]:
        if not getattr(module, "is_causal", True):
            raise NotSimulated(
                f"{self.source.name} sees tokens ahead, and only next-token models are simulated"
            )
        heads, dims = (query.shape[1], key.shape[1]), (query.shape[3], value.shape[3])
        self.attentions.append(Attended(heads, dims, how.get("sliding_window")))
        out, lse = self._attend([query, key, value])
        self.results |= {x.untyped_storage()._cdata for x in (out, lse)}
        self.attended |= {x.untyped_storage()._cdata for x in (query, key, value)} | self.results
        return out, None

    def _attend(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Run an attention, which is simulated elsewhere: here it has inputs and results."""
        recorder, room = self.recorder, self.room

        def forward(*given: Tensor) -> tuple[Any, Sequence[Tensor]]:
            query, wide = given[0], torch.promote_types(given[0].dtype, torch.float32)
            batch, heads, tokens, _ = query.shape
            out = query.new_empty(batch, tokens, heads, given[2].shape[3])
            results = out, query.new_empty(query.shape[:3], dtype=wide)
            recorder.need(room[0])
            reads, writes = recorder.touched(given), recorder.touched(results[:1])
            recorder.add(OpLaunch(ATTENTION, 0, reads, writes))
            return results, (*given, *results)

        def backward(kept: Sequence[Tensor], grad: Tensor, _: Any) -> Sequence[Tensor]:
            recorder.need(room[1])
            grads = [torch.empty_like(x) for x in kept[:3]]
            reads, writes = recorder.touched([grad, *kept]), recorder.touched(grads)
            recorder.add(OpLaunch(ATTENTION, 0, reads, writes))
            return grads

        return opaque(forward, backward, inputs)


def _same(number: int, x: Tensor, *_: Any, **__: Any) -> Any:
    """Return what a layer is given, as one of a number of values; alone if that is 0."""
    return (x, *[None] * (number - 1)) if number else x


@lru_cache(maxsize=64)
def num_returned(source: ModelSource, dtype: str, tp: int) -> int:
    """Return how many values layers return in a tuple, as the first one does; 0 without one."""
    module, number = meta_module(source, dtype, tp), [0]
    first, *others = layers_of(module)
    own = first.forward

    def seen(*args: Any, **kwargs: Any) -> Any:
        output = own(*args, **kwargs)
        number[0] = len(output) if isinstance(output, tuple) else 0
        return output

    def later(x: Tensor, *_: Any, **__: Any) -> Any:
        return _same(number[0], x)

    def attend(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
        batch, heads, tokens, _ = query.shape
        return query.new_empty(batch, tokens, heads, value.shape[3]), None

    def passed(*args: Any, **kwargs: Any) -> Any:
        return args[0] if args else kwargs["hidden_states"]

    states = [x for x in first.children() if state_of(x)]
    with forwards(dict.fromkeys(others, later) | dict.fromkeys(states, passed) | {first: seen}):
        run_module(source, module, 2, attend)
    return number[0]


class HeadRunner(ModelRunner):
    """What comes after the layers of a model, and the loss."""

    def run(self, entries: int, tiles: int) -> RecordedRun:
        """Run the last norm and the loss, `entries` of the vocabulary at a time."""
        after: list[Callable[..., Any]] = []
        last, hidden = self.layers[-1], list[Tensor]()

        def ended(x: Tensor, *_: Any, **__: Any) -> Any:
            hidden.append(x)
            return self.same(x)

        def noted(forward: Callable[..., Any], x: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not hidden:
                return forward(x, *args, **kwargs)
            after.append(forward)
            return x

        others = (x for x in self.module.children() if not isinstance(x, nn.ModuleList))
        self.model({last: ended} | {x: partial(noted, x.forward) for x in others})
        x = self.given(hidden[0])
        weight = x.new_empty(entries, x.shape[-1])

        def forward(given: Tensor) -> Tensor:
            for each in after:
                given = tiled(each, given, self.tile, self.recorder)
            return _loss(_resized(given, self.shard.tokens)[0], weight, tiles, self.recorder)

        return recorded_run(self.recorder, forward, x)


class RecordedRun(NamedTuple):
    """A forward and a backward: launches, sizes of saved storages, and the most bytes at once."""

    forward: tuple[OpLaunch, ...]
    backward: tuple[OpLaunch, ...]
    saved: dict[int, int]
    most: int


def recorded_run(
    recorder: LaunchRecorder, forward: Callable[[Tensor], Tensor], x: Tensor
) -> RecordedRun:
    """Run a function forward and backward; what it keeps is without weights."""
    saved: dict[int, int] = {}
    own = x.untyped_storage()._cdata

    def pack(kept: Tensor) -> Tensor:
        storage = kept.untyped_storage()
        # Weights and tables were there before, and are not counted.
        if storage._cdata == own or recorder.held(kept):
            saved[storage._cdata] = storage.nbytes()
        return kept

    with recorder, saved_tensors_hooks(pack, lambda kept: kept):
        end = _end(forward(x))
        number = len(recorder.launches)
        kept = dict(saved)
        end.backward(end.new_empty(()))
    launches = recorder.launches
    return RecordedRun(tuple(launches[:number]), tuple(launches[number:]), kept, recorder.peak)


@lru_cache(maxsize=256)
def head_run(
    source: ModelSource, entries: int, tiles: int, shard: Shard, mlp_tile: int | None
) -> RecordedRun:
    """Run what comes after the layers, see `HeadRunner`; equal ones run once."""
    return HeadRunner(source, shard, mlp_tile).run(entries, tiles)


def _end(x: Tensor) -> Tensor:
    """Return what comes after a layer: it keeps nothing, and makes the gradient of its input."""
    shape, dtype = x.shape, x.dtype
    return opaque(
        lambda y: (y.new_empty(()), ()), lambda _, grad: (grad.new_empty(shape, dtype=dtype),), [x]
    )


class _Opaque(torch.autograd.Function):
    """An op of which PyTorch sees its inputs and results only."""

    @staticmethod
    def forward(ctx: Any, forward: Any, backward: Any, *given: Tensor) -> Any:
        result, kept = forward(*given)
        ctx.set_materialize_grads(False)
        ctx.back = backward
        ctx.save_for_backward(*kept)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return None, None, *ctx.back(ctx.saved_tensors, *grads)


def opaque(
    forward: Callable[..., tuple[Any, Sequence[Tensor]]],
    backward: Callable[..., Sequence[Tensor]],
    given: Sequence[Tensor],
) -> Any:
    """Run an op by two functions.

    Args:
        forward: returns the results, and what it keeps.
        backward: takes what was kept and gradients of the results, and returns those of `given`.
        given: the inputs.
    """
    return _Opaque.apply(forward, backward, *given)


def _resized(x: Tensor, tokens: int) -> Tensor:
    """Return tokens of more or fewer ranks; what moves them is counted elsewhere."""
    number = x.shape[-2]
    if number == tokens:
        return x

    def made(given: Tensor, number: int) -> Tensor:
        return given.new_empty(*given.shape[:-2], number, given.shape[-1])

    return opaque(lambda y: (made(y, tokens), ()), lambda _, grad: (made(grad, number),), [x])


def tiled(
    compute: Callable[[Tensor], Tensor], x: Tensor, size: int | None, recorder: LaunchRecorder
) -> Tensor:
    """Run something over tiles of tokens, and again in backward; over all at once without a size.

    One tile runs, and counts as many times as there are tiles.
    """
    if size is None:
        return compute(x)
    tokens = x.shape[-2]
    number, first = -(-tokens // size), min(size, tokens)

    def forward(given: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        tiles = torch.empty_like(given)  # until they are joined
        with recorder.times(number):
            compute(given.narrow(-2, 0, first))
        return torch.empty_like(tiles), (given,)

    def backward(kept: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
        tiles, part = torch.empty_like(grad), kept[0].narrow(-2, 0, first).detach().requires_grad_()
        with recorder.times(number), torch.enable_grad():
            torch.autograd.backward(compute(part), grad.narrow(-2, 0, first))
        return (torch.empty_like(tiles),)

    return opaque(forward, backward, [x])


def _loss(x: Tensor, weight: Tensor, tiles: int, recorder: LaunchRecorder) -> Tensor:
    """Run the cross-entropy of a projection in tiles of the vocabulary, of which one runs.

    Logits are made again in backward, as the loss of the plan for transformers makes them.
    """

    def forward(given: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        with recorder.times(tiles):
            _, scores = _logits(given, weight)
            lse = scores.sub_(scores.amax(1, keepdim=True)).exp_().sum(1, keepdim=True)
        return lse, (given, lse)

    def backward(kept: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
        given, lse = kept
        total = torch.zeros_like(given, dtype=lse.dtype)
        with recorder.times(tiles):
            logits, scores = _logits(given, weight)
            scores.sub_(lse).exp_().mul_(grad)
            products = scores if logits is scores else logits.copy_(scores)
            total.add_(products @ weight)
            products.T @ given  # the gradient of the tile's weights
        return (total.to(given.dtype),)

    return opaque(forward, backward, [x])


def _logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits in their dtype, and in float32 or wider."""
    logits = x @ weight.T
    return logits, logits.to(torch.promote_types(logits.dtype, torch.float32))
