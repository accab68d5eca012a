"""The launcher: ``hvdliterun`` and `hvdlite.run` start N processes through mpirun.

::

    cli          hvdliterun: the job that the command line describes
    options      its options, also those of horovodrun
    check_build  what is installed, for --check-build and `hvdlite check`
    function     hvdlite.run and hvdlite.spawn: a Python function in the place of the command
    hosts        -H and --hostfile
    discovery    hosts that come and go, and the number of ranks
    mpirun       Open MPI, MPICH, Intel MPI: finding them, and how each is called
    ports        mpirun's ports, closed to others
    programs     programs that run to their end for what they print
    job          a running mpirun: signals, failures, the exit code
    status       what the ranks do, for who asks
    folders      temporary folders, which the next job removes if this one is killed

The ranks and the launcher, which talk by `hvdlite.observe.protocol`::

    rank         the small process around each rank, which names the one that failed
    worker       the program that each rank of hvdlite.run runs
    server       the launcher's end of all connections
"""
