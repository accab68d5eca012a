"""The example of Keras's fit, in a short form, on PyTorch."""

import pytest

from tests.examples.scripts import train_in_turn

pytest.importorskip("keras")


@pytest.mark.slow
def test_two_processes_learn_digits(tmp_path):
    pytest.importorskip("torch")
    arguments = ("--epochs", 4, "--checkpoint-dir", tmp_path)
    env = {"KERAS_BACKEND": "torch"}
    (result,) = train_in_turn("keras_digits.py", 2, arguments, env=env)
    assert result["framework"] == "keras on torch"
    assert result["test_accuracy"] >= 0.9
    # An accuracy over 360 images, each counted once.
    assert result["test_accuracy"] * 360 == pytest.approx(round(result["test_accuracy"] * 360))
    assert [path.name for path in tmp_path.iterdir()] == ["keras_digits.keras"]
