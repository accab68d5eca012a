"""Ranks whose replicas differ are told so with the second exchange; others are left alone."""

import logging

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd


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


def same_on_all_ranks(model):
    return len({tuple(each) for each in hvd.allgather_object(flat(model).tolist())}) == 1


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


@ranks(2, 3)
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
    assert same_on_all_ranks(model)


@pytest.mark.slow
@ranks(3)
def test_one_flipped_bit_in_one_weight():
    hvd.init()
    model = make_model()
    optimizer = wrap(model)
    step(model, optimizer)
    if last_rank():
        model[2].weight.data.view(torch.int32)[1, 7] ^= 1
    message = refused(model, optimizer)
    assert "'2.weight'" in message
    assert "on ranks 0, 1, " in message
    assert "on rank 2; 1 of 4 weights differ" in message


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


@ranks(2, 3)
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (other_class, "the optimizer's class is SGD on "),
        (other_number_of_groups, "the number of parameter groups is 1 on "),
    ],
)
def test_the_state_of_another_optimizer_is_not_broadcast(make, told):
    hvd.init()
    model = make_model()
    optimizer = wrap(model, make(model))
    with pytest.raises(hvd.MismatchError) as caught:
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert told in str(caught.value)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()


@ranks(2, 3)
def test_a_broadcast_after_the_first_step_is_early_enough():
    hvd.init()
    model = make_model(seed=hvd.rank())
    optimizer = wrap(model)
    for number in range(4):
        step(model, optimizer, number)
        if number == 0:
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert same_on_all_ranks(model)


@ranks(2)
def test_what_is_the_same_on_all_ranks_is_no_difference():
    hvd.init()
    model = make_model()
    model[0].weight.requires_grad_(False)
    with torch.no_grad():
        model[0].weight.fill_(hvd.rank())  # frozen, and not exchanged
        model[2].bias[0] = float("nan")
    fused = last_rank()  # as on a device of another kind
    plain = torch.optim.AdamW([model[0].bias, *model[2].parameters()], lr=0.1, fused=fused)
    optimizer = wrap(model, plain, backward_passes_per_step=2)
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
def test_batch_sizes_and_skipped_steps():
    hvd.init()
    model = make_model()
    optimizer = wrap(model)
    for number in range(3):
        optimizer.zero_grad()
        model(torch.ones(hvd.rank() + number + 1, 4)).square().mean().backward()
        optimizer.step(batch_size=hvd.rank() + number + 1)  # the first exchange is repeated
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    optimizer = wrap(make := make_model())
    for _ in range(3):
        optimizer.zero_grad()
        scaler.scale(make(torch.ones(1, 4)).square().mean() * 1e3).backward()
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
    assert same_on_all_ranks(model)


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
def test_schedules_that_let_weights_differ(options):
    hvd.init()
    model = make_model(seed=hvd.rank())
    optimizer = wrap(model, **options)
    for number in range(4):
        step(model, optimizer, number)


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
        warnings = []
        handler = logging.Handler()
        handler.emit = lambda record: warnings.append(record.getMessage())
        logging.getLogger("hvdlite").addHandler(handler)
        train(4)
        logging.getLogger("hvdlite").removeHandler(handler)
        assert len(warnings) == (1 if hvd.rank() == 0 else 0)
        assert all("lr is 0.1 on rank 0, 0.2 on rank 1" in each for each in warnings)
        monkeypatch.setenv("HVDLITE_CHECK_RANKS", "error")
        with pytest.raises(hvd.MismatchError):
            train(2)
        # Again and again on request: with the second exchange, the fifth, the eighth.
        monkeypatch.setenv("HVDLITE_CHECK_RANKS_EVERY", "3")
        hvd.shutdown()
        hvd.init()
        model = make_model()
        optimizer = wrap(model)
        for number in range(4):
            step(model, optimizer, number)
            if number == 2 and last_rank():
                model[2].bias.data.add_(1.0)
        assert "'2.bias'" in refused(model, optimizer, 4)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for number in range(5, 12):
            step(model, optimizer, number)
        monkeypatch.setenv("HVDLITE_CHECK_RANKS_EVERY", str(hvd.rank()))
        hvd.shutdown()
        with pytest.raises(ValueError, match="HVDLITE_CHECK_RANKS_EVERY is 0 on rank 0 and 1 on"):
            hvd.init()
    finally:
        monkeypatch.undo()
        hvd.shutdown()
        hvd.init()


@ranks(2, 3)
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
    assert same_on_all_ranks(model)
