"""hvdliterun --elastic: the other ranks go on in the same step when some have died."""

import functools
import json
import random
import re
import sys

import pytest

from hvdlite.engine.lane import LaneState
from hvdlite.recipe import Sharding
from hvdlite.recovery import is_delivered
from tests.campaigns import kill
from tests.launch import launcher
from tests.launch.launcher import running, survivors

# Three or four ranks that start together take long on a busy machine.
hvdliterun = functools.partial(launcher.hvdliterun, timeout=90)
NUMPY = """
import os, signal, sys
import numpy as np
import hvdlite as hvd
hvd.init()
start = hvd.rank()
"""


def state(confirmed, in_doubt=False):
    return LaneState(confirmed, in_doubt, closed=False, broken=False)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([state(3), state(3), state(3)], [False] * 3),  # nobody has it
        ([state(3, True), state(3), state(3, True)], [False] * 3),  # one has not
        ([state(3, True)] * 3, [True] * 3),  # all have it, and nobody knew
        ([state(4), state(3, True), state(4)], [False, True, False]),  # some know that all have
        ([state(3, True)], [True]),
    ],
)
def test_which_ranks_deliver_an_outcome_in_doubt(states, expected):
    assert [is_delivered(own, states) for own in states] == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "faults",
    [
        *(
            [f"kill:rank={rank},point={point},count={count}"]
            for rank, point, count in [
                (1, "meet", 20),
                (0, "exchange", 60),
                (2, "exchange", 61),  # in place
                (3, "confirm", 90),
                (0, "deliver", 91),
                (1, "delivered", 92),
            ]
        ),
        ["kill:rank=0,point=exchange,count=30", "kill:rank=2,point=exchange,count=30"],
        ["kill:rank=1,point=exchange,count=30", "kill:rank=3,point=recover"],
        [f"kill:rank={rank},point=meet,count={20 + 9 * rank}" for rank in (0, 1, 2)],
    ],
    ids=lambda faults: "+".join(faults),
)
def test_sums_are_those_of_the_ranks_that_live(faults):
    found = kill.run("arrays", faults)
    dead = {int(re.search(r"rank=(\d)", fault)[1]) for fault in faults}
    assert found.left == sorted({*range(4)} - dead)
    assert found.results == {str(4 - len(dead))}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_with_fewer_ranks(ranks):
    found = kill.run("arrays", ["kill:rank=0,point=exchange,count=40"], ranks)
    assert (found.left, found.results) == ([*range(1, ranks)], {str(ranks - 1)})


@pytest.mark.parametrize(
    "variables", [{"HVDLITE_SHARED_MEMORY": "0"}, {"HVDLITE_FORCE_LOCAL_SIZE": "2"}]
)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "count"),
    [("meet", 50), ("confirm", 50), *(("exchange", count) for count in (50, 54, 56, 58))],
)
def test_over_mpi_and_several_nodes(variables, point, count):
    found = kill.run("arrays", [f"kill:rank=1,point={point},count={count}"], extra=variables)
    assert (found.left, found.results) == ([0, 2, 3], {"3"})


@pytest.mark.parametrize(
    ("framework", "steps"),
    [
        pytest.param("tensorflow", 30, marks=pytest.mark.slow),
        pytest.param("keras", 60, marks=pytest.mark.slow),
    ],
)
def test_training_goes_on(framework, steps):
    faults = ["kill:rank=1,step=7", "kill:rank=0,step=20,point=confirm"]
    found = kill.run(framework, faults)
    assert found.left == [2, 3]
    (result,) = found.results
    assert result.split()[:2] == ["2", str(steps)]
    assert len(found.lost) == 2


@pytest.mark.slow
def test_the_same_without_a_death():
    found = kill.run("torch", [])
    assert (found.left, len(found.results), found.lost) == ([0, 1, 2, 3], 1, [])


@pytest.mark.slow
@pytest.mark.parametrize(("framework", "runs"), [("arrays", 6), ("torch", 4)])
def test_random_deaths(framework, runs):
    chance = random.Random(7)
    for _ in range(runs):
        faults = kill.random_faults(chance, kill.SCRIPTS[framework])
        found = kill.run(framework, faults)
        assert len(found.results) == 1, (faults, found)


def test_what_the_user_is_told():
    code = f"{NUMPY}if start == 1: sys.exit(print('bye') or os._exit(3))\nhvd.allreduce(1.0)\n"
    job = hvdliterun("--elastic", "-np", 2, sys.executable, "-c", code)
    assert job.returncode == 0, job.stderr
    lines = job.stderr.splitlines()
    assert re.fullmatch(
        r"hvdliterun: rank 1 on host \S+ exited with code 3; the other ranks go on", lines[0]
    )
    assert re.fullmatch(
        r"rank 1 died; the other one goes on in the same step, after \d\.\d{3} s", lines[1]
    )
    assert len(lines) == 2


def test_an_exception_is_the_death_of_its_rank():
    code = f"{NUMPY}if start == 0: raise KeyError('mine')\nprint(hvd.allreduce(2.0, op=hvd.Sum))\n"
    job = hvdliterun("--elastic", "-np", 3, sys.executable, "-c", code)
    assert (job.returncode, job.stdout.split()) == (0, ["4.0", "4.0"])
    assert "hvdlite: rank 0 of 3 leaves the job:\nTraceback" in job.stderr
    assert "KeyError: 'mine'" in job.stderr


def test_a_job_without_a_rank_that_is_left_has_failed():
    job = hvdliterun("--elastic", "-np", 2, sys.executable, "-c", f"{NUMPY}os.kill(os.getpid(), 9)")
    assert job.returncode == 137
    assert job.stderr.splitlines()[-1] == "hvdliterun: no rank is left"


def test_a_rank_that_dies_before_it_has_met_the_others_ends_the_job():
    code = "import os; os.environ['OMPI_COMM_WORLD_RANK'] == '1' and os._exit(5)\n" + NUMPY
    job = hvdliterun("--elastic", "-np", 3, sys.executable, "-c", code)
    assert job.returncode == 5
    assert "rank 1 on host" in job.stderr.splitlines()[-1]


def test_a_broadcast_whose_root_has_died_is_lost():
    code = f"""{NUMPY}
if start == 0:
    hvd.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
hvd.barrier()
try:
    hvd.broadcast_object(None, root_rank=0, name="weights")
except hvd.errors.HorovodInternalError as error:
    print(error)
print(hvd.allreduce(1.0, op=hvd.Sum))
"""
    job = hvdliterun("--elastic", "-np", 3, sys.executable, "-c", code)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [
        *["'weights' was lost: rank 0, which was to send it, has died"] * 2,
        *["2.0"] * 2,
    ]


def test_nothing_is_left_when_a_job_is_killed(tmp_path):
    code = f"{NUMPY}print(os.getpid(), flush=True)\nwhile True: hvd.allreduce(np.ones(100_000))\n"
    with running("--elastic", "-np", 3, sys.executable, "-c", code) as job:
        pids = [int(job.stdout.readline()) for _ in range(3)]
        job.kill()
    assert survivors(pids) == []


def test_another_mpi_is_refused(tmp_path):
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho 'HYDRA build details:'\necho '    Version: 4.3.1'\n")
    fake.chmod(0o755)
    job = hvdliterun("--elastic", "-np", 2, "true", env={"HVDLITE_MPIRUN": str(fake)})
    assert (job.returncode, job.stderr.count("\n")) == (2, 1)
    assert "--elastic needs Open MPI 5 or later" in job.stderr


def test_without_the_launcher_the_remedy_is_told():
    code = f"{NUMPY}"
    job = hvdliterun("-np", 2, sys.executable, "-c", code, env={"HVDLITE_ELASTIC": "1"})
    assert job.returncode != 0
    assert "hvdliterun --elastic" in job.stderr


def test_the_others_take_over_the_data():
    """Every sample of two epochs comes once, but for the dead rank's part of its last step."""
    code = f"""{NUMPY}
import json, time
batches = hvd.shard(np.arange(103), batch_size=5, seed=3)
steps = 0
for epoch in range(2):
    for batch in batches:
        steps += 1
        print(json.dumps([start, epoch, steps, batch.tolist()]), flush=True)
        if start == 1 and steps == 3 or start == 3 and steps == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.02 * start)
        hvd.allreduce(np.ones(3))
"""
    job = hvdliterun("--elastic", "-np", 4, sys.executable, "-c", code)
    assert job.returncode == 0, job.stderr
    lines = [json.loads(line) for line in job.stdout.splitlines()]
    steps = Sharding(103, 5, 0, 4).steps
    for epoch in range(2):
        taken = [sample for _, at, _, batch in lines if at == epoch for sample in batch]
        assert sorted(taken) == [*range(103)]
    for rank, last in enumerate([2 * steps, 3, 2 * steps, 7]):
        assert [step for start, _, step, _ in lines if start == rank] == [*range(1, last + 1)]
    expected = [len(indices) for indices in Sharding(103, 5, 0, 4, seed=3).indices(0)]
    sizes = {rank: [len(batch) for start, _, _, batch in lines if start == rank] for rank in (0, 2)}
    assert sizes[0][:3] == expected[:3]
    assert [a + b for a, b in zip(sizes[0][7:], sizes[2][7:], strict=True)] == [
        total for _ in range(2) for total in Sharding(103, 5, 0, 4).global_batch_sizes
    ][7:]


def test_elastic_run_adapts_at_the_next_commit():
    code = f"""{NUMPY}
state = hvd.elastic.ObjectState(step=0, total=0.0, calls=0)
sizes = []
state.register_reset_callbacks([lambda: sizes.append(hvd.size())])

@hvd.elastic.run
def train(state):
    state.calls += 1
    while state.step < 12:
        if start == 1 and state.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        state.total += float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])
        state.step += 1
        if state.step % 3 == 0:
            state.commit()

train(state)
print(start, hvd.rank(), hvd.size(), sizes, state.total, state.calls)
"""
    job = hvdliterun("--elastic", "-np", 3, sys.executable, "-c", code)
    assert job.returncode == 0, job.stderr
    total = 4 * 3.0 + 8 * 2.0  # the step of the death is not lost
    assert sorted(job.stdout.splitlines()) == [f"0 0 2 [2] {total} 2", f"2 1 2 [2] {total} 2"]


def test_elastic_run_returns_to_a_commit_without_the_dead_rank():
    code = f"""{NUMPY}
@hvd.elastic.run
def train(state):
    while state.step < 9:
        if start == 0 and state.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == 5 and not failed:
            failed.append(hvd.rank())
            raise hvd.errors.HorovodInternalError("once")
        state.total += float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])
        state.step += 1
        if state.step == 4:
            state.commit()

failed = []
state = hvd.elastic.ObjectState(step=0, total=0.0)
train(state)
print(start, hvd.rank(), hvd.size(), state.step, state.total)
"""
    job = hvdliterun("--elastic", "-np", 3, sys.executable, "-c", code)
    assert job.returncode == 0, job.stderr
    total = 2 * 3.0 + 7 * 2.0
    assert sorted(job.stdout.splitlines()) == [f"1 0 2 9 {total}", f"2 1 2 9 {total}"]


def test_what_cannot_go_on_starts_again(tmp_path):
    """Rank 0 dies before it has sent what only it has, and the script has kept its number."""
    code = f"""{NUMPY}
life = os.environ["HVDLITE_RESTART"]
if start == 0 and life == "0":
    os.kill(os.getpid(), signal.SIGKILL)
weights = hvd.broadcast_object(7 if start == 0 else None, root_rank=0, name="weights")
hvd.barrier()
print(life, hvd.size(), weights)
"""
    job = hvdliterun("--elastic", "--restarts", 1, "-np", 3, sys.executable, "-c", code)
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["1 3 7"] * 3


@pytest.mark.parametrize("longer", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_an_unequal_number_of_steps_does_not_hang(longer):
    code = f"""{NUMPY}
for step in range(4 + (start == {longer})):
    hvd.allreduce(np.ones(100))
print("done", start)
"""
    job = hvdliterun("--elastic", "-np", 3, sys.executable, "-c", code)
    assert sorted(job.stdout.splitlines()) == [
        f"done {rank}" for rank in range(3) if rank != longer
    ]
    assert "shut down without submitting" in job.stderr
    assert f"rank {longer} on host" in job.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("elastic", "end"),
    [
        (True, ""),
        (True, "hvd.shutdown(); time.sleep(1); print(hvd.is_initialized())"),
        (False, "hvd.shutdown()"),
    ],
)
def test_a_rank_with_fewer_batches_does_not_hang_a_training(elastic, end):
    """It ends, or lives on after `hvd.shutdown()`."""
    pytest.importorskip("torch")
    code = f"""
import time, torch
import hvdlite.torch as hvd
hvd.init()
start = hvd.rank()
torch.manual_seed(1)
layer = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=layer.named_parameters())
for batch in range(3 if start == 1 else 5):
    optimizer.zero_grad()
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
print("done", start, flush=True)
{end}
"""
    options = ["--elastic"] if elastic else []
    job = hvdliterun(*options, "-np", 3, sys.executable, "-c", code)
    assert job.stdout.splitlines() == (["done 1", "False"] if elastic and end else ["done 1"])
    assert "rank 1 shut down without submitting 'DistributedOptimizer" in job.stderr
    assert "(gradients of 'bias', 'weight')" in job.stderr
    assert re.search("^hvdliterun: rank [02] on host .* exited with code 1", job.stderr, re.M)
    assert "Exception ignored" not in job.stderr
    assert job.returncode == (0 if elastic else 1)


@pytest.mark.parametrize("point", ["meet", "delivered"])
@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_process_set_is_made_of_those_that_live(point, count):
    """Rank 2, a member, dies while the ranks make the set."""
    code = f"""{NUMPY}
some = hvd.add_process_set([1, 2, 3])
total = float(hvd.allreduce(1.0, op=hvd.Sum))
inside = hvd.allreduce(1.0, op=hvd.Sum, process_set=some) if some.included() else 0
print(start, hvd.size(), some.ranks, float(inside), total)
"""
    fault = f"kill:rank=2,point={point},count={count}"
    env = {"HVDLITE_REHEARSE": fault}
    job = hvdliterun("--elastic", "-np", 4, sys.executable, "-c", code, env=env)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.splitlines()) == [
        "0 3 [1, 2] 0.0 3.0",
        "1 3 [1, 2] 2.0 3.0",
        "3 3 [1, 2] 2.0 3.0",
    ]
