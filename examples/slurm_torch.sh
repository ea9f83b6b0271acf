#!/bin/bash
#SBATCH --job-name=ring-attn --nodes=2 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=64
#SBATCH --time=24:00:00 --requeue --open-mode=append
# sbatch examples/slurm_torch.sh CONFIG.toml: PyTorch on every GPU of every host. The folder of the run is one that all hosts share.

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # a new store at each restart: the old one has the addresses of dead ranks
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node="$SLURM_GPUS_ON_NODE" --max-restarts=3 \
    --rdzv-backend=c10d --rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$first:29500" -m ring_attn_cli train "$1" && exit

# The run failed more often than torchrun restarts it: start the job again, at most five times, from the newest checkpoint.
[ "${SLURM_RESTART_COUNT:-0}" -lt 5 ] && scontrol requeue "$SLURM_JOB_ID"
exit 1
