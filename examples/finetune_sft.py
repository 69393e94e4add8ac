"""Fine-tunes a causal language model by TRL's `SFTTrainer`, its sequence sharded.

    accelerate launch --config_file examples/finetune_sft.yaml examples/finetune_sft.py --lora

The text is Python's standard library, packed. Without `--model`, the model is a small one with
random weights that reads bytes, and nothing is downloaded. The YAML says how many processes share
a sequence (`cp`) and how many shard the model besides (`dp_shard`).
"""

from __future__ import annotations

import argparse
import sysconfig
import warnings
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from trl import SFTConfig, SFTTrainer

from parallel_plans.huggingface.trl import ContextParallelMixin

# TRL and peft use an option that transformers has given another name.
warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing` is deprecated")


class Trainer(ContextParallelMixin, SFTTrainer):
    """`SFTTrainer` over the mesh that `accelerate launch` describes."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and one for the end and padding."""
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<end>"]
    model = models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>")


def load(name: str | None) -> tuple[Any, Any]:
    """A model, with the same weights on every rank, and its tokenizer."""
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)
    torch.manual_seed(0)
    tokenizer = byte_tokenizer()
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, eos_token_id=256)
    return LlamaForCausalLM(config), tokenizer


def sources(number: int) -> Dataset:
    """Files of the standard library."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:number]
    return Dataset.from_dict({"text": [path.read_text(errors="replace") for path in paths]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder or a name on the Hub")
    parser.add_argument("--lora", action="store_true", help="train adapters only")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--files", type=int, default=20)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--out", default="out/finetune_sft")
    given = parser.parse_args()
    model, tokenizer = load(given.model)
    config = SFTConfig(
        output_dir=given.out,
        packing=True,
        max_length=given.seq_len,
        max_steps=given.steps,
        per_device_train_batch_size=1,
        learning_rate=3e-3 if given.lora or given.model is None else 2e-5,
        bf16=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    adapters = LoraConfig(r=8, target_modules="all-linear") if given.lora else None
    trainer = Trainer(
        model,
        config,
        train_dataset=sources(given.files),
        processing_class=tokenizer,
        peft_config=adapters,
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
