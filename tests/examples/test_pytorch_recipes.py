"""The larger PyTorch scripts, in a short form."""

import pytest

from tests.examples.scripts import run, train, train_in_turn

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SHORT = (
    *("--image-size", 32, "--width", 4, "--synthetic", 24, "--classes", 3, "--batch-size", 4),
    *("--epochs", 2, "--warmup-epochs", 1, "--milestones", 1),
)


def test_resnet50_and_resuming_it(tmp_path):
    """With most of the options; an interrupted training ends like the whole one."""
    script = "pytorch_imagenet_resnet50.py"
    options = (
        *(*SHORT, "--batches-per-allreduce", 2, "--gradient-predivide-factor", 2),
        "--sync-batch-norm",
    )
    folder = ("--checkpoint-dir", tmp_path)
    adasum = (*SHORT, "--use-adasum", "--fp16-allreduce")
    whole, _, resumed, other = train_in_turn(
        script, 2, options, (*options, *folder, "--epochs", 1), (*options, *folder), adasum
    )
    assert whole["train_loss"] > 0
    assert 0 <= whole["test_accuracy"] <= 1
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert other["weights_sha256"] != whole["weights_sha256"]


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


def test_amp():
    overflow = ("--epochs", 3, "--dtype", "float16", "--init-scale", 1e9)
    trained, scaled = train_in_turn("pytorch_amp.py", 2, ("--epochs", 12), overflow)
    assert trained["test_accuracy"] > 0.85
    assert trained["scale"] >= 1
    # Where gradients overflow, all ranks lower the scale.
    assert scaled["scale"] < 1e8
    assert scaled["train_loss"] < 3


def test_compression_and_resuming_it(tmp_path):
    """A resumed training sends the rest that the first part had not sent yet."""
    script, options = "pytorch_compression.py", ("--epochs", 4)
    folder = ("--checkpoint-dir", tmp_path / "parts")
    # 23 steps make an epoch: the second training is interrupted in the third.
    whole, _, resumed, other = train_in_turn(
        script,
        2,
        (*options, "--checkpoint-dir", tmp_path / "whole"),
        (*options, *folder, "--steps", 50),
        (*options, *folder),
        (*options, "--compression", "powersgd"),
    )
    assert whole["test_accuracy"] > 0.8
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert other["test_accuracy"] > 0.8
