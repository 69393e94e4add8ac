"""Run a layer on the meta device, forward and backward, and record what it launches and keeps.

Note [Run, not counted]: a layer is written in PyTorch, by the sizes of a `LayerShape` and with the
ops of transformers' modules: norms in float32, rotary embeddings by halves, an activation and a
product. It runs once, without content, on what one rank has of it. Launches, bytes that backward
needs, and the most bytes at once are those of this run; tests compare them with transformers'
own layers. An attention and a state are one op each, as their kernels are; the first is simulated,
the second counted by `StateShape`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dtensor_ring.lab.training.launches import ATTENTION, STATE, LaunchRecorder, OpLaunch
from dtensor_ring.lab.training.layer_seconds import Shard
from dtensor_ring.lab.training.model_shape import LayerShape, Product

EPSILON = 1e-6


@lru_cache(maxsize=256)
def layer_run(
    layer: LayerShape,
    hidden: int,
    shard: Shard,
    room: tuple[int, int] = (0, 0),
    tile: int | None = None,
) -> LayerRun:
    """Run a layer, see `LayerRunner`; equal ones run once."""
    return LayerRunner(layer, hidden, shard, room, tile).run()


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
    """

    forward: tuple[OpLaunch, ...]
    backward: tuple[OpLaunch, ...]
    attention_kept: int
    others_kept: int
    results: int
    most: int
    keeps_input: bool


class LayerRunner:
    """A layer with a recorder around it.

    Args:
        layer: the layer.
        hidden: numbers of a token between layers.
        shard: what the rank has of a batch.
        room: bytes that the attention needs, forward and backward.
        tile: tokens that norms and MLPs run on at once; `None` for all.
    """

    def __init__(
        self,
        layer: LayerShape,
        hidden: int,
        shard: Shard,
        room: tuple[int, int] = (0, 0),
        tile: int | None = None,
    ) -> None:
        self.layer, self.hidden, self.shard, self.room = layer, hidden, shard, room
        self.tile = tile
        self.dtype = getattr(torch, shard.dtype)
        self.recorder = LaunchRecorder()
        self.attended, self.results = set[int](), set[int]()  # storages of an attention

    def run(self) -> LayerRun:
        """Run the layer forward and backward."""
        given = self._there(-(-self.shard.tokens // self.shard.tp), self.hidden).requires_grad_()
        run = recorded_run(self.recorder, self._forward, given)
        kept = sum(run.saved.values())
        attended, results = (
            sum(size for x, size in run.saved.items() if x in which)
            for which in (self.attended, self.results)
        )
        own = given.untyped_storage()._cdata in run.saved
        return LayerRun(
            *(run.forward, run.backward, attended, kept - attended, results),
            most=run.most + own * given.nbytes,
            keeps_input=own,
        )

    def _there(self, *shape: int) -> Tensor:
        """Return a tensor that is there before the layer runs."""
        with self.recorder.paused():
            return torch.empty(shape, dtype=self.dtype, device="meta")

    def _forward(self, x: Tensor) -> Tensor:
        if self.layer.attention:
            mixed = self._mix(*self._normed(x))
            x = x + self._reduced(mixed)
        if self.layer.mlp:
            _, whole = self._normed(x)
            x = x + self._reduced(self._tiled(self._mlp, whole))
        return x

    def _normed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of a norm: that of this rank's tokens, and of all tokens."""
        weight = self._weight(self.hidden)
        local = self._tiled(lambda part: rms_norm(part, weight), x)
        return local, self._gathered(local)

    def _tiled(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return tiled(compute, x, self.tile, self.recorder)

    def _gathered(self, x: Tensor) -> Tensor:
        return x if len(x) == self.shard.tokens else _resized(x, self.shard.tokens)

    def _reduced(self, x: Tensor) -> Tensor:
        local = -(-self.shard.tokens // self.shard.tp)
        return x if len(x) == local else _resized(x, local)

    def _weight(self, *shape: int) -> Tensor:
        weight = self._there(*shape).requires_grad_()
        weight.register_post_accumulate_grad_hook(_dropped)
        return weight

    def _product(self, x: Tensor, product: Product, is_last: bool = False) -> Tensor:
        """Multiply tokens by weights, of which tensor parallelism divides one side."""
        inputs, outputs = product[:2]
        if product.divided and is_last:
            inputs //= self.shard.tp
        elif product.divided:
            outputs //= self.shard.tp
        if product.copies == 1:
            return F.linear(x, self._weight(outputs, inputs))
        return self._grouped(x, self._weight(product.copies, inputs, outputs))

    def _grouped(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply tokens by weights of experts, each by that of one, in one launch."""
        recorder, flops = self.recorder, 2 * len(x) * weight.shape[1] * weight.shape[2]

        def launch(result: Tensor, *given: Tensor) -> Tensor:
            touched = recorder.touched(given), recorder.touched([result])
            recorder.add(OpLaunch("grouped_mm", flops, *touched))
            return result

        def forward(given: Tensor, weight: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            out = given.new_empty(len(given), weight.shape[2])
            return launch(out, given, weight), (given, weight)

        def backward(kept: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
            given, weight = kept
            by_tokens = launch(torch.empty_like(given), grad, weight)
            return by_tokens, launch(torch.empty_like(weight), grad, given)

        return opaque(forward, backward, x, weight)

    def _mix(self, local: Tensor, whole: Tensor) -> Tensor:
        """Run what mixes tokens, the state and the attention, and the products around each."""
        products, number = self.layer.attention, self.layer.state_products
        parts = (self._state, products[:number]), (self._attention, products[number:])
        found = [self._around(act, of, local, whole) for act, of in parts if of]
        return found[0] if len(found) == 1 else found[0] + found[1]

    def _around(
        self,
        act: Callable[[Sequence[Tensor]], Tensor],
        products: Sequence[Product],
        local: Tensor,
        whole: Tensor,
    ) -> Tensor:
        """Run products, what mixes their outputs, and the last product.

        A product reads the narrowest tensor that is wide enough: products of low rank follow one
        another. What tensor parallelism does not divide runs on the tokens of this rank.
        """
        outputs, sources = list[Tensor](), [whole]
        for product in products[:-1]:
            fitting = [x for x in sources if x.shape[-1] >= product.inputs]
            source = min(fitting, key=lambda x: x.shape[-1], default=whole)
            source = _first(source, product.inputs, 1)
            if product.divided:
                outputs.append(self._product(source, product))
                sources.append(outputs[-1])
            else:
                own = local if source.shape[-1] == self.hidden else source
                sources.append(self._gathered(self._product(own, product)))
        return self._product(act(outputs), products[-1], is_last=True)

    def _state(self, outputs: Sequence[Tensor]) -> Tensor:
        """Run a convolution and a recurrence, by kernels that go chunk by chunk."""
        state, shard, recorder = self.layer.state, self.shard, self.recorder
        assert state is not None
        shapes, local = [x.shape for x in outputs], shard.tokens / shard.tp
        kept, ahead, back = (int(x * local) for x in state.bytes(shard.itemsize))
        flops, passes = (of(shard.is_sharded) * local for of in (state.flops, state.passes))
        launch = OpLaunch(STATE, int(flops), ((0, int(passes * shard.itemsize)),), ())

        def forward(*given: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
            out = given[0].new_empty(shard.tokens, state.values // shard.tp)
            recorder.need(ahead)
            recorder.add(launch)
            return out, (out, out.new_empty(max(0, kept - out.nbytes) // out.itemsize))

        def backward(_: Sequence[Tensor], grad: Tensor) -> Sequence[Tensor]:
            recorder.need(back)
            recorder.add(launch._replace(times=2))
            return [grad.new_empty(shape) for shape in shapes]

        return opaque(forward, backward, *outputs)

    def _attention(self, outputs: Sequence[Tensor]) -> Tensor:
        query, key, value, gate = self._heads(outputs)
        if self.layer.has_query_norm:
            weight = self._weight(self.layer.head_dim)
            query, key = rms_norm(query, weight), rms_norm(key, weight)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        tables = [self._there(1, 1, self.shard.tokens, self.layer.head_dim) for _ in range(2)]
        query, key = (rotated(x, *tables) for x in (query, key))
        out, lse = self._attend(query, key, value)
        self.results |= {x.untyped_storage()._cdata for x in (out, lse)}
        self.attended |= {x.untyped_storage()._cdata for x in (query, key, value)} | self.results
        out = out.transpose(1, 2).reshape(self.shard.tokens, -1)
        return out if gate is None else out * torch.sigmoid(gate)

    def _attend(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Run an attention, which is simulated elsewhere: here it has inputs and results."""
        recorder, room = self.recorder, self.room

        def forward(*given: Tensor) -> tuple[Any, Sequence[Tensor]]:
            query, wide = given[0], torch.promote_types(given[0].dtype, torch.float32)
            results = torch.empty_like(query), query.new_empty(query.shape[:3], dtype=wide)
            recorder.need(room[0])
            touched = recorder.touched(given), recorder.touched(results[:1])
            recorder.add(OpLaunch(ATTENTION, 0, *touched))
            return results, (*given, *results)

        def backward(kept: Sequence[Tensor], grad: Tensor, _: Any) -> Sequence[Tensor]:
            recorder.need(room[1])
            grads = [torch.empty_like(x) for x in kept[:3]]
            touched = recorder.touched([grad, *kept]), recorder.touched(grads)
            recorder.add(OpLaunch(ATTENTION, 0, *touched))
            return grads

        return opaque(forward, backward, *inputs)

    def _heads(self, outputs: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values, `(1, L, heads, H)`, and the gate of the output."""
        (heads, key_heads), tp, dim = self.layer.heads, self.shard.tp, self.layer.head_dim
        sizes = [count // tp * dim for count in (heads, key_heads, key_heads)]
        widths, gate = [x.shape[-1] for x in outputs], None
        parts = list(outputs)
        if self.layer.has_gate:
            # Split by head, as transformers does.
            both = parts[0].view(self.shard.tokens, -1, 2 * dim)
            parts[0], gate = both[..., :dim], both[..., dim:].reshape(self.shard.tokens, -1)
        elif widths != sizes:
            # Keys and values of latents are put together.
            joined = torch.cat(parts, -1)
            room = sum(sizes) - joined.shape[-1]
            joined = F.pad(joined, (0, room)) if room > 0 else joined
            parts = [x.contiguous() for x in joined[:, : sum(sizes)].split(sizes, -1)]
        query, key, value = (x.reshape(1, self.shard.tokens, -1, dim) for x in parts)
        return query, key, value, gate

    def _mlp(self, x: Tensor) -> Tensor:
        products = list(self.layer.mlp)
        if not self.layer.routed:
            return self._dense(x, products)
        router, *products = products
        number = len(products) if products[-1].copies > 1 else len(products) // 2
        scores = self._product(x, router).float().softmax(-1)
        weights, chosen = scores.topk(self.layer.routed, -1)
        copies = x.index_select(0, chosen.flatten())
        results = self._dense(copies, products[:number]) * weights.to(x.dtype).reshape(-1, 1)
        out = results.view(len(x), -1, self.hidden).sum(1)
        return out + self._dense(x, products[number:]) if products[number:] else out

    def _dense(self, x: Tensor, products: Sequence[Product]) -> Tensor:
        *into, last = products
        inner = [self._product(x, product) for product in into]
        made = F.silu(inner[0]) * inner[1] if len(inner) == 2 else F.gelu(inner[0])
        return _first(self._product(made, last, is_last=True), len(x), 0)


def _first(x: Tensor, number: int, dim: int) -> Tensor:
    """Return the first entries along a dim; a slice of all of them would have a kernel backward."""
    return x if x.shape[dim] == number else x.narrow(dim, 0, number)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Return an RMSNorm, in float32 or wider, as transformers' models compute it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    variance = wide.pow(2).mean(-1, keepdim=True)
    return weight * (wide * torch.rsqrt(variance + EPSILON)).to(x.dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotary embeddings of queries or keys, by halves, as transformers' models do it."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


def _dropped(parameter: Tensor) -> None:
    """Free a gradient, as FSDP2 does after it has reduced it."""
    parameter.grad = None


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
    hidden: int, entries: int, tiles: int, shard: Shard, mlp_tile: int | None
) -> RecordedRun:
    """Run the last norm, the output projection and the cross-entropy, a tile of entries at a time.

    Args:
        hidden: numbers of a token between layers.
        entries: of the vocabulary in a tile.
        tiles: number of tiles.
        shard: what the rank has of a batch.
        mlp_tile: tokens that the norm runs on at once; `None` for all.
    """
    recorder, dtype = LaunchRecorder(), getattr(torch, shard.dtype)
    x, norm, weight = (
        torch.empty(shape, dtype=dtype, device="meta")
        for shape in ((-(-shard.tokens // shard.tp), hidden), (hidden,), (entries, hidden))
    )

    norm.requires_grad_().register_post_accumulate_grad_hook(_dropped)

    def forward(given: Tensor) -> Tensor:
        normed = tiled(lambda part: rms_norm(part, norm), given, mlp_tile, recorder)
        if len(normed) < shard.tokens:
            normed = _resized(normed, shard.tokens)
        return _loss(normed, weight, tiles, recorder)

    return recorded_run(recorder, forward, x.requires_grad_())


def _end(x: Tensor) -> Tensor:
    """Return what comes after a layer: it keeps nothing, and makes the gradient of its input."""
    shape, dtype = x.shape, x.dtype
    return opaque(
        lambda y: (y.new_empty(()), ()), lambda _, grad: (grad.new_empty(shape, dtype=dtype),), x
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
    *given: Tensor,
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

    def made(given: Tensor, number: int) -> Tensor:
        return given.new_empty(number, *given.shape[1:])

    number = len(x)
    return opaque(lambda y: (made(y, tokens), ()), lambda _, grad: (made(grad, number),), x)


def tiled(
    compute: Callable[[Tensor], Tensor], x: Tensor, size: int | None, recorder: LaunchRecorder
) -> Tensor:
    """Run something over tiles of tokens, and again in backward; over all at once without a size.

    One tile runs, and counts as many times as there are tiles.
    """
    if size is None:
        return compute(x)
    number, first = -(-len(x) // size), slice(min(size, len(x)))

    def forward(given: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        tiles = torch.empty_like(given)  # until they are joined
        with recorder.times(number):
            compute(given[first])
        return torch.empty_like(tiles), (given,)

    def backward(kept: Sequence[Tensor], grad: Tensor) -> tuple[Tensor, ...]:
        tiles, part = torch.empty_like(grad), kept[0][first].detach().requires_grad_()
        with recorder.times(number), torch.enable_grad():
            torch.autograd.backward(compute(part), grad[first])
        return (torch.empty_like(tiles),)

    return opaque(forward, backward, x)


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

    return opaque(forward, backward, x)


def _logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits in their dtype, and in float32 or wider."""
    logits = x @ weight.T
    return logits, logits.to(torch.promote_types(logits.dtype, torch.float32))
