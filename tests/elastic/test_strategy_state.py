"""The state of compressions and schedules, when ranks die and spares come in."""

import copy
import json
import sys

import numpy as np
import pytest

from tests.launch.launcher import hvdliterun

pytest.importorskip("torch")


# As in strategies_torch.py: steps, those between two commits and between two exchanges of weights,
# the step in which process 1 dies, and the one in which all fail.
STEPS, COMMIT, EVERY, DEATH, FAILURE = 14, 3, 4, 7, 8
OUTER_RATE, OUTER_MOMENTUM = 0.5, 0.5


class Rank:
    """One rank's weights, and what its schedule and compression remember."""

    def __init__(self):
        self.weight = np.zeros(4)
        self.anchor = None
        self.momentum = np.zeros(4)
        self.residual = np.zeros(4)

    def step(self, process, step):
        if self.anchor is None:
            self.anchor = self.weight
        self.weight = self.weight - np.arange(1, 5) * (process + 1) * (step + 1)

    def send(self, is_top):
        """Return what it sends of its change, and remember the rest."""
        change = self.anchor - self.weight + self.residual
        chosen = np.arange(4) == np.argmax(np.abs(change)) if is_top else np.full(4, True)
        self.residual = np.where(chosen, 0.0, change)
        return np.where(chosen, change, 0.0)

    def take_over(self, other):
        """Take everything but residuals."""
        self.weight, self.anchor, self.momentum = other.weight, other.anchor, other.momentum


def exchange(kind, ranks):
    """Let the ranks average their weights, or make an outer step with Nesterov momentum."""
    mean = sum(rank.weight for rank in ranks) / len(ranks)
    change = sum(rank.send(kind == "diloco, topk") for rank in ranks) / len(ranks)
    for rank in ranks:
        if kind == "local":
            rank.weight = mean
        else:
            rank.momentum = OUTER_MOMENTUM * rank.momentum + change
            step = OUTER_RATE * (change + OUTER_MOMENTUM * rank.momentum)
            rank.weight = rank.anchor - step
        rank.anchor = None


def simulate(kind):
    """Return the weights of each process that is left, by its number."""
    ranks = {process: Rank() for process in range(3)}
    kept, kept_step, step = ranks, 0, 0
    while step < STEPS:
        if step == DEATH:
            ranks.pop(1, None)
        if step == FAILURE and 3 not in ranks:
            ranks, step = {process: kept[process] for process in ranks}, kept_step
            ranks[3] = Rank()  # the spare
            for rank in ranks.values():
                rank.take_over(ranks[0])
        for process, rank in ranks.items():
            rank.step(process, step)
        step += 1
        if step % EVERY == 0:
            exchange(kind, [*ranks.values()])
        if step % COMMIT == 0:
            kept, kept_step = copy.deepcopy(ranks), step
    return {process: rank.weight for process, rank in ranks.items()}


@pytest.mark.slow
def test_every_compression_and_schedule_goes_on():
    """The job itself checks in each step that nothing is lost, see there."""
    job = hvdliterun(
        *("--elastic", "-np", 3, "--spares", 1),
        *(sys.executable, "tests/elastic/strategies_torch.py"),
    )
    assert job.returncode == 0, job.stderr
    found = sorted(json.loads(line) for line in job.stdout.splitlines())
    assert [each[:2] for each in found] == [[0, [0, 6]], [2, [0, 6]], [3, [6]]]
    digests = found[0][2]
    assert len(set(digests.values())) == len(digests)
    for each in found:
        assert each[2] == digests
        assert each[4] == [0.5 ** (STEPS // 5)]
    for kind in found[0][3]:
        expected = simulate(kind)
        for process, *_, weights, _ in found:
            np.testing.assert_allclose(weights[kind], expected[process], 1e-12, err_msg=kind)
    assert "UserWarning" not in job.stderr
