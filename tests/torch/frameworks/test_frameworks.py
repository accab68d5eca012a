"""Frameworks on torch.distributed or Horovod train on hvdlite, started by ``hvdliterun``.

`make test-frameworks` installs them and runs this file; elsewhere it is skipped. Weights are
compared across ranks, to the bit, and with one process that trains on the data of all.
"""

import sys
from importlib.util import find_spec

import pytest

from tests.launch.launcher import hvdliterun

pytest.importorskip("torch")

import torch

from tests.torch.frameworks.toys.common import BATCH, RATE, STEPS, Net, Samples

pytestmark = pytest.mark.timeout(300)
GROUP = "hvdlite.torch.distributed.ProcessGroup"
WAYS = {
    "accelerate": ["plain", "sums"],
    "lightning": ["ddp", "fully_shard"],
    "transformers": ["once", "again"],
    "ignite": ["horovod"],
}


def alone(summed=1):
    """The weights that one process has after training on all data."""
    model, samples = Net(), Samples()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    count = 2 * BATCH * summed
    for step in range(STEPS // summed):
        part = slice(step * count, (step + 1) * count)
        optimizer.zero_grad()
        model(samples.inputs[part], samples.labels[part])["loss"].backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("framework", "way"), [(each, way) for each, ways in WAYS.items() for way in ways]
)
def test_it_trains_as_one_process_on_all_data(framework, way, tmp_path):
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed: make test-frameworks")
    toy = f"tests.torch.frameworks.toys.with_{framework}"
    arguments = (sys.executable, "-m", toy, tmp_path, way)
    flag = "--horovod" if way == "horovod" else "--torch"
    result = hvdliterun(flag, "-np", 2, *arguments, env={"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr
    first, second = (torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2))
    group = "horovod.torch.optimizer" if way == "horovod" else GROUP
    assert first["group"] == second["group"] == group
    expected = alone(2 if way == "sums" else 1)
    assert first["weights"].keys() == second["weights"].keys() == expected.keys()
    for name, each in first["weights"].items():
        assert torch.equal(each, second["weights"][name]), name
        torch.testing.assert_close(each, expected[name])
