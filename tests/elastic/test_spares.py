"""hvdliterun --spares: processes that wait, and take the places of ranks that have died."""

import json
import re
import sys
import time

import pytest

from hvdlite.base.settings import Settings
from hvdlite.elastic import spares
from hvdlite.errors import SettingsError
from tests.launch.launcher import hvdliterun

# In each step every rank adds 2^n, n being its process's number, so a sum tells who is in it.
CODE = """
import atexit, json, os, signal, sys, time
import numpy as np
import hvdlite as hvd
me = int(os.environ["OMPI_COMM_WORLD_RANK"])
sets = []
began = time.process_time(), time.monotonic()
hvd.init(process_sets=sets)
cpu = time.process_time() - began[0], time.monotonic() - began[1]

@hvd.elastic.run
def train(state):
    while state.step < 20:
        state.sums = [*state.sums, float(hvd.allreduce(2.0**me, op=hvd.Sum))]
        state.step += 1
        time.sleep(0.02)
        if state.step % 5 == 0:
            state.commit()

state = hvd.elastic.ObjectState(step=0, sums=[])
train(state)
print(json.dumps([me, hvd.rank(), hvd.size(), state.sums, cpu]))
"""


def run(faults, count=1, ranks=3, code=CODE, returncode=0):
    """Run a job with spares; return what its ranks have printed, and its standard error."""
    job = hvdliterun(
        *("--elastic", "-np", ranks, "--spares", count, sys.executable, "-c", code),
        env={"HVDLITE_REHEARSE": ";".join(faults)},
    )
    assert job.returncode == returncode, job.stderr
    return sorted(json.loads(line) for line in job.stdout.splitlines()), job.stderr


def at(rank, count):
    return f"kill:rank={rank},point=exchange,count={count}"


def test_a_spare_takes_the_place_of_a_rank():
    found, stderr = run([at(1, 8)])
    # Process 1 dies in the sixth sum: the state's broadcast, five sums and a commit come first. The
    # spare, process 3, comes in with the second commit.
    sums = [7.0] * 5 + [5.0] * 5 + [13.0] * 10
    assert [each[:4] for each in found] == [[0, 0, 3, sums], [2, 1, 3, sums], [3, 2, 3, sums]]
    assert re.fullmatch(
        r"hvdliterun: rank 1 on host \S+ was killed by signal 9 \(SIGKILL\); the other ranks go on"
        r"\nrank 1 died; the other 2 go on in the same step, after \S+ s\na spare comes in: 3 ranks"
        r"\n",
        stderr,
    )


@pytest.mark.slow
def test_without_a_death_a_spare_waits_and_ends_with_the_job():
    used = "[me, time.process_time() - began[0], time.monotonic() - began[1]]"
    told = f"me == 3 and atexit.register(lambda: print(json.dumps({used})))\nhvd.init("
    code = CODE.replace("hvd.init(", told).replace("< 20", "< 200")
    found, stderr = run([], code=code)
    assert [each[0] for each in found] == [0, 1, 2, 3]
    assert (found[0][3], stderr) == ([7.0] * 200, "")
    process, wall = found[3][1:]
    assert wall > 4.0
    assert process < 0.1 * wall + 0.5  # the start takes 0.3 s


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "count", "left"),
    [
        ([at(0, 8)], 1, [1, 2, 3]),  # the first survivor's state counts
        ([at(0, 8), at(2, 9)], 1, [1, 3]),
        ([at(0, 8), at(1, 9), at(2, 10)], 2, []),  # nobody has the state
        ([at(1, 8), at(2, 18)], 2, [0, 3, 4]),  # one after the other
        ([at(1, 8), at(3, 5)], 2, [0, 2, 4]),  # the spare dies, too, once it is a rank
        (["kill:rank=3,point=time,after=0"], 1, [0, 1, 2]),  # which a spare never gets to
    ],
)
def test_who_is_left(faults, count, left):
    if not left:
        found, stderr = run(faults, count, returncode=137)
        assert found == []
        assert "hvdlite: all ranks have died, so this spare ends" in stderr
        return
    found, stderr = run(faults, count)
    # By their numbers at the start, also after they have got others.
    dead = re.findall(r"rank=(\d),point=exchange", ";".join(faults))
    named = re.findall(r"^ranks? (.*) died; ", stderr, re.MULTILINE)
    assert sorted(re.findall(r"\d", "".join(named))) == sorted(dead)
    assert [each[0] for each in found] == left
    assert [each[1] for each in found] == [*range(len(left))]
    assert len({json.dumps(each[3]) for each in found}) == 1
    assert found[0][3][-1] == sum(2.0**process for process in left)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victims", "count", "left"),
    [
        ({0: 1, 2: 1}, 1, [1, 3]),  # in the first init()
        ({0: 2}, 0, [2]),
        ({2: 2}, 1, [0, 3]),  # the spare that has just come in goes on
        ({3: 1}, 2, [0, 2, 4]),  # and here it is the one that dies
        ({0: 2, 2: 3}, 2, []),  # nobody has the state
    ],
)
def test_a_death_while_a_world_is_formed(victims, count, left):
    planted = """
from hvdlite.base import observers
formed = 0
def reach(point, *args):
    global formed
    formed += point == "form"
    point == "form" and VICTIMS.get(me) == formed and os.kill(os.getpid(), signal.SIGKILL)
observers.add(reach)
hvd.init(process_sets=sets)
""".replace("VICTIMS", repr(victims))
    code = CODE.replace("hvd.init(process_sets=sets)\n", planted)
    faults = [] if 1 in [victims.get(0)] else [at(1, 8)]
    found, stderr = run(faults, count, 3, code, returncode=0 if left else 137)
    assert [each[:3] for each in found] == [[n, i, len(left)] for i, n in enumerate(left)]
    if not left:
        assert "hvdlite: all ranks have died, so this spare ends" in stderr
        return
    assert len({json.dumps(each[3]) for each in found}) == 1
    assert found[0][3][-1] == sum(2.0**process for process in left)


@pytest.mark.slow
def test_a_rank_that_cannot_communicate_ends_the_job_though_none_has_died():
    planted = """
from hvdlite.base import observers
hvd.init(process_sets=sets)
def reach(point, *args):
    if point == "form" and me == 0:
        raise OSError("no memory left")
observers.add(reach)
"""
    code = CODE.replace("hvd.init(process_sets=sets)\n", planted)
    found, stderr = run([at(1, 8)], 0, 3, code, returncode=1)
    assert found == []
    assert "the ranks cannot communicate, although none has died (no memory left)" in stderr


@pytest.mark.slow
def test_a_spare_that_dies_is_missed_by_nobody(tmp_path):
    file = str(tmp_path / "spare")
    code = CODE.replace(
        "hvd.init(", f"me == 3 and open({file!r}, 'w').write(str(os.getpid()))\nhvd.init("
    )
    killed = (
        f"time.sleep(0.02); me == state.step - 3 == 0 and os.kill(int(open({file!r}).read()), 9)"
    )
    found, stderr = run([at(1, 12)], code=code.replace("time.sleep(0.02)", killed))
    assert [each[0] for each in found] == [0, 2]
    assert (found[0][3][0], found[0][3][-1]) == (7.0, 5.0)
    assert "rank 3 on host" in stderr


@pytest.mark.slow
def test_process_sets_are_those_of_the_ranks():
    code = CODE.replace("sets = []", "sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2])]")
    code = code.replace("state.sums, cpu", "[each.ranks for each in sets], state.sums[-1]")
    found, _ = run([at(1, 12)], code=code)
    assert [each[3:] for each in found] == [[[[0], [1]], 13.0]] * 3
    found, _ = run([at(1, 12), "kill:rank=0,point=form"], code=code)
    assert [each[3:] for each in found] == [[[[], [0]], 12.0]] * 2


@pytest.mark.slow
def test_a_spare_makes_in_the_function_what_the_others_make():
    """Process 1 dies in the first call; a spare comes in, and process 2 dies in the second one."""
    pytest.importorskip("torch")
    code = """
import json, os, signal
import torch
import hvdlite.torch as hvd
me = int(os.environ["OMPI_COMM_WORLD_RANK"])
hvd.init()
model = torch.nn.Linear(3, 1)

@hvd.elastic.run
def train(state):
    state.calls += 1
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in range(2):
        for step, batch in enumerate(hvd.shard(torch.arange(48), batch_size=4)):
            print(json.dumps([state.calls, epoch, batch.tolist()]), flush=True)
            if (state.calls, epoch, step, me) in [(1, 0, 1, 1), (2, 0, 2, 2)]:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            model(torch.ones(3)).sum().backward()
            optimizer.step()
            if state.calls == 1 and step == 1:
                state.commit()

train(hvd.elastic.TorchState(model, calls=0))
"""
    found, _ = run([], code=code)
    for epoch in range(2):
        taken = [each for call, at, batch in found if (call, at) == (2, epoch) for each in batch]
        assert sorted(taken) == [*range(48)]


@pytest.mark.slow
def test_torch():
    job = hvdliterun(
        *("--elastic", "-np", 3, "--spares", 1),
        *(sys.executable, "tests/elastic/sparing_torch.py", 2),
        env={"HVDLITE_REHEARSE": "kill:rank=0,step=30"},
    )
    assert job.returncode == 0, job.stderr
    lines = re.findall(r"^left (\d): (\w{64}; (.*); (.*); (.*))$", job.stdout, re.MULTILINE)
    assert sorted(rank for rank, *_ in lines) == ["0", "1", "2"]
    assert len({rest for _, rest, *_ in lines}) == 1  # weights and momenta, too
    sizes, repeated, missed = (json.loads(text) for text in lines[0][2:])
    assert 2 in sizes
    assert sizes[-1] == 3
    assert missed == [0, 0]
    # At most what the dead rank has had of the epoch, and the others have not heard of.
    assert all(number <= 84 for number in repeated)


@pytest.mark.slow
def test_the_ends_of_the_ranks_reach_the_spares():
    code = """import sys, time, hvdlite as hvd
from hvdlite.elastic import spares
spares._SECONDS_TO_END = 60.0
hvd.init()
hvd.barrier()
print(time.time())
"""
    job = hvdliterun("--elastic", "-np", 2, "--spares", 2, sys.executable, "-c", code)
    assert (job.returncode, job.stderr) == (0, "")
    assert time.time() - max(map(float, job.stdout.split())) < 30.0  # no rank has waited in vain


def test_spares_need_a_job_that_goes_on():
    with pytest.raises(SettingsError, match="found 1 without HVDLITE_ELASTIC=1"):
        spares.check(Settings(spares=1), 3)
    with pytest.raises(SettingsError, match="found 3 for 3 processes"):
        spares.check(Settings(spares=3, elastic=True), 3)


@pytest.mark.slow
def test_arguments_that_do_not_fit_are_told_as_without_elastic():
    code = """
import hvdlite as hvd
try:
    hvd.init(virtual_ranks=1)
except ValueError as error:
    print(str(error).partition(":")[0])
"""
    job = hvdliterun("--elastic", "-np", 2, sys.executable, "-c", code)
    told = "virtual_ranks=1 is less than the number of processes, 2\n"
    assert (job.returncode, job.stdout) == (0, told * 2), job.stderr


@pytest.mark.slow
def test_a_spare_that_communicates_before_the_function_is_told():
    code = CODE.replace(
        "\n@hvd.elastic.run", "\nhvd.allreduce(1.0, name='early')\n@hvd.elastic.run", 1
    )
    assert "early" in code
    found, stderr = run([at(1, 8)], code=code, returncode=1)
    assert found == []
    assert "'early' cannot be submitted: this process has come in as a spare, and the" in stderr


@pytest.mark.slow
def test_init_takes_the_same_ranks_again():
    code = """
import json
import hvdlite as hvd
from mpi4py import MPI
for comm in (MPI.COMM_WORLD, None, [0, 1]):
    try:
        hvd.init(comm=comm)
        print(json.dumps([hvd.rank(), hvd.size(), float(hvd.allreduce(1.0, op=hvd.Sum))]))
        hvd.shutdown()
    except ValueError as error:
        print(json.dumps(str(error)))
"""
    job = hvdliterun("--elastic", "-np", 2, "--spares", 1, sys.executable, "-c", code)
    assert job.returncode == 0, job.stderr
    found = [json.loads(line) for line in job.stdout.splitlines()]
    assert sorted(each for each in found if isinstance(each, list)) == [
        *[[0, 2, 2.0]] * 2,
        *[[1, 2, 2.0]] * 2,
    ]
    told = "comm=[0, 1] is not what init() got first (None), and spares wait for those ranks"
    assert [each for each in found if told in each] == [
        each for each in found if isinstance(each, str)
    ]
    assert len(found) == 6
