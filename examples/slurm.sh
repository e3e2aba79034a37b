#!/bin/bash
# 4 machines x 8 GPUs = 32 ranks. Submit it in a folder that all see.
#SBATCH --job-name=lite-32
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --signal=TERM@120
#SBATCH --open-mode=append
#SBATCH --time=24:00:00
#SBATCH --requeue

set -euo pipefail

# What the rules of docs/environment.md ask for here; what is set already stays.
export GOMP_SPINCOUNT="${GOMP_SPINCOUNT:-20000}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
export NCCL_GRAPH_REGISTER="${NCCL_GRAPH_REGISTER:-0}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export TORCH_NCCL_HIGH_PRIORITY="${TORCH_NCCL_HIGH_PRIORITY:-1}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}"

# The ranks meet on the first machine, at a port of this job. A job that is requeued keeps its number, so its
# run goes on from the newest checkpoint.
machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${machines%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 20000))

srun --kill-on-bad-exit=1 \
    torchrun --nnodes=4 --nproc-per-node=8 --max-restarts=3 \
    --rdzv-id="slurm-$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:$port" \
    -m penstock train examples/slurm.toml
