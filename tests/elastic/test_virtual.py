"""Virtual ranks: no number of processes, and no death, changes the weights."""

import pickle
import sys

import pytest

from tests.campaigns import kill
from tests.launch.launcher import hvdliterun

pytest.importorskip("torch")


JOBS = {
    "torch": "tests/elastic/virtual_torch.py",
    "tensorflow": "tests/elastic/virtual_tensorflow.py",
}
slow = pytest.mark.slow


def at(rank, point="exchange", step=3):
    return f"kill:rank={rank},step={step},point={point}"


# At random, on 8 processes: python -m tests.campaigns.kill --framework virtual --ranks 8
@slow
@pytest.mark.parametrize(
    ("framework", "compression", "ranks", "faults", "left"),
    [
        ("torch", "topk", 4, [at(2), "kill:rank=3,point=recover", at(1, "deliver", 5)], [0]),
        ("tensorflow", "powersgd", 3, [at(0, "meet")], [1, 2]),
    ],
)
def test_neither_a_death_nor_the_number_of_processes_changes_the_weights(
    framework, compression, ranks, faults, left, monkeypatch
):
    pytest.importorskip(framework)
    script = kill.Script(JOBS[framework], 6, 0, arguments=(compression,))
    monkeypatch.setitem(kill.SCRIPTS, "job", script)
    found = kill.run("job", faults, ranks)
    assert found.left == left
    assert found.results == kill.run("job", [], ranks=1).results


LOOPS = """
import torch
import hvdlite.torch as hvd
hvd.init(virtual_ranks=4)
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), op=hvd.Sum)
steps = 0
while steps < 4:
    value = 10.0 ** hvd.virtual_rank()
    optimizer.zero_grad()
    model(torch.full((1, 1), value)).sum().backward()
    optimizer.step()
    steps += optimizer.stepped
print("weight", model.weight.item(), flush=True)
x = torch.ones(400, 3)
model = torch.nn.Linear(3, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
sampler = hvd.ShardSampler(x, batch_size=5)
for batch in torch.utils.data.DataLoader(x, batch_sampler=sampler, num_workers=1):
    optimizer.zero_grad()
    model(batch).sum().backward()
    optimizer.step()
"""


@slow
def test_a_loop_of_ones_own_goes_on_and_batches_that_were_prefetched_are_noticed():
    """Ranks 1 and 2 die in the first loop, and rank 3 in the second one, whose steps are more."""
    job = hvdliterun(
        *("--elastic", "-np", 4, sys.executable, "-c", LOOPS),
        env={"HVDLITE_REHEARSE": f"{at(1)};{at(2, step=4)};{at(3, step=6)}"},
    )
    assert job.stdout == "weight -4444.0\n" * 2, job.stderr
    assert job.returncode != 0
    assert "use num_workers=0, or hvd.shard" in job.stderr


def run_numpy(options, arguments, env=None):
    script = "tests/elastic/virtual_numpy.py"
    job = hvdliterun(*options, sys.executable, script, *arguments, env=env)
    return job, dict(line.split() for line in job.stdout.splitlines())


@slow
def test_a_checkpoint_after_deaths_has_the_state_of_all_virtual_ranks(tmp_path):
    _, expected = run_numpy(["-np", 1], [tmp_path / "undisturbed", 6])
    file = tmp_path / "file"
    # Rank 1 dies after a step that was refused, and rank 2 while the others tell what it had.
    job, found = run_numpy(
        ["--elastic", "-np", 4],
        [file, 6, 1],
        {"HVDLITE_REHEARSE": "kill:rank=2,step=3,point=exchange,count=2"},
    )
    assert found == {"0": expected["0"], "3": expected["0"]}, job.stderr
    job, found = run_numpy(["-np", 3], [file, 6])
    assert found == dict.fromkeys("012", expected["0"]), job.stderr
    saved, weights = pickle.loads(file.read_bytes())
    del saved["virtual"]["compression"][2]
    file.write_bytes(pickle.dumps((saved, weights)))
    job, _ = run_numpy(["-np", 1], [file, 6])
    assert job.returncode != 0
    assert "the state that was loaded lacks what" in job.stderr
    assert "has kept of virtual rank 2:" in job.stderr


@slow
def test_state_that_is_lost_is_told(tmp_path):
    job, _ = run_numpy(["--elastic", "-np", 4], [tmp_path / "file", 6, 1, 2, 3])
    assert job.returncode != 0
    assert "what PowerSGD(rank=1) has kept of virtual rank 1 is lost" in job.stderr
