"""The outer model: it merges images into the text, calls a language model, and has the head.

The model's own code runs with the whole batch on every rank: the vision encoder, the merge of
embeddings, positions, and masks. A rank may run the encoder on some of the images only
(`image_sharding.py`). The language model shards its inputs, and returns the hidden states of this
rank's tokens, on which the head then runs. With a cache it returns, on every rank, the hidden
states of all new tokens whose logits are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from inspect import signature
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from parallel_plans.huggingface.core.documents import DocumentBounds, has_content
from parallel_plans.huggingface.core.padding import check_ones_and_zeros
from parallel_plans.huggingface.core.random_state import random_of_rank
from parallel_plans.huggingface.core.versions import NAMES_OF_CACHE, cache_name, uses_cache
from parallel_plans.huggingface.generation.generate import GROWS, cache_of, call_with_cache
from parallel_plans.huggingface.losses.loss import give_labels, take_losses
from parallel_plans.huggingface.sharding.batch import BOUNDARIES, LOGITS_TO_KEEP
from parallel_plans.huggingface.sharding.late_embeddings import late_or_now
from parallel_plans.huggingface.sharding.sharding import (
    OutputSpec,
    Sharding,
    forward_by_name,
    named_arguments,
    own_method,
)
from parallel_plans.huggingface.vision.image_sharding import install_image_sharding
from parallel_plans.huggingface.vision.replicas import check_same_inputs

if TYPE_CHECKING:
    from parallel_plans.huggingface.generation.context_parallel_cache import ContextParallelCache


def install_outer_model(
    model: Any, decoder: Any, sharding: Sharding, deal_images: bool | None
) -> None:
    """Shard the tokens of a model where it calls its language model, and maybe images before."""
    outer = OuterModel(model, sharding)

    def is_called() -> bool:
        # Before the first token, `generate` itself may ask for the embeddings of a prompt's images.
        return outer.is_called or sharding.generates

    install_image_sharding(model, decoder, sharding.axis, deal_images, is_called)
    model.forward = _outer_forward(model, sharding, outer)
    decoder.forward = own_method(decoder, _inner_forward(type(decoder).forward, sharding, outer))
    embedding = model.get_input_embeddings()
    if "forward" not in vars(embedding):  # else another library put its own there
        embedding.forward = own_method(
            embedding, _embedding_forward(type(embedding).forward, outer)
        )


@dataclass
class OuterCall:
    """A forward of an outer model.

    Attributes:
        model: the outer model.
        token_arguments: arguments about the sharded tokens, see `OF_TOKENS`.
        tokens: ids, `(B, S)`.
        is_image: whether a token is a part of an image, `(B, S)`.
        cache: keys and values of the tokens before.
        has_run: whether the language model has run.
        spec: what the outputs are, once the language model has run without a cache.
    """

    model: Any
    token_arguments: dict[str, Any]
    tokens: Tensor | None
    is_image: Tensor | None
    cache: ContextParallelCache | None
    has_run: bool = False
    spec: OutputSpec | None = None

    def is_of_batch(self, ids: Any) -> bool:
        """Return whether `ids` are the tokens of the batch, perhaps with others for images."""
        tokens = self.tokens
        is_given = isinstance(tokens, Tensor) and isinstance(ids, Tensor) and has_content(ids)
        return is_given and ids.shape == tokens.shape and not ids.is_floating_point()


# Arguments about the sharded tokens; the merge of images before them has no use for these.
OF_TOKENS = (
    *("labels", "shift_labels", "num_items_in_batch", "ignore_index", "output_logits"),
    *(LOGITS_TO_KEEP, *BOUNDARIES),
)


# Note [Gradients of the vision encoder]: each rank has the embeddings of all images, and uses those
# of its own tokens. All ranks have one loss, and its backward sums over the ranks. So each rank's
# gradient is scaled by the world size, and the mean over the axis is the full gradient. The
# backward of the encoder is linear in it, so the encoder needs no correction.
class OuterModel:
    """Carries a batch to the language model within a model, and its outputs back to the head."""

    def __init__(self, model: Any, sharding: Sharding) -> None:
        self._names = list(signature(model.forward).parameters)
        self._sharding = sharding
        self._call: OuterCall | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> OuterModel:
        """Return `self`: copies of a model share the forward that calls this object."""
        return self

    def arguments(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the arguments of a call that are not `None`, by name."""
        found = named_arguments(self._names, args, kwargs)
        if model.get_output_embeddings() is None:
            found.pop("labels", None)  # the outer model of a base model takes them
        return found

    @property
    def is_called(self) -> bool:
        """Whether the model is running, on a batch that the ranks have compared."""
        return self._call is not None

    @property
    def call_to_come(self) -> OuterCall | None:
        """The call whose language model did not run yet."""
        call = self._call
        return None if call is None or call.has_run else call

    @contextmanager
    def call(self, model: Any, arguments: dict[str, Any]) -> Iterator[OuterCall]:
        """Open a context in which the model runs; take the arguments in `OF_TOKENS` out.

        Raises:
            RingError: on every rank, if the ranks have different batches.
            ValueError: if the cache belongs to another model, or the attention mask numbers
                documents.
        """
        cache = cache_of(model, self._sharding, arguments) if uses_cache(arguments) else None
        for name in (*NAMES_OF_CACHE, "use_cache"):
            arguments.pop(name, None)
        token_arguments = {name: arguments.pop(name) for name in OF_TOKENS if name in arguments}
        # Check on every call: otherwise a rank without images would not join the exchange. Text
        # after a cache is compared where it is sharded, or in a message of a layer.
        if cache is None or has_images(arguments):
            self._sharding.check_same_batch(arguments | token_arguments, "a batch with images")
        if cache is not None and not cache.memory.seq_len:
            self._sharding.agree(model, arguments | token_arguments)
        check_ones_and_zeros(arguments.get("attention_mask"))
        is_first = cache is None or not cache.memory.seq_len
        if is_first and not torch.compiler.is_compiling():
            check_same_inputs(model, self._sharding.axis, names_of_features(arguments))
        is_image = image_tokens(model.config, arguments)
        call = self._call = OuterCall(
            model, token_arguments, arguments.get("input_ids"), is_image, cache
        )
        try:
            yield call
        finally:
            self._call = None

    def running_call(self, decoder: Any) -> OuterCall:
        """Return the call in which the language model runs now.

        Raises:
            ValueError: if the whole model was not called, or its language model ran already.
        """
        call = self.call_to_come
        if call is None:
            raise ValueError(
                f"{type(decoder).__name__} is a part of a model under a context_parallel_plan, "
                "which is to be called as a whole, and calls it once"
            )
        call.has_run = True
        return call


def _outer_forward(model: nn.Module, sharding: Sharding, outer: OuterModel) -> MethodType:
    """Return the forward of the outer model."""
    plain: Any = type(model).forward

    def run(self: nn.Module, arguments: dict[str, Any]) -> Any:
        try:
            with outer.call(self, arguments) as call:
                how = {} if call.cache is None else {cache_name(self): call.cache}
                output = plain(self, **arguments, **how, use_cache=call.cache is not None)
        finally:
            losses = take_losses(self)
        if not call.has_run:
            raise ValueError(f"{type(self).__name__} did not call its language model")
        if call.spec is None:
            return output  # whole, as it is with a cache
        return sharding.joined(output, call.spec, losses)

    run_eager = torch.compiler.disable(run, reason=GROWS)

    def run_either(self: nn.Module, arguments: dict[str, Any]) -> Any:
        return run_eager(self, arguments) if uses_cache(arguments) else run(self, arguments)

    return forward_by_name(model, outer.arguments, run_either)


def _inner_forward(plain: Any, sharding: Sharding, outer: OuterModel) -> Any:
    """Return the forward of the language model; the head runs on its result."""
    kept = _of_last(plain)

    @wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        arguments, call = sharding.arguments(self, args, kwargs), outer.running_call(self)
        if call.cache is not None:
            arguments = arguments | call.token_arguments
            return call_with_cache(
                kept, self, sharding, call.cache, arguments, call.tokens, "last_hidden_state"
            )
        batch, spec = sharding.inputs(call.model, arguments | call.token_arguments)
        if call.is_image is not None and not torch.compiler.is_compiling():
            check_cuts(call.is_image, spec.plan.documents)
        give_labels(call.model, spec.head_labels)
        with random_of_rank(self, sharding.rank, spec.plan.indices.device):
            output = kept(self, **batch)
        call.spec = spec._replace(of_tokens=frozenset({*output.keys(), "logits"}))
        return output

    return forward


# Note [Ids in place of embeddings]: embeddings of all tokens would take more than a rank's part of
# all else. An eager forward hands on their ids instead, see `LateEmbeddings`.
def _embedding_forward(plain: Any, outer: OuterModel) -> Any:
    """Return the forward of the embedding of tokens, which looks up those of a batch late."""

    @wraps(plain)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = outer.call_to_come
        is_all = call is not None and len(args) == 1 and not kwargs and call.is_of_batch(args[0])
        if not is_all:
            return plain(self, *args, **kwargs)
        return late_or_now(self, partial(plain, self), args[0])

    return forward


def _of_last(plain: Any) -> Any:
    """Return a forward that drops the hidden states of tokens whose logits are not asked for."""

    def forward(self: nn.Module, *, logits_to_keep: Tensor | int = 0, **batch: Any) -> Any:
        output = plain(self, **batch)
        states = output.last_hidden_state
        if isinstance(logits_to_keep, Tensor):
            output.last_hidden_state = states.index_select(1, logits_to_keep)
        elif logits_to_keep:
            output.last_hidden_state = states[:, -logits_to_keep:]
        return output

    return forward


# Options of configs: the id of the token that stands for a part of an image.
IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")


def image_tokens(config: Any, arguments: dict[str, Any]) -> Tensor | None:
    """Return which tokens are parts of images, `(B, S)`; `None` if none are, or it is unknown."""
    tokens = arguments.get("input_ids")
    if not has_images(arguments):
        return None
    ids = [getattr(config, name, None) for name in IMAGE_TOKENS]
    known = [x for x in ids if isinstance(x, int)]
    if not isinstance(tokens, Tensor) or not known:
        return None
    return torch.isin(tokens, torch.tensor(known, device=tokens.device))


def has_images(arguments: dict[str, Any]) -> bool:
    """Return whether the arguments hold images or other features beside text."""
    return bool(names_of_features(arguments))


def names_of_features(arguments: dict[str, Any]) -> list[str]:
    """Return the names of the arguments that hold images or other features beside text."""
    named = arguments.items()
    return [name for name, x in named if name != "inputs_embeds" and _is_of_images(x)]


def _is_of_images(x: Any) -> bool:
    """Return whether an argument holds pixels or features."""
    return (isinstance(x, (list, dict)) and bool(x)) or (
        isinstance(x, Tensor) and x.is_floating_point()
    )


def check_cuts(is_image: Tensor, documents: DocumentBounds) -> None:
    """Refuse a document that begins within an image: its parts could not see one another.

    Raises:
        ValueError: naming the token.
    """
    bounds = documents.packed
    if bounds is None:
        return
    is_cut = (is_image[:, 1:] & is_image[:, :-1]).cpu()
    rows = bounds.expand(len(is_cut), -1)
    for row, begins in enumerate(rows.tolist()):
        for begin in begins:
            if 0 < begin <= is_cut.shape[1] and is_cut[row, begin - 1]:
                raise ValueError(
                    f"a document begins at token {begin} of row {row}, within an image: the tokens "
                    "on both sides stand for parts of one; let documents begin before their "
                    "images, with a token of text between two of them"
                )
