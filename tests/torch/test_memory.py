"""The memory of gradients, their own and the buckets'."""

import copy
import gc
import math
import os
import weakref

import numpy as np
import pytest

from tests.forks import Signal, run_forked
from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.torch import buffers
from tests.torch.checks import assert_identical_on_all_ranks
from tests.torch.test_distributed import grouped
from tests.torch.test_optimizer import batch as make_batch
from tests.torch.test_optimizer import flat as weights
from tests.torch.test_optimizer import (
    loss_of,
    make_model,
    own,
    relative_error,
    sgd,
    train,
)


def let_nothing_be_small(monkeypatch):
    monkeypatch.setattr(buffers, "_LARGE", 0)


def distributed():
    model = make_model()
    return model, hvd.DistributedOptimizer(sgd(model), model.named_parameters())


def backward(model, optimizer, step, set_to_none=True):
    optimizer.zero_grad(set_to_none=set_to_none)
    x, y = make_batch(step)
    loss_of(model, own(x), own(y)).backward()


@ranks(2)
@pytest.mark.parametrize("large", [False, True])
def test_a_gradient_is_the_ranks_own_and_then_the_average_in_the_same_tensor(monkeypatch, large):
    """Users get hold of it before `synchronize`, to clip it after."""
    if large:
        let_nothing_be_small(monkeypatch)
    hvd.init()
    model, optimizer = distributed()
    parameters = list(model.parameters())
    for step in range(8):
        backward(model, optimizer, step)
        x, y = make_batch(step)
        before = [parameter.grad for parameter in parameters]
        for found, expected in zip(
            before, torch.autograd.grad(loss_of(model, own(x), own(y)), parameters), strict=True
        ):
            torch.testing.assert_close(found, expected)
        versions = [gradient._version for gradient in before]
        optimizer.synchronize()
        for parameter, gradient, version in zip(parameters, before, versions, strict=True):
            assert parameter.grad is gradient
            assert gradient._version > version
        with optimizer.skip_synchronize():
            optimizer.step()


@ranks(2)
def test_a_change_that_torch_does_not_see_is_an_error(monkeypatch):
    let_nothing_be_small(monkeypatch)
    hvd.init()
    model, optimizer = distributed()
    for step in range(7):
        backward(model, optimizer, step)
        if step == 6:  # the turn of the first of six
            next(model.parameters()).grad.data *= 2
            with pytest.raises(RuntimeError, match=r"'0\.weight' was changed after backward"):
                optimizer.step()
        else:
            optimizer.step()


def flat_buffer(parameters):
    """Gradients that are views of one tensor, as flattening and DDP's buckets make them."""
    buffer = torch.zeros(sum(parameter.numel() for parameter in parameters))
    parts = buffer.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return buffer.split([parameter.numel() for parameter in parameters])


def own_buffers(share):
    def make(parameters):
        views = [torch.zeros(parameter.numel()) for parameter in parameters]
        for parameter, view in zip(parameters, views, strict=True):
            parameter.grad = share(view)
        return views

    return make


def arrays(parameters):
    views = [np.zeros(parameter.numel(), np.float32) for parameter in parameters]
    for parameter, view in zip(parameters, views, strict=True):
        parameter.grad = torch.from_numpy(view)
    return views


def exported(by):
    def make(parameters):
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        return [by(parameter.grad) for parameter in parameters]

    return make


@ranks(2)
@pytest.mark.parametrize(("numel", "large"), [(40, False), (40, True), (600_000, True)])
def test_averages_are_written_where_others_look(monkeypatch, numel, large):
    """The user's memory, which gradients are views of, or which is a view of them."""
    if large:
        let_nothing_be_small(monkeypatch)
    hvd.init()
    mean = (1 + hvd.size()) / 2
    for make in (
        flat_buffer,
        own_buffers(lambda view: view.view(-1)),
        own_buffers(torch.Tensor.detach),
        own_buffers(lambda view: view.share_memory_()),
        arrays,
        exported(torch.Tensor.numpy),
        exported(torch.from_dlpack),
    ):
        parameters = [torch.nn.Parameter(torch.zeros(numel)) for _ in range(2)]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
        views = make(parameters)
        places = [parameter.grad.data_ptr() for parameter in parameters]
        for step in range(5):
            for view in views:
                view *= 0
            sum((parameter * (hvd.rank() + 1)).sum() for parameter in parameters).backward()
            optimizer.step()
            for parameter, view in zip(parameters, views, strict=True):
                assert (view == mean).all()
                assert (parameter.grad == mean).all()
                assert (parameter == -mean * (step + 1)).all()
        assert [parameter.grad.data_ptr() for parameter in parameters] == places


@ranks(2)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize(
    "look", [torch.Tensor.numpy, torch.from_dlpack, np.from_dlpack, torch.Tensor.detach]
)
def test_averages_are_written_where_somebody_looks_after_the_backward_pass(
    monkeypatch, look, large
):
    if large:
        let_nothing_be_small(monkeypatch)
    hvd.init()
    parameters = [torch.nn.Parameter(torch.zeros(40)) for _ in range(2)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    for _ in range(5):
        optimizer.zero_grad()
        sum((parameter * (hvd.rank() + 1)).sum() for parameter in parameters).backward()
        seen = [look(parameter.grad) for parameter in parameters]
        optimizer.step()
        assert all((each == 1.5).all() for each in seen)


@ranks(2)
def test_a_gradient_that_nobody_shares_becomes_its_average_without_a_copy():
    """One that is lent, too: a view of numpy's must not make it look like numpy's."""
    hvd.init()
    small, lent = (torch.nn.Parameter(torch.zeros(numel)) for numel in (2**16, 2**20))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([small, lent], lr=1.0))
    for _ in range(6):
        optimizer.zero_grad()
        (small.sum() + lent.sum()).backward()
        places = [parameter.grad.data_ptr() for parameter in (small, lent)]
        optimizer.step()
        assert small.grad.data_ptr() != places[0]
        assert lent.grad.data_ptr() != places[1]


def places_of_small(steps, keep=lambda parameters: None):
    """Train in a bucket of 120 KB; return the gradients' addresses before and after exchanges."""
    parameters = [torch.nn.Parameter(torch.zeros(10_000)) for _ in range(3)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    places = []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        sum((parameter * step * (hvd.rank() + 1)).sum() for parameter in parameters).backward()
        own = [parameter.grad.data_ptr() for parameter in parameters]
        optimizer.step()
        mean = step * (1 + hvd.size()) / 2
        assert all((parameter.grad == mean).all() for parameter in parameters)
        places.append((own, [parameter.grad.data_ptr() for parameter in parameters]))
        keep(parameters)
    return places


@ranks(2)
def test_small_gradients_become_their_averages_without_a_copy_in_the_same_memory():
    hvd.init()
    places = places_of_small(6)
    assert all(not {*own} & {*averages} for own, averages in places)
    first, *others = [averages for _, averages in places[2:]]  # the order was learned before
    assert others == [first] * len(others)


@ranks(2)
def test_averages_are_copied_where_one_gradient_is_shared():
    hvd.init()
    parameters = [torch.nn.Parameter(torch.zeros(n)) for n in (30, 40, 50)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))
    parameters[1].grad = torch.from_numpy(array := np.zeros(40, np.float32))
    for step in range(1, 7):
        parameters[0].grad = parameters[2].grad = None
        array[:] = 0
        sum((parameter * step * (hvd.rank() + 1)).sum() for parameter in parameters).backward()
        own = [parameter.grad.data_ptr() for parameter in parameters]
        optimizer.step()
        assert all((parameter.grad == step * 1.5).all() for parameter in parameters)
        assert (array == step * 1.5).all()
        now = [parameter.grad.data_ptr() for parameter in parameters]
        assert now == own


def collections(call, threshold):
    """Return how often the garbage collector runs in a call, at so many new objects."""
    found = []
    gc.collect()
    thresholds = gc.get_threshold()
    gc.callbacks.append(lambda phase, _: found.extend([phase] * (phase == "start")))
    gc.set_threshold(threshold, *thresholds[1:])
    try:
        call()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.pop()
    return len(found)


@ranks(2)
@grouped
def test_a_step_makes_few_objects_that_the_garbage_collector_counts():
    """Python's objects of gradients are torch's own; a full collection may outlast a step."""
    hvd.init()
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(150)))
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    twin = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(model))
    twin.register_comm_hook(hvd.comm_hook_state(), hvd.comm_hook)

    def backward(trained):
        trained.zero_grad()
        trained(torch.full((3, 2), 1.0 + hvd.rank())).sum().backward()

    def step():
        backward(model)
        optimizer.step()

    for _ in range(8):
        step()
        backward(twin)
    assert collections(step, 500) == 0  # 300 of them are torch's
    assert collections(lambda: backward(twin), 300) == 0


@ranks(2)
def test_whoever_keeps_gradients_of_each_step_keeps_no_bucket_for_each():
    hvd.init()
    kept = []
    places = places_of_small(8, lambda parameters: kept.append(parameters[1].grad))
    assert [gradient.tolist() for gradient in kept] == [[1.5 * n] * 10_000 for n in range(1, 9)]
    assert all(own == averages for own, averages in places[3:])  # copied


@ranks(2)
def test_small_gradients_are_exchanged_after_torch_has_moved_their_memory():
    """It does so in place, as queues of torch.multiprocessing do with what is put in."""
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(40))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    for step in range(6):
        optimizer.zero_grad()
        (parameter * (hvd.rank() + 1) * step).sum().backward()
        optimizer.step()
        assert parameter.grad.tolist() == [1.5 * step] * 40
        parameter.grad.share_memory_()


@ranks(2)
def test_small_gradients_are_exchanged_after_forks_that_found_them_in_use():
    hvd.init()
    places = places_of_small(6, lambda parameters: run_forked(lambda: None))
    assert places[-1][1] == places[-2][1]


@ranks(2)
def test_without_torchs_count_of_views_all_is_copied(monkeypatch):
    let_nothing_be_small(monkeypatch)
    monkeypatch.setattr(buffers, "_use_count", None)
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(40))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    for step in range(5):
        optimizer.zero_grad()
        (parameter * (hvd.rank() + 1)).sum().backward()
        place = parameter.grad.data_ptr()
        optimizer.step()
        assert parameter.grad.data_ptr() == place
        assert parameter.tolist() == [-1.5 * (step + 1)] * 40


def lend_all(monkeypatch):
    """Let all gradients be lent, as far as they can be; return the numbers of those that were."""
    found = []
    lend = buffers.GradientBuffers._send_zero_copy

    def lend_and_spoil(self, step, number, gradient):
        lend(self, step, number, gradient)
        own = self._zero_copy_ranges[number]
        self._slots[number].view(-1)[own] = math.nan  # nobody is to read it
        found.append(number)

    monkeypatch.setattr(buffers, "LEAST_ZERO_COPY", 0)
    monkeypatch.setattr(buffers, "_LARGE", 0)
    monkeypatch.setattr(buffers.GradientBuffers, "_send_zero_copy", lend_and_spoil)
    return found


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [{"compression": hvd.Compression.bf16}, {"gradient_predivide_factor": 2.0}],
    ids=str,
)
def test_what_needs_the_whole_copy_gets_it(monkeypatch, options):
    check_whole_copies(monkeypatch, **options)


def check_whole_copies(monkeypatch, **options):
    lent = lend_all(monkeypatch)
    hvd.init()
    model = make_model()
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)
    train(model, optimizer, 4)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert_identical_on_all_ranks(model)
    assert not lent


@ranks(2)
def test_gradients_with_weights(monkeypatch):
    """Ranks that have no samples at all, too: what they have lent is not a number."""
    lent = lend_all(monkeypatch)
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("it", parameter)])
    for step in range(5):
        optimizer.zero_grad()
        samples = hvd.rank() + step % 2
        value = hvd.rank() + 1.0 if samples else math.nan
        (parameter * value).sum().backward()
        optimizer.synchronize(batch_size=samples)
        counts = [rank + step % 2 for rank in range(hvd.size())]
        mean = sum((rank + 1) * count for rank, count in enumerate(counts)) / sum(counts)
        torch.testing.assert_close(parameter.grad, torch.full((10,), mean))
    assert len(lent) == 5


CHANGES = {
    "in place": lambda parameter: parameter.grad.mul_(2),
    "unseen": lambda parameter: parameter.grad.data.mul_(2),
    "by numpy": lambda parameter: parameter.grad.numpy().fill(0.5),
}


@ranks(2)
@pytest.mark.parametrize("prepare", [None, let_nothing_be_small, lend_all])
@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("change", [*CHANGES])
def test_a_change_before_the_exchange_has_ended_is_an_error(monkeypatch, prepare, step, change):
    """Torch sees some of them, and others not."""
    lent = prepare and prepare(monkeypatch)
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(10))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("it", parameter)])

    def backward(factor=1.0):
        optimizer.zero_grad()
        (parameter * (hvd.rank() + 1) * factor).sum().backward()

    for _ in range(step):
        backward()
        optimizer.step()
    backward()
    CHANGES[change](parameter)
    words = r"'it' was changed after backward.*call optimizer\.clip_grad_norm_\(max_norm\)"
    with pytest.raises(RuntimeError, match=words):
        optimizer.step()
    backward()
    optimizer.step()
    assert lent is None or len(lent) == step + 2
    assert parameter.tolist() == [-1.5 * (step + 1)] * 10
    backward(math.nan)  # which is not equal to itself
    optimizer.step()
    assert parameter.isnan().all()


@ranks(2)
def test_a_lent_gradient_that_torch_moves_before_the_exchange_has_ended_is_an_error(monkeypatch):
    """Its old memory is freed, which the exchange would read; a copied one may move."""
    for lent in (False, True):
        if lent:
            lend_all(monkeypatch)
        hvd.init()
        parameter = torch.nn.Parameter(torch.zeros(10))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        for _ in range(5):
            optimizer.zero_grad()
            (parameter * (hvd.rank() + 1)).sum().backward()
            parameter.grad.share_memory_()
            if lent:
                with pytest.raises(RuntimeError, match="was changed after backward"):
                    optimizer.step()
            else:
                optimizer.step()
        assert parameter.tolist() == [0.0 if lent else -7.5] * 10


class _TwoViews(torch.autograd.Function):
    """Two parameters whose gradients lie in one tensor."""

    @staticmethod
    def forward(ctx, first, second):
        return (first + second).sum()

    @staticmethod
    def backward(ctx, gradient):
        both = torch.ones(2, 6) * gradient
        return both[0], both[1]


@ranks(2)
def test_gradients_that_share_memory_are_copied(monkeypatch):
    lent = lend_all(monkeypatch)
    hvd.init()
    first, second = (torch.nn.Parameter(torch.zeros(6)) for _ in range(2))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([first, second], lr=1.0), [("first", first), ("second", second)]
    )
    for step in range(5):
        optimizer.zero_grad()
        (_TwoViews.apply(first, second) * (hvd.rank() + 1)).backward()
        optimizer.step()
        expected = torch.full((6,), -1.5 * (step + 1))
        torch.testing.assert_close((first.data, second.data), (expected, expected))
    assert not lent


@ranks(2)
@pytest.mark.parametrize("by_model", [False, True])
def test_gradients_memory_is_released_when_they_are_zeroed(monkeypatch, by_model):
    """Where the model zeroes them, when the next step begins."""
    lent = lend_all(monkeypatch)
    hvd.init()
    model, optimizer = distributed()
    parameters, storages = list(model.parameters()), []
    for step in range(5):
        lent.clear()
        if by_model:
            model.zero_grad()
        else:
            optimizer.zero_grad()  # frees gradients where nothing is exchanged, too
            assert [storage() for storage in storages] == [None] * len(storages)
        x, y = make_batch(step)
        loss_of(model, own(x), own(y)).backward()
        assert [storage() for storage in storages] == [None] * len(storages)
        storages = [weakref.ref(parameters[number].grad.untyped_storage()) for number in lent]
        assert storages
        optimizer.step()
        assert None not in [storage() for storage in storages]


@pytest.mark.slow
@ranks(2)
@pytest.mark.parametrize("large", [False, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_forked_child_has_gradients_of_its_own(monkeypatch, set_to_none, large):
    """As it would have without hvdlite: a copy, at the time of the fork."""
    if large:
        let_nothing_be_small(monkeypatch)
    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(10_000))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
    mean = (1 + hvd.size()) / 2

    def step():
        optimizer.zero_grad(set_to_none)
        (parameter * (hvd.rank() + 1)).sum().backward()
        optimizer.step()

    for steps in range(1, 4):
        step()
        if steps > 1:
            continue
        written, go_on = Signal(), Signal()

        def child(written=written, go_on=go_on):
            parameter.grad[:500] = 7
            written.give()
            go_on.wait()
            assert (parameter.grad[:500] == 7).all()
            assert (parameter.grad[500:] == mean).all()

        def parent(written=written, go_on=go_on):
            written.wait()
            assert (parameter.grad == mean).all()
            for _ in range(4):  # the memory is used again
                step()
                parameter.grad *= 100
            go_on.give()

        run_forked(child, parent)
    assert parameter.tolist() == [-mean * 7] * 10_000


@ranks(2)
def test_a_forked_child_that_communicates_gets_an_error(monkeypatch):
    let_nothing_be_small(monkeypatch)
    hvd.init()
    model, optimizer = distributed()
    for step in range(4):
        backward(model, optimizer, step)
        if step < 3:
            optimizer.step()
    handle = hvd.allreduce_async(torch.ones(3), name="it") if hvd.rank() == 0 else None

    def child():
        calls = [lambda: hvd.allreduce(torch.ones(2)), optimizer.step, hvd.barrier]
        if handle is not None:
            calls += [lambda: hvd.synchronize(handle)]
        for call in calls:
            with pytest.raises(hvd.HorovodInternalError, match=f"started by rank {hvd.rank()}"):
                call()
        for parameter in model.parameters():  # in flight, some in their slots
            parameter.grad.zero_()

    run_forked(child)
    hvd.barrier()
    handle = handle or hvd.allreduce_async(torch.ones(3), name="it")
    assert hvd.synchronize(handle).tolist() == [1.0] * 3
    optimizer.step()
    reference = make_model()
    train(reference, sgd(reference), 4, local=False)
    assert relative_error(weights(model), weights(reference)) < 1e-5


def descriptors():
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
@ranks(
    3,
    fresh=True,
    timeout=240,
    env={"HVDLITE_FUSION_THRESHOLD": "4096", "HVDLITE_FIRST_BUCKET_SIZE": "4096"},
)
def test_descriptors_depend_neither_on_buckets_nor_on_starts():
    hvd.init()
    before = descriptors()
    parameters = [torch.nn.Parameter(torch.zeros(1024)) for _ in range(100)]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(parameters, lr=1.0))

    def step():
        optimizer.zero_grad()
        sum((parameter * (hvd.rank() + 1)).sum() for parameter in parameters).backward()
        optimizer.step()

    for _ in range(3):
        step()
    assert len(optimizer._reducer._hooks[0].exchange.buckets.plan) == 100
    assert descriptors() == before
    for _ in range(3):
        hvd.shutdown()
        hvd.init()
        added = hvd.add_process_set([0, 1])
        if added.included():
            hvd.allreduce(torch.ones(10_000), process_set=added)
        hvd.remove_process_set(added)
        step()
        step()
        assert descriptors() <= before + 2  # MPI has some of its own
    mean = (1 + hvd.size()) / 2
    assert all((parameter == -9 * mean).all() for parameter in parameters)


@ranks(2)
def test_an_optimizer_that_is_discarded_is_freed(monkeypatch):
    """With its model, as soon as nobody has it, also in the middle of a step."""
    hvd.init()
    gone = []
    for number in range(30):
        model, optimizer = distributed()
        for step in range(6):  # gradients come without hooks of their own in the end
            backward(model, optimizer, step)
            if step < 5 or number % 10:
                optimizer.step()
        if number == 1:
            before = descriptors()
        (members,) = optimizer._reducer._hooks
        objects = optimizer, optimizer._reducer, members, members.exchange, *model.parameters()
        gone += map(weakref.ref, objects)
        del model, optimizer, members, objects
        assert [each() for each in gone] == [None] * len(gone)
    assert descriptors() == before


@ranks(2)
def test_a_model_outlives_its_optimizer():
    hvd.init()
    model, optimizer = distributed()
    train(model, optimizer, 2)
    del optimizer
    reference = make_model()
    reference.load_state_dict(model.state_dict())
    for each in (model, reference):
        train(each, sgd(each), 5)
    assert torch.equal(weights(model), weights(reference))


@ranks(2)
def test_storages_can_be_resized_after_every_collective(size):
    """FSDP frees parameters in this way, and ``Tensor.numpy()`` would prevent it."""
    hvd.init()
    for dtype in (torch.float32, torch.bfloat16):
        for number, call in enumerate(
            (
                lambda tensor: hvd.allreduce_(tensor, name=f"in place {tensor.dtype}"),
                lambda tensor: hvd.broadcast_(tensor, 0),
                lambda tensor: hvd.broadcast_parameters([("t", tensor)], 0),
                lambda tensor: hvd.grouped_allreduce_([tensor]),
                hvd.allreduce,
                hvd.allgather,
                hvd.alltoall,
                hvd.reducescatter,
            )
        ):
            tensor = torch.full((4, 2), 2.0 + number, dtype=dtype)
            for _ in range(2):
                call(tensor)
                tensor.untyped_storage().resize_(0)
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.fill_(2.0 + number)
            call(tensor)
            assert (tensor == 2.0 + number).all()
