"""`torch.nn.MultiheadAttention` whose tokens are sharded: a ring between its projections."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtensor_ring.dtensor.axis import SequenceAxis
from dtensor_ring.dtensor.layer import number_layer
from dtensor_ring.ops.call_site import within_layer
from dtensor_ring.planning.mask import Mask

NO_PADDING = (
    "leave it out where is_causal hides the padding after a sequence, else attend by "
    "dtensor_ring.ring_attention with cu_seqlens"
)
NO_MASK = (
    "pass is_causal=True if it is causal, else attend by dtensor_ring.ring_attention with a mask "
    "or slices"
)


class ShardedMultiheadAttention(nn.MultiheadAttention):
    """The class that `ContextParallel` gives to `nn.MultiheadAttention`; parameters stay."""

    axis: SequenceAxis

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with this rank's tokens, `(B, L, E)`, or `(L, B, E)` without `batch_first`.

        Args:
            query: local shard; likewise key and value.
            key: must have the same number of tokens on each rank.
            value: must have the same number of tokens as the key.
            key_padding_mask: must be `None`.
            need_weights: must be `False`.
            attn_mask: ignored with `is_causal`; otherwise it must be `None`.
            average_attn_weights: ignored.
            is_causal: whether tokens see no later token of the whole sequence.

        Returns:
            The output, and `None`.

        Raises:
            ValueError: if attention over a sharded sequence cannot do what is asked.
        """
        # In inference, `nn.TransformerEncoder` turns a padding mask into a nested tensor.
        is_padded = key_padding_mask is not None or query.is_nested
        self._refuse(is_padded, need_weights, attn_mask is not None and not is_causal)
        inputs = query, key, value
        if any(isinstance(x, DTensor) for x in inputs):
            raise ValueError(
                "nn.MultiheadAttention under ContextParallel takes this rank's tokens, got "
                "DTensors; pass x.to_local()"
            )
        if any(x.ndim != 3 for x in inputs):
            raise ValueError(
                "query, key and value must be (B, L, E), or (L, B, E) without batch_first, got "
                f"{[x.ndim for x in inputs]} dims; add one to a sequence without a batch"
            )
        if not self.batch_first:
            inputs = tuple(x.transpose(0, 1) for x in inputs)
        heads = (
            F.linear(x, weight, bias).unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)
            for x, weight, bias in zip(inputs, *self._projections(), strict=True)
        )
        with within_layer(self):
            out = self.axis.attention(*heads, mask=Mask.causal() if is_causal else Mask.full())
        out = self.out_proj(out.transpose(1, 2).flatten(2))
        return out if self.batch_first else out.transpose(0, 1), None

    def _projections(self) -> tuple[Any, Any]:
        """Return the weights and the biases of query, key and value."""
        weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        bias = self.in_proj_bias
        return weights, (None,) * 3 if bias is None else bias.chunk(3)

    def _refuse(self, is_padded: bool, need_weights: bool, is_masked: bool) -> None:
        for is_asked, what, instead in (
            (need_weights, "need_weights=True", "call it with need_weights=False"),
            (is_padded, "key_padding_mask", NO_PADDING),
            (is_masked, "attn_mask without is_causal", NO_MASK),
            (
                self.training and self.dropout > 0,
                f"dropout={self.dropout}",
                "set its dropout = 0",
            ),
        ):
            if is_asked:
                raise ValueError(
                    f"nn.MultiheadAttention cannot serve {what} over a sharded sequence: {instead}"
                )


def shard_multihead(module: nn.MultiheadAttention, axis: SequenceAxis) -> nn.Module:
    """Make the module attend over an axis.

    Raises:
        ValueError: if it is a subclass, or has keys that belong to no token.
    """
    if type(module) is not nn.MultiheadAttention:
        raise ValueError(
            f"ContextParallel serves nn.MultiheadAttention itself, got {type(module).__name__}, "
            "which extends it; apply it once, or to a module that takes (B, N, L, H)"
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise ValueError(
            "nn.MultiheadAttention cannot serve add_bias_kv or add_zero_attn over a sharded "
            "sequence: make it without them"
        )
    module.__class__ = ShardedMultiheadAttention
    vars(module)["axis"] = axis
    number_layer(module, axis.mesh)
    # In inference, the layers around it skip this module, unless one of their parts has a hook.
    module.register_forward_pre_hook(_no_fast_path)
    return module


def _no_fast_path(module: nn.Module, args: Any) -> None:
    """Do nothing; the presence of a hook turns the fast path off."""
