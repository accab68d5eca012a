"""Gluon's LeNet: both kinds of loss and several devices give the gradients of whole batches."""

import contextlib
import io
import re

import pytest

import hvdlite as hvd
from tests.examples.conftest import EXAMPLES
from tests.harness import ranks

pytest.importorskip("torch")

EPOCH = re.compile(
    r"epoch 1: training accuracy ([01]\.\d{4}), test accuracy ([01]\.\d{4}), \d+\.\d\d s\n"
)


def train(script, *arguments):
    """Train for an epoch; return what is printed and the weights, in one tensor."""
    import torch

    hvd.shutdown()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        model = script.train(script.parse_options(["--epochs", "1", *arguments]))
    return printed.getvalue(), torch.nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.slow
@ranks(2)
def test_an_epoch_is_that_of_one_process_with_whole_batches(monkeypatch):
    import torch
    from torch.nn.functional import cross_entropy

    monkeypatch.syspath_prepend(str(EXAMPLES))
    import digits
    import gluon_lenet

    images, labels = gluon_lenet.to_tensors(digits.load().train)
    torch.manual_seed(1)
    model = gluon_lenet.make_lenet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    correct = 0
    # The last batches are no multiple of ranks and devices: their parts differ in size.
    batches = list(hvd.Sharding(1437, 128, rank=0, size=1, seed=1).indices(0))
    assert len(batches[-1]) % 4
    for batch in batches:
        optimizer.zero_grad()
        output = model(images[batch])
        cross_entropy(output, labels[batch]).backward()
        optimizer.step()
        correct += (output.argmax(dim=1) == labels[batch]).sum().item()
    expected = torch.nn.utils.parameters_to_vector(model.parameters()).detach()

    for arguments in (["--loss", "sum"], ["--loss", "mean", "--devices", "cpu", "cpu"]):
        printed, weights = train(gluon_lenet, *arguments)
        assert (weights - expected).abs().max() < 1e-4, arguments
        if hvd.rank() == 1:
            assert printed == ""
        else:
            accuracy, _ = map(float, EPOCH.fullmatch(printed).groups())
            assert accuracy == pytest.approx(correct / 1437, abs=2 / 1437)

    for arguments, message in (
        (["--batch-size", "5"], "--batch-size 5: found 2 ranks of 1 devices, expected a multiple"),
        (["--devices", "gone"], "--devices: .*gone.*; expected some such as cpu or cuda:0"),
    ):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as end:
            train(gluon_lenet, *arguments)
        assert end.value.code == 1
        assert hvd.rank() == 1 or re.fullmatch(f"{message}.*\n", errors.getvalue())


def test_a_batch_is_split_and_an_accuracy_accumulates(example):
    torch = pytest.importorskip("torch")
    script = example("gluon_lenet")
    batch, two = torch.arange(5), [torch.device("cpu"), torch.device("meta")]
    first, second = script.split_and_load(batch, two, even_split=False)
    assert first.tolist() == [0, 1, 2]
    assert (second.device.type, len(second)) == ("meta", 2)
    with pytest.raises(ValueError, match="5 is not divisible by 2 devices"):
        script.split_and_load(batch, two)
    with pytest.raises(ValueError, match="1 cannot give each of 2 devices one"):
        script.split_and_load(batch[:1], two, even_split=False)


def test_gradients_of_replicas_are_added_before_hooks_see_them(example):
    torch = pytest.importorskip("torch")
    script = example("gluon_lenet")
    model = torch.nn.Linear(1, 1, bias=False)
    seen = []
    model.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.item()))
    replicas = script.replicate(model, [torch.device("cpu")] * 2)
    (replicas[0](torch.tensor([[2.0]])) + replicas[1](torch.tensor([[3.0]]))).sum().backward()
    assert seen == [5.0]
