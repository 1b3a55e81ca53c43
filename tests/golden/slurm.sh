#!/bin/bash
#SBATCH --job-name=cifar
#SBATCH --comment=samestep/run=cifar,samestep/project=project,samestep/target=slurm,samestep/root=runs
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=16G
#SBATCH --output=runs/%x.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@120
#SBATCH --export=HOME,USER,PATH,LANG,http_proxy,https_proxy,no_proxy,WANDB_API_KEY
#SBATCH --gpus-per-node=2
restarts=3
trials=()
command=(srun --export=ALL --cpus-per-task=4 --kill-on-bad-exit=0 --wait=120 .venv/bin/python -m samestep.launch.entrypoint --nproc-per-node=2 --rdzv-conf=timeout=900 --max-restarts=3 --shutdown-timeout=90 cluster=slurm trainer.num_nodes=2 trainer.devices=2)

# The name of the run is that of the job. A trial of a sweep has a run of its own, and one more override.
export RUN_ID=$SLURM_JOB_NAME
if [ -n "$SLURM_ARRAY_TASK_ID" ]; then
    RUN_ID+=-$SLURM_ARRAY_TASK_ID
    command+=("${trials[$SLURM_ARRAY_TASK_ID]}")
fi

# Before the time limit, and before preemption, Slurm sends SIGTERM to the tasks but not to this shell. If this shell gets
# SIGTERM too, Slurm has decided already: the job was cancelled, or is queued again.
trap 'is_decided=1' TERM
"${command[@]}"
code=$?

# Slurm does not queue a job again that ends by itself, so the job asks for it: after SIGTERM and SIGUSR1 always (143, 138: the
# run has saved), after an error a few times, and never after success or a wrong configuration (2).
if [ -z "$is_decided" ]; then
    case $code in
        0 | 2) ;;
        138 | 143) scontrol requeue "$SLURM_JOB_ID" ;;
        *) [ "${SLURM_RESTART_COUNT:-0}" -ge "$restarts" ] || scontrol requeue "$SLURM_JOB_ID" ;;
    esac
fi
exit $code
