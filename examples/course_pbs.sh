#!/bin/bash
# Run a script of the course under PBS, on every slot that the job has been given:
#
#     qsub examples/course_pbs.sh
#     qsub -v SCRIPT="examples/course_pi.py --samples 4000000000" examples/course_pbs.sh
#
# Adapt the lines that begin with #PBS to your machine: project, queue, cores and GPUs of a node.
# mpiprocs is the number of ranks on each node: one per GPU, or one per socket without GPUs.
#PBS -N hvdlite-course
#PBS -A PROJECT
#PBS -q debug
#PBS -l select=2:ncpus=64:mpiprocs=4:ngpus=4
#PBS -l walltime=00:30:00
#PBS -j oe
set -euo pipefail

# PBS starts the script in the home folder.
cd "${PBS_O_WORKDIR:?not set: start this script by qsub, from the folder of the checkout}"
source "${VENV:-.venv}/bin/activate"

# PBS_NODEFILE names a host once for each of its slots; a hostfile may do the same.
ranks=$(wc -l < "$PBS_NODEFILE")
echo "ranks: $ranks, nodes: $(sort -u "$PBS_NODEFILE" | wc -l)"

# SCRIPT is split into words on purpose: it may carry options.
exec hvdliterun -np "$ranks" --hostfile "$PBS_NODEFILE" \
    python ${SCRIPT:-examples/course_resnet_torch.py --num_steps 50 --image_size 224 --batch_size 64}
