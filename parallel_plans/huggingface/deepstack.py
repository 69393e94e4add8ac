"""Features of images that early layers add to the tokens of images: those of this rank's tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor

MASK, FEATURES = "visual_pos_masks", "deepstack_visual_embeds"
"""Which tokens are of images, `(B, S)`, and for each layer the features of those, `(T, H)`."""
ROWS = "rows_of_features"


def feature_rows(batch: dict[str, Any]) -> dict[str, Tensor]:
    """For each token of an image the row of its features, `(B, S)`, to be dealt like tokens."""
    if batch.get(FEATURES) is None:
        return {}
    is_image = batch[MASK]
    return {ROWS: is_image.flatten().cumsum(0).view(is_image.shape) - 1}


def local_features(batch: dict[str, Any]) -> dict[str, Any]:
    """The batch of this rank, with the features of its tokens in their order."""
    rows = batch.pop(ROWS, None)
    if rows is None:
        return batch
    index = rows[batch[MASK]]
    return batch | {FEATURES: [x.index_select(0, index.to(x.device)) for x in batch[FEATURES]]}
