"""A passkey that is hidden in real text, and a small model that learns to find one.

The model is a Cohere2 of transformers, in which three layers of four see a window of tokens, with
rotary embeddings, and the fourth sees all tokens, without positions. So nothing in it depends on
how long the sequence is, but how sharp attention has to be: scores of the fourth layer are scaled
by the logarithm of the length (Chiang and Cholak, 2022, arXiv 2202.12172).
"""

from __future__ import annotations

import math
import time
from typing import Any

import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor
from transformers import Cohere2Config, Cohere2ForCausalLM

QUESTION = b"\x1epasskey="
"""Stands before the passkey, and at the end of the prompt; its first byte occurs in no text."""
NUM_DIGITS = 6
LENGTH = len(QUESTION) + NUM_DIGITS
LESSONS = ((128, 64), (512, 16), (2048, 4))
"""Tokens of a sequence and sequences of a step; the next ones come once passkeys are found."""
KNOWN, ENOUGH = 20, 0.98
"""Steps in a row that end a lesson, and the share of digits that are right in each of them."""
RATE = 3e-3


def passkey_model(num_tokens: int) -> Any:
    """A model for sequences of this length, with random weights, the same on every rank."""
    config = Cohere2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=16,
        sliding_window=64,
        max_position_embeddings=num_tokens + NUM_DIGITS,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        initializer_range=0.1,
        logit_scale=1.0,
        eos_token_id=None,  # each byte is text
    )
    torch.manual_seed(0)
    return Cohere2ForCausalLM(config)


def sharpen(model: Any, num_tokens: int) -> None:
    """Scale the scores of layers that see all tokens from the length in training to this one."""
    factor = max(1.0, math.log(num_tokens) / math.log(LESSONS[-1][0]))
    for layer in model.model.layers:
        if layer.self_attn.sliding_window is None:
            layer.self_attn.q_proj.weight.data *= factor


def draw_passkey(generator: torch.Generator) -> Tensor:
    """Six different digits, as bytes."""
    return torch.randperm(10, generator=generator)[:NUM_DIGITS] + ord("0")


def hide(text: Tensor, passkey: Tensor, depth: float) -> Tensor:
    """A prompt as long as the text: it has the passkey at this depth, and ends with the question.

    Args:
        text: bytes `(S,)`; what the passkey and the question replace is lost.
        passkey: digits as bytes.
        depth: where the passkey stands, from 0, the beginning, to 1, right before the question.

    Raises:
        ValueError: if the text is too short.
    """
    question = torch.tensor(list(QUESTION))
    last = len(text) - len(question) - LENGTH
    if last < 0:
        raise ValueError(f"a prompt has at least {len(question) + LENGTH} tokens, got {len(text)}")
    prompt, begin = text.long().clone(), int(depth * last)
    prompt[begin : begin + LENGTH] = torch.cat([question, passkey])
    prompt[-len(question) :] = question
    return prompt


def lesson_of(
    text: Tensor, seq_len: int, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Sequences `(B, S)` and labels, which are the digits of a passkey that stands before them.

    Each sequence has its passkey once and asks for it three times, the last time at its end.
    """
    starts = torch.randint(0, len(text) - seq_len, (batch,), generator=generator)
    tokens = torch.stack([text[start : start + seq_len] for start in starts]).long()
    labels = torch.full_like(tokens, -100)
    for row, label in zip(tokens, labels, strict=True):
        passkey = draw_passkey(generator)
        places = torch.randperm(seq_len // LENGTH - 1, generator=generator)[:3].sort().values
        first, *others = *(places * LENGTH).tolist(), seq_len - LENGTH
        for begin in (first, *others):
            row[begin : begin + LENGTH] = torch.cat([torch.tensor(list(QUESTION)), passkey])
        for begin in others:
            label[begin + len(QUESTION) : begin + LENGTH] = passkey
    return tokens, labels


def learn(model: Any, text: Tensor, seconds: float) -> float:
    """Train until passkeys are found in the longest lesson, or the time is over.

    Returns:
        The share of digits that were right in the last step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0)
    generator, begin, right = torch.Generator().manual_seed(0), time.monotonic(), 0.0
    with Progress() as progress:
        for seq_len, batch in LESSONS:
            task, known = progress.add_task(f"passkeys in {seq_len} bytes", total=1.0), 0
            while known < KNOWN and time.monotonic() - begin < seconds:
                right = step(model, optimizer, *lesson_of(text, seq_len, batch, generator))
                known = known + 1 if right > ENOUGH else 0
                progress.update(task, completed=1.0 if known == KNOWN else right * ENOUGH)
    return right


def step(model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, labels: Tensor) -> float:
    """Learn from a lesson; return the share of digits that were right before."""
    asked = labels[:, 1:] != -100
    logits = model(input_ids=tokens, use_cache=False).logits[:, :-1][asked]
    wanted = labels[:, 1:][asked]
    F.cross_entropy(logits, wanted).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return (logits.argmax(-1) == wanted).float().mean().item()
