"""Attention that holds all scores in float64, in torchtitan's own trainer and validator."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.validate import Validator
from torchtitan.config.override import derive
from torchtitan.models.common.attention import BaseAttention
from torchtitan.models.deepseek_v3.mtp import MTPLoss
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from parallel_plans.torchtitan import RingTrainer


class DenseAttention(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        window_size: tuple[int, int] = (-1, 0)

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.left = config.window_size[0]

    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Tensor,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Any = None,
    ) -> Tensor:
        num_groups = q_BLNH.shape[2] // k_BLNH.shape[2]
        k, v = (x.repeat_interleave(num_groups, 2).double() for x in (k_BLNH, v_BLNH))
        scale = q_BLNH.shape[-1] ** -0.5 if scale is None else scale
        scores = torch.einsum("bqnh,bknh->bnqk", q_BLNH.double(), k) * scale
        index = torch.arange(q_BLNH.shape[1])
        lag = index[:, None] - index
        visible = attention_masks & (lag >= 0)
        if self.left >= 0:
            visible &= lag <= self.left
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        out = torch.einsum("bnqk,bknh->bqnh", scores.softmax(-1), v)
        if out_transform is not None:
            out = out_transform(out, scores.logsumexp(-1).transpose(1, 2))
        return out.to(q_BLNH.dtype)


def same_document(positions: Tensor) -> Tensor:
    """By the rule of torchtitan's masks: a document starts where positions are 0."""
    document = (positions == 0).cumsum(1)
    return document[:, :, None] == document[:, None]


class GivesMasks:
    """Beside what a trainer or validator of torchtitan prepares of a batch."""

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], *args: Any
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        inputs, labels, extra = super().post_dataloading_process(input_dict, *args)
        return inputs, labels, extra | {"attention_masks": same_document(input_dict["positions"])}


class DenseValidator(GivesMasks, Validator):
    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass


class DenseTrainer(GivesMasks, Trainer):
    """One process that reads what data-parallel ranks would, a batch of each rank in turn."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        num_replicas: int = 1

    def batch_generator(self, data_iterable: Any) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        num_replicas, training = self.config.num_replicas, self.config.training
        loaders = [
            self.config.dataloader.build(
                dp_world_size=num_replicas,
                dp_rank=rank,
                tokenizer=self.tokenizer,
                seq_len=training.seq_len,
                local_batch_size=training.local_batch_size,
            )
            for rank in range(num_replicas)
        ]
        yield from super().batch_generator(chain.from_iterable(zip(*loaders, strict=True)))


class ForgetfulTrainer(RingTrainer):
    """A negative control: all tokens of a row in one document."""

    @dataclass(kw_only=True, slots=True)
    class Config(RingTrainer.Config):
        pass

    def post_dataloading_process(
        self, input_dict: dict[str, Any], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        inputs, labels, extra = super().post_dataloading_process(input_dict, labels)
        documents = extra["attention_masks"]
        whole = torch.tensor([0, documents.cu_seqlens.shape[-1] - 1], dtype=torch.int32)
        return inputs, labels, extra | {"attention_masks": replace(documents, cu_seqlens=whole)}


def use_dense(config: Trainer.Config, num_replicas: int) -> Trainer.Config:
    for _, attention, _, _ in config.model_spec.model.traverse(BaseAttention.Config):
        attention.inner_attention = derive(attention.inner_attention, DenseAttention.Config)
    if isinstance(config.loss, MTPLoss.Config):
        config.loss = derive(config.loss, MTPLoss.Config)
    return derive(
        config,
        DenseTrainer.Config,
        num_replicas=num_replicas,
        activation_checkpoint=None,
        validator=derive(config.validator, DenseValidator.Config),
    )


def ignore_documents(config: RingTrainer.Config) -> RingTrainer.Config:
    return derive(config, ForgetfulTrainer.Config)
