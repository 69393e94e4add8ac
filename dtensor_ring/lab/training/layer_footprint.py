"""The footprint of a training step by layer: what each keeps, and its fullest moment.

Note [Borders of layers]: hooks tell when a layer begins and ends in forward, and when the gradient
of its output is there, which begins its backward. The peak is read and set back at each border.
A layer that is computed again runs once here: what it then keeps and sends follows from this run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dtensor_ring.lab.training.footprint import RESULTS, Footprint
from dtensor_ring.lab.training.model_source import layers_of
from dtensor_ring.lab.training.step_memory import KEPT_ITEMSIZE, LayerBytes, RunBytes


class _Part:
    """A call of a layer, or what comes before or after all of them.

    Attributes:
        alive: bytes that were alive when it began.
        kept: bytes that attentions had kept by then.
        results: bytes of results of attentions by then.
        peak: the most bytes in its forward and backward.
        stream: bytes of its output.
        inputs: what it is given, while a checkpoint keeps that for it.
    """

    def __init__(self, step: Footprint) -> None:
        self.alive, self.kept, self.results = step.alive, step.kept, step.results
        self.peak, self.stream = step.alive, 0
        self.inputs: Any = None


class LayerFootprint(Footprint):
    """A footprint of a step of a model, see Note [Borders of layers].

    Args:
        module: the model, whose parameters are whole.
        checkpoint: what backward computes again, one of `CHECKPOINTS`.
        share: the part of a gradient that stays once it is there, as FSDP2 reduces it, in float32
            or wider; `None` if it stays as it is.
    """

    def __init__(self, module: nn.Module, checkpoint: str, share: float | None) -> None:
        super().__init__()
        self.count(list(module.parameters()))
        self._checkpoint, self._is_inside = checkpoint, False
        self._before = self._after = self._now = _Part(self)
        self._calls: list[_Part] = []
        self._alive_at_end = self.alive
        for layer in layers_of(module):
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave)
        for parameter in module.parameters():
            if parameter.requires_grad and share is not None:
                parameter.register_post_accumulate_grad_hook(partial(self._reduce, share))

    def run(self, loss: Callable[[], Tensor]) -> None:
        """Run a forward that returns the loss, and its backward."""
        with self:
            found = loss()
            self._alive_at_end = self.alive
            found.backward()
            self._turn(self._before)

    def runs(self, op: Any) -> int:
        is_kept = self._checkpoint == "attention" and op in RESULTS
        return 2 if self._is_inside and self._checkpoint != "none" and not is_kept else 1

    def _turn(self, part: _Part) -> None:
        """Begin with a part, and give the last one its peak."""
        self._now.peak = max(self._now.peak, self.peak)
        self._now, self.peak = part, self.alive

    def _turn_back(self, call: _Part) -> None:
        """Begin with the backward of a layer, after that of another."""
        self._now.inputs = None
        self._turn(call)

    def _enter(self, layer: nn.Module, args: Any) -> None:
        if self._calls:  # what came after the layer before
            self._calls[-1].peak = max(self._calls[-1].peak, self.peak)
        self._calls.append(_Part(self))
        self._turn(self._calls[-1])
        self._is_inside = True
        if self._checkpoint != "none":
            self._calls[-1].inputs = args

    def _leave(self, layer: nn.Module, args: Any, output: Any) -> None:
        call, self._is_inside = self._calls[-1], False
        stream = next((x for x in tree_leaves(output) if isinstance(x, Tensor)), None)
        if stream is not None and stream.requires_grad:
            call.stream = stream.nbytes
            stream.register_hook(lambda _: self._turn_back(call))
        self._after = _Part(self)
        self._turn(self._after)

    def _reduce(self, share: float, parameter: Tensor) -> None:
        parameter.grad = None
        self.keep(int(parameter.numel() * max(KEPT_ITEMSIZE, parameter.itemsize) * share))

    @property
    def bytes(self) -> RunBytes:
        """What the run needed, with the gradients that were there."""
        parts = [*self._calls, self._after]
        return RunBytes(
            before=parts[0].alive - self._before.alive,
            layers=[self._layer(call, after) for call, after in pairwise(parts)],
            head_kept=self._alive_at_end - self._after.alive,
            head_most=max(self._before.peak, self._after.peak) - self._after.alive,
        )

    def _layer(self, call: _Part, after: _Part) -> LayerBytes:
        kept, most = after.kept - call.kept, call.peak - call.alive
        if self._checkpoint == "none":
            return LayerBytes(kept, after.alive - call.alive - kept, most)
        results = after.results - call.results if self._checkpoint == "attention" else 0
        return LayerBytes(results, call.stream, most)
