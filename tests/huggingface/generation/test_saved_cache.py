"""Caches that are saved or handed over: chats go on with the tokens of the stock model."""

from __future__ import annotations

import pickle
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import DynamicCache

from parallel_plans.huggingface import (
    ContextParallelCache,
    hand_over_cache,
    restore_model,
    stock_model,
)
from parallel_plans.huggingface.core.versions import with_cache
from tests.families import BESIDE_POOLS, CHOOSES_POOLS
from tests.huggingface.generation.generating import exact_softmax, generate, sharded, stock, tokens
from tests.huggingface.planned import under_plan
from tests.pool import Pool, on_ranks
from tests.results import of_first_rank

FAMILIES = ("Llama", "Gemma 3", "DeepSeek-V3.2", "Llama 4", "MiniMax M3")
TURNS = 11, 3, 5


def turn(model: Any, cache: Any, said: Tensor, number: int, padded: int = 0) -> Tensor:
    """The tokens after a question and its answer; the first row may begin with padding."""
    said = torch.cat([said, tokens(TURNS[number])], 1)
    mask = torch.ones_like(said)
    mask[0, :padded] = 0
    given = with_cache(model, {"attention_mask": mask, "cache": cache})
    with exact_softmax():
        return generate(model, input_ids=said, **given).sequences


class StockChat(NamedTuple):
    """What was said after two turns, its cache, and what was said after three."""

    two: Tensor
    cache: DynamicCache
    three: Tensor

    @classmethod
    def of(cls, family: str, padded: int = 0) -> StockChat:
        model = stock(family)
        cache, said = DynamicCache(config=model.config), [tokens(0)]
        for number in range(2):
            said.append(turn(model, cache, said[-1], number, padded))
        return cls(said[2], deepcopy(cache), turn(model, cache, said[2], 2, padded))

    @classmethod
    def read(cls, folder: str) -> StockChat:
        return torch.load(Path(folder, "stock.pt"), weights_only=False)


def save(family: str, folder: str) -> None:
    """Two turns, which leave tokens that were sharded, and tokens that came one by one."""
    model = sharded(family)
    chat, said = ContextParallelCache(model, block=2), tokens(0)
    for number in range(2):
        said = turn(model, chat, said, number)
    whole, state = chat.whole(), chat.state_dict()
    expected, cache, last = StockChat.read(folder)
    assert torch.equal(said, expected)
    for here, there in zip(whole.layers, cache.layers, strict=True):
        if there.keys is not None:
            torch.testing.assert_close(here.keys, there.keys)
            torch.testing.assert_close(here.values, there.values)
        assert here.get_seq_length() == there.get_seq_length()
    if dist.get_rank() == 0:
        torch.save(whole, Path(folder, "whole.pt"))
        torch.save(state, Path(folder, "state.pt"))
        torch.save(said, Path(folder, "said.pt"))
    dcp.save({"chat": state}, checkpoint_id=str(Path(folder, "dcp")))
    for act in (pickle.dumps, lambda x: torch.save(x, Path(folder, "refused.pt"))):
        with pytest.raises(TypeError, match=r"ContextParallelCache cannot be pickled.*state_dict"):
            act(chat)
    assert copy(chat).get_seq_length() == deepcopy(chat).get_seq_length() == said.shape[1] - 1
    with stock_model(model):
        assert torch.equal(turn(model, whole, said, 2), last)
    assert restore_model(model) is model
    with torch.no_grad(), pytest.raises(ValueError, match=r"under no plan any more.*whole\(\)"):
        model(tokens(1), **with_cache(model, {"cache": chat}))


def go_on(family: str, folder: str, layout: str) -> None:
    model = sharded(family, layout)
    said = torch.load(Path(folder, "said.pt"))
    state = torch.load(Path(folder, "state.pt"))
    if layout == "zigzag":
        state = torch.load(Path(folder, "dcp.pt"), weights_only=False)["chat"]
    chat = ContextParallelCache(model)
    model.generate(tokens(4), max_new_tokens=2, cache=chat)  # is replaced
    chat.load_state_dict(state)
    assert torch.equal(turn(model, chat, said, 2), StockChat.read(folder).three)


def check_refused(folder: str) -> None:
    state = torch.load(Path(folder, "state.pt"))
    model = sharded("Llama")
    chat = ContextParallelCache(model)
    with pytest.raises(ValueError, match=r"state_dict\(\) of a cache of 2 layers, got seq_len, l"):
        chat.load_state_dict({x: y for x, y in state.items() if x != "full.layers.1.keys"})
    with pytest.raises(ValueError, match=r"state_dict\(\) of a ContextParallelCache of the same"):
        chat.load_state_dict(state | {"window.0.keys": state["full.layers.0.keys"]})
    changed = {"full.layers.1.values": state["full.layers.1.values"] + dist.get_rank()}
    with pytest.raises(ValueError, match=r"load the same state.*differ in full.layers.1.values"):
        chat.load_state_dict(state | changed)
    restore_model(model)
    eight = ContextParallelCache(sharded("Llama", cache_dtype="int8"))
    with pytest.raises(ValueError, match="cache_dtype None, and the plan of this model has int8"):
        eight.load_state_dict(state)
    assert chat.get_seq_length() == 0
    chat.load_state_dict(chat.state_dict())
    assert chat.whole().get_seq_length() == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_chats_go_on(pool: Pool, tmp_path: Path, family: str) -> None:
    folder, expected = str(tmp_path), StockChat.of(family)
    torch.save(expected, tmp_path / "stock.pt")
    pool.run(2, save, family, folder)
    dcp_to_torch_save(str(tmp_path / "dcp"), str(tmp_path / "dcp.pt"))
    said = torch.load(tmp_path / "said.pt")
    cache = torch.load(tmp_path / "whole.pt", weights_only=False)
    assert torch.equal(turn(stock(family), cache, said, 2), expected.three)
    pool.run(3, go_on, family, folder, "zigzag")
    pool.run(1, go_on, family, folder, "contiguous")
    if family == "Llama":
        pool.run(2, check_refused, folder)


@pytest.mark.parametrize(
    ("family", "padded"),
    [
        *((family, 4) for family in CHOOSES_POOLS),
        *((family, 0) for family in BESIDE_POOLS),
        *(pytest.param(family, 0, marks=pytest.mark.repeats) for family in CHOOSES_POOLS),
    ],
)
@on_ranks(2)
def test_chats_of_pools_go_on(family: str, padded: int) -> None:
    """A chat goes on from its state, and with the stock model if that keeps what pools are of."""
    model = sharded(family)
    chat, said = ContextParallelCache(model, block=2), tokens(0)
    for number in range(2):
        said = turn(model, chat, said, number, padded)
    two, expected = of_first_rank(lambda: StockChat.of(family, padded)[::2])
    assert torch.equal(said, two)
    last = said, 2, padded
    loaded = ContextParallelCache(model)
    loaded.load_state_dict(chat.state_dict())
    if family in BESIDE_POOLS:
        with pytest.raises(ValueError, match=r"keeps what these are made of.*state_dict"):
            chat.whole()
    else:
        whole = loaded.whole()
        with stock_model(model):
            assert torch.equal(turn(model, whole, *last), expected)
    assert torch.equal(turn(model, loaded, *last), expected)


GROUPS = [((0,), (3,)), ((0, 1), (2, 3)), ((0, 1, 2, 3), (1, 2)), ((0, 1, 2), (3,))]
HANDED_OVER = ("Llama", "Gemma 3", "DeepSeek-V3", "Qwen3-Next", "DeepSeek-V3.2")


def on(ranks: tuple[int, ...], family: str, layout: str, **options: Any) -> Any:
    """The model under a plan over these ranks, `None` on others; all ranks must call it."""
    mesh = DeviceMesh("cpu", [*ranks])
    if mesh.get_coordinate() is None:
        return None
    return under_plan(stock(family), layout, mesh=mesh, **options)


@torch.no_grad()
def handed_over(models: list[Any], prompt: torch.Tensor, mesh: DeviceMesh) -> Any:
    """The cache of the second group, after the first one has prefilled all but the last token."""
    caches = [None if x is None else ContextParallelCache(x) for x in models]
    if models[0] is not None:
        models[0](prompt[:, :-1], cache=caches[0])
    hand_over_cache(*caches, mesh)
    return caches[1]


def stock_tokens(family: str, prompt: torch.Tensor) -> torch.Tensor:
    with exact_softmax():
        return generate(stock(family), inputs=prompt).sequences


@pytest.mark.parametrize("num_groups", [1, pytest.param(4, marks=pytest.mark.repeats)])
@on_ranks(4)
def test_tokens_are_those_of_the_stock_model(num_groups: int) -> None:
    """Each family over one of the groups in turn, or over all."""
    mesh = init_device_mesh("cpu", (4,))
    for number, family in enumerate(HANDED_OVER, 2):
        prompt = tokens(29)
        expected = of_first_rank(partial(stock_tokens, family, prompt))
        for ranks in [*GROUPS, *GROUPS][number % 4 :][:num_groups]:
            models = [on(x, family, "zigzag") for x in ranks]
            cache = handed_over(models, prompt, mesh)
            if cache is not None:
                found = generate(models[1], inputs=prompt, cache=cache).sequences
                assert torch.equal(found, expected), (family, ranks)


@pytest.mark.parametrize("family", ["Llama", "Gemma 3"])
@on_ranks(4)
def test_eight_bits_stay(family: str) -> None:
    """What was rounded stays so: the logits are those of the ranks that have prefilled."""
    mesh, options = init_device_mesh("cpu", (4,)), {"cache_dtype": "int8"}
    prompt = tokens(64 * 3 + 6, rows=1)
    first = on((0, 1), family, "whole_blocks:64", **options)
    models = [first, on((3,), family, "whole_blocks:64", **options)]
    cache, logits = handed_over(models, prompt, mesh), torch.empty(0)
    with torch.no_grad():
        if first is not None:
            alone = ContextParallelCache(first)
            first(prompt[:, :-1], cache=alone)
            logits = first(prompt[:, -1:], cache=alone).logits
        elif cache is not None:
            logits = models[1](prompt[:, -1:], cache=cache).logits
    told: list[Any] = [None] * 4
    dist.all_gather_object(told, logits)
    torch.testing.assert_close(told[3], told[0], atol=1e-12, rtol=1e-12)


@on_ranks(2)
def test_what_does_not_fit() -> None:
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    models = on((0,), "Llama", "zigzag"), on((1,), "Llama", "zigzag")
    other = on((1,), "Gemma 3", "zigzag")
    cache = handed_over([*models], tokens(9), mesh)
    source = None if rank else ContextParallelCache(models[0])
    with pytest.raises(ValueError, match="to an empty one: a target has 8 tokens"):
        hand_over_cache(source, cache, mesh)
    with pytest.raises(ValueError, match="to an empty one: no rank has a source"):
        hand_over_cache(None, None if cache is None else ContextParallelCache(models[1]), mesh)
    target = None if other is None else ContextParallelCache(other)
    with pytest.raises(ValueError, match="hand over caches of the same model"):
        hand_over_cache(source, target, mesh)
