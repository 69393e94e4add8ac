"""The options of a plan about what a model keeps for its backward."""

from __future__ import annotations

from typing import Any, NamedTuple

from parallel_plans.huggingface.activations.host_memory import HostMemory, offload
from parallel_plans.huggingface.activations.token_tiles import (
    join_tiles,
    num_tokens_of,
    run_in_tiles,
)
from parallel_plans.huggingface.activations.tokenwise import tokenwise_modules
from parallel_plans.huggingface.core.language_model import language_model_of
from parallel_plans.huggingface.probing.proxy_model import small_proxy

# The output that has the logits of routers.
OF_ROUTER = "router_logits"


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
        # A model without weights cannot run tokens. Its proxy has the same modules.
        is_meta = any(x.is_meta for x in model.parameters())
        examined = language_model_of(small_proxy(model, every_layer=True)) if is_meta else decoder
        names = tokenwise_modules(examined)
        if not names:
            raise ValueError(
                f"mlp_tile={num_tokens}: no module of {type(decoder).__name__} takes and returns a "
                "tensor with all tokens and keeps more for backward; leave it out"
            )
        for name in names:
            run_in_tiles(decoder.get_submodule(name), name, num_tokens)
        if decoder.base_model is not decoder:  # below a head, which may compute with these logits
            decoder.base_model.register_forward_hook(_join_router_logits)


def _join_router_logits(model: Any, args: tuple[Any, ...], output: Any) -> None:
    """Join the router logits of tiles, if the output has any; see `join_tiles`."""
    if getattr(output, OF_ROUTER, None):
        num_tokens = num_tokens_of(output.last_hidden_state)
        setattr(output, OF_ROUTER, join_tiles(getattr(output, OF_ROUTER), num_tokens))
