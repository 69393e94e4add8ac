"""Shards the features that early layers add to the tokens of images."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Which tokens belong to images, `(B, S)`, and the features of these tokens by layer, `(T, H)`.
MASK, FEATURES = "visual_pos_masks", "deepstack_visual_embeds"
ROWS = "rows_of_features"


def feature_rows(batch: dict[str, Any]) -> dict[str, Tensor]:
    """Return the row of features of each image token, `(B, S)`, to be sharded like tokens."""
    if batch.get(FEATURES) is None:
        return {}
    is_image = batch[MASK]
    return {ROWS: is_image.flatten().cumsum(0).view(is_image.shape) - 1}


def local_features(batch: dict[str, Any]) -> dict[str, Any]:
    """Return the batch of this rank, with the features of its tokens in their order."""
    rows = batch.pop(ROWS, None)
    if rows is None:
        return batch
    index = rows[batch[MASK]]
    return batch | {FEATURES: [x.index_select(0, index.to(x.device)) for x in batch[FEATURES]]}
