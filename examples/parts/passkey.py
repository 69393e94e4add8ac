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

QUESTION = b"\x1ekey="
"""Stands before the passkey, and at the end of the prompt; its first byte occurs in no text."""
NUM_DIGITS = 6
LENGTH = len(QUESTION) + NUM_DIGITS
LESSONS = ((256, 8), (1024, 4), (1024, 8))
"""Tokens of a sequence, far beyond what windows pass on, and sequences of a step."""
KNOWN, ENOUGH = 10, 0.95
"""Steps in a row that end a lesson, and the share of digits that are right in each of them."""
RATE, LAST_STEPS = 5e-3, 600
"""The learning rate, and the steps of the last lesson, in which it falls to zero."""


def passkey_model(num_tokens: int) -> Any:
    """A model for sequences of this length, with random weights, the same on every rank."""
    config = Cohere2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=32,
        sliding_window=32,
        max_position_embeddings=num_tokens + NUM_DIGITS,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
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
    text: Tensor, seq_len: int, batch: int, generator: torch.Generator, decoys: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Sequences `(B, S)` and labels, which are the digits of a passkey that stands before them.

    Each sequence has its passkey once and asks for it three times, the last time at its end. Beside
    them stand decoys: other digits behind a question that lacks its first byte. They are for what a
    million bytes of text have, and a short sequence has not.

    Args:
        text: bytes of which sequences are made.
        seq_len: tokens of a sequence.
        batch: number of sequences.
        generator: draws all that is random.
        decoys: share of the sequence that is replaced by them.
    """
    starts = torch.randint(0, len(text) - seq_len, (batch,), generator=generator)
    tokens = torch.stack([text[start : start + seq_len] for start in starts]).long()
    labels, question = torch.full_like(tokens, -100), torch.tensor(list(QUESTION))
    for row, label in zip(tokens, labels, strict=True):
        passkey = draw_passkey(generator)
        places = torch.randperm(seq_len // LENGTH - 1, generator=generator) * LENGTH
        first, *others = *places[:3].sort().values.tolist(), seq_len - LENGTH
        for begin in (first, *others):
            row[begin : begin + LENGTH] = torch.cat([question, passkey])
        for begin in others:
            label[begin + len(QUESTION) : begin + LENGTH] = passkey
        for begin in places[3 : int(decoys * len(places))].tolist():
            decoy = torch.cat([question[1:], draw_passkey(generator)])
            row[begin + 1 : begin + LENGTH] = decoy
    return tokens, labels


def learn(model: Any, text: Tensor, seconds: float) -> float:
    """Train until passkeys are found in short sequences, then in the longest ones.

    Args:
        model: the model.
        text: bytes of which sequences are made.
        seconds: the time after which training ends, whatever was learnt.

    Returns:
        The share of digits that were right in the last steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0)
    generator, end = torch.Generator().manual_seed(0), time.monotonic() + seconds
    right = [0.0]
    with Progress() as progress:
        for lesson in LESSONS:
            (seq_len, batch), is_last = lesson, lesson == LESSONS[-1]
            wanted = LAST_STEPS if is_last else KNOWN
            task, done = progress.add_task(f"passkeys in {seq_len} bytes", total=wanted), 0
            while done < wanted and time.monotonic() < end:
                for group in optimizer.param_groups:
                    warm = min(1, len(right) / 50)
                    group["lr"] = RATE * warm * (1 - done / LAST_STEPS if is_last else 1)
                right.append(step(model, optimizer, *lesson_of(text, seq_len, batch, generator)))
                done = done + 1 if is_last or right[-1] > ENOUGH else 0
                progress.update(task, completed=done)
    return sum(right[-KNOWN:]) / KNOWN


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
