"""Runs the vision encoder of a model on each image on one rank only, where that is faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import wraps
from inspect import signature
from itertools import accumulate, pairwise
from math import prod
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dtensor_ring import SequenceAxis
from dtensor_ring.extension import gather_rows
from parallel_plans.huggingface.core.patterns import frozen
from parallel_plans.huggingface.core.random_state import random_of_rank
from parallel_plans.huggingface.vision.replicas import told_by_replicas

# Flops that a device computes while it sends a byte: 400 TFLOP/s, and 50 GB/s to its peers.
FLOPS_PER_BYTE = 8_000
FEATURES, HIDDEN = "get_image_features", "last_hidden_state"


class Share(NamedTuple):
    """The images that this rank runs, and the sizes of what all ranks run.

    A rank without an image runs the first one and drops the result: FSDP gathers the encoder's
    weights on all ranks or on none.

    Attributes:
        begin: index of the first image of this rank.
        end: index after its last image.
        sizes: the size of each image.
        totals: the total size of the images of each rank.
    """

    begin: int
    end: int
    sizes: tuple[int, ...]
    totals: tuple[int, ...]

    @classmethod
    def of(cls, sizes: tuple[int, ...], rank: int, world_size: int) -> Share:
        """Return the share of a rank.

        >>> Share.of((1, 1, 2), 1, 2), Share.of((4, 4), 2, 3)[:2]
        (Share(begin=2, end=3, sizes=(1, 1, 2), totals=(2, 2)), (1, 2))
        """
        counts = shared_out(sizes, world_size)
        begins = [sum(counts[:i]) for i in range(world_size + 1)]
        totals = tuple(sum(sizes[begins[i] : begins[i + 1]]) for i in range(world_size))
        begin, end = begins[rank : rank + 2]
        begin, end = (begin, end) if begin < end else (0, 1)
        return cls(begin, end, sizes, totals)


class EmbeddingSize(NamedTuple):
    """The size of image embeddings, measured on the first images; equal on all ranks.

    Attributes:
        tokens: number of tokens of an image of size 1.
        num_bytes: bytes to send for each token, over all embeddings.
    """

    tokens: Fraction
    num_bytes: int

    def rows(self, sizes: tuple[int, ...]) -> list[int] | None:
        """Return the tokens of each size; `None` if any is not a whole number."""
        found = [size * self.tokens for size in sizes]
        return [int(x) for x in found] if all(x.denominator == 1 for x in found) else None


# Note [When images are sharded]: a rank that runs the encoder on its own images only saves the
# flops of the other images, but the embeddings must be sent. The cost model counts 2 flops for each
# weight of the encoder and each patch, 6 if a backward follows, and the bytes of all embeddings in
# forward and backward. A byte costs `FLOPS_PER_BYTE`. Ranks decide alike, as they have compared
# their batches.
#
# Note [Gradients of sharded images]: the gradients of an image's embeddings from the tokens of all
# ranks are summed on the rank that ran the image; other ranks get none. So the sum over ranks of
# the encoder's gradients is the same as if each rank ran all images, and so is the mean.
class ImageSharding:
    """Shards the images of a model's calls over the ranks of an axis, and gathers embeddings.

    Args:
        axis: the axis that shards the tokens.
        num_weights: number of weights of the modules that embed images.
        patch: pixels of a patch in an image.
        shards: whether to shard images; `None` lets the cost model decide.

    Attributes:
        num_run: images of the last call that this rank ran and needed; 0 if they cannot be split.
    """

    def __init__(
        self, axis: SequenceAxis, num_weights: int, patch: int, shards: bool | None
    ) -> None:
        self._axis, self._num_weights, self._patch, self._shards = axis, num_weights, patch, shards
        self._is_tried = False
        self._embeddings: EmbeddingSize | None = None
        self.num_run = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ImageSharding:
        """Return itself: copies of a model share the call that it is a part of."""
        return self

    def features(
        self, plain: Callable[..., Any], model: nn.Module, arguments: dict[str, Any]
    ) -> Any:
        """Return the model's `get_image_features` of all images."""
        rank, size = self._axis.mesh.get_local_rank(), self._axis.mesh.size()
        may_shard = self._shards is not False and size > 1 and not torch.compiler.is_compiling()
        images = Images.of(arguments) if may_shard else None
        self.num_run = number = 0 if images is None else len(images.sizes)
        # A trial runs the encoder, which all replicas that share its weights must do at once.
        is_trial = may_shard and not self._is_tried
        told = told_by_replicas(model, self._axis, number) if is_trial else {}
        # With one image there is nothing to deal. Replicas that share the encoder's weights have
        # other batches, and run the trial only if all have two images.
        if images is None or min([number, *told.values()]) < 2:
            return plain(model, **arguments)
        share = Share.of(images.sizes, rank, size)
        if not self._is_tried:
            self._embeddings, self._is_tried = self._tried(plain, model, images, share), True
        if not self._pays(images, share):
            return plain(model, **arguments)
        self.num_run = share.end - share.begin if share.totals[rank] else 0
        with random_of_rank(model, rank, images.arguments["pixel_values"].device):
            output = plain(model, **images.part(share.begin, share.end))
        # Other outputs of the encoder cover only this rank's images, so they are dropped.
        return type(output)(**self._joined(_merged(output), share))

    def _tried(
        self, plain: Any, model: nn.Module, images: Images, share: Share
    ) -> EmbeddingSize | None:
        """Return the size of embeddings, or `None` if those of an image depend on other images."""
        # The encoder's code does not show this, so it is run once in evaluation mode.
        with frozen(model):
            whole = [*_rows(_merged(plain(model, **images.arguments)))]
            part = [*_rows(_merged(plain(model, **images.part(share.begin, share.end))))]
        ratios = {Fraction(len(x), sum(images.sizes)) for x in whole}
        width = sum(x.shape[1] * x.itemsize for x in whole)
        found = EmbeddingSize(ratios.pop(), width) if len(ratios) == 1 else None
        is_equal = found is not None and _is_part(part, whole, share, found)
        # The ranks ran different images, but must reach the same result.
        wrong = self._axis.sum(torch.tensor(float(not is_equal), device=whole[0].device))
        return None if wrong.item() else found

    def _pays(self, images: Images, share: Share) -> bool:
        """Return whether sharding pays, see Note [When images are sharded]."""
        embeddings = self._embeddings
        if embeddings is None or embeddings.rows(share.sizes) is None:
            return False
        if self._shards is not None:
            return self._shards
        total, most = sum(share.totals), max(share.totals)
        pixels = images.arguments["pixel_values"]
        num_patches = prod(pixels.shape[:-1]) if pixels.ndim < 4 else self._patches(pixels)
        # Two FLOPs for each weight and patch forward, and four more backward.
        flops = (6 if torch.is_grad_enabled() else 2) * self._num_weights * num_patches
        num_bytes = 2 * embeddings.num_bytes * total * embeddings.tokens
        # The slowest rank saves (total - most) / total of the flops of all images. Both sides are
        # multiplied by `total`: whole numbers compare exactly, on all ranks alike.
        return flops * (total - most) > FLOPS_PER_BYTE * num_bytes * total

    def _patches(self, pixels: Tensor) -> int:
        """Return the number of patches of images `(N, C, height, width)`."""
        return len(pixels) * (prod(pixels.shape[2:]) // self._patch)

    def _joined(self, merged: dict[str, Any], share: Share) -> dict[str, Any]:
        """Gather the embeddings of all images, in the form of this rank's embeddings."""
        # One message holds them all, so that ranks send in the same order, also in backward.
        assert self._embeddings is not None
        rows, tokens = self._embeddings.rows(share.totals), self._embeddings.rows(share.sizes)
        assert rows is not None and tokens is not None
        layers = [*_rows(merged)]
        own = torch.cat(layers, 1)
        own = own if rows[self._axis.mesh.get_local_rank()] else own[:0]
        whole = gather_rows(own, rows, self._axis.mesh)
        parts = iter(whole.split([x.shape[1] for x in layers], 1))
        return {name: _formed(x, parts, tokens) for name, x in merged.items()}


def check_deal_images(model: Any, shards: Any) -> None:
    """Refuse `deal_images` for a model that has no known method to embed images.

    Raises:
        ValueError: saying what is supported.
    """
    if shards not in (None, True, False):
        raise ValueError(f"deal_images must be True, False or None, got {shards!r}")
    if shards and not _owners(model):
        raise ValueError(
            f"deal_images=True needs a model that makes embeddings by a method {FEATURES}, and "
            f"{type(model).__name__} has none; leave deal_images out"
        )


def _owners(model: Any) -> list[Any]:
    """Return the innermost modules that embed images."""
    owners = [x for x in model.modules() if hasattr(x, FEATURES)]
    return [x for x in owners if not any(y in owners for y in x.modules() if y is not x)]


def install_image_sharding(
    model: Any, decoder: nn.Module, axis: SequenceAxis, shards: bool | None, is_called: Any
) -> None:
    """Shard images where a model calls `get_image_features`, while `is_called()`."""
    for owner in _owners(model):
        image_sharding = ImageSharding(
            axis, _num_weights(model, decoder), _patch_size(model.config), shards
        )
        owner.get_image_features = MethodType(_features(owner, image_sharding, is_called), owner)
        owner.context_parallel_images = image_sharding


def _features(owner: Any, image_sharding: ImageSharding, is_called: Callable[[], bool]) -> Any:
    plain = type(owner).get_image_features

    @wraps(plain)
    def get_image_features(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_called():  # a user calls it, perhaps on one rank only
            return plain(self, *args, **kwargs)
        arguments = dict(signature(plain).bind(self, *args, **kwargs).arguments)
        del arguments["self"]
        arguments |= arguments.pop("kwargs", {})
        return image_sharding.features(plain, self, arguments)

    return get_image_features


def _num_weights(model: Any, decoder: nn.Module) -> int:
    """Return the number of weights outside the language model and the head."""
    head = model.get_output_embeddings()
    others = [decoder] if head is None else [decoder, head]
    left_out = {id(x) for module in others for x in module.parameters()}
    return sum(x.numel() for x in model.parameters() if id(x) not in left_out)


def _patch_size(config: Any) -> int:
    """Return the pixels of a patch of a model's images; 1 if the config does not name them."""
    size = getattr(getattr(config, "vision_config", None), "patch_size", 1)
    return prod(size) if isinstance(size, (list, tuple)) else size**2


# Outputs that models merge into the text. A model without them merges the last hidden state.
EMBEDDINGS = ("pooler_output", "deepstack_features")


def _merged(output: Any) -> dict[str, Any]:
    """Return the outputs that models merge into the text, by name."""
    found = {name: getattr(output, name, None) for name in EMBEDDINGS}
    found = {name: x for name, x in found.items() if x is not None}
    return found or {HIDDEN: output.last_hidden_state}


def _rows(x: Any) -> Iterator[Tensor]:
    """Yield the embeddings of each layer, concatenated to `(T, H)`."""
    if isinstance(x, dict):
        for part in x.values():
            yield from _rows(part)
    elif isinstance(x, Tensor) or (x and isinstance(x[0], Tensor)):
        yield _flat(x)
    else:
        for layer in x:
            yield from _rows(layer)


def _formed(x: Any, parts: Iterator[Tensor], tokens: list[int]) -> Any:
    """Return the next of `parts` in the form of `x`: by image, or by layer and image."""
    if isinstance(x, Tensor):
        return next(parts).reshape((-1, *x.shape[1:]))
    if x and isinstance(x[0], Tensor):
        return next(parts).split(tokens)
    return type(x)(_formed(layer, parts, tokens) for layer in x)


def _flat(x: Any) -> Tensor:
    parts = [x] if isinstance(x, Tensor) else list(x)
    return torch.cat([part.flatten(0, -2) for part in parts])


# Relative tolerance: above 16-bit rounding, far below the effect of another image.
TOLERANCE = 0.02


def _is_part(part: list[Tensor], whole: list[Tensor], share: Share, found: EmbeddingSize) -> bool:
    """Return whether this rank's embeddings equal their rows among those of all images."""
    rows = found.rows(share.sizes)
    if rows is None or len(part) != len(whole):
        return False
    begin, end = sum(rows[: share.begin]), sum(rows[: share.end])
    return all(
        len(x) == end - begin and bool((x - y[begin:end]).norm() <= TOLERANCE * y.norm())
        for x, y in zip(part, whole, strict=True)
    )


PIXELS, GRID = "pixel_values", "image_grid_thw"
SIZES, PLACES = "image_sizes", "image_position_ids"


class Images(NamedTuple):
    """Arguments of `get_image_features`, and how large each of their images is.

    Attributes:
        arguments: the arguments, by name.
        sizes: size of each image, in patches if the model counts them, else in pixels, else 1.
        has_grid: whether the patches of all images are rows of one tensor.
    """

    arguments: dict[str, Any]
    sizes: tuple[int, ...]
    has_grid: bool

    @classmethod
    def of(cls, arguments: dict[str, Any]) -> Images | None:
        """Return the images of a call; `None` if it is unknown where to cut them."""
        pixels, grid = arguments.get(PIXELS), arguments.get(GRID)
        tensors = {name: x for name, x in arguments.items() if isinstance(x, Tensor)}
        if not isinstance(pixels, Tensor) or not pixels.numel():
            return None
        if isinstance(grid, Tensor):
            sizes = tuple(grid.prod(-1).tolist())
            is_known = set(tensors) == {PIXELS, GRID} and sum(sizes) == len(pixels)
            return cls(arguments, sizes, True) if is_known else None
        # Batches padded with empty images have one dim more.
        if pixels.ndim > 4 or any(len(x) != len(pixels) for x in tensors.values()):
            return None
        return cls(arguments, _sizes(arguments, len(pixels)), False)

    def part(self, begin: int, end: int) -> dict[str, Any]:
        """Return the arguments for images `begin ... end - 1`."""
        first, last = sum(self.sizes[:begin]), sum(self.sizes[:end])
        return {
            name: x
            if not isinstance(x, Tensor)
            else x[first:last]
            if self.has_grid and name == PIXELS
            else x[begin:end]
            for name, x in self.arguments.items()
        }


def _sizes(arguments: dict[str, Any], number: int) -> tuple[int, ...]:
    """Return the sizes of images that are one row each."""
    sizes, places = arguments.get(SIZES), arguments.get(PLACES)
    if isinstance(sizes, Tensor):
        return tuple(sizes.prod(-1).tolist())
    if isinstance(places, Tensor):  # -1 marks padding
        return tuple((places != -1).all(-1).sum(-1).tolist())
    return (1,) * number


def shared_out(sizes: Sequence[int], world_size: int) -> list[int]:
    """Return how many images each rank gets, in their order, to balance the sum of sizes.

    The total size is cut into equal shares, and an image goes to the rank whose share holds its
    middle.

    >>> shared_out([1, 1, 1], 2), shared_out([4, 1, 1, 2], 2), shared_out([5], 3)
    ([1, 2], [1, 3], [0, 1, 0])
    """
    total, counts = max(1, sum(sizes)), [0] * world_size
    for begin, end in pairwise(accumulate(sizes, initial=0)):
        counts[min(world_size - 1, (begin + end) * world_size // (2 * total))] += 1
    return counts
