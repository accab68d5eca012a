"""The launcher: ``hvdliterun`` starts a command on N processes through mpirun.

::

    cli          the command line, and the job it describes
    hosts        -H and --hostfile
    mpirun       Open MPI, MPICH, Intel MPI: finding them, and how each is called
    environment  the variables that the ranks get
    command      the user's command, checked before N processes are started
    job          a running mpirun: signals, failures, the exit code
    rank         the small process around each rank that names the one that failed
    build        --check-build
"""

from __future__ import annotations
