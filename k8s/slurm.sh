
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
