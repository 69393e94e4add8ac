#!/bin/sh
# transformers 5.24.0, accelerate 1.15.0, torch 2.15.0: `evaluate()` before `train()` trains each process of DDP alone.
#
# `Trainer.evaluate()` has accelerate prepare the model for evaluation, without DDP, and accelerate marks it as prepared.
# `train()` has it prepared again, which accelerate then skips: nothing wraps it, no gradient is averaged, and nothing is said.
#
# Seen: two processes over gloo, each with rows of its own, have equal weights after four steps. With `evaluate()` before
# `train()` their weights differ, and the model that is trained is no `DistributedDataParallel`.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 numpy==2.4.6 transformers==5.24.0 accelerate==1.15.0
cat >"$folder/train.py" <<'PROGRAM'
import sys
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

SIZES = dict(vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
is_evaluated_first = sys.argv[1] == "evaluated"
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(**SIZES))
rows = [{"input_ids": x, "labels": x} for x in torch.randint(0, 64, (16, 12))]
with tempfile.TemporaryDirectory() as output:
    options = dict(max_steps=4, per_device_train_batch_size=1, learning_rate=1e-2, use_cpu=True)
    quiet = dict(save_strategy="no", report_to=[], disable_tqdm=True)
    trainer = Trainer(model, TrainingArguments(output, **options, **quiet), train_dataset=rows, eval_dataset=rows)
    if is_evaluated_first:
        trainer.evaluate()
    trainer.train()
weights = torch.cat([x.detach().flatten() for x in model.parameters()])
every = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(every, weights)
if dist.get_rank() == 0:
    is_equal = torch.allclose(every[0], every[1], atol=1e-6)
    with open(sys.argv[2], "a") as seen:
        print(sys.argv[1], "equal weights:", is_equal, type(trainer.model_wrapped).__name__, file=seen)
dist.destroy_process_group()
PROGRAM
for first in trained evaluated; do
	OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 2 \
		"$folder/train.py" "$first" "$folder/seen" >/dev/null 2>"$folder/errors" || { cat "$folder/errors"; exit 1; }
done
cat "$folder/seen"
cat >"$folder/expected" <<'EXPECTED'
trained equal weights: True DistributedDataParallel
evaluated equal weights: False LlamaForCausalLM
EXPECTED
diff "$folder/expected" "$folder/seen"
