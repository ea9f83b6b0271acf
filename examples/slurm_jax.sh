#!/bin/bash
#SBATCH --job-name=ring-attn --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --cpus-per-task=8
#SBATCH --time=24:00:00 --requeue --open-mode=append
# sbatch examples/slurm_jax.sh CONFIG.toml: JAX, one process for each GPU. The folder of the run is one that all hosts share.

srun --kill-on-bad-exit=1 python -m ring_attn_cli train "$1" --framework jax --coordinator auto && exit

# A process of jax.distributed cannot be replaced: start the job again, at most five times, from the newest checkpoint.
[ "${SLURM_RESTART_COUNT:-0}" -lt 5 ] && scontrol requeue "$SLURM_JOB_ID"
exit 1
