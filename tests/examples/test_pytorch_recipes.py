"""The larger PyTorch scripts, in a short form."""

import json

import pytest

from tests.examples.conftest import EXAMPLES
from tests.harness import run_script

pytest.importorskip("torch")

SHORT = (
    *("--image-size", 32, "--width", 4, "--synthetic", 24, "--classes", 3, "--batch-size", 4),
    *("--epochs", 2, "--warmup-epochs", 1, "--milestones", 1),
)


def run(name, size, *arguments):
    return run_script(EXAMPLES / name, size, ["--json", *map(str, arguments)], timeout=240)


def train(name, size, *arguments):
    job = run(name, size, *arguments)
    assert job.returncode == 0, job.stderr
    result = json.loads(job.stdout.splitlines()[-1])
    assert result["processes"] == size
    assert result["identical"] is True
    assert 0 <= result["test_accuracy"] <= 1
    return result


def test_resnet50_and_resuming_it(tmp_path):
    """With most of the options; an interrupted training ends like the whole one."""
    options = ("--batches-per-allreduce", 2, "--gradient-predivide-factor", 2, "--sync-batch-norm")
    whole = train("pytorch_imagenet_resnet50.py", 2, *SHORT, *options)
    assert whole["train_loss"] > 0
    folder = ("--checkpoint-dir", tmp_path)
    train("pytorch_imagenet_resnet50.py", 2, *SHORT, *options, *folder, "--epochs", 1)
    resumed = train("pytorch_imagenet_resnet50.py", 2, *SHORT, *options, *folder)
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_resnet50_with_adasum_and_16_bit_gradients():
    train("pytorch_imagenet_resnet50.py", 2, *SHORT, "--use-adasum", "--fp16-allreduce")


def test_resnet50_on_a_folder_of_images(tmp_path):
    image = pytest.importorskip("PIL.Image")
    for number in range(8):
        folder = tmp_path / ("cats", "dogs")[number % 2]
        folder.mkdir(exist_ok=True)
        image.new("RGB", (40 + number, 30), (30 * number, 0, 0)).save(folder / f"{number}.png")
        (folder / "notes.txt").write_text("no image")
    folders = ("--train-dir", tmp_path, "--val-dir", tmp_path)
    result = train("pytorch_imagenet_resnet50.py", 2, *SHORT, *folders)
    # Each of the 8 images is counted once.
    assert result["test_accuracy"] * 8 == pytest.approx(round(result["test_accuracy"] * 8))
    missing = tmp_path / "missing"
    job = run("pytorch_imagenet_resnet50.py", 2, "--train-dir", missing)
    assert job.returncode != 0
    assert f"{missing}: found no images" in job.stderr
    assert "Traceback" not in job.stderr


@pytest.mark.parametrize(("size", "epochs", "accuracy"), [(1, 2, 0.3), (2, 12, 0.85)])
def test_amp(size, epochs, accuracy):
    result = train("pytorch_amp.py", size, "--epochs", epochs)
    assert result["test_accuracy"] > accuracy
    assert result["scale"] >= 1


def test_amp_lowers_the_scale_on_all_ranks_where_gradients_overflow():
    result = train("pytorch_amp.py", 2, "--epochs", 3, "--dtype", "float16", "--init-scale", 1e9)
    assert result["scale"] < 1e8
    assert result["train_loss"] < 3


def test_compression_and_resuming_it(tmp_path):
    """What has not been sent yet comes back with the rest of the training."""
    options = ("--epochs", 6)
    whole = train("pytorch_compression.py", 2, *options, "--checkpoint-dir", tmp_path / "whole")
    assert whole["test_accuracy"] > 0.8
    folder = ("--checkpoint-dir", tmp_path / "parts")
    # 23 steps make an epoch: this one is interrupted in the fourth.
    train("pytorch_compression.py", 2, *options, *folder, "--steps", 70)
    resumed = train("pytorch_compression.py", 2, *options, *folder)
    assert resumed["weights_sha256"] == whole["weights_sha256"]


def test_compression_of_low_rank():
    options = ("--compression", "powersgd", "--epochs", 6)
    assert train("pytorch_compression.py", 3, *options)["test_accuracy"] > 0.8
