import contextlib
import io
import json

import numpy as np
import pytest

import hvdlite
from tests.examples import idx
from tests.harness import ranks


@pytest.fixture
def console(example):
    return example("console")


@pytest.fixture
def options(console, monkeypatch):
    """Parse options of the examples."""

    def parse(*arguments):
        monkeypatch.setattr("sys.argv", ["script", *arguments])
        return console.parse_options("A script.\n\nMore.")

    return parse


def test_epochs_by_data_set_of_which_a_sixth_is_warm_up(options):
    for arguments, epochs, warm_up in (
        ((), 30, 5),
        (("--data-dir", "mnist"), 6, 1),
        (("--data-dir", "mnist", "--epochs", "2", "--warmup-epochs", "0"), 2, 0),
    ):
        found = options(*arguments)
        assert (found.epochs, found.warmup_epochs) == (epochs, warm_up)


def test_numbers_below_one(options, capsys):
    for option in ("--epochs", "--steps", "--batch-size"):
        with pytest.raises(SystemExit) as caught:
            options(option, "0")
        assert caught.value.code == 2
        assert f"{option}: 0 is not above 0" in capsys.readouterr().err


def test_plan_of_whole_epochs(options, example):
    plan = example("plan").Plan(
        options("--epochs", "3", "--warmup-epochs", "0.5"), steps_per_epoch=4
    )
    assert list(plan.epochs(0)) == [(0, range(4)), (1, range(4, 8)), (2, range(8, 12))]
    assert list(plan.epochs(2)) == [(2, range(8, 12))]
    assert list(plan.epochs(3)) == []
    assert plan.warmup_steps == 2
    assert [plan.decay(step) for step in (0, 3, 6)] == [1, 0.75, 0.5]


def test_plan_that_stops_early(options, example):
    for steps, expected in (
        (3, [(0, range(3))]),
        (4, [(0, range(4))]),
        (5, [(0, range(4)), (1, range(4, 5))]),
        (99, [(0, range(4)), (1, range(4, 8))]),
    ):
        plan = example("plan").Plan(options("--epochs", "2", "--steps", str(steps)), 4)
        assert list(plan.epochs(0)) == expected
        # The learning rate is the one of a training that goes on, so that it can be resumed.
        assert plan.decay(4) == 0.5


@ranks(1, 2)
def test_report_is_one_line_of_rank_0():
    console = _import("console")
    hvdlite.init()
    result = {"framework": "x", "images_per_s": None, "train_loss": 0.5}
    weights = [np.arange(6.0).reshape(2, 3).T, np.zeros((), np.float32)]
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        console.report(hvdlite, True, result, weights)
        console.report(hvdlite, False, result, [weights[0].T, weights[1]])
    lines = text.getvalue().splitlines()
    if hvdlite.rank():
        assert lines == []
        return
    found = json.loads(lines[0])
    assert found == {**result, "identical": True, "weights_sha256": found["weights_sha256"]}
    assert len(found["weights_sha256"]) == 64
    assert lines[1].startswith("framework: x, images_per_s: None, train_loss: 0.5, weights_sha256")
    assert lines[1].endswith(", identical: True")
    assert found["weights_sha256"] not in lines[1]  # other weights have another hash


@ranks(2, 3)
def test_different_weights_end_the_job():
    console = _import("console")
    hvdlite.init()
    rank = hvdlite.rank()
    weights = [np.float32([1, rank == 1])]
    code, errors = _exit(lambda: console.report(hvdlite, False, {}, weights))
    assert code == 1
    assert errors.count("\n") == (rank == 0)
    assert ("the ranks have different weights" in errors) == (rank == 0)


@ranks(2)
def test_data_that_one_rank_cannot_read(tmp_path):
    failures = _import("failures")
    hvdlite.init()
    rank = hvdlite.rank()
    if rank == 0:
        idx.write(tmp_path)
    folder = tmp_path if rank == 0 else tmp_path / "nowhere"
    code, errors = _exit(lambda: failures.load_data(hvdlite, folder))
    assert code == 1
    assert errors.count("\n") == (rank == 0)
    assert (f"{tmp_path / 'nowhere'}: found nothing" in errors) == (rank == 0)
    assert ("(on rank 1)" in errors) == (rank == 0)


def _import(module):
    """Import a module on a rank, out of reach for fixtures of the test's process."""
    import importlib
    import sys

    from tests.examples.conftest import EXAMPLES

    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module(module)


def _exit(function):
    """Return the exit code with which a call ends the process, and its standard error."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as caught:
        function()
    return caught.value.code, errors.getvalue()
