"""What the heads of multi-token prediction read and predict, and what is refused."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from tests.pool import on_ranks
from tests.torchtitan.test_torchtitan_parts import _on_cpu

pytestmark = pytest.mark.skipif(not find_spec("torchtitan"), reason="needs torchtitan")

LENGTHS = (5, 1, 2, 8)
"""Of the documents in a row."""
IGNORED = -100


def _batch() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Two rows of the same documents, whose tokens all differ, and labels one after the tokens."""
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, -1)
    tokens = torch.arange(100, 132).view(2, 16)
    return {"input": tokens, "positions": positions}, tokens + 1


@pytest.mark.parametrize("layout", ["zigzag", "striped", "balanced"])
@on_ranks(1, around=_on_cpu)
def test_tokens_and_labels_ahead(layout: str) -> None:
    for num_heads in (1, 3, 9, 16):
        _check_ahead(layout, num_heads)


def _check_ahead(layout: str, num_heads: int) -> None:
    """Against a loop over tokens; also with more heads than a document has tokens."""
    from parallel_plans.torchtitan.inner_attention import own_tokens
    from parallel_plans.torchtitan.multi_token import Ahead

    batch, labels = _batch()
    document = [i for i, n in enumerate(LENGTHS) for _ in range(n)]
    seen = torch.zeros(16)
    for rank in range(2):
        own = own_tokens(batch, layout, rank, 2)
        ahead: Any = Ahead.of(batch, labels, own, num_heads)
        assert len(ahead.tokens) == len(ahead.is_token) == len(ahead.labels) == num_heads
        for shift in range(1, num_heads + 1):
            for column, index in enumerate(own.indices.tolist()):
                there = index + shift
                is_there = there < 16 and document[there] == document[index]
                expected = (100 + there, True, 101 + there) if is_there else (0, False, IGNORED)
                found = tuple(
                    side[shift - 1][0, column].item()
                    for side in (ahead.tokens, ahead.is_token, ahead.labels)
                )
                assert found == expected, (rank, shift, index)
        seen[own.indices] += 1
    assert seen.tolist() == [1] * 16


@on_ranks(1, around=_on_cpu)
def test_refused() -> None:
    from torchtitan.models.deepseek_v3.mtp import MTPLoss

    from parallel_plans.torchtitan.inner_attention import own_tokens
    from parallel_plans.torchtitan.multi_token import Ahead, check_heads, give_ahead, num_heads_of

    batch, labels = _batch()
    own = own_tokens(batch, "zigzag", 0, 2)
    with pytest.raises(ValueError, match=r"MTP roll shift must be in \[1, 16\], got 17"):
        Ahead.of(batch, labels, own, 17)
    assert Ahead.of(batch, labels, own, 0) is None
    assert give_ahead(own.documents, None, labels, None) is own.documents
    ahead, loss = Ahead.of(batch, labels, own, 2), MTPLoss(MTPLoss.Config())
    with pytest.raises(ValueError, match=r"with 2 heads .* needs the loss RingMTPLoss, .* MTPLoss"):
        give_ahead(own.documents, ahead, labels, loss)
    assert num_heads_of(SimpleNamespace()) == 0
    heads = SimpleNamespace(mtp_layers=[None])
    with pytest.raises(ValueError, match="not served with tensor parallelism over 2 ranks"):
        check_heads(heads, 2)
    for config, tp in ((heads, 1), (SimpleNamespace(), 2), (None, 2)):
        check_heads(config, tp)


@on_ranks(2, around=_on_cpu)
def test_without_the_trainer() -> None:
    """A ring of several ranks needs what is ahead."""
    from torchtitan.models.deepseek_v3 import model_registry

    from parallel_plans.torchtitan import RingAttention, use_ring

    config: Any = model_registry("debugmodel", num_mtp_layers=1).model
    use_ring(config, "contiguous")
    with torch.device("meta"):
        model = config.build()
    mesh = init_device_mesh("cpu", (2,))
    for part in model.modules():
        if isinstance(part, RingAttention):
            part.axis = part.axis_of(mesh)
    tokens, documents = torch.zeros(1, 8, dtype=torch.long), torch.tensor([0, 16])
    with pytest.raises(ValueError, match="only RingTrainer and RingValidator take them"):
        model(tokens, positions=tokens, attention_masks=documents)
