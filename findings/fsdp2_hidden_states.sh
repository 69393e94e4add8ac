#!/bin/sh
# transformers 5.24.0 with torch 2.15.0: a backbone under `fully_shard` returns no hidden states, and says nothing.
#
# `model(ids, output_hidden_states=True).hidden_states` of a `LlamaModel` is a tuple of all layers' states. After `fully_shard(model)` it
# is None. `fully_shard` changes the class of the root to `FSDPLlamaModel`, and transformers finds what to record by the name of the
# class. A `LlamaForCausalLM` under `fully_shard` has the states: its backbone keeps its class. Code that reads `hidden_states[-1]`
# fails far from the cause.
#
# Seen: 3 and None states of a backbone, 3 of a model with a head.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-compile torch==2.15.0 transformers==5.24.0 numpy==2.4.6
cat >"$folder/states.py" <<'PROGRAM'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (1,))
config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2)


def number_of_states(model):
    states = model(torch.arange(8)[None], output_hidden_states=True).hidden_states
    return states if states is None else len(states)


print(number_of_states(LlamaModel(config)))
print(number_of_states(fully_shard(LlamaModel(config), mesh=mesh)))
print(number_of_states(fully_shard(LlamaForCausalLM(config), mesh=mesh)))
dist.destroy_process_group()
PROGRAM
OMP_NUM_THREADS=1 "$folder/venv/bin/python" -m torch.distributed.run --standalone --nproc-per-node 1 \
	"$folder/states.py" 2>/dev/null >"$folder/seen"
cat "$folder/seen"
printf '3\nNone\n3\n' | diff - "$folder/seen"
