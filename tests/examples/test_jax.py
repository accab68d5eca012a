"""The script for JAX, whose wrapper of an optimizer lies in it."""

import pytest

from tests.docs import pages
from tests.examples.conftest import EXAMPLES
from tests.examples.scripts import train, train_in_turn


@pytest.fixture
def jax():
    pytest.importorskip("optax")
    return pytest.importorskip("jax")


def test_the_page_shows_the_functions_that_the_script_has():
    page = (pages.ROOT / "docs" / "guides" / "jax.md").read_text()
    source = (EXAMPLES / "jax_optax.py").read_text()
    assert source[source.index("def distributed(") : source.index("\n\ndef main(")] in page


def _options(size):
    """Return options of one global batch size and learning rate, whatever the number of ranks."""
    return ("--batch-size", 48 // size, "--lr", 0.06 / size, "--warmup-epochs", 0, "--epochs", 2)


@pytest.mark.slow
@pytest.mark.usefixtures("jax")
def test_two_ranks_learn_what_one_does_with_the_whole_batch(tmp_path):
    """In steps whose batches differ in size, too; the weights are the same bits on both ranks."""
    alone = train("jax_optax.py", 1, *_options(1))
    assert alone["test_accuracy"] > 0.85
    folder = ("--checkpoint-dir", tmp_path)
    # 30 steps make an epoch: the second training is interrupted in the second.
    spread, _, resumed = train_in_turn(
        "jax_optax.py",
        2,
        _options(2),
        (*_options(2), *folder, "--steps", 40),
        (*_options(2), *folder),
    )
    assert spread["train_loss"] == pytest.approx(alone["train_loss"], rel=1e-4)
    assert spread["test_accuracy"] == pytest.approx(alone["test_accuracy"], abs=0.01)
    assert (tmp_path / "jax_optax.npz").exists()
    assert resumed["weights_sha256"] == spread["weights_sha256"]
