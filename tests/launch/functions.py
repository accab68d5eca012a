"""Functions that the tests run on several ranks."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import time

import numpy as np

import hvdlite as hvd


class PlainError(Exception):
    """Can be pickled."""


class TwoArgumentsError(Exception):
    """Can be pickled, but not unpickled."""

    def __init__(self, what, why):
        super().__init__(f"{what} because {why}")


def number():
    """This process's rank, without MPI."""
    return int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])


def world(*args, **kwargs):
    """The rank, the size, a sum over the ranks, and the arguments."""
    hvd.init()
    total = hvd.allreduce(np.float64([hvd.rank()]), op=hvd.Sum)
    return hvd.rank(), hvd.size(), float(total[0]), args, kwargs


def work(number):
    """The task of a worker of multiprocessing."""
    hvd.init()
    return number, hvd.rank(), hvd.size()


def with_workers():
    """Return the results of workers, one for each start method, and a sum over the ranks."""
    hvd.init()
    found = []
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            found += pool.map(work, [1])
    return found, float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])


def square_of_rank():
    return number() ** 2


def raise_on(failing, error):
    """One rank raises, the others wait for it."""
    hvd.init()
    if hvd.rank() == failing:
        time.sleep(0.2)
        raise error
    hvd.allreduce(np.ones(3), name="x")


def mismatch():
    """An error that all ranks get."""
    hvd.init()
    hvd.allreduce(np.ones(2 + hvd.rank()), name="x")


def end_on(failing, how):
    """One rank ends in another way than by returning."""
    hvd.init()
    hvd.barrier()
    if hvd.rank() == failing:
        if how == "_exit":
            os._exit(0)
        sys.exit(3)
    hvd.allreduce(np.ones(3), name="x")


def unpicklable_result():
    return threading.Lock() if number() == 1 else 0


class FailsToLoad:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self):
        return int, ("not a number",)


def result_that_cannot_be_unpickled():
    return FailsToLoad()


def returned(value):
    return value


def read_input():
    return sys.stdin.read()


def print_lines(count):
    """Many lines, written in pieces, on both streams; the last is not ended."""
    rank = number()
    for line in range(count):
        for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
            stream.write(f"{name} {rank}")
            stream.flush()
            stream.write(f" {line} ")
            stream.write("x" * (line % 200) + "\n")
    print("without an end", end="", flush=True)
    os.write(1, b" \xff")


def environment(*names):
    return [os.environ.get(name) for name in names]


def grandchild():
    """Leaves a process behind that keeps its pipes open."""
    import subprocess

    print("before")
    return subprocess.Popen(["sleep", "30"]).pid


def numbered(index, folder, word):
    """Write a file for each rank; the result cannot be pickled, but `spawn` drops it."""
    hvd.init()
    total = hvd.allreduce(np.float64([index]), op=hvd.Sum)
    text = f"{hvd.rank()} {hvd.size()} {float(total[0])} {word} {os.environ['A']}"
    (folder / str(index)).write_text(text)
    print(word)
    return threading.Lock()
