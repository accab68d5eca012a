"""hvdliterun --elastic: the other ranks go on in the same step when some have died."""

import json
import re
import sys

import pytest

from hvdlite.elastic.recovery import LaneState, is_delivered
from hvdlite.recipe import Sharding
from tests.campaigns import kill
from tests.launch.launcher import hvdliterun

# Three or four ranks that start together take long on a busy machine.
NUMPY = """
import os, signal, sys
import numpy as np
import hvdlite as hvd
hvd.init()
start = hvd.rank()
"""


def run(code, ranks, *options, env=None, returncode=0):
    """Run a job; return the lines that its ranks have printed, sorted, and its standard error."""
    program = (sys.executable, "-c", NUMPY + code)
    job = hvdliterun("--elastic", *options, "-np", ranks, *program, env=env)
    assert job.returncode == returncode, job.stderr
    return sorted(job.stdout.splitlines()), job.stderr


def state(confirmed, in_doubt=False):
    return LaneState(confirmed, in_doubt, closed=False)


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


def at(rank, point, count):
    return f"kill:rank={rank},point={point},count={count}"


OVER_MPI, TWO_NODES = {"HVDLITE_SHARED_MEMORY": "0"}, {"HVDLITE_FORCE_LOCAL_SIZE": "2"}
# Deaths one after the other, or two at once.
FAULTS = [
    ([at(1, "meet", 20), at(0, "exchange", 60), at(3, "confirm", 90)], {}),
    ([at(2, "exchange", 61), at(0, "deliver", 91), at(1, "delivered", 122)], {}),  # in place first
    ([at(0, "exchange", 30), at(2, "exchange", 30)], {}),
    ([at(1, "exchange", 30), "kill:rank=3,point=recover"], {}),
    (["kill:rank=0,point=start", "kill:rank=3,point=start"], {}),
    ([at(1, "meet", 50), at(2, "exchange", 58)], OVER_MPI),
    ([at(1, "meet", 50), at(2, "exchange", 54)], TWO_NODES),
]


@pytest.mark.parametrize(
    ("faults", "variables"),
    [
        ([at(0, "exchange", 40)], {}),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in FAULTS),
    ],
    ids=lambda each: "+".join(each),
)
def test_sums_are_those_of_the_ranks_that_live(faults, variables):
    found = kill.run("arrays", faults, extra=variables)
    dead = {int(re.search(r"rank=(\d)", fault)[1]) for fault in faults}
    assert found.left == sorted({*range(4)} - dead)
    assert found.results == {str(4 - len(dead))}


def test_a_group_in_place_runs_again_from_what_it_was_given():
    """Each time a rank dies when the first array has its sum."""
    code = """
from hvdlite.collectives.allreduce import Allreduce
execute = Allreduce.execute
victims = {"group.1": 2, "views.1": 3}
def dying(self, *args):
    if victims.get(self.name) == start:
        os.kill(os.getpid(), signal.SIGKILL)
    return execute(self, *args)
Allreduce.execute = dying
for name in ("group", "views"):
    mine = [np.ones(10, dtype) for dtype in ("float32", "float64")]
    outs = mine if name == "group" else [each[:] for each in mine]
    hvd.grouped_allreduce(mine, op=hvd.Sum, outs=outs, name=name)
    print(name, mine[0][0], mine[1][0])
"""
    assert run(code, 4)[0] == ["group 3.0 3.0"] * 3 + ["views 2.0 2.0"] * 2


def test_a_rank_without_memory_for_the_recovery_leaves_it_to_the_others():
    code = """
from hvdlite.elastic.recovery import Recovery
def short(*args):
    raise MemoryError("no room")
if start == 1:
    Recovery._tell = short
if start == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    print(hvd.allreduce(1.0, op=hvd.Sum))
except hvd.HorovodInternalError as error:
    print(error)
"""
    (total, told), stderr = run(code, 3)
    assert "rank 1: no recovery: MemoryError('no room')" in told
    assert total == "1.0"
    assert "left without the others" not in stderr  # no lane of rank 1 waits for them


def test_a_rank_that_dies_before_it_has_met_the_others_ends_the_job():
    code = "import os; os.environ['OMPI_COMM_WORLD_RANK'] == '1' and os._exit(5)\n" + NUMPY
    job = hvdliterun("--elastic", "-np", 3, sys.executable, "-c", code)
    assert job.returncode == 5
    assert "rank 1 on host" in job.stderr.splitlines()[-1]


@pytest.mark.slow
def test_roots_are_known_by_their_numbers_at_the_start():
    """Each that is left gets the number of another, such as the root's."""
    code = """
import time
def meet_without(victim):
    hvd.barrier()
    if start == victim:
        time.sleep(0.3)  # so that the others are in what follows
        os.kill(os.getpid(), signal.SIGKILL)
meet_without(0)
try:
    hvd.broadcast_object(None, root_rank=0, name="weights")
except hvd.errors.HorovodInternalError as error:
    print(error)
meet_without(2)
arrays = [hvd.broadcast_async(np.full(3, start), root_rank=2, name="array")]
found = hvd.broadcast_object(start, root_rank=2, name="object")
print(start, hvd.rank(), found, arrays[0].wait().tolist())
meet_without(1)
hvd.barrier()
time.sleep(0.5 * (start == 3))
print(start, hvd.broadcast(np.array(start), hvd.join(), name="last to join"))
"""
    assert run(code, 5)[0] == [
        *["'weights' was lost: rank 0, which was to send it, has died"] * 4,
        *["1 0 3 [3, 3, 3]", "3 1 3 [3, 3, 3]", "3 3", "4 2 3 [3, 3, 3]", "4 3"],
    ]


@pytest.mark.slow
def test_a_loss_is_the_average_of_those_that_live():
    """Rank 2, with most samples, dies between the exchanges of the gradients and of the loss."""
    pytest.importorskip("torch")
    code = """
import torch
import hvdlite.torch as hvd
from hvdlite.base import observers
weight = torch.nn.Parameter(torch.zeros(3))
optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=0.0), [("w", weight)])
def observe(point, *about):
    if (step, start, point) == (2, 2, "delivered"):
        os.kill(os.getpid(), signal.SIGKILL)
observers.add(observe)
def closure():
    optimizer.zero_grad()
    loss = (weight - start).square().sum()
    loss.backward()
    return loss
for step in range(4):
    print(step, float(optimizer.step(closure, batch_size=[1, 3, 4][start])))
"""
    assert {*run(code, 3)[0]} == {"0 7.125", "1 7.125", "2 2.25", "3 2.25"}


@pytest.mark.slow
def test_lockstep_ends_though_its_news_are_older_than_a_death():
    """A rank dies while all know that rank 3 has no next item, or fails, and none has asked yet."""
    code = """
import time
def items(failing):
    yield from range(2 if start == 3 else 9)
    if failing:
        raise OSError("disk")
for victim, failing in enumerate([False, True]):
    found = []
    try:
        for item in hvd.lockstep(items(failing)):
            found.append(item)
            if len(found) == 2:
                time.sleep(0.3)
                if start == victim:
                    os.kill(os.getpid(), signal.SIGKILL)
                hvd.barrier()
    except (OSError, hvd.HorovodInternalError) as error:
        found.append(str(error).partition(":")[0])
    print(start, found)
"""
    assert run(code, 4)[0] == [
        *["1 [0, 1]", "2 [0, 1, 'rank 3 has no next item']", "2 [0, 1]"],
        *["3 [0, 1, 'disk']", "3 [0, 1]"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["missing", "sparse"])
def test_a_death_between_buckets_of_which_one_lacks_gradients(kind):
    """Rank r brings 2^r; rank 0 dies when the ranks that are left have the first bucket."""
    pytest.importorskip("torch")
    code = f"""
import torch
import hvdlite.torch as hvd
layers = [torch.nn.Linear(300, 300, bias=False) for _ in range(3)]
layers.append(torch.nn.Embedding(9, 2, sparse={kind == "sparse"}))
weights = [layer.weight for layer in layers]
names = [(f"w{{number}}", weight) for number, weight in enumerate(weights)]
for weight in weights:
    torch.nn.init.zeros_(weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0), names)
for step in range(4):
    optimizer.zero_grad()
    used = weights[: 2 if start == 2 and {kind == "missing"} else 3]
    loss = 2.0**start * (layers[3](torch.arange(9)).sum() + sum(each.sum() for each in used))
    loss.backward()
    optimizer.step()
print(*(sorted({{*weight.grad.to_dense().flatten().tolist()}}) for weight in weights))
"""
    variables = {"HVDLITE_FUSION_THRESHOLD": "400000", "HVDLITE_FIRST_BUCKET_SIZE": "400000"}
    variables["HVDLITE_REHEARSE"] = "kill:rank=0,step=3,count=2"
    expected = "[3.0] [3.0] [1.0] [3.0]" if kind == "missing" else "[3.0] [3.0] [3.0] [3.0]"
    assert run(code, 3, env=variables)[0] == [expected] * 2


# The other two scale each row by its place in what they get. Rank 0's rows have no receiver if it
# dies before them.
FORWARD = ["1 [0, 2, 2] [0, 1, 2, 1, 2, 3]", "2 [0, 3, 3] [1100, 1003, 4, 4, 5, 6]"]
BACKWARD = ["1 [2, 2, 2] [100, 3, 4, 4, 5, 6]", "2 [3, 3, 3] [1200, 1005, 6, 7, 8, 9]"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("framework", "moment", "expected"),
    [
        ("torch", "forward", FORWARD),
        ("tensorflow", "backward", BACKWARD),
    ],
)
def test_gradients_find_their_way_after_a_death(framework, moment, expected):
    """Rank 0 dies in an alltoall, or between it and the one of the gradients."""
    pytest.importorskip(framework)
    code = f"""
import importlib, time
backend = importlib.import_module("hvdlite.{framework}")
def die(now):
    if now == "{moment}" and start == 0:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
rows = np.arange(6, dtype=np.float32).reshape(6, 1) + 10 * start
def forward(x):
    hvd.barrier()
    die("forward")
    found, counts = backend.alltoall(x, [1, 2, 3])
    gathered, sent = backend.allgather(x[:1]), backend.broadcast(x[:2], hvd.size() - 1)
    die("backward")
    scale = tensor(np.arange(1, 1 + len(found), dtype=np.float32).reshape(-1, 1))
    each = tensor(np.arange(len(gathered), dtype=np.float32).reshape(-1, 1))
    return (found * scale).sum() + 100 * (gathered * each).sum() + 1000 * sent.sum(), counts
if "{framework}" == "torch":
    import torch
    tensor = torch.from_numpy
    x = torch.tensor(rows, requires_grad=True)
    loss, counts = forward(x)
    loss.backward()
    gradient = x.grad.numpy()
else:
    import tensorflow as tf
    tf.Tensor.sum = lambda self: tf.reduce_sum(self)
    tensor = tf.constant
    x = tf.Variable(rows)
    with tf.GradientTape() as tape:
        loss, counts = forward(x)
    gradient = tape.gradient(loss, x).numpy()
print(start, np.asarray(counts).tolist(), gradient[:, 0].astype(int).tolist())
"""
    assert run(code, 3)[0] == expected


def test_another_mpi_is_refused(tmp_path):
    fake = tmp_path / "mpirun"
    fake.write_text("#!/bin/sh\necho 'HYDRA build details:'\necho '    Version: 4.3.1'\n")
    fake.chmod(0o755)
    job = hvdliterun("--elastic", "-np", 2, "true", env={"HVDLITE_MPIRUN": str(fake)})
    assert (job.returncode, job.stderr.count("\n")) == (2, 1)
    assert "--elastic needs Open MPI 5 or later" in job.stderr


@pytest.mark.slow
def test_without_the_launcher_the_remedy_is_told():
    job = hvdliterun("-np", 2, sys.executable, "-c", NUMPY, env={"HVDLITE_ELASTIC": "1"})
    assert job.returncode != 0
    assert "hvdliterun --elastic" in job.stderr


def test_the_others_take_over_the_data():
    """Every sample of two epochs comes once, but for the dead rank's part of its last step."""
    code = """
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
    lines = sorted(map(json.loads, run(code, 4)[0]))
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


@pytest.mark.slow
def test_data_of_unknown_length_are_shared_out_in_the_next_epoch():
    code = """
class Items:
    def __iter__(self):
        return iter(range(24))
batches = hvd.shard(Items(), batch_size=2, shuffle=False)
for epoch in range(2):
    for step, batch in enumerate(batches):
        if epoch:
            print(start, batch)
        if start == 0 and step == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        hvd.allreduce(np.ones(2))
"""
    starts = range(0, 24, 4)
    assert sorted(run(code, 3)[0]) == sorted(
        f"{rank} [{first + rank - 1}, {first + rank + 1}]" for first in starts for rank in (1, 2)
    )


def test_elastic_run_adapts_at_the_next_commit_to_which_it_returns_after_a_failure():
    code = """
state = hvd.elastic.ObjectState(step=0, total=0.0)
sizes, calls = [], []
state.register_reset_callbacks([lambda: sizes.append(hvd.size())])

@hvd.elastic.run
def train(state):
    calls.append(state.step)
    while state.step < 12:
        if start == 1 and state.step == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == 8 and len(sizes) == 1:
            raise hvd.HorovodInternalError("once")
        state.total += float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0])
        state.step += 1
        if state.step % 3 == 0:
            state.commit()

train(state)
print(start, hvd.rank(), hvd.size(), sizes, state.total, calls)
"""
    total = 4 * 3.0 + 8 * 2.0  # the step of the death is not lost
    assert run(code, 3)[0] == [
        f"{start} {rank} 2 [2, 2] {total} [0, 6, 6]" for rank, start in ((0, 0), (1, 2))
    ]


@pytest.mark.parametrize(
    ("point", "variables"),
    [
        ("meet", {}),
        pytest.param("confirm", {"HVDLITE_SHARED_MEMORY": "0"}, marks=pytest.mark.slow),
    ],
)
def test_a_failure_without_a_death_is_that_of_all_ranks(point, variables):
    code = """
@hvd.elastic.run
def train(state):
    while state.step < 9:
        state.total += float(hvd.allreduce(np.ones(1), op=hvd.Sum, name="x")[0])
        state.step += 1
        state.commit()

state = hvd.elastic.ObjectState(step=0, total=0.0)
train(state)
print(start, hvd.rank(), hvd.size(), state.step, state.total)
"""
    env = {"HVDLITE_REHEARSE": f"raise:rank=1,point={point},count=9", **variables}
    lines, stderr = run(code, 3, env=env)
    assert lines == [f"{rank} {rank} 3 9 27.0" for rank in range(3)]
    assert "has died" not in stderr
    assert "communication has failed on rank 1: RuntimeError(" in stderr


@pytest.mark.slow
def test_who_gives_up_waiting_lets_the_others_know():
    """Rank 3 dies, and rank 0 has given up waiting for rank 2 when that comes."""
    code = """
import time
failed = []

@hvd.elastic.run
def train(state):
    while state.step < 6:
        if state.step == 3 and not failed:
            failed.append(state.step)
            if start == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep([0, 0.5, 2.5][start])
        hvd.allreduce(np.ones(1))
        state.step += 1
        state.commit()

train(hvd.elastic.ObjectState(step=0))
print(start, hvd.rank(), hvd.size())
"""
    env = {"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "1"}
    assert run(code, 4, env=env)[0] == ["0 0 3", "1 1 3", "2 2 3"]


@pytest.mark.slow
def test_what_cannot_go_on_starts_again(tmp_path):
    """Rank 0 dies before it has sent what only it has, and the script has kept its number."""
    code = """
life = os.environ["HVDLITE_RESTART"]
if start == 0 and life == "0":
    os.kill(os.getpid(), signal.SIGKILL)
weights = hvd.broadcast_object(7 if start == 0 else None, root_rank=0, name="weights")
hvd.barrier()
print(life, hvd.size(), weights)
"""
    assert run(code, 3, "--restarts", 1)[0] == ["1 3 7"] * 3


@pytest.mark.slow
def test_a_rank_with_fewer_batches_does_not_hang_a_training():
    """It lives on after `hvd.shutdown()`."""
    pytest.importorskip("torch")
    code = """
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
hvd.shutdown()
time.sleep(1)
print(hvd.is_initialized())
"""
    job = hvdliterun("--elastic", "-np", 3, sys.executable, "-c", code)
    assert job.stdout.splitlines() == ["done 1"]
    assert "rank 1 shut down without submitting 'DistributedOptimizer" in job.stderr
    assert "(gradients of 'bias', 'weight')" in job.stderr
    assert re.search("^hvdliterun: rank [02] on host .* exited with code 1", job.stderr, re.M)
    assert "Exception ignored" not in job.stderr
    assert job.returncode == 1


# At each point, over a simulated MPI: test_crash_points.py.
@pytest.mark.slow
@pytest.mark.parametrize("point", ["meet", "recover"])
def test_a_process_set_is_made_of_those_that_live(point):
    """Rank 2, a member, dies while the ranks make the set."""
    code = """
some = hvd.add_process_set([1, 2, 3])
total = float(hvd.allreduce(1.0, op=hvd.Sum))
inside = hvd.allreduce(1.0, op=hvd.Sum, process_set=some) if some.included() else 0
print(start, hvd.size(), some.ranks, float(inside), total)
"""
    env = {"HVDLITE_REHEARSE": f"kill:rank=2,point={point}"}
    assert run(code, 4, env=env)[0] == [
        "0 3 [1, 2] 0.0 3.0",
        "1 3 [1, 2] 2.0 3.0",
        "3 3 [1, 2] 2.0 3.0",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("variables", [{}, {"HVDLITE_FORCE_LOCAL_SIZE": "2"}])
def test_a_process_set_is_added_while_much_is_in_flight(variables):
    """The ranks begin the operations in different orders, of which some are not everywhere yet."""
    code = """
def begin(names):
    return [hvd.allreduce_async(np.full(9_000 * (1 + name), 2.0**start), op=hvd.Sum,
                                name=str(name)) for name in names]
before = hvd.add_process_set([0, 1])
for step in range(30):
    names = sorted(range(8), reverse=bool((start + step) % 2))
    handles = begin(names[:5])
    some = hvd.add_process_set([0, 2])
    handles += begin(names[5:])
    for handle in handles:
        assert (handle.wait() == 7.0).all()
    for each, total in ((before, 3.0), (some, 5.0)):
        if each.included():
            assert hvd.allreduce(2.0**start, op=hvd.Sum, process_set=each) == total
    hvd.remove_process_set(some)
from hvdlite.engine import runtime
print(runtime.engine().supervisor.recoveries >= 31)
"""
    lines, stderr = run(code, 3, env=variables)
    assert lines == ["True"] * 3
    assert "rank" not in stderr  # only Open MPI tells of calls that a recovery has ended


@pytest.mark.slow
def test_process_sets_of_init_are_those_of_its_ranks():
    """Rank 0 dies while the first is added, so the others have other numbers for the second."""
    code = """
import os, signal
import numpy as np
import hvdlite as hvd
from hvdlite.base import observers
if os.environ["OMPI_COMM_WORLD_RANK"] == "0":  # faults are planted later
    observers.add(lambda point, *_: point == "recover" and os.kill(os.getpid(), signal.SIGKILL))
sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([1, 2]), hvd.ProcessSet([2, 3])]
hvd.init(process_sets=sets)
print([each.ranks for each in sets])
for each in sets:
    if each.included():
        assert hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=each) == len(each.ranks)
"""
    job = hvdliterun("--elastic", "-np", 4, sys.executable, "-c", code)
    assert job.returncode == 0, job.stderr
    assert job.stdout == "[[0], [0, 1], [1, 2]]\n" * 3, job.stderr
