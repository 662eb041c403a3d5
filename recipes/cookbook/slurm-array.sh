#!/bin/bash
#SBATCH --array=0-14
#SBATCH --gpus=1
#SBATCH --signal=USR1@120
#SBATCH --requeue
# A preempted run saves and exits with code 75: it is queued again and resumes.
srun lmworks ablate slurm-array.yaml --index "$SLURM_ARRAY_TASK_ID/15"
code=$?
[ $code -ne 75 ] || scontrol requeue "$SLURM_JOB_ID"
exit $code
