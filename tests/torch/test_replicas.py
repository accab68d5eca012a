"""Ranks whose replicas differ are told so with the second exchange; others are left alone."""

import weakref
from functools import partial

import pytest

from tests.harness import ranks
from tests.logs import logged

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from tests.torch.checks import assert_identical_on_all_ranks


def make_model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))


def wrap(model, optimizer=None, **options):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)


def step(model, optimizer, number=0, before_step=lambda: None):
    generator = torch.Generator().manual_seed(10 * number + hvd.rank())
    optimizer.zero_grad()
    model(torch.randn(3, 4, generator=generator)).square().mean().backward()
    before_step()
    optimizer.step()


def flat(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def refused(model, optimizer, number=1):
    """Make a step that all ranks refuse and that leaves the weights; return the message."""
    before = flat(model)
    with pytest.raises(hvd.MismatchError, match="HVDLITE_CHECK_RANKS=warn") as caught:
        step(model, optimizer, number)
    assert torch.equal(flat(model), before)
    assert len(set(hvd.allgather_object(str(caught.value)))) == 1
    return str(caught.value)


def last_rank():
    return hvd.rank() == hvd.size() - 1


@ranks(3)
def test_weights_that_were_never_broadcast():
    hvd.init()
    model = make_model(seed=hvd.rank())
    optimizer = wrap(model)
    step(model, optimizer)
    message = refused(model, optimizer)
    assert "'0.weight' is " in message
    assert all(f"on rank {rank}" in message for rank in range(hvd.size()))
    assert "4 of 4 weights differ" in message
    assert "hvd.broadcast_parameters(model.state_dict(), root_rank=0)" in message
    refused(model, optimizer, 2)  # until it is mended
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for number in range(3, 6):
        step(model, optimizer, number)
    assert_identical_on_all_ranks(model)


@ranks(2)
@pytest.mark.parametrize("is_owned", [False, True])
def test_frozen_weights_that_were_never_broadcast(is_owned):
    """The optimizer may have them, or their names alone."""
    hvd.init()
    model = make_model(seed=hvd.rank())
    model[0].requires_grad_(False)
    torch.nn.init.zeros_(model[2].weight)
    torch.nn.init.zeros_(model[2].bias)
    owned = model if is_owned else model[2]
    optimizer = wrap(model, torch.optim.SGD(owned.parameters(), lr=0.1))
    step(model, optimizer)
    message = refused(model, optimizer)
    assert "the weight '0.weight' is " in message
    assert "2 of 4 weights differ" in message
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for number in range(2, 5):
        step(model, optimizer, number)
    if not is_owned:  # nor kept
        frozen = weakref.ref(model[0].weight)
        del model[0]
        assert frozen() is None
        return
    model[0].requires_grad_(True)
    for number in range(5, 30):  # in all positions
        step(model, optimizer, number)
    assert_identical_on_all_ranks(model)


def other_class(model):
    return (torch.optim.Adam if last_rank() else torch.optim.SGD)(model.parameters(), lr=0.1)


def other_rate(model):
    return torch.optim.SGD(model.parameters(), lr=0.2 if last_rank() else 0.1)


def other_rate_as_tensor(model):
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.5 if last_rank() else 0.25))


def other_betas(model):
    return torch.optim.AdamW(model.parameters(), betas=(0.8 if last_rank() else 0.9, 0.99))


def other_decay_of_a_group(model):
    decay = 0.1 if last_rank() else 0.0
    groups = [
        {"params": model[0].parameters()},
        {"params": model[2].parameters(), "weight_decay": decay},
    ]
    return torch.optim.SGD(groups, lr=0.1)


def other_number_of_groups(model):
    if last_rank():
        groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
        return torch.optim.SGD(groups, lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.1)


@ranks(2)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (other_class, "the optimizer's class is SGD on rank 0, Adam on rank 1"),
        (other_rate, "the optimizer's lr is 0.1 on rank 0, 0.2 on rank 1"),
        (other_rate_as_tensor, "the optimizer's lr is 0.25 on rank 0, 0.5 on rank 1"),
        (other_betas, "the optimizer's betas is (0.9, 0.99) on rank 0, (0.8, 0.99) on rank 1"),
        (other_decay_of_a_group, "weight_decay in group 1 is 0.0 on rank 0, 0.1 on rank 1"),
        (other_number_of_groups, "the number of the optimizer's groups is 1 on rank 0, 2 on"),
    ],
)
def test_another_optimizer(make, told):
    hvd.init()
    model = make_model()
    optimizer = wrap(model, make(model))
    step(model, optimizer)
    message = refused(model, optimizer)
    assert told in message
    assert "make the same optimizer, with the same arguments, on all ranks" in message


@ranks(2)
def test_what_is_the_same_on_all_ranks_is_no_difference():
    hvd.init()
    model = make_model()
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[0].weight.fill_(hvd.rank())  # frozen, and not named
        model[2].bias[0] = float("nan")
    fused = last_rank()  # as on a device of another kind
    plain = torch.optim.AdamW([model[0].bias, *model[2].parameters()], lr=0.1, fused=fused)
    named = [*model.named_parameters()][1:]
    optimizer = hvd.DistributedOptimizer(plain, named, backward_passes_per_step=2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            model(torch.ones(1, 4)).square().mean().backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
        schedule.step()
    # A layer that comes later, and is broadcast after its first step.
    late = torch.nn.Linear(2, 1)
    optimizer.add_param_group({"params": late.parameters()})
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):
            late(torch.ones(1, 2)).mean().backward()
        optimizer.step()
        hvd.broadcast_parameters(late.state_dict(), root_rank=0)


@ranks(2)
def test_settings(monkeypatch):
    def train(steps):
        hvd.shutdown()
        hvd.init()
        model = make_model()
        optimizer = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1 * (1 + hvd.rank())))
        for number in range(steps):
            step(model, optimizer, number)
        return model, optimizer

    try:
        monkeypatch.setenv("HVDLITE_CHECK_RANKS", "off")
        train(3)
        monkeypatch.setenv("HVDLITE_CHECK_RANKS", "warn")
        with logged() as warnings:
            train(4)
        assert len(warnings) == (1 if hvd.rank() == 0 else 0)
        assert all("lr is 0.1 on rank 0, 0.2 on rank 1" in each for each in warnings)
        monkeypatch.setenv("HVDLITE_CHECK_RANKS", "error")
        with pytest.raises(hvd.MismatchError):
            train(2)
        monkeypatch.setenv("HVDLITE_CHECK_RANKS_EVERY", str(hvd.rank()))
        hvd.shutdown()
        with pytest.raises(ValueError, match="HVDLITE_CHECK_RANKS_EVERY is 0 on rank 0 and 1 on"):
            hvd.init()
    finally:
        monkeypatch.undo()
        hvd.shutdown()
        hvd.init()


@ranks(3)
def test_a_rank_that_has_joined_is_compared_when_it_is_back():
    hvd.init()
    model = make_model()
    optimizer = wrap(model)
    step(model, optimizer)
    if last_rank():
        hvd.join()
    else:
        for number in range(1, 3):
            step(model, optimizer, number)
        hvd.join()
    # Weights of steps without that rank are not its own: they have to be broadcast.
    message = refused(model, optimizer, 3)
    assert "'0.weight'" in message
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for number in range(4, 7):
        step(model, optimizer, number)
    assert_identical_on_all_ranks(model)


def raise_rate_in_place(model, optimizer):
    optimizer.param_groups[0]["lr"].fill_(0.5)


def change_moment(model, optimizer):
    optimizer.state[model[2].bias]["exp_avg"] += 1.0


@ranks(2)
@pytest.mark.parametrize(
    ("part", "told", "cause"),
    [
        (raise_rate_in_place, "the optimizer's lr is 0.25 on ", "average the metric"),
        (change_moment, " of the weight '2.bias' is ", "in place"),
    ],
)
def test_what_one_rank_changes_alone(part, told, cause):
    """It is found in a bounded number of steps, and is no missing broadcast."""
    hvd.init()
    model = make_model()
    rate = torch.tensor(0.25)
    optimizer = wrap(model, torch.optim.Adam(model.parameters(), lr=rate))
    for number in range(5):
        step(model, optimizer, number)
    step(model, optimizer, 5, lambda: part(model, optimizer) if last_rank() else None)
    for number in range(6, 18):  # eight or more arrays, of which a step compares two
        try:
            step(model, optimizer, number)
        except hvd.MismatchError as error:
            message = str(error)
            break
    assert told in message
    assert cause in message
    since, apart = message.partition("(equal in step ")[2].split(", apart in step ")
    assert int(since) <= 6 < number + 1 == int(apart.partition(")")[0])
    assert len(set(hvd.allgather_object(message))) == 1
    refused(model, optimizer, number)  # until it is mended
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for number in range(18, 30):
        step(model, optimizer, number)
    assert_identical_on_all_ranks(model)


@ranks(2)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LBFGS", {"lr": 0.1, "max_iter": 3, "history_size": 2}),
        ("Adagrad", {}),
        ("Adam", {"amsgrad": True}),
        ("ASGD", {}),
        ("Rprop", {}),
        ("NAdam", {}),
    ],
)
def test_states_of_all_kinds(name, options):
    hvd.init()
    model = make_model()
    if name == "NAdam":
        model.bfloat16()  # its state is of another dtype
    optimizer = wrap(model, getattr(torch.optim, name)(model.parameters(), **options))
    for number in range(12):
        generator = torch.Generator().manual_seed(10 * number + hvd.rank())
        inputs = torch.randn(3, 4, generator=generator).to(model[0].weight.dtype)

        def closure(inputs=inputs):
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
            loss.backward()
            return loss

        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    assert_identical_on_all_ranks(model.float())
    values = [label for label, _ in optimizer._reducer._hooks[0]._check._values()]
    assert len(values) > 4, values


@ranks(2)
def test_skipped_steps_sparse_gradients_and_state_that_comes_late():
    hvd.init()
    torch.manual_seed(0)
    table = torch.nn.Embedding(6, 3, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(table.parameters()), table.named_parameters()
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100, growth_interval=2)
    model = make_model()
    dense = wrap(model, torch.optim.Adam(model.parameters()))
    for number in range(12):
        optimizer.zero_grad()
        table(torch.tensor([number % 5, hvd.rank()])).square().sum().backward()
        optimizer.step()
        dense.zero_grad()
        loss = model(torch.full((2, 4), 1e3 * (1 + hvd.rank()))).square().mean()
        scaler.scale(loss).backward()
        scaler.step(dense)  # the first ones are left out, on all ranks
        scaler.update()
    assert dense.state
    assert_identical_on_all_ranks(model)
    assert_identical_on_all_ranks(table)


@ranks(2)
def test_steps_are_counted_on_in_a_new_world():
    hvd.init()
    model = make_model()
    optimizer = wrap(model)
    for number in range(4):
        step(model, optimizer, number)
    hvd.shutdown()
    hvd.init()
    for number in range(4, 8):
        step(model, optimizer, number)
    step(model, optimizer, 8, lambda: last_rank() and optimizer.param_groups[0].update(lr=0.5))
    assert "(equal in step 9, apart in step 10)" in refused(model, optimizer, 9)


@ranks(2)
@pytest.mark.parametrize("width", [8, 2000], ids=["small", "zero-copy"])
def test_ranks_that_train_on_the_same_data_are_told_so(width):
    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 600))
    optimizer = wrap(model)
    with logged() as messages:
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).square().mean().backward()
            optimizer.step()
    assert len(messages) == (hvd.rank() == 0)
    assert all("computed the same gradients, to the bit, in steps 2 to 4" in m for m in messages)


@ranks(2, 3)
@pytest.mark.parametrize("differs", ["seed", "batch_size", "epoch", "split", "nothing"])
def test_ranks_that_divide_the_data_differently_are_told_so(differs):
    hvd.init()
    others = {"seed": 1, "batch_size": 4}
    changes = {differs: 7} if last_rank() and differs in others else {}
    generator = torch.Generator().manual_seed(int(differs == "split" and last_rank()))
    part, _ = torch.utils.data.random_split(range(100), [96, 4], generator)
    sampler = hvd.ShardSampler(part, **{**others, **changes})
    if differs == "epoch" and last_rank():
        sampler.set_epoch(3)
    inputs = torch.randn(96, 4, generator=torch.Generator().manual_seed(5))
    model = make_model()
    optimizer = wrap(model)
    batches = iter(sampler)
    with logged() as messages:
        if hvd.rank() == 0:
            next(iter(hvd.ShardSampler(30, 2)))  # a look at other data
        for _ in range(4):
            optimizer.zero_grad()
            model(inputs[next(batches)]).square().mean().backward()
            optimizer.step()
    assert len(messages) == (hvd.rank() == 0 and differs != "nothing")
    others = "rank 0" if hvd.size() == 2 else "ranks 0, 1"
    said = f"{others} and rank {hvd.size() - 1} divide the data differently in steps 2 to 4"
    assert all(said in message for message in messages)


@ranks(1)
def test_a_sampler_of_batches_in_the_place_of_one_of_samples():
    hvd.init()
    dataset = torch.utils.data.TensorDataset(torch.arange(12.0))
    loader = torch.utils.data.DataLoader(dataset, batch_size=3, sampler=hvd.ShardSampler(12, 3))
    with pytest.raises(TypeError, match="pass it to the DataLoader as batch_sampler="):
        next(iter(loader))
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=hvd.ShardSampler(12, 3))
    assert [len(batch) for (batch,) in loader] == [3, 3, 3, 3]
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, sampler=hvd.ShardSampler(12, 3))
    assert [len(batch) for (batch,) in loader] == [3, 3, 3, 3]


def by_hand(model, number):
    for parameter in model.parameters():
        hvd.allreduce_(parameter.grad)


def metric(model, number):
    hvd.allreduce(torch.ones(1))


class Around(torch.optim.Optimizer):
    """An optimizer that has another one make its steps."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


@ranks(2)
def test_an_optimizer_that_was_not_wrapped():
    hvd.init()
    # What is exchanged before each step, how the optimizer is made, and what begins the count.
    cases = [
        (None, "plain", "broadcast"),
        (None, "plain", "sampler"),
        (metric, "plain", "broadcast"),
        (None, "beside", "broadcast"),
        (by_hand, "plain", "broadcast"),
        (None, "wrapped", "broadcast"),
        (None, "around", "broadcast"),
        (None, "plain", ""),
    ]
    warned = []
    for exchange, kind, begins in cases:
        model = torch.nn.Sequential(make_model(), torch.nn.Linear(2, 2000))
        optimizer = torch.optim.Adam(model.parameters())
        if kind in ("wrapped", "around"):
            optimizer = wrap(model, Around(optimizer) if kind == "around" else optimizer)
        if begins == "broadcast":
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        elif begins == "sampler":
            hvd.ShardSampler(100, batch_size=10)
        other = make_model()
        others = wrap(other) if kind == "beside" else None
        with logged() as messages:
            for number in range(60):
                if others is not None:
                    step(other, others, number)
                before = partial(exchange, model, number) if exchange else lambda: None
                step(model, optimizer, number, before)
        alone = [each for each in messages if each.startswith("each rank trains by itself")]
        assert all("of the 50 steps of Adam nothing was exchanged" in each for each in alone)
        warned.append(len(alone))
    assert warned == ([1, 1, 1, 1, 0, 0, 0, 0] if hvd.rank() == 0 else [0] * 8)
