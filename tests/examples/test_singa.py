"""SINGA's CNN: both ways to start it, its five modes, their bytes, and both frameworks."""

import contextlib
import importlib
import io
import re
import subprocess
import sys

import pytest

import hvdlite as hvd
from tests.benchmarks import traffic
from tests.examples.conftest import EXAMPLES, IMAGES, few_digits
from tests.harness import mpirun, ranks

pytest.importorskip("torch")

SCRIPT = EXAMPLES / "singa_cnn.py"
STEPS = 3  # with batches of 64 on two ranks
AGREEMENT = 800  # and the evaluation: bytes, as if all were the steps'
WEIGHTS = 520 + 25_050 + 400_500 + 5_010  # of both convolutions and both linear layers
EPOCH = re.compile(
    r"Starting Epoch 0:\n"
    r"Training loss = (\d+\.\d{6}), training accuracy = ([01]\.\d{6})\n"
    r"Evaluation accuracy = ([01]\.\d{6}), Elapsed Time = \d+\.\d{6}s\n"
)


def train(script, *arguments):
    """Train for an epoch; return what is printed and the bytes that a rank sends per step."""
    import singa_common

    hvd.shutdown()
    options = singa_common.parse_options("", ["--epochs", "1", *arguments])
    with traffic.counting() as counter, contextlib.redirect_stdout(io.StringIO()) as printed:
        script.train(options)
    return printed.getvalue(), counter.sent() / STEPS


@pytest.mark.slow
@ranks(2)
def test_an_epoch_is_that_of_one_process_with_the_union_of_the_batches(monkeypatch):
    import torch
    from torch.nn.functional import cross_entropy

    few_digits(monkeypatch)
    import digits
    import singa_cnn

    printed, sent = train(singa_cnn)
    if hvd.rank() == 1:
        assert printed == ""
        return
    # Two ranks send half of their gradients, and receive half of the sums.
    assert 4 * WEIGHTS <= sent < 4 * WEIGHTS + AGREEMENT

    images, labels = singa_cnn.to_tensors(digits.load().train, torch.device("cpu"))
    torch.manual_seed(1)
    model = singa_cnn.make_model()
    assert sum(parameter.numel() for parameter in model.parameters()) == WEIGHTS
    optimizer = torch.optim.SGD(model.parameters(), lr=0.005, momentum=0.9, weight_decay=1e-5)
    loss_sum, correct = 0.0, 0
    for batch in hvd.Sharding(IMAGES, 128, rank=0, size=1, seed=1).indices(0):
        optimizer.zero_grad()
        output = model(images[batch])
        loss = cross_entropy(output, labels[batch])
        loss.backward()
        optimizer.step()
        loss_sum += loss.item()
        correct += (output.argmax(dim=1) == labels[batch]).sum().item()
    loss, accuracy, _ = map(float, EPOCH.fullmatch(printed).groups())
    # As SINGA prints it: the sum over all steps and ranks.
    assert loss == pytest.approx(2 * loss_sum, rel=1e-4)
    assert accuracy == pytest.approx(correct / IMAGES, abs=2 / IMAGES)


# The least and the most bytes of a step, the ranks' agreement left out.
MODES = {
    "fp16": (2 * WEIGHTS, 2 * WEIGHTS),
    # The network is smaller than a part: all of it after each step and before the evaluation.
    "partialUpdate": (4 * WEIGHTS * (1 + 1 / STEPS), 4 * WEIGHTS * (1 + 1 / STEPS)),
    # Of each entry its position and its value.
    "sparseTopK": (8 * WEIGHTS / 20, 8 * WEIGHTS / 20),
    "sparseThreshold": (1, 4 * WEIGHTS / 20),
}


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_modes(monkeypatch, mode):
    few_digits(monkeypatch)
    import singa_cnn

    printed, sent = train(singa_cnn, "--dist-option", mode)
    least, most = MODES[mode]
    assert least <= sent <= most + AGREEMENT
    assert bool(EPOCH.fullmatch(printed)) == (hvd.rank() == 0)


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("mode", ["partialUpdate", "sparseTopK"])
def test_modes_of_tensorflow(monkeypatch, mode):
    """They send what those of PyTorch send."""
    pytest.importorskip("tensorflow")
    few_digits(monkeypatch)
    import singa_cnn_tensorflow

    assert singa_cnn_tensorflow.make_model().count_params() == WEIGHTS
    printed, sent = train(singa_cnn_tensorflow, "--dist-option", mode)
    least, most = MODES[mode]
    assert least <= sent <= most + AGREEMENT
    assert bool(EPOCH.fullmatch(printed)) == (hvd.rank() == 0)


@ranks(2)
def test_mistakes_end_the_script_with_one_line(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import singa_cnn
    import singa_common

    def start(*arguments):
        options = singa_common.parse_options("", list(map(str, arguments)))
        singa_common.start(singa_cnn.train, options)

    def end(*arguments):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as caught:
            start(*arguments)
        # Python prints a text that a script exits with.
        code = caught.value.code
        return code if isinstance(code, str) else errors.getvalue().splitlines()[-1:]

    assert "none: found nothing, expected a folder" in end(
        "--spawn", 2, "--data-dir", tmp_path / "none"
    )
    (line,) = end("--dist-option", "sparseTopK", "--spars", 2)
    assert "--spars: ratio=2.0 is not a number above 0" in line
    (line,) = end("--epochs", 0)
    assert "--epochs: found 0, expected 1 or more" in line

    for script, framework in (("singa_cnn", "torch"), ("singa_cnn_tensorflow", "tensorflow")):
        monkeypatch.delitem(sys.modules, script, raising=False)
        monkeypatch.setitem(sys.modules, framework, None)
        with pytest.raises(SystemExit, match=rf"run `pip install 'hvdlite\[{framework}\]'`"):
            importlib.import_module(script)


@pytest.mark.slow
def test_spawn():
    job = subprocess.run(
        [sys.executable, SCRIPT, "--spawn", "2", "--epochs", "1"],
        env=mpirun.environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert job.returncode == 0, job.stderr
    lines = job.stdout.splitlines(keepends=True)
    assert all(line.startswith("[0] ") for line in lines), "only rank 0 reports"
    assert EPOCH.fullmatch("".join(line.removeprefix("[0] ") for line in lines))
