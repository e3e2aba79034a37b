#!/bin/bash
# 4 machines x 8 GPUs = 32 ranks. Submit it in a folder that all see.
# Words behind the script go to the run, with the number of a job array for %a: sbatch job.sh --resume
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
export KINETO_LOG_LEVEL="${KINETO_LOG_LEVEL:-6}"
export PYTORCH_ALLOC_CONF="${PYTORCH_ALLOC_CONF:-expandable_segments:True}"
export NCCL_GRAPH_REGISTER="${NCCL_GRAPH_REGISTER:-0}"
export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}"
export TORCH_NCCL_HIGH_PRIORITY="${TORCH_NCCL_HIGH_PRIORITY:-1}"
export TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING="${TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING:-0}"
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}"
export SLURM_JOB_START_TIME="${SLURM_JOB_START_TIME:-$(date +%s)}"  # old versions of Slurm do not set it

# The ranks meet on the first machine, at a port of this job. A job that is requeued keeps its number, so its
# run goes on from the newest checkpoint, and a search from its newest trial.
machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${machines%%$'\n'*}
port=$((20000 + SLURM_JOB_ID % 12000))

code=0
srun --kill-on-bad-exit=1 \
    torchrun --nnodes=4 --nproc-per-node=8 --max-restarts=3 \
    --rdzv-id="slurm-$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:$port" \
    -m penstock train examples/slurm.toml "${@//%a/${SLURM_ARRAY_TASK_ID:-}}" || code=$?

# A run that was asked to stop has saved. After a preemption its job requeues itself.
if ((code)); then
    job=${SLURM_ARRAY_TASK_ID+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID-$SLURM_JOB_ID}
    facts=$(scontrol show job --oneliner "$job")
    if [[ $facts =~ " PreemptTime="[0-9] ]]; then
        scontrol requeue "$job"
    fi
fi
exit "$code"
