"""Common patterns around a training step, against one process on all ranks' data."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch
from torch.utils.checkpoint import checkpoint

import hvdlite.torch as hvd
from tests.torch.checks import assert_close, assert_identical_on_all_ranks

STEPS = 5
SAMPLES = 12  # divisible by 1, 2, 3 and 4


def make_model(seed=0, inputs=4, outputs=2):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 8), torch.nn.Tanh(), torch.nn.Linear(8, outputs)
    ).double()


def make_deep_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(16)]).double()


def data_of(step, columns=4):
    """All ranks' samples of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, columns, generator=generator, dtype=torch.float64)


def own(whole):
    share = SAMPLES // hvd.size()
    return whole[hvd.rank() * share :][:share]


def everything(whole):
    return whole


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, **options)


def distribute(optimizer, **options):
    return hvd.DistributedOptimizer(optimizer, **options)


def check_alike(train, *models_of, tolerance=1e-11):
    """Run ``train(models, wrap, part)`` here with all ranks, and alone on everything."""
    hvd.init()
    mine, alone = ([make() for make in models_of] for _ in range(2))
    train(mine, distribute, own)
    train(alone, lambda optimizer, **options: optimizer, everything)
    for model, reference in zip(mine, alone, strict=True):
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(parameter, expected, tolerance)
        assert_identical_on_all_ranks(model)


@ranks(2)
@pytest.mark.parametrize("way", ["freezes", "optimizer", "module", "passes"])
def test_two_networks_that_train_against_each_other(way):
    """A GAN: the generator's pass leaves gradients in the critic, which are thrown away."""

    def train(models, wrap, part):
        generator, critic = models
        passes = 2 if way == "passes" else 1
        optimizers = [wrap(sgd(generator)), wrap(sgd(critic), backward_passes_per_step=passes)]
        is_reset = optimizers[1] if way in ("freezes", "optimizer") else critic
        for step in range(STEPS):
            real, noise = part(data_of(step, 2)), part(data_of(100 + step))
            is_reset.zero_grad()
            losses = critic(generator(noise).detach()).mean(), -critic(real).mean()
            for loss in losses if passes == 2 else [sum(losses)]:
                loss.backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            critic.requires_grad_(way != "freezes")
            (critic(generator(noise)) - 1).square().mean().backward()
            critic.requires_grad_(True)
            optimizers[0].step()

    check_alike(train, make_model, lambda: make_model(1, 2, 1))


@ranks(2)
def test_two_optimizers_on_one_model_one_of_them_every_other_step():
    def train(models, wrap, part):
        (model,) = models
        first = wrap(torch.optim.SGD(model[0].parameters(), lr=0.1))
        second = wrap(torch.optim.Adam(model[2].parameters(), lr=0.01), backward_passes_per_step=2)
        for step in range(6):
            first.zero_grad()
            model(part(data_of(step))).square().mean().backward()
            first.step()
            if step % 2:
                second.step()
                second.zero_grad()

    check_alike(train, make_model)


class Tied(torch.nn.Module):
    """The first and the last layer have one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.inside = torch.nn.Linear(4, 6, bias=False, dtype=torch.float64)
        self.outside = torch.nn.Linear(6, 4, dtype=torch.float64)
        self.again = torch.nn.Linear(4, 6, bias=False, dtype=torch.float64)
        self.again.weight = self.inside.weight

    def forward(self, x):
        return self.again(self.outside(torch.tanh(self.inside(x))))


class Scaled(torch.autograd.Function):
    """Returns gradients that are views of one tensor."""

    @staticmethod
    def forward(ctx, x, scale, shift):
        ctx.save_for_backward(x, scale)
        return x * scale + shift

    @staticmethod
    def backward(ctx, upstream):
        x, scale = ctx.saved_tensors
        both = torch.stack([(upstream * x).sum(0), upstream.sum(0)])
        return upstream * scale, both[0], both[1]


class ScaledLayer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.full((4,), 2.0, dtype=torch.float64))
        self.shift = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, x):
        return Scaled.apply(x, self.scale, self.shift)


def square(model, x):
    return model(x).square().mean()


def penalised(model, x):
    """The second derivative is one of the step's gradients."""
    output = model(x.requires_grad_())
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.square().mean() + slope.square().sum(1).mean()


def checkpointed(reentrant, model, x):
    hidden = checkpoint(model[:2], x.requires_grad_(), use_reentrant=reentrant)
    return checkpoint(model[2], hidden, use_reentrant=reentrant).square().mean()


def averaged(model, x):
    """A differentiable collective, beside the exchange."""
    loss = square(model, x)
    return loss if len(x) == SAMPLES else hvd.allreduce(loss, op=hvd.Average) * 1.0


@ranks(2)
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(
    ("make", "loss_of"),
    [
        (Tied, square),
        # They share a version, too: one seems to be changed when the other is added to.
        (ScaledLayer, square),
        (make_model, penalised),
        (make_model, partial(checkpointed, False)),
        (make_model, partial(checkpointed, True)),
        (make_model, averaged),
    ],
)
def test_gradients_that_come_in_other_ways(make, loss_of, passes):
    def train(models, wrap, part):
        (model,) = models
        optimizer = wrap(sgd(model), backward_passes_per_step=passes)
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(passes):
                loss_of(model, part(data_of(passes * step + number)).clone()).backward()
            optimizer.step()

    check_alike(train, make)


@ranks(2)
@pytest.mark.parametrize("numel", [8, 70_000])
def test_gradients_that_cannot_be_written_to(numel):
    """They repeat one element, or are lazily conjugated, and a program keeps them."""

    def make():
        model = torch.nn.Module()
        model.real = torch.nn.Parameter(torch.ones(numel, dtype=torch.float64))
        model.complex = torch.nn.Parameter(torch.full((numel,), 1 + 2j, dtype=torch.complex128))
        return model

    def train(models, wrap, part):
        (model,) = models
        optimizer, kept = wrap(sgd(model)), []
        for step in range(STEPS):
            mean = part(data_of(step)).mean()
            optimizer.zero_grad()
            (model.complex.conj() * torch.complex(mean, 2 * mean)).real.sum().backward()
            model.real.grad = mean.expand(numel)
            kept.append(model.complex.grad.view(numel))
            assert model.complex.grad.is_conj()
            optimizer.step()
        model.complex = torch.nn.Parameter(torch.view_as_real(model.complex.detach()))

    check_alike(train, make)


@ranks(2)
def test_steps_in_the_backward_pass():
    """A parameter's hook takes its step, and frees its gradient before the next one is made."""

    def train(models, wrap, part):
        (model,) = models
        optimizers = {each: wrap(torch.optim.Adam([each])) for each in model.parameters()}

        def step(parameter):
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(step)
        for number in range(STEPS):
            square(model, part(data_of(number))).backward()

    check_alike(train, make_model)


@ranks(2)
def test_a_step_in_the_hook_of_the_last_gradient():
    """At the end of the pass the averages are there, which belong to no other step."""

    def train(models, wrap, part):
        (model,) = models
        optimizer = wrap(sgd(model))

        next(model.parameters()).register_post_accumulate_grad_hook(lambda _: optimizer.step())
        for number in range(STEPS):
            optimizer.zero_grad()
            square(model, part(data_of(number))).backward()

    check_alike(train, make_deep_model)


@ranks(2)
def test_backward_passes_in_two_threads_at_once():
    def train(models, wrap, part):
        parameters = [each for model in models for each in model.parameters()]
        for trial in range(8):  # the threads meet in the first steps of an optimizer
            optimizer = wrap(torch.optim.SGD(parameters, lr=0.01))
            for step in range(3):
                optimizer.zero_grad()
                losses = [square(model, part(data_of(trial + step))) for model in models]
                with ThreadPoolExecutor() as threads:
                    for done in [threads.submit(loss.backward) for loss in losses]:
                        done.result()
                optimizer.step()

    check_alike(train, make_deep_model, make_deep_model)


@ranks(2)
def test_backward_with_create_graph():
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model))
    for step in range(5):
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*create_graph=True")
            square(model, own(data_of(step))).backward(create_graph=True)
        optimizer.step()
        assert_identical_on_all_ranks(model)


def drop(parameter):
    parameter.grad = None


@ranks(2)
@pytest.mark.parametrize("width", [3, 2**14, 2**19], ids=["small", "large", "lent"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("good_steps", [0, 2])
def test_a_hook_that_drops_the_gradient_is_noticed(width, before, good_steps):
    hvd.init()
    model = torch.nn.Linear(width, 1)
    armed = []

    def may_drop(parameter):
        if armed:
            drop(parameter)

    if before:
        model.weight.register_post_accumulate_grad_hook(may_drop)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    if not before:
        model.weight.register_post_accumulate_grad_hook(may_drop)

    def train():
        optimizer.zero_grad()
        model(torch.ones(2, width)).sum().backward()
        optimizer.step()

    for _ in range(good_steps):
        train()
    armed.append(True)
    with pytest.raises(RuntimeError, match=r"'weight' was (computed, but|changed after backward)"):
        train()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="after").item() == 2


@ranks(2)
@pytest.mark.parametrize("converted_after", [0, 1, 4])
def test_a_model_that_is_converted_after_wrapping(converted_after):
    hvd.init()
    check_conversion(converted_after)


def check_conversion(converted_after, **options):
    """Check a conversion to float64, in which averages of float32 would be found."""
    model, reference = make_model().float(), make_model().float()
    optimizer = distribute(sgd(model), named_parameters=model.named_parameters(), **options)
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    for group in optimizer.param_groups:
        group.update(lr=0.1, momentum=0.0)
    for step in range(7):
        if step == converted_after:
            model.double()
            reference.double()
            with torch.no_grad():  # from here on to the last bit
                for own_one, other in zip(model.parameters(), reference.parameters(), strict=True):
                    own_one.copy_(other)
        for each, stepped, share in ((model, optimizer, own), (reference, plain, everything)):
            stepped.zero_grad()
            data = share(data_of(step)).to(next(each.parameters()).dtype)
            each(data).square().mean().backward()
            stepped.step()
    for own_one, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert_close(own_one, other, 1e-13)
        assert own_one.grad.dtype is torch.float64


@ranks(2, 3)
def test_a_conversion_of_some_parameters_leaves_the_sums_of_others_alone(size):
    hvd.init()
    early, late = (torch.nn.Parameter(torch.zeros(3, dtype=torch.float32)) for _ in range(2))
    optimizer = torch.optim.SGD([early, late.requires_grad_(False)], lr=1.0)
    distribute(optimizer, op=hvd.Sum)
    for step in range(4):
        late.requires_grad_(step > 0)  # so it is exchanged apart
        if step == 2:
            early.data, early.grad = early.data.double(), None
        optimizer.zero_grad()
        ((early + late) * (1 + hvd.rank())).sum().backward()
        optimizer.step()
    total = sum(range(1, size + 1))
    assert torch.equal(early, torch.full((3,), -4.0 * total, dtype=torch.float64))
    assert torch.equal(late, torch.full((3,), -3.0 * total))


@ranks(2)
def test_a_model_that_is_converted_on_one_rank_only():
    hvd.init()
    check_conversion_on_one_rank(0)
    check_conversion_on_one_rank(4)


def check_conversion_on_one_rank(steps, **options):
    model = make_model().float()
    optimizer = distribute(sgd(model), named_parameters=model.named_parameters(), **options)

    def step(model=model, optimizer=optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 4, dtype=next(model.parameters()).dtype)).sum().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    if hvd.rank() == 1:
        model.double()
        optimizer.state.clear()
    words = r"'0\.weight'.* float32.* on rank 0, .*float64.* on rank 1"
    with pytest.raises(hvd.HorovodInternalError, match=words):
        step()


@ranks(2)
def test_a_parameter_of_another_shape_after_wrapping():
    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(4))
    optimizer = distribute(torch.optim.SGD([weight], lr=1.0))

    def step(shape):
        weight.data = torch.zeros(shape)
        weight.grad = None
        (weight * (1 + hvd.rank())).sum().backward()
        optimizer.step()

    for shape in ((4,), (4,), (2, 2), (1,), (2, 3), (3, 2)):
        step(shape)
        assert torch.equal(weight, torch.full(shape, -1.5))
    with pytest.raises(hvd.MismatchError, match=r"\[3, 2\] on rank 0, .*\[2, 3\] on rank 1"):
        step((3, 2) if hvd.rank() == 0 else (2, 3))


class Float32Gradient(torch.autograd.Function):
    """The sum of x * weight, whose gradient is x in float32, whatever the weight's dtype is."""

    @staticmethod
    def forward(context, weight, x):
        context.x = x
        return (weight.float() * x).sum()

    @staticmethod
    def backward(context, gradient):
        return gradient * context.x, None


@ranks(2)
@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="it came with torch 2.10")
@pytest.mark.parametrize("numel", [3, 2**19])
def test_gradients_of_another_dtype_than_their_weight(numel, size):
    hvd.init()
    weights = [torch.nn.Parameter(torch.ones(numel, dtype=torch.bfloat16)) for _ in range(2)]
    always, at_times = weights
    optimizer = distribute(torch.optim.SGD(weights, lr=1.0))
    for step in range(5):
        if step == 1:  # a conversion, as model.double() is
            always.grad_dtype = at_times.grad_dtype = torch.float32
        if step > 0:
            optimizer.zero_grad()
            x = torch.full((numel,), 1 + (hvd.rank() + 1) * 2**-15)
            loss = Float32Gradient.apply(always, x)
            if hvd.rank() == 0:
                loss = loss + Float32Gradient.apply(at_times, x)
            loss.backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
        if step > 0:
            assert (always.grad.dtype, at_times.grad.dtype) == (torch.float32, torch.float32)
            assert_close(always.grad, torch.full((numel,), 1 + (size + 1) * 2**-16), 1e-7)
            assert_close(at_times.grad, torch.full((numel,), (1 + 2**-15) / size), 1e-7)
    at_times.grad_dtype = None
    with pytest.raises(ValueError, match=r"grad_dtype of 'parameter\.1' is None.*torch.bfloat16"):
        distribute(torch.optim.SGD(weights, lr=1.0))
