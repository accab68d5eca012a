import copy

import pytest

from tests.harness import ranks
from tests.logs import logged

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.torch.scheduled import tensor_weights
from tests.keras import exchanges
from tests.torch import test_memory as memory
from tests.torch import test_optimizer as training
from tests.torch import test_replicas as replicas
from tests.torch import test_training_patterns as patterns
from tests.torch.checks import assert_close, assert_identical_on_all_ranks


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2), torch.nn.Linear(6, 2)
    ).double()


#: By hand: 96, then 32, 16, 12, 2 and 2 elements. The last layer is rank 0's alone, see `loss_of`.
PARTS = [["0.weight"], ["0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]]


def loss_of(model, rank, step):
    """Rank 0 alone uses the last layer, and nobody in step 1."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, y = (torch.randn(5, n, generator=generator, dtype=torch.float64) for n in (6, 2))
    output = model[:3](x)
    if rank == 0 and step != 1:
        output = output + model[3](x)
    return (output - y).square().mean()


def closure_of(model, optimizer, rank, step):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, rank, step)
        loss.backward()
        return loss

    return closure


CLIP = 0.5


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.05)


def wrapped(schedule, make=sgd, **options):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        make(model.parameters()), model.named_parameters(), schedule=schedule, **options
    )
    return model, optimizer


def train(model, optimizer, steps, first=0):
    for step in range(first, steps):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()


class Simulation:
    """All ranks in one process, by torch's own optimizers."""

    def __init__(self, size, make=sgd):
        self.models = [make_model() for _ in range(size)]
        self.optimizers = [make(model.parameters()) for model in self.models]
        # Of the outer step, too, which is one of SGD with Nesterov momentum.
        self.shared = make_model()
        self.outer = torch.optim.SGD(self.shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def step(self, step):
        """Make the step of each rank on its own gradients."""
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.step(closure_of(model, optimizer, rank, step))

    def clipped_step(self, step, share):
        for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            closure_of(model, optimizer, rank, step)()
        if share:
            for group in zip(*(model.parameters() for model in self.models), strict=True):
                own = [parameter.grad for parameter in group if parameter.grad is not None]
                for parameter in group:
                    parameter.grad = sum(own) / len(group) if own else None
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()

    @torch.no_grad()
    def average(self, names=None, moments=()):
        for name, _ in self.models[0].named_parameters():
            if names is None or name in names:
                group = [model.get_parameter(name) for model in self.models]
                self.average_tensors(group)
                for key in moments:
                    states = [o.state[p] for o, p in zip(self.optimizers, group, strict=True)]
                    self.average_tensors([state[key] for state in states])

    @staticmethod
    def average_tensors(group):
        mean = sum(tensor.clone() for tensor in group) / len(group)
        for tensor in group:
            tensor.copy_(mean)

    @torch.no_grad()
    def outer_step(self):
        for name, shared in self.shared.named_parameters():
            own = [model.get_parameter(name) for model in self.models]
            shared.grad = shared - sum(own) / len(own)
        self.outer.step()
        for model in self.models:
            model.load_state_dict(self.shared.state_dict())


def assert_as(model, expected, tolerance=1e-10):
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert_close(own, other, tolerance)


@ranks(1, 3)
def test_local_sgd_after_shared_steps_with_clipping(size):
    hvd.init()
    model, optimizer = wrapped(hvd.Schedule.LocalSGD(every=2, start=2))
    with exchanges() as count:
        for step in range(7):
            optimizer.zero_grad()
            loss_of(model, hvd.rank(), step).backward()
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            with optimizer.skip_synchronize():
                optimizer.step()
            if step in (1, 3, 5):
                assert_identical_on_all_ranks(model)
            if step == 1:
                count.clear()
    # Two averages, each in one bucket, and no gradients.
    assert sum("bucket" in name for name in count) == (0 if size == 1 else 2)
    simulation = Simulation(size)
    for step in range(7):
        simulation.clipped_step(step, share=step < 2)
        if step in (3, 5):
            simulation.average()
    assert_as(model, simulation.models[hvd.rank()])


@ranks(2)
def test_diloco(size):
    hvd.init()
    model, optimizer = wrapped(hvd.Schedule.DiLoCo(every=2), adam)
    train(model, optimizer, 6)
    simulation = Simulation(size, adam)
    for step in range(6):
        simulation.step(step)
        if step % 2:
            simulation.outer_step()
    assert_as(model, simulation.models[hvd.rank()])
    assert_identical_on_all_ranks(model)


@ranks(2)
@pytest.mark.parametrize("momentum", [False, True])
def test_partial_synchronisation(size, momentum):
    hvd.init()

    def make(parameters):
        return torch.optim.SGD(list(parameters)[:4], lr=0.1, momentum=0.9)

    model, optimizer = wrapped(hvd.Schedule.PartialSync(parts=2, momentum=momentum), make)
    train(model, optimizer, 5)
    simulation = Simulation(size, make)
    for step in range(5):
        simulation.step(step)
        simulation.average(PARTS[step % 2][:3], ["momentum_buffer"] if momentum else [])
    assert_as(model, simulation.models[hvd.rank()])
    state = simulation.optimizers[hvd.rank()].state
    for own, other in zip(
        list(model.parameters())[:4],
        list(simulation.models[hvd.rank()].parameters())[:4],
        strict=True,
    ):
        assert_close(optimizer.state[own]["momentum_buffer"], state[other]["momentum_buffer"])


@ranks(2)
def test_momentum_that_only_one_rank_has_is_refused_everywhere():
    hvd.init()
    model, optimizer = wrapped(hvd.Schedule.PartialSync(parts=1, momentum=True))
    with pytest.raises(hvd.MismatchError, match=r"momentum_buffer"):
        train(model, optimizer, 1)


@ranks(2)
def test_outer_gradients_may_be_compressed(size):
    hvd.init()
    feedback = hvd.Compression.ErrorFeedback(hvd.Compression.fp16)
    model, optimizer = wrapped(hvd.Schedule.DiLoCo(every=2), compression=feedback)
    train(model, optimizer, 4)
    assert_identical_on_all_ranks(model)
    exact, of_exact = wrapped(hvd.Schedule.DiLoCo(every=2))
    train(exact, of_exact, 4)
    assert_as(model, exact, 1e-3)
    assert not torch.equal(model[0].weight, exact[0].weight)


@ranks(2)
def test_accumulation_is_that_of_backward_passes():
    hvd.init()
    results = []
    for options in ({"schedule": hvd.Schedule.Accumulate(2)}, {"backward_passes_per_step": 2}):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model.parameters()), **options)
        assert not hasattr(optimizer, "average_weights")
        with exchanges() as count:
            for step in range(4):
                loss_of(model, hvd.rank(), step).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
        results.append((len(count), model[0].weight.detach()))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@ranks(2)
def test_weights_may_be_averaged_before_an_evaluation(size):
    hvd.init()
    model, optimizer = wrapped(hvd.Schedule.LocalSGD(every=3))
    train(model, optimizer, 2)
    optimizer.average_weights()
    assert_identical_on_all_ranks(model)
    simulation = Simulation(size)
    for step in range(2):
        simulation.step(step)
    simulation.average()
    assert_as(model, simulation.models[hvd.rank()])


@ranks(2)
def test_a_schedules_state_is_saved_and_loaded(size):
    hvd.init()
    for schedule in (hvd.Schedule.DiLoCo(every=3), hvd.Schedule.LocalSGD(every=2, start=2)):
        whole, of_whole = wrapped(schedule)
        train(whole, of_whole, 6)
        model, optimizer = wrapped(schedule)
        train(model, optimizer, 4)
        saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        model, optimizer = wrapped(schedule)
        for part, state in zip((model, optimizer), saved, strict=True):
            part.load_state_dict(state)
        with exchanges() as count:
            loss_of(model, hvd.rank(), 4).backward()
        assert not count
        train(model, optimizer, 6, first=4)
        assert all(map(torch.equal, model.parameters(), whole.parameters()))


@ranks(2)
def test_back_to_shared_steps_by_a_state():
    hvd.init()
    schedule = hvd.Schedule.LocalSGD(every=2, start=2)
    model, optimizer = wrapped(schedule)
    states = [copy.deepcopy(each.state_dict()) for each in (model, optimizer)]
    train(model, optimizer, 3)
    for each, state in zip((model, optimizer), states, strict=True):
        each.load_state_dict(state)
    optimizer.state.clear()
    train(model, optimizer, 2)
    assert_identical_on_all_ranks(model)
    again, of_again = wrapped(schedule)
    train(again, of_again, 2)
    assert all(map(torch.equal, model.parameters(), again.parameters()))


@ranks(2)
def test_schedulers_late_parameters_and_an_older_optimizer():
    hvd.init()
    model = make_model()
    hvd.DistributedOptimizer(sgd(model.parameters()))
    plain = sgd(model[0].parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=1)  # which replaces step
    optimizer = hvd.DistributedOptimizer(plain, schedule=hvd.Schedule.LocalSGD(every=2))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    for step in range(2):
        model.zero_grad()
        loss_of(model, 1 + hvd.rank(), step).backward()
        with exchanges() as count:
            optimizer.step()
        scheduler.step()
        assert any("bucket" in name for name in count) == (step == 1)
    assert_identical_on_all_ranks(model[:3])
    assert not torch.equal(model[2].weight, make_model()[2].weight)


@ranks(2)
def test_closures():
    hvd.init()

    def make(parameters):
        return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)

    model, optimizer = wrapped(hvd.Schedule.LocalSGD(every=2), make)
    simulation = Simulation(2, make)
    for step in range(2):
        own = loss_of(model, hvd.rank(), step)
        assert optimizer.step(closure_of(model, optimizer, hvd.rank(), step)) == own
        simulation.step(step)
    simulation.average()
    assert_as(model, simulation.models[hvd.rank()], 1e-8)


@ranks(2)
def test_what_is_refused():
    hvd.init()
    local = hvd.Schedule.LocalSGD(every=2)
    with pytest.raises(ValueError, match=r"averages weights, which op=hvd\.Adasum does not"):
        wrapped(local, op=hvd.Adasum)
    model, optimizer = wrapped(local)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_of(model, hvd.rank(), 0)).backward()
    with pytest.raises(RuntimeError, match=r"with schedule=hvd\.Schedule\.LocalSGD\(every=2\) the"):
        scaler.step(optimizer)


@ranks(2)
def test_ranks_with_different_schedules(size):
    hvd.init()
    for schedule, words in (
        (None, r"schedule Schedule\.LocalSGD\(every=2\) on rank"),
        (hvd.Schedule.LocalSGD(every=3), r"schedule is Schedule\.LocalSGD\(every=2\) on rank"),
    ):
        differs = hvd.rank() == 1
        model, optimizer = wrapped(schedule if differs else hvd.Schedule.LocalSGD(every=2))
        with pytest.raises(hvd.MismatchError, match=words):
            train(model, optimizer, 1)


@ranks(2)
def test_a_step_that_was_given_up_is_forgotten():
    hvd.init()
    weights = []
    for is_disturbed in (False, True):
        model, optimizer = wrapped(hvd.Schedule.DiLoCo(every=2, outer_lr=0.5, outer_momentum=0.0))
        train(model, optimizer, 1)
        if is_disturbed:
            loss_of(model, hvd.rank(), 7).backward()
            optimizer._restart()
        train(model, optimizer, 2, first=1)
        assert_identical_on_all_ranks(model)
        weights.append(model[0].weight.detach())
    assert torch.equal(*weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_moments_have_the_shape_of_their_parameter(dtype):
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
    optimizer = adam([parameter])
    parameter.grad = torch.ones(3, dtype=dtype)
    optimizer.step()
    assert {"step"} < {*optimizer.state[parameter]}
    weights = tensor_weights([parameter], lambda number: optimizer.state[parameter])
    assert [moment.name for moment in weights.moments(0)] == ["exp_avg", "exp_avg_sq"]


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"schedule": hvd.Schedule.LocalSGD(every=3)},
        {"schedule": hvd.Schedule.DiLoCo(every=3)},
        {"schedule": hvd.Schedule.PartialSync(parts=2)},
        {"op": hvd.Adasum},
    ],
    ids=str,
)
def test_weights_may_differ(options):
    hvd.init()
    model = replicas.make_model(seed=hvd.rank())
    optimizer = replicas.wrap(model, **options)
    for number in range(4):
        replicas.step(model, optimizer, number)


@ranks(2)
@pytest.mark.parametrize(
    "options", [{"schedule": hvd.Schedule.LocalSGD(every=2)}, {"op": hvd.Adasum}]
)
def test_each_rank_clips_its_own_gradients(options):
    hvd.init()
    training.check_clipping_by_each_rank(**options)


@pytest.mark.slow
@ranks(3)
def test_a_rank_outside_of_the_process_set_steps_by_itself():
    training.check_steps_outside_of_a_process_set(schedule=hvd.Schedule.LocalSGD(every=1))


@ranks(2)
def test_a_model_that_is_converted_after_wrapping():
    hvd.init()
    options = {"schedule": hvd.Schedule.LocalSGD(every=1)}
    for converted_after in (0, 4):
        patterns.check_conversion(converted_after, **options)
    patterns.check_conversion_on_one_rank(4, **options)


@ranks(2)
def test_adasum_gets_the_whole_copy(monkeypatch):
    memory.check_whole_copies(monkeypatch, op=hvd.Adasum)


@ranks(2)
def test_parameters_that_come_later_have_the_names_that_were_given():
    training.check_later_parameters(schedule=hvd.Schedule.DiLoCo(4))


@ranks(2)
def test_local_steps_are_no_training_by_oneself():
    hvd.init()
    model, optimizer = wrapped(hvd.Schedule.LocalSGD(every=100))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    with logged() as messages:
        for step in range(60):
            optimizer.step(closure_of(model, optimizer, hvd.rank(), step))
    assert messages == []
