#!/usr/bin/env bash
# Trains torchtitan's Llama 3 debug model on Python's standard library, its sequence over a ring.
#
#     examples/train_torchtitan.sh                              # GPUs by twos, or 2 CPU processes
#     examples/train_torchtitan.sh --training.steps=20          # any flag of torchtitan
#
# PYTHON chooses the interpreter, NPROC the number of processes, a multiple of 2.
set -euo pipefail
cd "$(dirname "$0")/.."
export HF_HUB_OFFLINE=1 # everything is read from disk
python=${PYTHON:-.venv/bin/python}
assets=out/torchtitan
"$python" examples/torchtitan_assets.py "$assets"

gpus=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
gpus=$((gpus / 2 * 2)) # the ring of that config has two ranks
entry=torchtitan.train
size=()
if [ "$gpus" -eq 0 ]; then
	entry=examples.torchtitan_cpu
	size=(--training.local_batch_size=1 --training.seq_len=1024 --training.mixed_precision_param=float32)
	export OMP_NUM_THREADS=1
fi

exec "$python" -m torch.distributed.run --standalone --tee 3 --local-ranks-filter 0 --role rank \
	--nproc-per-node "${NPROC:-$((gpus > 0 ? gpus : 2))}" -m "$entry" \
	--module parallel_plans.torchtitan --config llama3_debugmodel_ring \
	--hf_assets_path="$assets" --dump_folder="$assets/outputs" \
	--dataloader.dataset=c4_test --dataloader.dataset_path="$assets/data" \
	"${size[@]}" "$@"
