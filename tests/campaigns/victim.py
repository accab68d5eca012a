"""Run a script, in which one rank kills itself at one step of the job's first run.

python victim.py RANK STEP SCRIPT [ARGUMENTS]
"""

import itertools
import os
import runpy
import signal
import sys
from pathlib import Path

import hvdlite
from hvdlite.observe import status


def main(rank: int, at: int, arguments: list[str]) -> None:
    count_step = status.count_step
    steps = itertools.count(1)

    def count_and_die(key: object) -> None:
        count_step(key)
        if next(steps) == at and hvdlite.rank() == rank:
            os.kill(os.getpid(), signal.SIGKILL)

    if os.environ["HVDLITE_RESTART"] == "0":
        status.count_step = count_and_die
    sys.argv = arguments
    sys.path[0] = str(Path(arguments[0]).parent)
    runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
