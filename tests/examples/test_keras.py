"""The example of Keras's fit, in a short form, on both frameworks."""

import importlib.util
import json

import pytest

from tests.examples.conftest import EXAMPLES
from tests.harness import run_script

pytest.importorskip("keras")


@pytest.mark.parametrize("backend", ["tensorflow", "torch"])
def test_two_processes_learn_digits(backend, tmp_path):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    arguments = ["--json", "--epochs", "6", "--checkpoint-dir", tmp_path]
    script = EXAMPLES / "keras_digits.py"
    job = run_script(script, 2, arguments, env={"KERAS_BACKEND": backend}, timeout=300)
    assert job.returncode == 0, job.stderr
    result = json.loads(job.stdout.splitlines()[-1])
    assert job.stdout.count('"weights_sha256"') == 1, "only rank 0 reports"
    assert result["framework"] == f"keras on {backend}"
    assert result["processes"] == 2
    assert result["identical"] is True
    assert result["test_accuracy"] >= 0.95
    # An accuracy over 360 images, each counted once.
    assert result["test_accuracy"] * 360 == pytest.approx(round(result["test_accuracy"] * 360))
    assert [path.name for path in tmp_path.iterdir()] == ["keras_digits.keras"]
