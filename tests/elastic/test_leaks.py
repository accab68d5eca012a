"""Recoveries and resets leave nothing in the processes, and a job leaves nothing on its host."""

import json
import random
import signal
import sys

import pytest

from tests.campaigns import soak
from tests.launch.launcher import hvdliterun

# Each step ends in a failure of one rank, so that all of them return to the commit before it.
RESETS = """
import json, os, sys
from pathlib import Path
import numpy as np
import hvdlite as hvd
from hvdlite.world import world
hvd.init()
report = []

def usage():
    maps = Path("/proc/self/maps").read_text()
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return [len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")),
            maps.count("memfd:"), number(), int(status["RssAnon"].split()[0])]

def number():
    "Return the highest of the world's communicators: it rises with any that stay from before."
    now = world.current()
    return max(comm.py2f() for comm in (now.comm, now.node, now.cross))

@hvd.elastic.run
def train(state):
    while state.step < int(sys.argv[1]):
        hvd.allreduce(np.ones(1 << 16), name="first")
        state.step += 1
        state.commit()
        report.append(usage())
        if state.step % hvd.size() == hvd.rank():
            raise hvd.HorovodInternalError("planted")
        hvd.allreduce(np.ones(3), name="second")

train(hvd.elastic.ObjectState(step=0))
print(json.dumps(report))
"""
_WARM = 5


@pytest.mark.parametrize(
    ("resets", "elastic", "variables"),
    [
        (20, ["--elastic"], {}),
        pytest.param(20, [], {}, marks=pytest.mark.slow),
        pytest.param(20, ["--elastic"], {"HVDLITE_SHARED_MEMORY": "0"}, marks=pytest.mark.slow),
    ],
)
def test_resets_do_not_grow_the_processes(resets, elastic, variables):
    job = hvdliterun(
        *("-np", 2, *elastic, sys.executable, "-c", RESETS, resets),
        env={"HVDLITE_LOG_LEVEL": "error", **variables},
    )
    assert (job.returncode, job.stderr) == (0, "")
    for line in job.stdout.splitlines():
        files, threads, segments, communicators, memory = zip(*json.loads(line), strict=True)
        assert len(files) == resets
        for numbers in (files, threads, segments):
            assert set(numbers[_WARM:]) == {numbers[_WARM]}
        assert max(communicators) <= max(communicators[:_WARM])
        # 5 KiB for each reset were measured, and pieces of 1 MiB that Python takes at once.
        assert memory[-1] - memory[_WARM] < 10 * resets + 2048


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all", "hvdliterun", "mpirun"])
def test_a_job_that_is_killed_leaves_nothing(kind):
    assert soak.run(kind, random.Random(1), 0.0, {})


def test_a_job_that_is_killed_at_its_start_leaves_nothing():
    job = soak.Job({}, spares=0)
    try:
        job.launcher.send_signal(signal.SIGKILL)
        job.launcher.wait()
        job.wait_until_gone()
        job.next_start()
        assert job.leftovers() == []
    finally:
        job.end()
        job.remove()
