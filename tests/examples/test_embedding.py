"""The recommender whose tables are spread over the ranks."""

import json

import pytest

from tests.examples.conftest import EXAMPLES
from tests.harness import run_script

pytest.importorskip("torch")


def _train(size, *arguments):
    """Train with one global batch size and learning rate, whatever the number of ranks."""
    options = ["--json", "--batch-size", str(60 // size), "--lr", str(0.02 / size), *arguments]
    job = run_script(EXAMPLES / "pytorch_embedding.py", size, options, timeout=120)
    assert job.returncode == 0, job.stderr
    return json.loads(job.stdout.splitlines()[-1])


def test_it_learns_the_same_on_any_number_of_ranks(tmp_path):
    alone = _train(1, "--epochs", "8", "--warmup-epochs", "0")
    assert alone["rows_here"] == 300
    assert alone["test_loss"] < 0.6  # of a variance of 1
    for size in (2, 3):
        spread = _train(
            size, "--epochs", "8", "--warmup-epochs", "0", "--checkpoint-dir", str(tmp_path)
        )
        assert spread["identical"]
        assert spread["rows_here"] < 300 / size + 2
        assert spread["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-3)
        assert spread["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-3)
    assert (tmp_path / "pytorch_embedding.npz").exists()
