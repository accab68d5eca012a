#!/bin/bash
# Run a script of the course under Slurm, on every task that the job has been given:
#
#     sbatch examples/course_slurm.sh
#     sbatch examples/course_slurm.sh examples/course_pi.py --samples 4000000000
#
# Adapt the lines that begin with #SBATCH to your machine: account, partition, cores and GPUs of a
# node. ntasks-per-node is the number of ranks: one per GPU, or one per socket without GPUs.
#SBATCH --job-name=hvdlite-course
#SBATCH --account=PROJECT
#SBATCH --partition=debug
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=16
#SBATCH --time=00:30:00
set -euo pipefail

cd "${SLURM_SUBMIT_DIR:?not set: start this script by sbatch, from the folder of the checkout}"
source "${VENV:-.venv}/bin/activate"

if [ $# -eq 0 ]; then
    set -- examples/course_resnet_torch.py --num_steps 50 --image_size 224 --batch_size 64
fi
echo "ranks: $SLURM_NTASKS, nodes: $SLURM_JOB_NUM_NODES"

# mpirun asks Slurm for the hosts. If your site's MPI library is built for its Slurm, this is the
# same: srun --mpi=pmix python "$@"
exec hvdliterun -np "$SLURM_NTASKS" python "$@"
