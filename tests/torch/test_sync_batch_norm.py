import copy
import pickle

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from tests.torch.checks import assert_close

CHANNELS = 3


def batch_of(rank, shape, seed=0, dtype=torch.float64):
    """A rank's part: ranks have 2, 3, 4, ... samples, unlike each other and far from 0."""
    generator = torch.Generator().manual_seed(10 * seed + rank)
    values = torch.randn(2 + rank, CHANNELS, *shape, generator=generator, dtype=torch.float64)
    return (values * (rank + 1) + 5 * rank).to(dtype)


def weights_of(output, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(output.shape[1:], generator=generator, dtype=torch.float64)


def loss_of(output):
    """Every element counts differently, in any batch alike."""
    return (output.double().square() * weights_of(output)).sum()


def plain_layer(dtype=torch.float64, **options):
    layer = torch.nn.BatchNorm2d(CHANNELS, dtype=dtype, **options)
    layer._check_input_dim = lambda input: None  # for inputs of any number of axes
    if layer.affine:
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([0.5, 1.0, -2.0]))
            layer.bias.copy_(torch.tensor([1.0, 0.0, 3.0]))
    return layer


def sync_layer(plain, **options):
    layer = hvd.SyncBatchNorm(CHANNELS, dtype=torch.float64, **options)
    layer.load_state_dict(plain.state_dict())
    return layer


@ranks(3)
@pytest.mark.parametrize("shape", [(), (4,), (3, 2), (2, 2, 2)], ids=str)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"eps": 0.1}],
    ids=str,
)
def test_equals_one_process_on_the_whole_batch(size, shape, options):
    hvd.init()
    plain = plain_layer(**options)
    layer = sync_layer(plain, **options)
    for step in range(2):
        parts = [batch_of(rank, shape, step).requires_grad_() for rank in range(size)]
        whole = plain(torch.cat(parts))
        loss_of(whole).backward()
        mine = batch_of(hvd.rank(), shape, step).requires_grad_()
        output = layer(mine)
        loss_of(output).backward()
        assert_close(output, whole.split([len(part) for part in parts])[hvd.rank()])
        assert_close(mine.grad, parts[hvd.rank()].grad)
    if layer.affine:  # local sums, which an optimizer would average
        for own, one in zip(layer.parameters(), plain.parameters(), strict=True):
            assert_close(hvd.allreduce(own.grad, op=hvd.Sum), one.grad)
    assert layer.state_dict().keys() == plain.state_dict().keys()
    for own, one in zip(layer.buffers(), plain.buffers(), strict=True):
        assert_close(own, one)
    layer.eval(), plain.eval()
    mine = batch_of(hvd.rank(), shape, 7)
    assert_close(layer(mine), plain(mine))


@ranks(1)
def test_alone_it_is_torchs_to_the_bit():
    hvd.init()
    for dtype in (torch.float32, torch.bfloat16):
        plain = torch.nn.BatchNorm1d(CHANNELS)
        layer = hvd.SyncBatchNorm(CHANNELS)
        found = []
        for each in (plain, layer):
            data = batch_of(0, (4,), dtype=dtype).requires_grad_()
            output = each(data)
            loss_of(output).backward()
            found.append((output, data.grad, each.weight.grad, *each.buffers()))
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("half_weights", [False, True])
def test_narrow_types_have_statistics_in_float32(size, dtype, half_weights):
    hvd.init()
    parts = [batch_of(rank, (5,), dtype=dtype).double() for rank in range(size)]
    for part in parts:
        part.requires_grad_()
    plain = plain_layer()
    whole = plain(torch.cat(parts))
    loss_of(whole).backward()
    layer = hvd.SyncBatchNorm(CHANNELS, dtype=dtype if half_weights else torch.float32)
    layer.load_state_dict(plain.state_dict())
    layer.running_mean, layer.running_var = layer.running_mean.float(), layer.running_var.float()
    layer.running_mean.zero_(), layer.running_var.fill_(1.0)
    mine = batch_of(hvd.rank(), (5,), dtype=dtype).requires_grad_()
    output = layer(mine)
    assert output.dtype == dtype
    loss_of(output).backward()
    tolerance = 10 * torch.finfo(dtype).eps
    expected = whole.split([len(part) for part in parts])[hvd.rank()]
    assert_close(output.double(), expected, tolerance)
    scale = max(part.grad.abs().max() for part in parts).item()
    assert_close(mine.grad.double() / scale, parts[hvd.rank()].grad / scale, tolerance)
    assert_close(layer.running_mean.double(), plain.running_mean, 1e-5)
    assert_close(layer.running_var.double(), plain.running_var, 1e-5)


@ranks(2)
def test_variance_of_values_far_from_zero(size):
    """A difference of sums of squares would have no digit of it right."""
    hvd.init()
    values = 1e6 + torch.arange(float(4 * size)).reshape(-1, 1)
    layer = hvd.SyncBatchNorm(1, momentum=1.0)
    layer(values[4 * hvd.rank() : 4 * hvd.rank() + 4])
    assert_close(layer.running_var, values.double().var(0).float(), 1e-6)


@ranks(3)
def test_an_empty_batch_on_one_rank_or_on_all(size):
    hvd.init()
    last = size - 1
    parts = [batch_of(rank, (2,)) for rank in range(last)]
    parts.append(torch.zeros(0, CHANNELS, 2, dtype=torch.float64))
    plain = plain_layer()
    layer = sync_layer(plain)
    whole = torch.cat(parts).requires_grad_()
    loss_of(plain(whole)).backward()
    mine = parts[hvd.rank()].clone().requires_grad_()
    output = layer(mine)
    assert output.shape == mine.shape
    loss_of(output).backward()
    assert_close(mine.grad, whole.grad.split([len(part) for part in parts])[hvd.rank()])
    assert_close(layer.running_var, plain.running_var)
    before = layer.running_mean.clone()
    assert layer(mine[:0]).shape == (0, CHANNELS, 2)
    assert torch.equal(layer.running_mean, before)


@ranks(1, 2)
def test_one_value_per_channel_is_refused_on_all_ranks(size):
    hvd.init()
    layer = hvd.SyncBatchNorm(CHANNELS)
    mine = torch.zeros(1 if hvd.rank() == 0 else 0, CHANNELS)
    with pytest.raises(ValueError, match="one value per channel on all ranks"):
        layer(mine)
    if size > 1:  # one here and one there do
        layer(torch.full((1, CHANNELS), float(hvd.rank())))
    for shape in ((4,), (4, CHANNELS + 1)):
        with pytest.raises(ValueError, match=rf"rank {hvd.rank()}: expected an input of shape"):
            layer(torch.zeros(shape))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@ranks(2)
def test_layers_of_different_widths_are_an_error_on_all_ranks(size):
    hvd.init()
    width = 2 + hvd.rank()
    with pytest.raises(hvd.HorovodInternalError, match="the shape after its first axis"):
        hvd.SyncBatchNorm(width)(torch.ones(2, width))
    hvd.SyncBatchNorm(2)(torch.full((2, 2), float(hvd.rank())))


@ranks(2)
def test_training_before_init_is_an_error():
    hvd.shutdown()
    layer = hvd.SyncBatchNorm(CHANNELS)
    with pytest.raises(ValueError, match="not been initialized"):
        layer(torch.zeros(2, CHANNELS))
    assert layer.eval()(torch.zeros(2, CHANNELS)).shape == (2, CHANNELS)
    hvd.init()


def small_network():
    torch.manual_seed(0)
    shared = torch.nn.BatchNorm2d(4)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        shared,
        torch.nn.ReLU(),
        torch.nn.Sequential(torch.nn.Conv2d(4, 4, 1), shared, torch.nn.BatchNorm2d(4)),
        torch.nn.Flatten(),
        torch.nn.Linear(4 * 6 * 6, 5),
        torch.nn.BatchNorm1d(5, affine=False),
    ).double()


@ranks(2)
def test_a_converted_network_trains_like_one_process(size):
    hvd.init()
    reference = small_network()
    model = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(reference))
    plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters()
    )
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        whole = torch.randn(4 * size, 3, 8, 8, generator=generator, dtype=torch.float64)
        for each, data, wrapped in (
            (reference, whole, plain),
            (model, whole[4 * hvd.rank() :][:4], optimizer),
        ):
            wrapped.zero_grad()
            (each(data) - 1).pow(3).abs().mean().backward()
            wrapped.step()
    for name, tensor in model.state_dict().items():
        assert_close(tensor, reference.state_dict()[name])


@ranks(1)
def test_conversion_keeps_what_a_layer_has():
    hvd.init()
    model = small_network()
    calls = []
    model[1].register_forward_hook(lambda *_: calls.append("hook"))
    model[6].eval()
    before = dict(model.named_parameters())
    converted = hvd.convert_sync_batchnorm(model)
    assert converted is model
    kinds = [type(model[n]) for n in (1, 6)] + [type(model[3][n]) for n in (1, 2)]
    assert kinds == [hvd.SyncBatchNorm] * 4
    assert model[1] is model[3][1]
    assert not model[6].training
    assert model[1].training
    assert dict(model.named_parameters()).keys() == before.keys()
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    model(torch.ones(2, 3, 8, 8, dtype=torch.float64))
    assert calls == ["hook", "hook"]
    alone = torch.nn.BatchNorm1d(2)
    assert isinstance(hvd.convert_sync_batchnorm(alone), hvd.SyncBatchNorm)
    with pytest.raises(ValueError, match="run the model once"):
        hvd.convert_sync_batchnorm(torch.nn.LazyBatchNorm1d())
    other = torch.nn.ModuleDict({"a": alone, "b": alone})
    hvd.convert_sync_batchnorm(other)
    assert other["a"] is other["b"]


@ranks(3)
def test_a_copy_of_a_layer_has_its_process_set():
    """Momentum encoders and averaged weights are copies; torch.save pickles whole models."""
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    whole = sync_layer(plain_layer())
    part = sync_layer(plain_layer(), process_set=pair)
    inputs = batch_of(hvd.rank(), (2, 2))
    expected = whole(inputs)
    for layer in (copy.deepcopy(whole), pickle.loads(pickle.dumps(whole))):
        assert torch.equal(layer(inputs), expected)
    if pair.included():
        assert torch.equal(copy.deepcopy(part)(inputs), part(inputs))
    hvd.remove_process_set(pair)
    part.process_set = hvd.add_process_set(pickle.loads(pickle.dumps(pair)))
    assert part.process_set.ranks == [0, 2]


@ranks(2)
def test_second_derivatives_are_refused():
    hvd.init()
    layer = sync_layer(plain_layer())
    data = batch_of(hvd.rank(), (2,)).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(layer(data)), data, create_graph=True)
    assert gradient.requires_grad
    with pytest.raises(NotImplementedError, match="has no second derivative"):
        gradient.square().sum().backward()


@ranks(2)
def test_checkpointed_layers():
    """Their forward pass runs twice, the second time during the backward pass."""
    hvd.init()
    plain = plain_layer()
    layer = sync_layer(plain)
    mine = batch_of(hvd.rank(), (2,)).requires_grad_()
    again = mine.detach().clone().requires_grad_()
    loss_of(layer(mine)).backward()
    loss_of(torch.utils.checkpoint.checkpoint(layer, again, use_reentrant=False)).backward()
    assert_close(again.grad, mine.grad)
