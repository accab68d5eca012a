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


def _options(console, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["script", *arguments])
    return console.parse_options("A script.\n\nMore.")


def test_epochs_by_data_set(console, monkeypatch):
    assert _options(console, monkeypatch).epochs == 30
    assert _options(console, monkeypatch, "--data-dir", "mnist").epochs == 6
    assert _options(console, monkeypatch, "--data-dir", "mnist", "--epochs", "2").epochs == 2


def test_a_sixth_of_the_epochs_is_warm_up(console, monkeypatch):
    assert _options(console, monkeypatch).warmup_epochs == 5
    assert _options(console, monkeypatch, "--warmup-epochs", "0").warmup_epochs == 0


@pytest.mark.parametrize("option", ["--epochs", "--steps", "--batch-size"])
def test_numbers_below_one(console, monkeypatch, capsys, option):
    with pytest.raises(SystemExit) as caught:
        _options(console, monkeypatch, option, "0")
    assert caught.value.code == 2
    assert f"{option}: 0 is not above 0" in capsys.readouterr().err


def test_plan_of_whole_epochs(console, example, monkeypatch):
    options = _options(console, monkeypatch, "--epochs", "3", "--warmup-epochs", "0.5")
    plan = example("plan").Plan(options, steps_per_epoch=4)
    assert list(plan.epochs(0)) == [(0, range(4)), (1, range(4, 8)), (2, range(8, 12))]
    assert list(plan.epochs(2)) == [(2, range(8, 12))]
    assert list(plan.epochs(3)) == []
    assert plan.warmup_steps == 2
    assert [plan.decay(step) for step in (0, 3, 6)] == [1, 0.75, 0.5]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (3, [(0, range(3))]),
        (4, [(0, range(4))]),
        (5, [(0, range(4)), (1, range(4, 5))]),
        (99, [(0, range(4)), (1, range(4, 8))]),
    ],
)
def test_plan_that_stops_early(console, example, monkeypatch, steps, expected):
    options = _options(console, monkeypatch, "--epochs", "2", "--steps", str(steps))
    plan = example("plan").Plan(options, steps_per_epoch=4)
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
