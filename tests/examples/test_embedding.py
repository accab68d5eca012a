"""The recommender whose tables are spread over the ranks."""

import pytest

from tests.examples.scripts import train

pytest.importorskip("torch")
pytestmark = pytest.mark.slow


def _train(size, *arguments):
    """Train with one global batch size and learning rate, whatever the number of ranks."""
    options = ("--batch-size", 60 // size, "--lr", 0.02 / size, "--epochs", 8, "--warmup-epochs", 0)
    return train("pytorch_embedding.py", size, *options, *arguments)


def test_it_learns_the_same_on_any_number_of_ranks(tmp_path):
    alone = _train(1)
    assert alone["rows_here"] == 300
    assert alone["test_loss"] < 0.6  # of a variance of 1
    spread = _train(2, "--checkpoint-dir", tmp_path)
    assert spread["rows_here"] < 300 / 2 + 2
    assert spread["test_loss"] == pytest.approx(alone["test_loss"], rel=1e-3)
    assert spread["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-3)
    assert (tmp_path / "pytorch_embedding.npz").exists()
