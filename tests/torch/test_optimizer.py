import abc
import copy
import math
from collections import OrderedDict, defaultdict

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch
from torch.nn.utils.clip_grad import clip_grad_norm_ as clip_by_name

import hvdlite.torch as hvd
from hvdlite.observe import status
from tests.torch.checks import assert_identical_on_all_ranks

SPARSE = hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.05))
SAMPLES = 24  # divisible by 1, 2, 3 and 4 ranks


def make_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8), torch.nn.Linear(8, 2)
    )


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 6, generator=generator), torch.randn(
        SAMPLES, 2, generator=generator
    )


def own(data):
    share = SAMPLES // hvd.size()
    return data[hvd.rank() * share : (hvd.rank() + 1) * share]


def loss_of(model, x, y):
    return (model(x) - y).square().mean()


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(model, optimizer, steps, local=True, before_step=lambda: None):
    for step in range(steps):
        x, y = batch(step)
        if local:
            x, y = own(x), own(y)
        optimizer.zero_grad()
        loss_of(model, x, y).backward()
        before_step()
        optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Derived(abc.ABC, torch.optim.SGD):
    """An optimizer with the memory layout of its first base, like those of pytorch_optimizer."""


def relative_error(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


@ranks(2)
def test_what_is_wrapped_stays_what_it_was():
    hvd.init()
    model = make_model()
    plain = Derived(model.parameters(), lr=0.1, momentum=0.9)
    before = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    loss_of(model, *batch(0)).backward()
    plain.step()
    momentum = dict(plain.state)
    calls = []
    plain.register_step_post_hook(lambda *_: calls.append("hook"))
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    assert isinstance(optimizer, Derived)
    assert type(optimizer).__name__ == "Derived"
    assert dict(optimizer.state) == momentum
    train(model, optimizer, 2)
    before.step()
    after.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.25)
    assert calls == ["hook", "hook"]
    assert_identical_on_all_ranks(model)
    assert list(optimizer._parameter_names.values()) == [
        name for name, _ in model.named_parameters()
    ]
    state = copy.deepcopy(optimizer.state_dict())
    other = make_model()
    restored = hvd.DistributedOptimizer(sgd(other), other.named_parameters())
    restored.load_state_dict(state)
    assert restored.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(optimizer)


class Around(torch.optim.Optimizer):
    """An optimizer around another one, without torch's constructor, as timm's Lookahead is."""

    def __init__(self, inner):
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self.inner, self.defaults = inner, inner.defaults
        self.param_groups, self.state = inner.param_groups, defaultdict(dict)

    def step(self, closure=None):
        return self.inner.step(closure)


@ranks(2)
def test_an_optimizer_that_calls_no_constructor_of_torch():
    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = hvd.DistributedOptimizer(Around(torch.optim.SGD([weight], lr=1.0)))
    for step in range(1, 4):
        optimizer.zero_grad()
        (weight * (hvd.rank() + 1)).backward()
        optimizer.step()
        assert weight.item() == -1.5 * step


def check_clipping_by_each_rank(**options):
    """Check that a rank clips its own gradients."""
    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    x, y = batch(hvd.rank())
    loss_of(model, x, y).backward()
    loss_of(alone, x, y).backward()
    expected = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
    assert optimizer.clip_grad_norm_(max_norm=0.1).item() == pytest.approx(expected.item())
    for parameter, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad)
    optimizer.step()


def clip_by_torch(kind, weights):
    if kind == "value":
        torch.nn.utils.clip_grad_value_(weights, 0.25)
    else:
        generator = (weight for weight in weights)
        clip_by_name(generator, 0.25 if kind == "norm" else 1e9)


@ranks(2)
@pytest.mark.parametrize("kind", ["norm", "value", "no gradient"])
def test_torch_clips_averages(kind):
    """One rank may have no gradient; another optimizer's in flight stay as they are."""
    hvd.init()
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SGD([each], lr=1.0), [("it", each)])
        for each in (first, second)
    ]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if kind != "no gradient" or hvd.rank() == 0:
            (first * torch.tensor([3.0, 5.0 - hvd.rank()])).sum().backward()
        (second * (hvd.rank() + 1)).sum().backward()
        for weight in (first, second):
            clip_by_torch(kind, [weight])
            clip_by_torch(kind, [weight])  # these are averages already
        for optimizer in optimizers:
            optimizer.step()
        if hvd.rank() == 0:  # what a step has used, no rank exchanges: the others do not come
            assert torch.nn.utils.clip_grad_norm_([first], 1e9) > 0
    averages = [3.0, 2.5 if kind == "no gradient" else 4.5], [1.5, 1.5]
    if kind == "no gradient":
        averages[0][0] = 1.5
    for weight, average in zip((first, second), averages, strict=True):
        expected = torch.tensor(average)
        if kind == "norm":
            expected *= 0.25 / expected.norm()
        elif kind == "value":
            expected = expected.clamp(max=0.25)
        torch.testing.assert_close(weight.detach(), -3 * expected, rtol=1e-5, atol=1e-5)


@ranks(2)
@pytest.mark.parametrize("by_optimizer", [False, True])
def test_torch_clips_averages_where_only_gradients_without_hooks_come(by_optimizer):
    hvd.init()
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(8)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=1.0))
    for step in range(8):
        if by_optimizer:
            optimizer.zero_grad()
        else:
            for weight in weights:
                weight.grad = None
        sum(weights[3:4] if step == 6 else weights).mul(hvd.rank() + 1).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1e-3)
        assert norm.item() == pytest.approx(1.5 * (1 if step == 6 else math.sqrt(8)))
        optimizer.step()


@ranks(2)
@pytest.mark.parametrize("has_reset", [False, True])
def test_torch_clips_the_averages_of_gradients_that_are_assigned(has_reset):
    """As those of torch.func and torch.autograd.grad, of which no hook tells."""
    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0), [("it", weight)])
    for _ in range(3):
        if has_reset:
            weight.grad = None
        loss = (weight * torch.tensor([3.0, 5.0 - 2 * hvd.rank()])).sum()
        (weight.grad,) = torch.autograd.grad(loss, [weight])
        assert torch.nn.utils.clip_grad_norm_([weight], 1e-3).item() == pytest.approx(5.0)
        optimizer.step()
        if hvd.rank() == 0:  # those that the step has used
            assert torch.nn.utils.clip_grad_norm_([weight], 1e9) > 0


@ranks(2)
def test_torch_clips_the_averages_of_what_adds_up_still():
    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(2))
    plain = torch.optim.SGD([weight], lr=1.0)
    optimizer = hvd.DistributedOptimizer(plain, [("it", weight)], backward_passes_per_step=3)
    for limit, expected in ((0.5, 0.5), (1.75, 1.75), (10.0, 3.25)):
        (weight * (hvd.rank() + 1)).sum().backward()
        torch.nn.utils.clip_grad_value_([weight], limit)
        assert weight.grad.tolist() == [expected] * 2
    optimizer.step()
    assert weight.tolist() == [-3.25] * 2


@ranks(2)
def test_gradients_that_cannot_be_clipped():
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    x, y = batch(0)
    loss_of(model, x * (torch.inf if hvd.rank() else 1.0), y).backward()
    with pytest.raises(RuntimeError, match="non-finite"):  # on all ranks
        optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    with pytest.raises(ValueError, match=r"step\(batch_size=8\) comes after clip_grad_norm_\(\)"):
        optimizer.step(batch_size=8)
    optimizer.zero_grad()
    loss_of(model, x, y).backward()
    optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
    optimizer.step()
    assert_identical_on_all_ranks(model)
    scaler = torch.amp.GradScaler("cpu")
    optimizer.zero_grad()
    scaler.scale(loss_of(model, x, y)).backward()
    optimizer.synchronize()
    scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match=r"comes after synchronize\(\)"):
        scaler.step(optimizer, batch_size=8)


@ranks(2)
def test_step_after_synchronize_reduces_once_and_warns():
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), op=hvd.Sum)
    x, y = batch(0)
    loss_of(model, own(x), own(y)).backward()
    optimizer.synchronize()
    once = [parameter.grad.clone() for parameter in model.parameters()]
    words = r"optimizer\.step\(\) called without optimizer\.skip_synchronize\(\)"  # Horovod's
    with pytest.warns(UserWarning, match=words):
        optimizer.step()
    for parameter, gradient in zip(model.parameters(), once, strict=True):
        assert torch.equal(parameter.grad, gradient)


@ranks(2)
def test_unsynchronized_steps_and_resets_are_errors():
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    loss_of(model, *batch(0)).backward()
    with (
        pytest.raises(RuntimeError, match="have not been exchanged"),
        optimizer.skip_synchronize(),
    ):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"set_back.*after backward.*call one of these first"):
        optimizer.set_backward_passes_per_step(2)
    with pytest.raises(RuntimeError, match=r"more than 1 times before step.*requires_grad_\(False"):
        loss_of(model, *batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"zero_grad\(\) was called .* failed half-way"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"'3\.bias' was changed after backward"):
        optimizer.synchronize()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert_identical_on_all_ranks(model)


@ranks(2)
@pytest.mark.parametrize("batch_size", [None, 4])
def test_gradients_that_are_reset_without_a_step(batch_size):
    """All ranks may throw gradients away, in steps weighted by samples, too, but not one alone."""
    hvd.init()
    model, unused = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    for count in range(3):
        for _ in range(count):
            loss_of(model, *batch(7)).backward()
            optimizer.zero_grad(set_to_none=count == 1)
        loss_of(model, *map(own, batch(count))).backward()
        optimizer.step(batch_size=batch_size)
        optimizer.zero_grad()
    reference = sgd(unused)
    for count in range(3):
        reference.zero_grad()
        loss_of(unused, *batch(count)).backward()
        reference.step()
    for parameter, expected in zip(model.parameters(), unused.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)
    loss_of(model, *batch(0)).backward()
    if hvd.rank():
        optimizer.step(batch_size=batch_size)
    optimizer.zero_grad()
    loss_of(model, *batch(0)).backward()
    with pytest.raises(hvd.MismatchError, match=r"step\(\) or zero_grad\(\).*without step\(\)"):
        optimizer.step(batch_size=batch_size)


@ranks(2)
def test_what_a_compression_remembers_cannot_be_thrown_away():
    hvd.init()
    model = make_model()
    compression = hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.5))
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), compression=compression
    )
    loss_of(model, *batch(0)).backward()
    for each in (model, optimizer):
        with pytest.raises(RuntimeError, match=r"another optimizer.* freeze"):
            each.zero_grad()
    optimizer.step()
    model.zero_grad()
    train(model, optimizer, 1)
    assert_identical_on_all_ranks(model)


def unfreeze(model, optimizer):
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)


def add_group(model, optimizer):
    model.extra = torch.nn.Parameter(torch.zeros(2))
    optimizer.add_param_group({"params": [model.extra]})


def replace(model, optimizer):
    for parameters in (group["params"] for group in optimizer.param_groups):
        old, parameters[-1] = parameters[-1], torch.nn.Parameter(parameters[-1].detach().clone())
        model[3].bias = parameters[-1]
        optimizer.state.pop(old, None)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (unfreeze, r"new: '0\.weight', new: '0\.bias'"),
        (add_group, r"new: 'parameter\.6'"),
        (replace, r"new: 'parameter\.6', removed: '3\.bias'"),
    ],
)
@pytest.mark.parametrize("overlap", ["0", "1"])
@ranks(2, settings={"HVDLITE_OVERLAP": "0"})  # in a world that reads the parameter
def test_parameters_that_one_rank_alone_changes_are_an_error(
    monkeypatch, size, change, names, overlap
):
    """At once, on all ranks; and they train on when the others have done the same."""
    monkeypatch.setenv("HVDLITE_OVERLAP", overlap)
    hvd.init()
    model = make_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    train(model, optimizer, 3)
    is_last = hvd.rank() == size - 1
    if is_last:
        change(model, optimizer)
    with pytest.raises(hvd.MismatchError, match=f"none on rank.*{names} on rank {size - 1};"):
        train(model, optimizer, 1)
    if not is_last:
        change(model, optimizer)
    optimizer.zero_grad()
    train(model, optimizer, 3)
    assert_identical_on_all_ranks(model)
    other = make_model(1)  # its exchange has the same label on all ranks
    train(other, hvd.DistributedOptimizer(sgd(other), other.named_parameters()), 2)
    assert_identical_on_all_ranks(other)


@pytest.mark.parametrize("within_step", [False, True])
@pytest.mark.parametrize("compression", [hvd.Compression.none, SPARSE])
@ranks(2)
def test_parameters_that_are_replaced_are_exchanged_no_longer(within_step, compression):
    hvd.init()
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), compression
    )
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    known = []
    for step in range(12):
        x, y = batch(step)
        for each, stepped, data in (
            (model, optimizer, (own(x), own(y))),
            (reference, plain, (x, y)),
        ):
            if not within_step:
                replace(each, stepped)
            stepped.zero_grad()
            loss_of(each, *data).backward()
            if within_step:
                replace(each, stepped)  # the new one has no gradient in this step
            stepped.step()
        reducer = optimizer._reducer
        known.append((len(reducer._hooks), len(reducer.names), len(reducer._state.state_dict())))
    assert len(set(known[2:])) == 1
    assert {len(model[0].weight._post_accumulate_grad_hooks)} == {1}
    if compression is hvd.Compression.none:
        assert relative_error(flat(model), flat(reference)) < 1e-5
    assert_identical_on_all_ranks(model)


@ranks(2)
def test_an_earlier_optimizer_of_the_same_parameters():
    hvd.init()
    model = make_model()
    earlier, later = (
        hvd.DistributedOptimizer(sgd(model), model.named_parameters()) for _ in range(2)
    )
    x, y = batch(0)
    words = "DistributedOptimizer that was wrapped last.*raise backward_passes_per_step.*earlier"
    train(model, earlier, 1)
    with pytest.raises(RuntimeError, match=words):
        loss_of(model, own(x), own(y)).backward()
    with pytest.raises(RuntimeError, match="was changed after backward"):
        later.step()
    train(model, later, 2)
    assert_identical_on_all_ranks(model)


@ranks(2)
def test_a_backward_pass_that_fails_on_one_rank():
    """The others' gradients count alone, and all weights stay the same."""
    hvd.init()
    model, reference = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    plain = sgd(reference)
    fails = []

    def fail(gradient):
        if fails:
            raise ValueError("half-way")

    for step in range(6):
        x, y = batch(step)
        is_good = step % 2 == 0 or hvd.rank() == 0
        optimizer.zero_grad()
        hidden = model[0](own(x))
        hidden.register_hook(fail)
        loss = (model[1:](hidden) - own(y)).square().mean()
        if is_good:
            loss.backward()
            optimizer.step(batch_size=SAMPLES // 2)
        else:
            fails.append(step)
            with pytest.raises(ValueError, match="half-way"):
                loss.backward()
            fails.clear()
            with pytest.raises(RuntimeError, match=r"leave all .*step\(batch_size=0\)"):
                optimizer.zero_grad()
            optimizer.step(batch_size=0)
        plain.zero_grad()
        count = SAMPLES if step % 2 == 0 else SAMPLES // 2
        loss_of(reference, x[:count], y[:count]).backward()
        plain.step()
    assert relative_error(flat(model), flat(reference)) < 1e-5
    assert_identical_on_all_ranks(model)


@ranks(2)
def test_two_optimizers_in_one_program(monkeypatch):
    hvd.init()
    counted = memoryview(bytearray(16)).cast("q")
    monkeypatch.setattr(status, "_notes", lambda: counted)
    first, second = make_model(0), make_model(1)
    both = [
        hvd.DistributedOptimizer(sgd(model), model.named_parameters()) for model in (first, second)
    ]
    for step in range(3):
        x, y = batch(step)
        for optimizer in both:
            optimizer.zero_grad()
        (loss_of(first, own(x), own(y)) + loss_of(second, own(x), own(y))).backward()
        for optimizer in both if hvd.rank() == 0 else reversed(both):
            optimizer.step()
    assert_identical_on_all_ranks(first)
    assert_identical_on_all_ranks(second)
    assert counted[0] == 3


@ranks(1)
def test_refused_arguments():
    hvd.init()
    model = make_model()
    named, parameters = list(model.named_parameters()), list(model.parameters())
    no_pairs = r"named_parameters is a .* must be pairs of a name"
    unnamed = [(0, parameter) for parameter in parameters]
    for words, name, *wrong in (
        (r"expected a torch\.optim", "optimizer", model),
        ("wrap it once", "optimizer", hvd.DistributedOptimizer(sgd(model))),
        (r"more than once: 0\.weight", "named_parameters", [*named, named[0]]),
        (r"5 of the optimizer's 6 parameters", "named_parameters", named[:1]),
        (no_pairs, "named_parameters", model.parameters(), 5, model, dict(named), unnamed),
        (no_pairs, "named_parameters", [("a", 1)]),
        ("{}={!r} is not an integer", "backward_passes_per_step", 0, 1.5, "2", None, True),
        ("{}={!r} is not an integer", "num_groups", -1, 1.5, "2", None),
        ("{}={!r} is not an integer", "groups", -1, 1.5),
        ("{}={!r}", "gradient_predivide_factor", "2"),
        (r"needs op=hvd\.Average", "op", hvd.Sum),
        ("not Max", "op", hvd.Max),
        ("compression", "compression", 16),
        ("neither a number nor a list", "groups", "all"),
        (r"groups\[1\] is a Parameter", "groups", [parameters[:2], parameters[2]]),
        (
            r"groups\[0\] has a \w+ that is no parameter of",
            "groups",
            [[torch.zeros(1).requires_grad_()]],
        ),
        (r"stands in groups twice", "groups", [parameters[:2], parameters[1:3]]),
    ):
        for value in wrong:
            options = {"optimizer": sgd(model), name: value}
            if value is hvd.Sum:
                options["gradient_predivide_factor"] = 2.0
            kind = TypeError if value in (model, 16) and name != "named_parameters" else ValueError
            with pytest.raises(kind, match=words.format(name, value)):
                hvd.DistributedOptimizer(**options)


def one_weight():
    """A weight at 0, a loss whose gradient is rank + 1, and the optimizer with rate 1."""
    weight = torch.nn.Parameter(torch.zeros(1))
    return weight, lambda: (weight * (hvd.rank() + 1)).sum(), torch.optim.SGD([weight], lr=1.0)


@ranks(2)
def test_a_step_after_one_that_failed_is_exchanged():
    hvd.init()
    weight, loss, plain = one_weight()
    optimizer = hvd.DistributedOptimizer(plain)

    def failing():
        raise KeyError("no data")

    with pytest.raises(KeyError):
        optimizer.step(failing)
    loss().backward()
    optimizer.step()
    assert weight.item() == -1.5


@ranks(2)
def test_a_closure_that_synchronizes_is_exchanged_once():
    hvd.init()
    weight, loss, plain = one_weight()
    optimizer = hvd.DistributedOptimizer(plain, op=hvd.Sum)

    def closure():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_([weight], 2.0)
        return value

    with optimizer.skip_synchronize():
        optimizer.step(closure)
    assert weight.item() == pytest.approx(-2.0, rel=1e-5)


@ranks(1)
def test_grad_scaler_leaves_other_optimizers_alone():
    hvd.init()
    hvd.DistributedOptimizer(sgd(make_model()))
    weight, loss, plain = one_weight()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss()).backward()
    scaler.step(plain)
    assert weight.item() == -1.0


@ranks(2)
def test_after_a_step_that_a_grad_scaler_left_out_a_rank_without_a_gradient_takes_part(size):
    hvd.init()
    weight, loss, plain = one_weight()
    optimizer = hvd.DistributedOptimizer(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss() * (torch.inf if hvd.rank() else 1.0)).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.item() == 0.0
    weight.grad = None  # zero_grad() would begin a step, too
    if hvd.rank() == 0:
        scaler.scale(loss()).backward()
    scaler.step(optimizer)
    assert weight.item() == pytest.approx(-1 / size)


@pytest.mark.slow
@ranks(3)
def test_a_rank_outside_of_the_process_set_steps_by_itself():
    check_steps_outside_of_a_process_set()


def check_steps_outside_of_a_process_set(**options):
    hvd.init()
    some = hvd.add_process_set([0, 1])
    weight, loss, plain = one_weight()
    hvd.DistributedOptimizer(plain)  # its hooks exchange nothing any more
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("weight", weight)], process_set=some, **options
    )
    for step in range(3):
        optimizer.zero_grad()
        loss().backward()
        if step == 1 and not options:
            optimizer.synchronize()
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    # The gradient of a rank is one more than its number.
    assert weight.item() == (-9.0 if hvd.rank() == 2 else -4.5)
    assert optimizer._parameter_names == {weight: "weight"}
    if hvd.rank() == 2:
        optimizer.step(batch_size=4)
        optimizer.set_backward_passes_per_step(2)
        optimizer.average_weights()
        optimizer.consolidate_exchange_state()
        for call in (hvd.broadcast_parameters, hvd.broadcast_optimizer_state):
            what = [weight] if call is hvd.broadcast_parameters else optimizer
            with pytest.raises(ValueError, match="rank 2 is not in"):
                call(what, 0, process_set=some)
    hvd.remove_process_set(some)


@ranks(1)
def test_an_optimizer_that_cannot_be_wrapped_stays_as_it_was(size):
    hvd.init()
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    with pytest.raises(ValueError, match="process set"):
        hvd.DistributedOptimizer(optimizer, process_set=hvd.ProcessSet([0]))  # not registered
    assert type(optimizer) is torch.optim.SGD
    assert hvd.DistributedOptimizer(optimizer) is optimizer


@ranks(2)
def test_parameters_that_come_later_have_the_names_that_were_given():
    check_later_parameters(compression=hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.4)))


def check_later_parameters(**options):
    hvd.init()
    states = []
    for is_whole in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        inner = torch.optim.SGD(model[1].parameters(), lr=0.1)
        if is_whole:
            inner.add_param_group({"params": model[0].parameters()})
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
        if is_whole:
            optimizer.load_state_dict(states[0])
        else:
            optimizer.add_param_group({"params": model[0].parameters()})
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        states.append(optimizer.state_dict())
    kept = repr(states[0]["hvdlite"])
    assert kept == repr(states[1]["hvdlite"])
    assert all(repr(name) in kept for name, _ in model.named_parameters())
    optimizer.zero_grad()
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()


@ranks(2)
def test_what_was_frozen_at_first_joins_the_world_of_a_later_init():
    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(3), requires_grad=False)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
    optimizer.step()
    hvd.shutdown()
    hvd.init()
    weight.requires_grad_(True)
    (weight.sum() * 2 * hvd.rank()).backward()
    optimizer.step()
    assert weight.tolist() == [-1.0] * 3
