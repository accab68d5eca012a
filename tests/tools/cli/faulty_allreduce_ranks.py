"""Ranks of the benchmark of sums on which gloo's are wrong, or end a rank."""

import os
import signal

import torch.distributed as dist

from hvdlite.tools.bench import allreduce_ranks


def _measure_with(all_reduce, comm, arguments):
    dist.all_reduce = all_reduce
    return allreduce_ranks.measure(comm, **arguments)


def measure_wrong(comm, **arguments):
    return _measure_with(lambda tensor: tensor.fill_(1), comm, arguments)


def measure_killed(comm, **arguments):
    def all_reduce(tensor):
        if comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()  # until the launcher ends this rank, too

    return _measure_with(all_reduce, comm, arguments)
