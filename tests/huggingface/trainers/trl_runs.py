"""Runs of TRL's trainers on small models, by one process or by the ranks of a mesh."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh

from tests.families import SMALL, VOCABULARY, small_model
from tests.huggingface.trainers.test_trainer import counted

NUM_ROWS, BATCH, STEPS, RESUMED = 32, 4, 4, 2
WORDS = [f"w{number}" for number in range(VOCABULARY - 4)]
UNLIKE = "step_time"
"""Of a log: what a clock says, beside what `counted` knows."""
ROLES = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} </s>{% endgeneration %}"
    "{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
)
Sizes = tuple[int, int] | None
"""Of the axes dp and cp, or one process without a mesh."""
Result = tuple[dict[str, Any], dict[str, torch.Tensor]]
# TRL and peft use what transformers has given another name; GRPO calls its rollouts experimental;
# the others are of accelerate and FSDP2, which says not to write to the sharded outputs.
HARMLESS = (
    "`(is_)?gradient_checkpointing` is deprecated",
    "You are using 'rollout_func'",
    "Slicing a flattened dim",
    "FSDP2-wrapped module .* returned a view",
    "TypedStorage is",
)


@dataclass(frozen=True)
class Run:
    """A trainer, its rows, its model and its options."""

    trainer: str
    rows: str
    tied: bool = False
    lora: bool = False
    fsdp: bool = False
    saves: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        named = [name for name in ("tied", "lora", "fsdp", "saves") if getattr(self, name)]
        return "-".join([self.trainer, self.rows, *named, *self.options])


def tokenizer() -> Any:
    """One token a word."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "</s>", "<unk>", "<s>", *WORDS]
    model = models.WordLevel({name: number for number, name in enumerate(names)}, "<unk>")
    raw = Tokenizer(model)
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    made = PreTrainedTokenizerFast(tokenizer_object=raw, **special)
    made.chat_template = ROLES
    return made


def rows(kind: str, number: int, is_even: bool = False) -> Any:
    """Of unlike lengths unless they are to be even, each kind as TRL names its columns."""
    from datasets import Dataset

    generator = torch.Generator().manual_seed(1)

    def words(least: int, most: int) -> str:
        length = int(torch.randint(least, most + 1, (1,), generator=generator))
        length = most if is_even else length
        numbers = torch.randint(len(WORDS), (length,), generator=generator).tolist()
        return " ".join(WORDS[number] for number in numbers)

    def row(index: int) -> dict[str, Any]:
        prompt, answer, other = words(2, 6), words(1, 9), words(1, 9)
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        return {
            "text": {"text": f"{prompt} {answer}"},
            "completion": {"prompt": f"{prompt} ", "completion": answer},
            "messages": {"messages": turns + turns[:1]},
            "preference": {"prompt": f"{prompt} ", "chosen": answer, "rejected": other},
            "label": {"prompt": f"{prompt} ", "completion": answer, "label": index % 3 > 0},
            "prompt": {"prompt": f"{prompt} "},
        }[kind]

    return Dataset.from_list([row(index) for index in range(number)])


def config_of(run: Run, folder: str, batch: int, **options: Any) -> Any:
    import trl

    defaults: dict[str, Any] = {
        "output_dir": folder,
        "per_device_train_batch_size": batch,
        "per_device_eval_batch_size": batch,
        "gradient_accumulation_steps": 2,
        "max_steps": STEPS if run.saves else RESUMED,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": RESUMED,
        "save_strategy": "steps" if run.saves else "no",
        "save_steps": RESUMED,
        "learning_rate": 0.05,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "gradient_checkpointing": False,
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return getattr(trl, f"{run.trainer}Config")(**defaults | run.options | options)


@contextmanager
def harmless() -> Iterator[None]:
    """Without warnings of other libraries about each other."""
    with warnings.catch_warnings():
        for message in HARMLESS:
            warnings.filterwarnings("ignore", message)
        yield


def result_of(run: Run, folder: str, sizes: Sizes = None, resume: str | None = None) -> Result:
    """Numbers of a run, and the parameters that it trained."""
    with harmless():
        trainer = trainer_of(run, folder, sizes)
        trainer.train(resume_from_checkpoint=resume)
        numbers = counted_numbers(trainer)
        trained = {name: x for name, x in trainer.model.named_parameters() if x.requires_grad}
        whole = {name: getattr(x, "full_tensor", lambda x=x: x)() for name, x in trained.items()}
    return numbers, {name: x.detach().clone() for name, x in whole.items()}


def counted_numbers(trainer: Any) -> dict[str, Any]:
    """What a training logged, but for times."""
    return {
        f"{name} of {number}": value
        for number, entry in enumerate(trainer.state.log_history)
        for name, value in counted(entry).items()
        if UNLIKE not in name
    }


def trainer_of(run: Run, folder: str, sizes: Sizes = None, **changes: Any) -> Any:
    """TRL's, or ours on ranks (dp, cp), given other arguments if there are changes."""
    import trl

    made = getattr(trl, f"{run.trainer}Trainer")
    # TRL's losses of an evaluation are means of batches, so replicas would weight rows otherwise.
    given: dict[str, Any] = {
        "processing_class": tokenizer(),
        "train_dataset": rows(run.rows, NUM_ROWS),
        "eval_dataset": rows(run.rows, 8, is_even=True),
    }
    options: dict[str, Any] = {}
    if sizes is not None:
        made = type("Parallel", (mixin_of(run.trainer), made), {})
        names = ("dp_shard" if run.fsdp else "dp_replicate", "cp")
        given["mesh"] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        options = {"fsdp": run.fsdp}
    config = config_of(run, folder, BATCH // (sizes or (1, 1))[0], **options)
    model = changes.pop("model", None) or model_of(run)
    if run.lora:
        from peft import LoraConfig

        given["peft_config"] = LoraConfig(r=4, task_type="CAUSAL_LM", init_lora_weights=False)
    elif run.trainer in ("DPO", "KTO"):
        given["ref_model"] = reference_of(model)
    if run.options.get("precompute_ref_log_probs"):  # TRL looks for them beside the rows
        for name in ("train_dataset", "eval_dataset"):
            given[name] = on_disk(given[name], f"{folder}/{name}")
    if run.trainer == "GRPO":
        given |= {"rollout_func": rollouts, "reward_funcs": reward, "eval_dataset": None}
    torch.manual_seed(2)  # of adapters
    return made(model, args=config, **given | changes)


def on_disk(dataset: Any, folder: str) -> Any:
    """The same rows, in a folder that all ranks share."""
    from accelerate import PartialState
    from datasets import load_from_disk

    state = PartialState()
    if state.is_main_process:
        dataset.save_to_disk(folder)
    state.wait_for_everyone()
    return load_from_disk(folder)


def mixin_of(trainer: str) -> Any:
    if trainer == "GRPO":
        from parallel_plans.huggingface.grpo import ContextParallelGRPOMixin

        return ContextParallelGRPOMixin
    from parallel_plans.huggingface.trl import ContextParallelMixin

    return ContextParallelMixin


def model_of(run: Run) -> Any:
    options = {"tie_word_embeddings": run.tied, "use_cache": False}
    if run.trainer != "Reward":
        return small_model("Llama", **options)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_labels=1, **options)
    return transformers.LlamaForSequenceClassification(config)


def reference_of(model: Any) -> Any:
    """A model that is not equal to it: rewards of equal ones would be rounding only."""
    made = deepcopy(model)
    with torch.no_grad():
        made.lm_head.weight.mul_(0.9)
    return made


def rollouts(prompts: list[str], trainer: Any) -> dict[str, list[Any]]:
    """Completions of a prompt's words and of its place among the same prompts."""
    torch.rand(1)  # on one rank only, and TRL shuffles completions next
    encode = trainer.processing_class.encode
    prompt_ids = [encode(prompt) for prompt in prompts]
    completion_ids = [
        [4 + (sum(ids) * (number % 2 + 1) + 3 * place) % 28 for place in range(1 + len(ids))]
        for number, ids in enumerate(prompt_ids)
    ]
    logprobs = [[-1.0] * len(ids) for ids in completion_ids]
    return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": logprobs}


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]
