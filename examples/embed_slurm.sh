#!/bin/bash
# Images to vectors with one task per GPU. Shards that are written stay: submit it again after a
# time limit or a failure, with the same arguments, and it goes on with the shards that are missing.
#
#     sbatch examples/embed_slurm.sh Qwen/Qwen3-VL-2B-Instruct '/data/tars/*.tar' /data/vectors
#
#SBATCH --job-name=embed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=12
#SBATCH --time=04:00:00
#SBATCH --requeue
set -eu
repo=$1 source=$2 out=$3
shift 3

# SLURM_PROCID and SLURM_NTASKS tell each task which shards are its own. Exit code 3 means that all
# is done but for images that cannot be decoded; errors.csv lists them.
srun vitgraph embed "$repo" "$source" --out "$out" --device auto --no-progress "$@" || [ $? = 3 ]
vitgraph embed --verify "$out"
