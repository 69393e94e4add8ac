"""What checkpointed layers keep for backward: results of attention, and tensors in host memory.

Layers that are computed again in backward keep the results of their attention. Selective
checkpointing of torch keeps what an op returned beside the graph, where the hooks of saved tensors
do not see it: up to torch 2.14 never, from 2.15 on if the caller asks for it. Here they do, as what
an attention returned is as large as the input of a layer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from parallel_plans.huggingface.activations import token_tiles
from parallel_plans.huggingface.core.modules import language_model_of
from parallel_plans.huggingface.probing.proxy_model import needs_proxy, small_proxy


class KeptForBackward(NamedTuple):
    """What a model keeps for its backward.

    Attributes:
        mlp_tile: tokens of a tile, over which modules run whose tokens do not interact; `None` for
            all tokens at once.
        offload: whether what checkpointed layers keep goes to host memory.
    """

    mlp_tile: int | None = None
    offload: bool = False

    def install(self, model: Any) -> None:
        """Change the layers of a model's decoder accordingly.

        Raises:
            ValueError: if tiles are asked for, and no module can run over them.
        """
        decoder = language_model_of(model)
        if self.mlp_tile is not None:
            self._tile(model, decoder, self.mlp_tile)
        if self.offload:
            offload(decoder.base_model, HostMemory())

    def _tile(self, model: Any, decoder: Any, num_tokens: int) -> None:
        if any(getattr(module, "_is_expert_parallel", False) for module in model.modules()):
            raise ValueError(
                f"mlp_tile={num_tokens}: experts of expert parallelism send tokens in each call, "
                "and ranks may have different numbers of tiles; leave one of them out"
            )
        examined = decoder
        if needs_proxy(model):  # it has the same modules
            examined = language_model_of(small_proxy(model, every_layer=True))
        names = token_tiles.tokenwise_modules(examined)
        if not names:
            raise ValueError(
                f"mlp_tile={num_tokens}: no module of {type(decoder).__name__} takes and returns a "
                "tensor with all tokens and keeps more for backward; leave it out"
            )
        for name in names:
            token_tiles.run_in_tiles(decoder.get_submodule(name), name, num_tokens)
        if decoder.base_model is not decoder:  # below a head, which may compute with these logits
            decoder.base_model.register_forward_hook(_join_router_logits)


# The output that has the logits of routers.
OF_ROUTER = "router_logits"


def _join_router_logits(model: Any, args: tuple[Any, ...], output: Any) -> None:
    """Join the router logits of tiles, if the output has any; see `join_tiles`."""
    if getattr(output, OF_ROUTER, None):
        num_tokens = token_tiles.num_tokens_of(output.last_hidden_state)
        setattr(output, OF_ROUTER, token_tiles.join_tiles(getattr(output, OF_ROUTER), num_tokens))


OPS = torch.ops.dtensor_ring
KEPT = tuple(op.default for op in (OPS.ring_attention, OPS.select_keys, OPS.selected_attention))


def ring_checkpoint_contexts() -> tuple[Any, Any]:
    """Return contexts for `torch.utils.checkpoint` that recompute everything but attention.

    A layer runs ring attention once in forward and once in backward, as without checkpointing. It
    keeps the output of its attention, `(B, N, L, H)`, and its log-sum-exp, beside its input, and
    the positions of keys that its index chose. Hooks of saved tensors around the layer, as those
    of `context_parallel_plan(..., offload=True)` and `torch.autograd.graph.save_on_cpu`, get all.

    Example:
        >>> config = LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16,
        ...     num_hidden_layers=1, num_attention_heads=2)
        >>> model = LlamaForCausalLM(config)
        >>> model.activation_checkpointing_enable(
        ...     {"use_reentrant": False, "context_fn": ring_checkpoint_contexts}
        ... )
    """
    # None while a graph is traced, too: compilers know the contexts of torch only.
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None:
        return create_selective_checkpoint_contexts([*KEPT])
    pack, unpack = hooks
    kept: deque[Any] = deque()
    return _Keeping(kept, pack), _Kept(kept, unpack)


class _Keeping(TorchDispatchMode):
    """Keeps the results of attentions, in the order of their calls."""

    def __init__(self, kept: deque[Any], pack: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._kept, self._pack = kept, pack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **kwargs or {})
        if func in KEPT:
            # Detached: the results will refer to the graph, which keeps these.
            tensors, form = tree_flatten(results)
            # Backward runs the layer again, with the same calls in the same order.
            self._kept.append(([self._pack(x.detach()) for x in tensors], form))
        return results


class _Kept(TorchDispatchMode):
    """Gives these results in place of attentions, in the same order."""

    def __init__(self, kept: deque[Any], unpack: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self._kept, self._unpack = kept, unpack

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KEPT:
            return func(*args, **kwargs or {})
        if not self._kept:
            raise RuntimeError(
                "a second backward of a layer that keeps the results of its attention for one: "
                "with retain_graph=True, checkpoint without ring_checkpoint_contexts"
            )
        packed, form = self._kept.popleft()
        return tree_unflatten([self._unpack(x) for x in packed], form)


# What a layer keeps with `ring_checkpoint_contexts`: its input, and two results of its attention.
AHEAD = 3
# Smaller tensors stay on the device.
MIN_BYTES = 2**20
# The attribute of a model that has its `HostMemory`.
HOST_MEMORY = "context_parallel_host_memory"


# Note [Copies beside kernels]: a copy runs on a stream of its own, beside the kernels of a layer.
# In forward, a tensor stays on the device until the next `AHEAD` ones were saved: then the stream
# of the kernels waits for its copy, which has had a layer's time, and the memory is free. In
# backward, whoever takes a tensor starts the copies of the `AHEAD` before it, which the next layer
# takes. The last ones that a forward saved are still on the device when backward begins. All memory
# belongs to the stream of the kernels, which waits for a copy before memory is freed, so that
# nothing else is put there too early, however far the host is ahead.
#
# What three layers save, and when it is copied:
#
#     kernels      layer 1 | layer 2 | layer 3 | layer 3 back | layer 2 back | layer 1 back
#     to host      1       | 2       | 3       |              |              |
#     to device            |         |         | 2            | 1            |
class Copies(Protocol):
    """Copies between a device and host memory, each with a function that waits for it."""

    def takes(self, x: Tensor) -> bool:
        """Return whether a tensor is on a device whose memory is not that of the host."""

    def to_host(self, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Start a copy of a tensor to host memory; its own memory must not change meanwhile."""

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, Callable[[], None]]:
        """Start a copy of a tensor back to its device."""


class StreamCopies:
    """Copies on a stream beside that of the kernels, to and from pinned memory."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}

    def takes(self, x: Tensor) -> bool:
        return type(x) is Tensor and x.device.type not in ("cpu", "meta")

    def to_host(self, x: Tensor) -> tuple[Tensor, Callable[[], None]]:
        host = torch.empty_like(x, device="cpu", pin_memory=True)
        return host, self._copy(host, x, x.device)

    def to_device(self, host: Tensor, device: torch.device) -> tuple[Tensor, Callable[[], None]]:
        x = torch.empty_like(host, device=device)
        return x, self._copy(x, host, device)

    def _copy(self, target: Tensor, source: Tensor, device: torch.device) -> Callable[[], None]:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        stream = self._streams[device]
        # After all kernels so far: they made the source, or used the memory of the target.
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            target.copy_(source, non_blocking=True)
        return partial(_wait_for, stream.record_event(), device)


def _wait_for(event: torch.Event, device: torch.device) -> None:
    torch.accelerator.current_stream(device).wait_event(event)


class _OnDevice:
    """A tensor on the device, whose copy may be under way."""

    def __init__(self, x: Tensor, wait: Callable[[], None]) -> None:
        self._tensor: Tensor | None = x
        self._wait, self._version = wait, x._version

    def __bool__(self) -> bool:
        return self._tensor is not None

    def take(self) -> Tensor:
        """Wait for the copy, and return the tensor; the caller has the only reference then."""
        x, self._tensor = self._tensor, None
        assert x is not None, "it was taken before"
        self._wait()
        # A change in place may have come before the copy had read the tensor.
        if x._version != self._version:
            raise RuntimeError(
                f"a tensor {tuple(x.shape)} was changed in place while it was copied to host "
                "memory for backward; leave offload out"
            )
        return x


class _InHostMemory:
    """A tensor that was saved for backward, in the order of a forward."""

    def __init__(self, host: Tensor, x: _OnDevice, device: torch.device, before: Any) -> None:
        self.host, self.near, self.device = host, x, device
        self.before: ref[_InHostMemory] | None = before
        self.was_taken = False


class HostMemory:
    """Moves the tensors that layers save for backward, see Note [Copies beside kernels].

    Attributes:
        copies: what makes the copies.
        min_bytes: smaller tensors are left where they are.
    """

    def __init__(self, copies: Copies | None = None, min_bytes: int = MIN_BYTES) -> None:
        self.copies: Copies = copies or StreamCopies()
        self.min_bytes = min_bytes
        self._last: ref[_InHostMemory] | None = None
        self._near: deque[_OnDevice] = deque()
        self._open: list[tuple[nn.Module, saved_tensors_hooks]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> HostMemory:
        """Return itself: copies of a model take turns."""
        return self

    def open(self, model: nn.Module) -> None:
        """Begin to move what a model saves, but for its parameters."""
        # The dicts, as FSDP2 puts other parameters into them while the model runs.
        parameters = [x._parameters for x in model.modules() if x._parameters]
        hooks = saved_tensors_hooks(partial(self.pack, parameters), self.unpack)
        # Entered by hand: the forward that it surrounds runs between two hooks of the model.
        hooks.__enter__()
        self._open.append((model, hooks))

    def close(self, model: nn.Module) -> None:
        """End what `open` began for a model, if it did: a hook before that one may have raised."""
        if self._open and self._open[-1][0] is model:
            self._open.pop()[1].__exit__()

    def pack(self, parameters: Sequence[dict[str, Any]], x: Tensor) -> Any:
        """Start the copy of a tensor to host memory; return what stands for it.

        What is small, no real number, a parameter or a view with gaps stays, and stands for itself.
        """
        is_large = x.is_floating_point() and x.nbytes >= self.min_bytes
        if not is_large or not self.copies.takes(x) or not _is_dense(x):
            return x
        # Parameters stay on the device anyway, so their copies would free nothing.
        if _is_one_of(parameters, x):
            return x
        host, wait = self.copies.to_host(x)
        saved = _InHostMemory(host, _OnDevice(x, wait), x.device, self._last)
        self._last = ref(saved)
        self._hold(saved.near, AHEAD)
        return saved

    def unpack(self, saved: Any) -> Tensor:
        """Return a tensor on its device, and start the copies of those that are needed next."""
        if isinstance(saved, Tensor):
            return saved
        saved.was_taken = True
        if not saved.near:
            self._fetch(saved)
        self._fetch_before(saved)
        return saved.near.take()

    def _fetch_before(self, saved: _InHostMemory) -> None:
        """Start the copies of the tensors that were saved before this one, the latest first."""
        for _ in range(AHEAD):
            before = None if saved.before is None else saved.before()
            if before is None:
                return
            saved = before
            if not saved.was_taken and not saved.near:
                self._fetch(saved)

    def _fetch(self, saved: _InHostMemory) -> None:
        x, wait = self.copies.to_device(saved.host, saved.device)
        saved.near = _OnDevice(x, wait)
        # This layer's may be there still, beside those of the next one.
        self._hold(saved.near, 2 * AHEAD)

    def _hold(self, x: _OnDevice, num_held: int) -> None:
        """Keep a tensor on the device until its copy was waited for."""
        # Backward has taken some of them, which are not held any more.
        self._near = deque(filter(None, self._near))
        self._near.append(x)
        while len(self._near) > num_held:
            self._near.popleft().take()


def offload(model: nn.Module, memory: HostMemory) -> None:
    """Let a model whose layers are checkpointed keep their tensors in host memory.

    It does so in training. Hooks surround the whole model: graphs of compiled layers do not see
    them, but what such a graph saves goes through them. In a graph of the model they do nothing.
    """
    setattr(model, HOST_MEMORY, memory)
    if _enter not in model._forward_pre_hooks.values():  # of an earlier plan
        model.register_forward_pre_hook(_enter)
        model.register_forward_hook(_leave, always_call=True)


def _enter(model: Any, args: tuple[Any, ...]) -> None:
    # Absent after the plan was taken off.
    memory = vars(model).get(HOST_MEMORY)
    is_training = model.training and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if memory is not None and is_training and model.is_activation_checkpointing:
        memory.open(model)


def _leave(model: Any, args: tuple[Any, ...], output: Any) -> None:
    memory = vars(model).get(HOST_MEMORY)
    if memory is not None and not torch.compiler.is_compiling():
        memory.close(model)


def _is_dense(x: Tensor) -> bool:
    """Return whether a copy has the same strides, on which compiled graphs rely."""
    return torch.empty_like(x, device="meta").stride() == x.stride()


def _is_one_of(parameters: Sequence[dict[str, Any]], x: Tensor) -> bool:
    """Return whether a tensor is a parameter, or a view of one."""
    storage = x.untyped_storage()._cdata
    found = (p for by_name in parameters for p in by_name.values() if p is not None)
    return any(_local(p).untyped_storage()._cdata == storage for p in found)


def _local(x: Tensor) -> Tensor:
    return x._local_tensor if isinstance(x, DTensor) else x
