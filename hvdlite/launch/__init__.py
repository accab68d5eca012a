"""The launcher: ``hvdliterun`` and `hvdlite.run` start N processes through mpirun.

::

    cli          the job that the command line describes
    options      the options, also those of horovodrun
    hosts        -H and --hostfile
    mpirun       Open MPI, MPICH, Intel MPI: finding them, and how each is called
    environment  the variables that the ranks get
    command      the user's command, checked before N processes are started
    job          a running mpirun: signals, failures, the exit code
    rank         the small process around each rank that names the one that failed
    build        --check-build

and for a Python function in the place of the command::

    function     run and spawn
    calls        how the ranks are started, and what came of it
    worker       what each rank runs
    parcel       functions, arguments and results as they travel
    account      exceptions as they travel
    wire, post   the connection to the caller, a rank's end and the caller's
    stream       what a rank prints, on its way there
"""

from __future__ import annotations
