"""Gluon's LeNet: losses of both kinds, devices and frameworks give whole batches' gradients."""

import contextlib
import io
import re

import pytest

import hvdlite as hvd
from tests.benchmarks import traffic
from tests.examples.conftest import IMAGES, few_digits
from tests.harness import ranks

pytest.importorskip("torch")

WEIGHTS = 156 + 880 + 48_120 + 10_164 + 850  # of two convolutions and three linear layers
EPOCH = re.compile(
    r"epoch 1: training accuracy ([01]\.\d{4}), test accuracy ([01]\.\d{4}), \d+\.\d\d s\n"
)


def train(script, *arguments):
    """Train for an epoch; return what is printed, the network, and the bytes of a step."""
    import gluon_common

    hvd.shutdown()
    add_more = getattr(script, "add_devices", lambda parser: None)
    options = gluon_common.parse_options("", ["--epochs", "1", *arguments], add_more)
    with traffic.counting() as counter, contextlib.redirect_stdout(io.StringIO()) as printed:
        model = script.train(options)
    return printed.getvalue(), model, counter.sent() / len(whole_batches())


def whole_batches():
    """Return the positions of the images of an epoch's batches, all ranks' together."""
    # The last batches are no multiple of ranks and devices: their parts differ in size.
    batches = list(hvd.Sharding(IMAGES, 128, rank=0, size=1, seed=1).indices(0))
    assert len(batches[-1]) % 4
    return batches


def check_printed(printed, correct):
    if hvd.rank() == 1:
        assert printed == ""
    else:
        accuracy, _ = map(float, EPOCH.fullmatch(printed).groups())
        assert accuracy == pytest.approx(correct / IMAGES, abs=1e-4)


def use_float64(monkeypatch, digits):
    """Let images be float64: in float32, a ReLU near 0 tells a batch from the sum of its parts."""
    resize = digits.resize
    monkeypatch.setattr(digits, "resize", lambda *arguments: resize(*arguments).astype("float64"))


@pytest.mark.slow
@ranks(2)
def test_an_epoch_is_that_of_one_process_with_whole_batches(monkeypatch):
    import torch
    from torch.nn.functional import cross_entropy

    few_digits(monkeypatch)
    import digits
    import gluon_lenet

    use_float64(monkeypatch, digits)
    torch.set_default_dtype(torch.float64)
    try:
        images, labels = gluon_lenet.to_tensors(digits.load().train)
        torch.manual_seed(1)
        model = gluon_lenet.make_lenet()
        assert sum(parameter.numel() for parameter in model.parameters()) == WEIGHTS
        optimizer = torch.optim.SGD(model.parameters(), lr=0.04)
        correct = 0
        for batch in whole_batches():
            optimizer.zero_grad()
            output = model(images[batch])
            cross_entropy(output, labels[batch]).backward()
            optimizer.step()
            correct += (output.argmax(dim=1) == labels[batch]).sum().item()

        for arguments in (["--loss", "sum"], ["--loss", "mean", "--devices", "cpu", "cpu"]):
            printed, trained, _ = train(gluon_lenet, *arguments)
            for found, expected in zip(trained.parameters(), model.parameters(), strict=True):
                assert (found - expected).abs().max() < 1e-12, arguments
            check_printed(printed, correct)
    finally:
        torch.set_default_dtype(torch.float32)

    for arguments, message in (
        (["--batch-size", "5"], "--batch-size 5: found 2 ranks of 1 devices, expected a multiple"),
        (["--devices", "gone"], "--devices: .*gone.*; expected some such as cpu or cuda:0"),
    ):
        errors = io.StringIO()
        with contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as end:
            train(gluon_lenet, *arguments)
        assert end.value.code == 1
        assert hvd.rank() == 1 or re.fullmatch(f"{message}.*\n", errors.getvalue())


@pytest.mark.slow
@ranks(2)
def test_an_epoch_of_tensorflow_is_that_of_one_process_with_whole_batches(monkeypatch):
    keras = pytest.importorskip("keras")
    tf = pytest.importorskip("tensorflow")
    few_digits(monkeypatch)
    import digits
    import gluon_lenet_tensorflow as script

    use_float64(monkeypatch, digits)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # another test may have used Keras
    try:
        images, labels = script.to_arrays(digits.load().train)
        keras.utils.set_random_seed(1)
        model = script.make_lenet()
        assert model.count_params() == WEIGHTS
        optimizer = keras.optimizers.SGD(0.04)
        correct = 0
        for batch in whole_batches():
            with tf.GradientTape() as tape:
                outputs = model(images[batch])
                losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels[batch], outputs)
                loss = tf.reduce_mean(losses)
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )
            correct += (outputs.numpy().argmax(axis=1) == labels[batch]).sum()

        for loss in ("sum", "mean"):
            printed, trained, _ = train(script, "--loss", loss)
            for found, expected in zip(trained.get_weights(), model.get_weights(), strict=True):
                assert abs(found - expected).max() < 1e-12, loss
            check_printed(printed, correct)
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")
    _, _, sent = train(script, "--compression", "1bit")
    assert WEIGHTS / 8 <= sent < WEIGHTS / 8 + 1500


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
