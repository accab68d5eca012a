import contextlib
import io
import json
from types import SimpleNamespace

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


def test_plan_of_whole_epochs(console, monkeypatch):
    options = _options(console, monkeypatch, "--epochs", "3", "--warmup-epochs", "0.5")
    plan = console.Plan(options, steps_per_epoch=4)
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
def test_plan_that_stops_early(console, monkeypatch, steps, expected):
    options = _options(console, monkeypatch, "--epochs", "2", "--steps", str(steps))
    plan = console.Plan(options, steps_per_epoch=4)
    assert list(plan.epochs(0)) == expected
    # The learning rate is the one of a training that goes on, so that it can be resumed.
    assert plan.decay(4) == 0.5


def test_report_is_one_line_of_json(console, capsys):
    rank_0, rank_1 = (SimpleNamespace(rank=lambda rank=rank: rank) for rank in range(2))
    result = {"framework": "x", "identical": True, "images_per_s": None, "train_loss": 0.5}
    console.report(rank_0, True, result)
    assert json.loads(capsys.readouterr().out) == result
    console.report(rank_0, False, result)
    assert capsys.readouterr().out == (
        "framework: x, identical: True, images_per_s: None, train_loss: 0.5\n"
    )
    console.report(rank_1, True, result)
    assert capsys.readouterr().out == ""


@ranks(1, 2)
def test_images_per_s(size):
    console = _import_console()
    hvdlite.init()
    assert console.images_per_s(hvdlite, []) is None
    assert console.images_per_s(hvdlite, [(10, 2.0)]) == 5 * size
    assert console.images_per_s(hvdlite, [(10, 60.0), (10, 2.0), (10, 3.0)]) == 4 * size


@ranks(1, 2)
def test_equal_weights_have_one_hash():
    console = _import_console()
    hvdlite.init()
    weights = [np.arange(6.0).reshape(2, 3).T, np.zeros((), np.float32)]
    sha256, identical = console.compare_weights(hvdlite, weights)
    assert identical
    assert len(sha256) == 64
    others = [np.arange(6.0).reshape(2, 3), weights[1]]
    assert sha256 != console.compare_weights(hvdlite, others)[0]


@ranks(2, 3)
def test_different_weights_end_the_job():
    console = _import_console()
    hvdlite.init()
    rank = hvdlite.rank()
    _, identical = console.compare_weights(hvdlite, [np.float32([1, rank == 1])])
    assert identical is False
    code, errors = _exit(lambda: console.report(hvdlite, False, {"identical": identical}))
    assert code == 1
    assert errors.count("\n") == (rank == 0)
    assert ("the ranks have different weights" in errors) == (rank == 0)


@ranks(2)
def test_data_that_one_rank_cannot_read(tmp_path):
    console = _import_console()
    hvdlite.init()
    rank = hvdlite.rank()
    if rank == 0:
        idx.write(tmp_path)
    folder = tmp_path if rank == 0 else tmp_path / "nowhere"
    code, errors = _exit(lambda: console.load_data(hvdlite, folder))
    assert code == 1
    assert errors.count("\n") == (rank == 0)
    assert (f"{tmp_path / 'nowhere'}: found nothing" in errors) == (rank == 0)
    assert ("(on rank 1)" in errors) == (rank == 0)


def _import_console():
    """Import the module on a rank, out of reach for fixtures of the test's process."""
    import importlib
    import sys

    from tests.examples.conftest import EXAMPLES

    if str(EXAMPLES) not in sys.path:
        sys.path.append(str(EXAMPLES))
    return importlib.import_module("console")


def _exit(function):
    """Return the exit code with which a call ends the process, and its standard error."""
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as caught:
        function()
    return caught.value.code, errors.getvalue()
