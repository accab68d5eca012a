"""The example of Keras's fit, in a short form, on its default."""

import pytest

from tests.examples.scripts import train_in_turn

pytest.importorskip("keras")


@pytest.mark.slow
def test_two_processes_learn_digits(tmp_path):
    pytest.importorskip("tensorflow")
    arguments = ("--epochs", 4, "--checkpoint-dir", tmp_path)
    (result,) = train_in_turn("keras_digits.py", 2, arguments)
    assert result["framework"] == "keras on tensorflow"
    assert result["test_accuracy"] >= 0.9
    # An accuracy over 360 images, each counted once.
    assert result["test_accuracy"] * 360 == pytest.approx(round(result["test_accuracy"] * 360))
    assert [path.name for path in tmp_path.iterdir()] == ["keras_digits.keras"]
