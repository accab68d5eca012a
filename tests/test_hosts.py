"""Jobs over separate network hosts, started by hvdliterun as a user would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.hosts import BURST, ROOT, network_hosts, why_unavailable
from tests.launch.launcher import command, environment, survivors

pytestmark = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


@pytest.fixture(scope="module")
def network():
    with network_hosts(2) as made:
        yield made


def job(network, counts, check, *arguments, settings=None, python=sys.executable):
    """Run a check of tests.host_checks on so many ranks of each host."""
    ranks = python, "-m", "tests.host_checks", check, *arguments
    hosts = network.slots(*counts)
    return network.run(
        command("-np", sum(counts), "-H", hosts, *ranks), environment(settings), timeout=90
    )


def passes(network, counts, check, *arguments, **options):
    done = job(network, counts, check, *arguments, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_with_mpich_too(network):
    mpich = os.environ.get("HVDLITE_TEST_MPICH")
    if not mpich:
        pytest.skip("HVDLITE_TEST_MPICH does not name MPICH's mpiexec")
    own = Path(mpich).with_name("python")
    python = str(own) if own.exists() else sys.executable
    settings = {"HVDLITE_MPIRUN": mpich}
    passes(network, (2, 1), "layout", "2", "1", settings=settings, python=python)


@pytest.mark.slow
@pytest.mark.parametrize("counts", [(2, 2), (1, 2)])
def test_nodes_and_results(network, counts):
    passes(network, counts, "everything", *map(str, counts))


def test_a_failing_rank_on_the_other_host_ends_the_job(network):
    done = job(network, (2, 2), "fail_on", "3")
    # Which rank is named is a race: Open MPI ends the peers of one whose connections close.
    assert done.returncode != 0
    assert "hvdlite: rank 3 of 4 ends the job:" in done.stderr
    assert "AssertionError: the reason" in done.stderr


@pytest.mark.slow
def test_an_allreduce_goes_through_the_network_once(network):
    before = [(host.received(), host.sent()) for host in network.hosts]
    output = passes(network, (1, 1), "traffic", "4")
    for line in output.splitlines():
        _, through, _ = map(float, line.split())
        assert 4e6 < through < 1.5 * 4e6
    for host, (received, sent) in zip(network.hosts, before, strict=True):
        assert host.received() - received > 2 * 4e6
        assert host.sent() - sent > 2 * 4e6


@pytest.mark.slow
def test_an_exchange_takes_the_time_that_its_bytes_need():
    rate, size = 100e6, 4e6
    with network_hosts(2, rate) as network:
        output = passes(network, (1, 1), "traffic", str(size / 1e6))
    numbers = [list(map(float, line.split())) for line in output.splitlines()]
    _, through, seconds = zip(*numbers, strict=True)
    assert min(through) > size
    # The rank that was first at the start has seen all of it.
    assert max(seconds) > (size - BURST) * 8 / rate
    assert max(seconds) < 5 * max(through) * 8 / rate


def test_a_command_that_hangs_is_ended(network):
    hanging = "echo began; setsid sleep 60 & sleep 60"
    with pytest.raises(TimeoutError, match=r"ran longer than 0.5 s\nbegan"):
        network.run(["sh", "-c", hanging], timeout=0.5)
    assert network.hosts[0].processes() == []


_KILLED = """
import os, subprocess, time
from tests.harness.hosts import network_hosts

with network_hosts(2) as made:
    left = subprocess.Popen(made.hosts[1].enter("sleep", "60"))
    while left.pid not in made.hosts[1].processes():
        pass
    children = open(f"/proc/self/task/{os.getpid()}/children").read()
    print(made.folder, children, flush=True)
    while True:  # A signal just before one long wait would be seen after it.
        time.sleep(0.05)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_nothing_is_left_of_a_process_that_is_killed(how):
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        folder, *pids = process.stdout.readline().split()
        assert len(pids) == 4  # The bridge has a keeper too.
        os.killpg(process.pid, how)
        assert survivors(list(map(int, pids))) == []
        assert process.wait(10) == -how
    assert not Path(folder).exists()
