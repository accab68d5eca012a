import copy
import hashlib
import warnings

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.observe import status

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


def identical_on_all_ranks(model):
    digest = hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()
    return len(set(hvd.allgather_object(digest))) == 1


def relative_error(value, expected):
    return ((value.double() - expected.double()).norm() / expected.double().norm()).item()


@ranks(1, 2, 3, 4)
def test_twenty_steps_equal_one_process_on_the_whole_batch():
    hvd.init()
    reference = make_model()
    train(reference, sgd(reference), 20, local=False)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    train(model, optimizer, 20)
    assert relative_error(flat(model), flat(reference)) < 1e-5
    assert identical_on_all_ranks(model)


@ranks(2)
def test_many_small_buckets(monkeypatch):
    """The buckets' order and number must not matter."""
    hvd.shutdown()
    monkeypatch.setenv("HVDLITE_FUSION_THRESHOLD", "64")
    monkeypatch.setenv("HVDLITE_FIRST_BUCKET_SIZE", "0")
    hvd.init()
    try:
        reference = make_model()
        train(reference, sgd(reference), 5, local=False)
        model = make_model()
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        train(model, optimizer, 5)
        assert relative_error(flat(model), flat(reference)) < 1e-6
        assert identical_on_all_ranks(model)
    finally:
        hvd.shutdown()
        monkeypatch.undo()
        hvd.init()


@ranks(2, 3)
def test_sum_and_predivide(size):
    hvd.init()
    whole = make_model()
    x, y = batch(0)
    loss_of(whole, x, y).backward()
    average = torch.cat([parameter.grad.flatten() for parameter in whole.parameters()])
    for options, factor in (
        ({"op": hvd.Sum}, size),
        ({"gradient_predivide_factor": 4.0}, 1),
        ({"gradient_predivide_factor": 0.5, "compression": hvd.Compression.none}, 1),
        ({"gradient_predivide_factor": 4.0, "groups": 2}, 1),
        ({"gradient_predivide_factor": 4.0, "num_groups": 2, "op": hvd.Average}, 1),
        ({"gradient_predivide_factor": 4.0, "groups": lambda p: [p[:2], p[3:]]}, 1),
    ):
        model = make_model()
        if callable(groups := options.get("groups")):
            options = {**options, "groups": groups(list(model.parameters()))}
        optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
        loss_of(model, own(x), own(y)).backward()
        optimizer.synchronize()
        found = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
        assert relative_error(found, average * factor) < 1e-6, options


@ranks(2, 4)
def test_compression_trains_alike_to_its_precision():
    hvd.init()
    reference = make_model()
    train(reference, sgd(reference), 10, local=False)
    for compression, tolerance in ((hvd.Compression.fp16, 2e-3), (hvd.Compression.bf16, 2e-2)):
        model = make_model()
        optimizer = hvd.DistributedOptimizer(
            sgd(model), model.named_parameters(), compression=compression
        )
        train(model, optimizer, 10)
        error = relative_error(flat(model), flat(reference))
        assert 1e-7 < error < tolerance, compression
        assert identical_on_all_ranks(model)


@ranks(2)
def test_bfloat16_model():
    hvd.init()
    model = make_model().to(torch.bfloat16)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    x, y = (data.to(torch.bfloat16) for data in batch(0))
    loss_of(model, own(x), own(y)).backward()
    optimizer.step()
    assert len(set(hvd.allgather_object(flat(model).float().numpy().tobytes()))) == 1


@ranks(1, 2)
def test_what_is_wrapped_stays_what_it_was():
    hvd.init()
    model = make_model()
    plain = sgd(model)
    before = torch.optim.lr_scheduler.StepLR(plain, step_size=1, gamma=0.5)
    loss_of(model, *batch(0)).backward()
    plain.step()
    momentum = dict(plain.state)
    calls = []
    plain.register_step_post_hook(lambda *_: calls.append("hook"))
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    after = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    assert isinstance(optimizer, torch.optim.SGD)
    assert type(optimizer).__name__ == "SGD"
    assert dict(optimizer.state) == momentum
    train(model, optimizer, 2)
    before.step()
    after.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.25)
    assert calls == ["hook", "hook"]
    assert identical_on_all_ranks(model)
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


@ranks(2)
def test_a_scheduler_made_before_wrapping_does_not_bypass_the_exchange():
    """Schedulers replace ``step`` on the instance by one that calls the old class's."""
    hvd.init()
    model = make_model()
    plain = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(plain, step_size=100)
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    train(model, optimizer, 3)
    scheduler.step()
    assert identical_on_all_ranks(model)


@ranks(2)
def test_clipping_between_synchronize_and_step():
    hvd.init()
    reference = make_model()
    plain = sgd(reference)
    train(
        reference,
        plain,
        5,
        local=False,
        before_step=lambda: torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1),
    )
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    for step in range(5):
        x, y = batch(step)
        optimizer.zero_grad()
        loss_of(model, own(x), own(y)).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
    assert relative_error(flat(model), flat(reference)) < 1e-5
    assert identical_on_all_ranks(model)


@ranks(1, 2, 3)
@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
def test_clip_grad_norm_averages_first(norm_type):
    hvd.init()
    reference, norms = make_model(), []

    def clip():
        norms.append(torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1, norm_type))

    train(reference, sgd(reference), 5, local=False, before_step=clip)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    for step, expected in enumerate(norms):
        x, y = batch(step)
        optimizer.zero_grad()
        loss_of(model, own(x), own(y)).backward()
        if step == 3:
            optimizer.synchronize()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = optimizer.clip_grad_norm_(0.1, norm_type)
            assert found.item() == pytest.approx(expected.item(), rel=1e-4)
            optimizer.step()
    assert relative_error(flat(model), flat(reference)) < 1e-4
    assert identical_on_all_ranks(model)


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


@ranks(2)
def test_clipping_where_ranks_exchange_no_gradients():
    hvd.init()
    check_clipping_by_each_rank(process_set=hvd.add_process_set([1]))


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
    assert identical_on_all_ranks(model)


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
def test_a_gradient_changed_too_early_is_an_error():
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    loss_of(model, *batch(0)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    words = r"'0.weight' was changed after backward.*call optimizer\.clip_grad_norm_\(max_norm\)"
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()


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
    with pytest.raises(RuntimeError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=r"more than 1 times before step"):
        loss_of(model, *batch(0)).backward()
    with pytest.raises(RuntimeError, match=r"'3\.bias' was changed after backward"):
        optimizer.synchronize()
    optimizer.zero_grad()
    train(model, optimizer, 1)
    assert identical_on_all_ranks(model)


@ranks(1, 2)
def test_accumulation_over_several_backward_passes():
    hvd.init()
    reference = make_model()
    plain = sgd(reference)
    for step in range(3):
        plain.zero_grad()
        for part in range(2):
            loss_of(reference, *batch(2 * step + part)).backward()
        plain.step()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        sgd(model), model.named_parameters(), backward_passes_per_step=2
    )
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            x, y = batch(2 * step + part)
            loss_of(model, own(x), own(y)).backward()
        optimizer.step()
    assert relative_error(flat(model), flat(reference)) < 1e-5
    # A short last accumulation, and another number of passes.
    train(model, optimizer, 1)
    optimizer.set_backward_passes_per_step(1)
    train(model, optimizer, 1)
    assert identical_on_all_ranks(model)


class Branches(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left = torch.nn.Linear(6, 2)
        self.right = torch.nn.Linear(6, 2)
        self.never = torch.nn.Linear(6, 2)

    def forward(self, x, left):
        return self.left(x) if left else self.right(x)


@ranks(1, 2, 3)
def test_unused_parameters_differ_by_rank(size):
    hvd.init()
    model = Branches()
    start = {name: parameter.clone() for name, parameter in model.named_parameters()}
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    x, _ = batch(0)
    for _ in range(2):
        optimizer.zero_grad()
        model(x, left=hvd.rank() == 0).sum().backward()
        optimizer.step()
    assert model.never.weight.grad is None
    # Each rank's gradient of the sum over 24 samples is the sum of the inputs.
    by_rank = x.sum(0).expand(2, 6)
    share = {"left": 1 / size, "right": (size - 1) / size}
    for name, part in share.items():
        weight = getattr(model, name).weight
        moved = (start[f"{name}.weight"] - weight).detach()
        assert torch.allclose(moved, 2 * part * by_rank, atol=1e-4), name
        if part == 0:
            assert weight.grad is None
    assert identical_on_all_ranks(model)


@ranks(2)
def test_step_without_backward_on_one_rank_or_on_all():
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    optimizer.step()
    assert all(parameter.grad is None for parameter in model.parameters())
    if hvd.rank() == 0:
        loss_of(model, *batch(0)).backward()
    optimizer.step()
    assert identical_on_all_ranks(model)
    assert all(parameter.grad is not None for parameter in model.parameters())


@ranks(2)
def test_layers_frozen_at_first_and_groups_added_later():
    hvd.init()
    model = make_model()
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model[:3].parameters(), lr=0.1),
        list(model[:3].named_parameters()),
    )
    train(model, optimizer, 2)
    for parameter in model[0].parameters():
        parameter.requires_grad_(True)
    optimizer.add_param_group({"params": model[3].parameters()})
    for parameter in model[3].parameters():
        parameter.grad = None
    train(model, optimizer, 2)
    assert identical_on_all_ranks(model)


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
@ranks(2, 3)
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
    assert identical_on_all_ranks(model)
    other = make_model(1)  # its exchange has the same label on all ranks
    train(other, hvd.DistributedOptimizer(sgd(other), other.named_parameters()), 2)
    assert identical_on_all_ranks(other)


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
    assert identical_on_all_ranks(model)


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
    assert identical_on_all_ranks(model)


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
    assert identical_on_all_ranks(model)


@ranks(2)
def test_closures_are_synchronized_each_time():
    hvd.init()
    reference = make_model()
    plain = torch.optim.LBFGS(reference.parameters(), lr=0.1, max_iter=4)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4), model.named_parameters()
    )
    x, y = batch(0)

    def closure(model, optimizer, x, y):
        optimizer.zero_grad()
        loss = loss_of(model, x, y)
        loss.backward()
        return loss

    plain.step(lambda: closure(reference, plain, x, y))
    optimizer.step(lambda: closure(model, optimizer, own(x), own(y)))
    optimizer.step(closure=lambda: closure(model, optimizer, own(x), own(y)))
    plain.step(closure=lambda: closure(reference, plain, x, y))
    assert relative_error(flat(model), flat(reference)) < 1e-3
    assert identical_on_all_ranks(model)


@ranks(2)
def test_two_optimizers_in_one_program():
    hvd.init()
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
    assert identical_on_all_ranks(first)
    assert identical_on_all_ranks(second)


@ranks(2, 3)
def test_models_that_differ_by_rank_are_named_in_step_one(size):
    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 4 + (hvd.rank() == 1)), torch.nn.Linear(6, 2))
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    (model[0](torch.ones(1, 6)).sum() + model[1](torch.ones(1, 6)).sum()).backward()
    with pytest.raises(hvd.HorovodInternalError, match=r"'0.weight' float32\[4, 6\] on rank"):
        optimizer.step()
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size
    working = make_model()
    train(working, hvd.DistributedOptimizer(sgd(working), working.named_parameters()), 2)
    assert identical_on_all_ranks(working)


@ranks(2)
def test_sparse_gradients_as_dense_ones():
    hvd.init()
    torch.manual_seed(0)
    rows = torch.tensor([hvd.rank(), 2, 2])
    table = torch.nn.Embedding(4, 3, sparse=True)
    hvd.broadcast_parameters(table.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(table.parameters(), lr=1.0), table.named_parameters(), sparse_as_dense=True
    )
    table(rows).sum().backward()
    optimizer.synchronize()
    expected = torch.tensor([0.5, 0.5, 2.0, 0.0]).unsqueeze(1).expand(4, 3)
    assert table.weight.grad.is_sparse
    assert torch.equal(table.weight.grad.to_dense(), expected)
    optimizer.zero_grad()
    if hvd.rank() == 0:  # the other rank's average is of the kind that its last gradient was
        table(rows).sum().backward()
    optimizer.synchronize()
    assert table.weight.grad.is_sparse
    expected = torch.tensor([0.5, 0.0, 1.0, 0.0]).unsqueeze(1).expand(4, 3)
    assert torch.equal(table.weight.grad.to_dense(), expected)
    optimizer.zero_grad()
    table.weight.sum().backward()
    optimizer.step()
    assert not table.weight.grad.is_sparse
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SparseAdam(table.parameters()), sparse_as_dense=True
    )
    for _ in range(3):
        optimizer.zero_grad()
        table(rows).square().sum().backward()
        optimizer.step()
    assert identical_on_all_ranks(table)


@ranks(2)
def test_works_again_after_shutdown_and_init(monkeypatch):
    hvd.init()
    counted = memoryview(bytearray(16)).cast("q")
    monkeypatch.setattr(status, "_steps", counted)
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    train(model, optimizer, 2)
    hvd.shutdown()
    hvd.init()
    train(model, optimizer, 2)
    assert identical_on_all_ranks(model)
    assert counted[0] == 4


@ranks(1)
def test_refused_arguments():
    hvd.init()
    model = make_model()
    named = list(model.named_parameters())

    def wrap(optimizer=None, **options):
        return hvd.DistributedOptimizer(optimizer or sgd(model), **options)

    with pytest.raises(TypeError, match=r"expected a torch\.optim"):
        wrap(optimizer=model)
    with pytest.raises(ValueError, match="wrap it once"):
        wrap(wrap())
    with pytest.raises(ValueError, match=r"more than once: 0\.weight"):
        wrap(named_parameters=[*named, named[0]])
    with pytest.raises(ValueError, match=r"5 of the optimizer's 6 parameters"):
        wrap(named_parameters=named[:1])
    with pytest.raises(ValueError, match="pairs of a name and a parameter"):
        wrap(named_parameters=model.parameters())
    for wrong in (5, model, dict(named), [(0, parameter) for _, parameter in named], [("a", 1)]):
        with pytest.raises(ValueError, match=r"named_parameters is a .* must be pairs of a name"):
            wrap(named_parameters=wrong)
    for name, wrong in (
        ("backward_passes_per_step", (0, 1.5, "2", None, True)),
        ("num_groups", (-1, 1.5, "2", None)),
        ("groups", (-1, 1.5)),
    ):
        for value in wrong:
            with pytest.raises(ValueError, match=f"{name}={value!r} is not an integer"):
                wrap(**{name: value})
    with pytest.raises(ValueError, match="gradient_predivide_factor='2'"):
        wrap(gradient_predivide_factor="2")
    with pytest.raises(ValueError, match=r"needs op=hvd\.Average"):
        wrap(gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ValueError, match="not Max"):
        wrap(op=hvd.Max)
    with pytest.raises(TypeError, match="compression"):
        wrap(compression=16)
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match="neither a number nor a list"):
        wrap(groups="all")
    with pytest.raises(ValueError, match=r"groups\[1\] is a Parameter"):
        wrap(groups=[parameters[:2], parameters[2]])
    with pytest.raises(ValueError, match=r"groups\[0\] has a Parameter that is no parameter of"):
        wrap(groups=[[torch.nn.Parameter(torch.zeros(1))]])
    with pytest.raises(
        ValueError, match=r"groups\[1\] has a parameter that stands in groups twice"
    ):
        wrap(groups=[parameters[:2], parameters[1:3]])


@ranks(2)
def test_a_subclass_that_calls_its_parents_step_exchanges_once():
    hvd.init()

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            return super().step(closure)

    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        Counting(model.parameters(), lr=0.1), model.named_parameters()
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 2)
    assert identical_on_all_ranks(model)


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
def test_a_skipped_step_leaves_nothing_behind():
    """As where GradScaler finds an overflow: synchronize(), and no step."""
    hvd.init()
    weight, loss, plain = one_weight()
    optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=2)
    for _ in range(2):
        loss().backward()
    optimizer.synchronize()
    assert weight.grad.item() == 3.0
    optimizer.zero_grad()
    loss().backward()  # a short last accumulation
    optimizer.step()
    assert weight.item() == -1.5
    optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad()
    if hvd.rank() == 0:
        loss().backward()
    optimizer.step()
    assert weight.item() == -2.0


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


@ranks(2)
def test_changes_behind_torchs_back_are_noticed():
    hvd.init()
    for change in (
        lambda gradient: gradient.data.clamp_(-1, 1),
        lambda gradient: gradient.numpy().fill(0.5),
    ):
        weight, loss, plain = one_weight()
        optimizer = hvd.DistributedOptimizer(plain)
        (10 * loss()).backward()
        change(weight.grad)
        with pytest.raises(RuntimeError, match="was changed after backward"):
            optimizer.step()
    weight, loss, plain = one_weight()
    optimizer = hvd.DistributedOptimizer(plain)
    (loss() * float("nan")).backward()
    optimizer.step()
    assert weight.isnan().all()


@ranks(2)
def test_parameters_wrapped_again_belong_to_the_new_optimizer():
    hvd.init()
    weight, loss, plain = one_weight()
    hvd.DistributedOptimizer(plain)
    for _ in range(2):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([weight], lr=1.0))
        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
    assert weight.item() == -6.0


@ranks(2)
def test_passes_are_not_changed_while_gradients_are_on_their_way():
    hvd.init()
    weight, loss, plain = one_weight()
    optimizer = hvd.DistributedOptimizer(plain)
    loss().backward()
    with pytest.raises(RuntimeError, match="set_backward_passes_per_step"):
        optimizer.set_backward_passes_per_step(2)
    optimizer.step()
    assert weight.item() == -1.5


@ranks(2)
def test_a_first_step_without_gradient_after_shutdown_and_init():
    hvd.init()
    weight, loss, plain = one_weight()
    other, other_loss, other_plain = one_weight()
    both = [hvd.DistributedOptimizer(plain), hvd.DistributedOptimizer(other_plain)]
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 0:
        loss().backward()
    else:
        other_loss().backward()
    for optimizer in both:
        optimizer.step()
    assert (weight.item(), other.item()) == (-0.5, -1.0)


def scaled_model(fused=False):
    model = make_model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, fused=fused), model.named_parameters()
    )
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=1024.0)


@ranks(2)
def test_grad_scaler_after_synchronize():
    """As Horovod documents it; in one step one rank overflows, and all skip it."""
    hvd.init()
    reference = make_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    model, optimizer, scaler = scaled_model()
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = loss_of(model, own(x), own(y))
        if step == 2 and hvd.rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        if step != 2:
            plain.zero_grad()
            loss_of(reference, x, y).backward()
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
            plain.step()
    assert scaler.get_scale() == 512.0
    assert relative_error(flat(model), flat(reference)) < 1e-5
    assert identical_on_all_ranks(model)


@ranks(2, 3)
@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_without_synchronize(size, fused):
    """As torch documents it: in two steps one rank overflows, and all skip these."""
    hvd.init()
    for init_scale, clips in ((1024.0, False), (1024.0, True), (1.0, True)):
        reference = make_model()
        plain = torch.optim.SGD(reference.parameters(), lr=0.1)
        model, optimizer, _ = scaled_model(fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
        for step in range(7):
            x, y = batch(step)
            model.zero_grad()
            loss = loss_of(model, own(x), own(y))
            if step in (0, 5) and hvd.rank() == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            if step not in (0, 5):
                plain.zero_grad()
                loss_of(reference, x, y).backward()
                if clips:
                    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
                plain.step()
        assert scaler.get_scale() == init_scale / 4
        assert relative_error(flat(model), flat(reference)) < 1e-5
        assert identical_on_all_ranks(model)


@ranks(2)
def test_grad_scaler_and_weights_of_batches():
    hvd.init()
    model, optimizer, scaler = scaled_model()
    reference = make_model()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    x, y = batch(0)
    mine = slice(0, 6) if hvd.rank() == 0 else slice(6, SAMPLES)
    for _ in range(2):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x[mine], y[mine])).backward()
        scaler.step(optimizer, batch_size=len(x[mine]))
        scaler.update()
        plain.zero_grad()
        loss_of(reference, x, y).backward()
        plain.step()
    assert relative_error(flat(model), flat(reference)) < 1e-5
    scaler.scale(loss_of(model, x[mine], y[mine])).backward()
    optimizer.synchronize(batch_size=len(x[mine]))
    scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match=r"comes after synchronize\(\)"):
        scaler.step(optimizer, batch_size=len(x[mine]))


@ranks(1)
def test_grad_scaler_leaves_other_optimizers_alone():
    hvd.init()
    scaled_model()
    weight, loss, plain = one_weight()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(loss()).backward()
    scaler.step(plain)
    assert weight.item() == -1.0


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
