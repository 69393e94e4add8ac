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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from dtensor_ring.lab.training.launches import ATTENTION, STATE, Launch, LaunchRecorder
from dtensor_ring.lab.training.layer_seconds import Shard
from dtensor_ring.lab.training.model_shape import LayerShape, Product
from dtensor_ring.lab.training.state_shape import StateShape

EPSILON = 1e-6


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

    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]
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
            local, whole = self._normed(x)
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
        return x if len(x) == self.shard.tokens else _Resized.apply(x, self.shard.tokens)

    def _reduced(self, x: Tensor) -> Tensor:
        local = -(-self.shard.tokens // self.shard.tp)
        return x if len(x) == local else _Resized.apply(x, local)

    def _weight(self, *shape: int) -> Tensor:
        weight = self._there(*shape).requires_grad_()
        weight.register_post_accumulate_grad_hook(_dropped)
        return weight

    def _product(self, x: Tensor, product: Product, is_last: bool = False) -> Tensor:
        """Multiply tokens by weights, of which tensor parallelism divides one side."""
        inputs, outputs = product[:2]
        if product.divided:
            inputs, outputs = (
                (inputs // self.shard.tp, outputs)
                if is_last
                else (inputs, outputs // self.shard.tp)
            )
        if product.copies == 1:
            return F.linear(x, self._weight(outputs, inputs))
        rows = -(-len(x) // product.copies)  # of an expert
        if rows * product.copies == len(x):
            batches = x.view(product.copies, rows, inputs)
        else:
            batches = _Resized.apply(x, rows * product.copies).view(product.copies, rows, inputs)
        return (batches @ self._weight(product.copies, inputs, outputs)).flatten(0, 1)

    def _mix(self, local: Tensor, whole: Tensor) -> Tensor:
        """Run what mixes tokens, the state and the attention, and the products around it."""
        layer, outputs = self.layer, list[Tensor]()
        lasts = self._lasts()
        sources = [whole]
        results = list[Tensor]()
        for i, product in enumerate(layer.attention):
            if i in lasts:
                results.append(self._mixed(outputs, len(results)))
                results[-1] = self._product(results[-1], product, is_last=True)
                outputs = []
                continue
            fitting = [x for x in sources if x.shape[-1] >= product.inputs] or [whole]
            source = _first(min(fitting, key=lambda x: x.shape[-1]), product.inputs, 1)
            if product.divided:
                outputs.append(self._product(source, product))
                sources.append(outputs[-1])
            else:
                own = local if source.shape[-1] == self.hidden else source
                sources.append(self._gathered(self._product(own, product)))
        found = results[0]
        for other in results[1:]:
            found = found + other
        return found

    def _lasts(self) -> set[int]:
        """Return the numbers of the products after the state and after the attention."""
        count = len(self.layer.attention)
        if self.layer.state is None or not self.layer.heads[0]:
            return {count - 1}
        # A state has products before it and one after it; then come those of the attention.
        return {self.layer.state_products - 1, count - 1}

    def _mixed(self, outputs: Sequence[Tensor], number: int) -> Tensor:
        if self.layer.state is not None and number == 0:
            return self._state(self.layer.state, outputs)
        return self._attention(outputs)

    def _state(self, state: StateShape, outputs: Sequence[Tensor]) -> Tensor:
        values = state.values // self.shard.tp
        return _State.apply(self, state, values, *outputs)

    def _attention(self, outputs: Sequence[Tensor]) -> Tensor:
        query, key, value, gate = self._heads(outputs)
        if self.layer.has_query_norm:
            weight = self._weight(self.layer.head_dim)
            query, key = rms_norm(query, weight), rms_norm(key, weight)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        tables = [self._there(1, 1, self.shard.tokens, self.layer.head_dim) for _ in range(2)]
        query, key = (rotated(x, *tables) for x in (query, key))
        out, lse = _Attention.apply(self, query, key, value)
        self.results |= {x.untyped_storage()._cdata for x in (out, lse)}
        self.attended |= {x.untyped_storage()._cdata for x in (query, key, value)} | self.results
        out = out.transpose(1, 2).reshape(self.shard.tokens, -1)
        return out if gate is None else out * torch.sigmoid(gate)

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
            joined = torch.cat(outputs, -1)
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

    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]
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
        end = _End.apply(forward(x))
        number = len(recorder.launches)
        kept = dict(saved)
        end.backward(end.new_empty(()))
    launches = recorder.launches
    return RecordedRun(tuple(launches[:number]), tuple(launches[number:]), kept, recorder.peak)


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
            normed = _Resized.apply(normed, shard.tokens)
        return _Loss.apply(normed, weight, tiles, recorder)

    return recorded_run(recorder, forward, x.requires_grad_())


class _End(torch.autograd.Function):
    """What comes after a layer: it keeps nothing, and makes the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.made = x.shape, x.dtype
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        shape, dtype = ctx.made
        return grad.new_empty(shape, dtype=dtype)


class _Resized(torch.autograd.Function):
    """Tokens of more or fewer ranks; what moves them is counted elsewhere."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int) -> Tensor:
        ctx.tokens = len(x)
        return x.new_empty(tokens, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty(ctx.tokens, *grad.shape[1:]), None


class _Attention(torch.autograd.Function):
    """An attention of a rank, which is simulated elsewhere: inputs and results."""

    @staticmethod
    def forward(
        ctx: Any, of: LayerRunner, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.of = of
        ctx.set_materialize_grads(False)
        out = torch.empty_like(query)
        lse = query.new_empty(query.shape[:3], dtype=torch.promote_types(out.dtype, torch.float32))
        of.recorder.need(of.room[0])
        of.recorder.add(
            Launch(ATTENTION, 0, of.recorder.touched([query, key, value]), of.recorder.touched([out]))
        )
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Any, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        recorder = ctx.of.recorder
        recorder.need(ctx.of.room[1])
        grads = [torch.empty_like(x) for x in (query, key, value)]
        reads = recorder.touched([grad, query, key, value, out, lse])
        recorder.add(Launch(ATTENTION, 0, reads, recorder.touched(grads)))
        return None, *grads


class _State(torch.autograd.Function):
    """A convolution and a recurrence, by kernels that go chunk by chunk."""

    @staticmethod
    def forward(ctx: Any, of: LayerRunner, state: StateShape, values: int, *given: Tensor) -> Tensor:
        shard = of.shard
        kept, forward, ctx.needs = (x * shard.tokens // shard.tp for x in state.bytes(shard.itemsize))
        out = given[0].new_empty(shard.tokens, values)
        inside = out.new_empty(max(0, kept - out.nbytes) // out.itemsize)
        of.recorder.need(forward)
        of.recorder.add(_state_launch(of, state))
        ctx.of, ctx.state, ctx.shapes = of, state, [x.shape for x in given]
        ctx.save_for_backward(out, inside)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.of.recorder.need(ctx.needs)
        ctx.of.recorder.add(_state_launch(ctx.of, ctx.state)._replace(times=2))
        return None, None, None, *(grad.new_empty(shape) for shape in ctx.shapes)


def _state_launch(of: LayerRunner, state: StateShape) -> Launch:
    shard, is_sharded = of.shard, of.shard.is_sharded
    flops = state.flops(is_sharded) * shard.tokens // shard.tp
    size = state.passes(is_sharded) * shard.itemsize * shard.tokens // shard.tp
    return Launch(STATE, flops, ((0, size),), ())


def tiled(
    compute: Callable[[Tensor], Tensor], x: Tensor, size: int | None, recorder: LaunchRecorder
) -> Tensor:
    """Run something over tiles of tokens; over all at once if there is no size."""
    return compute(x) if size is None else _Tiles.apply(x, compute, min(size, len(x)), recorder)


class _Tiles(torch.autograd.Function):
    """Something that runs on a few tokens at a time, and again in backward. One tile runs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, compute: Callable[[Tensor], Tensor], size: int, recorder: LaunchRecorder
    ) -> Tensor:
        ctx.how = compute, size, recorder
        ctx.save_for_backward(x)
        tiles = torch.empty_like(x)  # until they are joined
        with recorder.times(-(-len(x) // size)):
            compute(x[:size])
        return torch.empty_like(tiles)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (x,), (compute, size, recorder) = ctx.saved_tensors, ctx.how
        tiles = torch.empty_like(x)
        part = x[:size].detach().requires_grad_()
        with recorder.times(-(-len(x) // size)), torch.enable_grad():
            torch.autograd.backward(compute(part), grad[:size])
        return torch.empty_like(tiles), None, None, None


class _Loss(torch.autograd.Function):
    """The cross-entropy of a projection, in tiles of the vocabulary; one tile runs.

    Logits are made again in backward, as the loss of the plan for transformers makes them.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, tiles: int, recorder: LaunchRecorder
    ) -> Tensor:
        ctx.tiles, ctx.recorder = tiles, recorder
        with recorder.times(tiles):
            logits, scores = _logits(x, weight)
            lse = scores.sub_(scores.amax(1, keepdim=True)).exp_().sum(1, keepdim=True)
        ctx.save_for_backward(x, weight, lse)
        return lse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, lse = ctx.saved_tensors
        total = torch.zeros_like(x, dtype=lse.dtype)
        with ctx.recorder.times(ctx.tiles):
            logits, scores = _logits(x, weight)
            scores.sub_(lse).exp_().mul_(grad)
            products = scores if logits is scores else logits.copy_(scores)
            total.add_(products @ weight)
            products.T @ x  # the gradient of the tile's weights
        return total.to(x.dtype), None, None, None


def _logits(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits in their dtype, and in float32 or wider."""
    logits = x @ weight.T
    return logits, logits.to(torch.promote_types(logits.dtype, torch.float32))
