"""The backend of torch.distributed, what is built on it, and DDP's hook.

Expected values are closed forms, or numpy's in float64; models are compared with one process.
"""

import datetime
import gc
import itertools
import operator
import time
import weakref
from functools import reduce, wraps

import numpy as np
import pytest

from tests.harness import ranks
from tests.logs import logged

pytest.importorskip("torch")

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from hvdlite.torch import c10d, distributed
from tests.compression.strategies import ONE_OF_EACH
from tests.torch.test_collectives import DTYPES

Op = dist.ReduceOp
SIZES = [0, 1, 7, 1 << 17]
SHAPES = [(), *SIZES]


def grouped(test):
    """Run a test in a group of all ranks."""

    @wraps(test)
    def run(**arguments):
        dist.init_process_group("hvdlite")
        try:
            test(**arguments)
        finally:
            dist.destroy_process_group()

    return run


def own(shape, dtype=torch.float32, rank=None):
    """Return a tensor of a rank, which the others can compute, too."""
    draw = np.random.default_rng(dist.get_rank() if rank is None else rank)
    return torch.from_numpy(draw.integers(1, 5, shape)).to(dtype)


def every(shape, dtype=torch.float32):
    """Return the tensors of all ranks."""
    return [own(shape, dtype, rank) for rank in range(dist.get_world_size())]


@ranks(1, 2, 4)
@grouped
def test_all_reduce_of_every_dtype(size):
    for dtype in DTYPES:
        for count in SHAPES:
            tensor, expected = own(count, dtype), sum(every(count, dtype))
            dist.all_reduce(tensor)
            assert torch.equal(tensor, expected), (dtype, count)


@ranks(3)
@grouped
def test_all_reduce_by_every_operation(size):
    operations = {
        Op.SUM: operator.add,
        Op.PRODUCT: operator.mul,
        Op.MIN: torch.minimum,
        Op.MAX: torch.maximum,
        Op.BAND: operator.and_,
        Op.BOR: operator.or_,
        Op.BXOR: operator.xor,
    }
    for op, function in operations.items():
        for count in SIZES:
            tensor = own(count, torch.int64)
            dist.all_reduce(tensor, op)
            assert torch.equal(tensor, reduce(function, every(count, torch.int64))), op
    tensor = own(5)
    dist.all_reduce(tensor, Op.AVG)
    assert torch.equal(tensor, sum(every(5)) / size)
    tensor = own(5)
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(tensor, sum(every(5)) / 2)


@ranks(2)
@grouped
@pytest.mark.parametrize("view", [None, torch.detach, torch.from_dlpack])
def test_all_reduce_again_in_memory_that_only_some_ranks_share(size, view):
    """A tensor that is reduced again moves, if it is alone; a copy on one rank is as good."""
    count = 1 << 18
    tensor, places = torch.empty(count), set()
    viewed = tensor if view is None else view(tensor)
    for step in range(6):
        used = tensor.clone() if step > 3 and dist.get_rank() == 0 else tensor
        used.fill_(dist.get_rank() + step)
        dist.all_reduce(used)
        assert torch.equal(used, torch.full_like(used, size * (size - 1) / 2 + size * step))
        assert torch.equal(viewed, tensor)
        places.add(tensor.data_ptr())
    assert len(places) == (2 if view is None else 1)


@ranks(2)
@grouped
def test_a_tensor_that_other_processes_share_stays_where_they_see_it(size):
    tensor = torch.ones(1 << 18).share_memory_()
    for _ in range(3):
        dist.all_reduce(tensor)
    assert tensor.is_shared()
    assert (tensor == size**3).all()


@ranks(2)
@grouped
def test_tensors_whose_elements_do_not_lie_in_order(size):
    base = own((6, 4))
    tensor = base.clone().T
    dist.all_reduce(tensor)
    assert torch.equal(tensor, sum(every((6, 4))).T)
    out = torch.empty(4, 6 * size).T
    dist.all_gather_single(out, base)
    assert torch.equal(out, torch.cat(every((6, 4))))
    tensor = base.clone().T
    dist.broadcast(tensor, 1)
    assert torch.equal(tensor, own((6, 4), rank=1).T)


@ranks(3)
@grouped
def test_broadcast_and_reduce_from_and_to_every_rank(size):
    for root in range(size):
        for count in SHAPES:
            tensor = own(count)
            dist.broadcast(tensor, root)
            assert torch.equal(tensor, own(count, rank=root))
            tensor = own(count)
            dist.reduce(tensor, root)
            expected = sum(every(count)) if dist.get_rank() == root else own(count)
            assert torch.equal(tensor, expected)


@ranks(2, 3)
@grouped
def test_all_gather_and_reduce_scatter_even_and_uneven(size):
    rank = dist.get_rank()
    for count in SIZES:
        out = torch.empty(size, count)
        dist.all_gather_single(out, own(count))
        assert torch.equal(out, torch.stack(every(count)))
        part = torch.empty(count)
        dist.reduce_scatter_single(part, own((size, count)))
        assert torch.equal(part, sum(every((size, count)))[rank])
    parts = [torch.empty(number + 1) for number in range(size)]
    dist.all_gather(parts, own(rank + 1))
    assert all(torch.equal(part, own(n + 1, rank=n)) for n, part in enumerate(parts))
    given = [torch.full((number + 1,), rank + number) for number in range(size)]
    part = torch.empty(rank + 1, dtype=torch.int64)
    dist.reduce_scatter(part, given)
    assert part.tolist() == [size * (size - 1) // 2 + size * rank] * (rank + 1)


@ranks(3)
@grouped
def test_all_to_all_gather_and_scatter(size):
    rank = dist.get_rank()
    received = torch.empty(size)
    dist.all_to_all_single(received, torch.arange(size) * 10.0 + rank)
    assert received.tolist() == [rank * 10.0 + other for other in range(size)]
    sent = torch.full((sum(range(size + 1)), 2), float(rank))
    splits = [other + 1 for other in range(size)]
    received = torch.empty((rank + 1) * size, 2)
    dist.all_to_all_single(received, sent, [rank + 1] * size, splits)
    assert received[:, 0].tolist() == [other for other in range(size) for _ in range(rank + 1)]
    outputs = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(outputs, [torch.full((other + 1,), float(rank)) for other in range(size)])
    assert all((each == other).all() for other, each in enumerate(outputs))
    for root, shape in itertools.product(range(size), [(), 3]):
        parts = [torch.empty(shape) for _ in range(size)] if rank == root else None
        dist.gather(own(shape), parts, root)
        assert parts is None or all(map(torch.equal, parts, every(shape)))
        given = [own(shape, rank=100 + n) for n in range(size)] if rank == root else None
        part = torch.empty(shape)
        dist.scatter(part, given, root)
        assert torch.equal(part, own(shape, rank=100 + rank))


@ranks(2)
@grouped
def test_a_profile_shows_calls_also_those_that_fail(size):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(3), async_op=True).wait()
        with pytest.raises(hvd.HorovodInternalError, match="shape is"):
            dist.all_reduce(torch.ones(3 + dist.get_rank()))
        dist.barrier()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["hvdlite:allreduce"] == 2
    assert counts["hvdlite:barrier"] == 1


@ranks(2, 3)
@grouped
def test_point_to_point(size):
    rank, others = dist.get_rank(), dist.get_world_size() - 1
    for count in SHAPES:
        tensors = [torch.empty(count) for _ in range(size)]
        following, before = (rank + 1) % size, (rank - 1) % size
        requests = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, own(count), following, tag=7),
                dist.P2POp(dist.irecv, tensors[0], before, tag=7),
            ]
        )
        for request in requests:
            request.wait()
        assert torch.equal(tensors[0], own(count, rank=before))
    if rank:
        dist.send(torch.tensor([rank]), 0, tag=rank)
        dist.send(torch.tensor([rank]), 0)
        return
    for other in range(others, 0, -1):  # in another order than they come
        found = torch.empty(1, dtype=torch.int64)
        assert dist.recv(found, other, tag=other) == found.item() == other
    assert {dist.recv(found) for _ in range(others)} == {*range(1, size)}


@ranks(2)
@grouped
def test_a_message_that_is_not_what_was_expected_is_a_named_error(size):
    if dist.get_rank():
        for sent in (torch.ones(3), torch.ones(9), torch.ones(5, dtype=torch.int32), torch.ones(5)):
            dist.send(sent, 0)
        return
    for found in ("3 elements of float32", "more elements", "5 elements of int32"):
        with pytest.raises(hvd.HorovodInternalError, match=f"receive from rank 1 .*{found}"):
            dist.recv(torch.empty(5), 1)
    dist.recv(tensor := torch.empty(5), 1)
    assert torch.equal(tensor, torch.ones(5))


@ranks(2)
@grouped
def test_work_futures_and_coalescing(size):
    tensors = [own(3), own(1 << 17)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    second = works[1].get_future().then(lambda future: future.value()[0] * 2)
    assert torch.equal(second.wait(), sum(every(1 << 17)) * 2)
    works[0].wait()
    assert works[0].is_completed()
    assert torch.equal(works[0].result()[0], sum(every(3)))
    parts = [torch.zeros(3) for _ in range(size)]
    gathering = dist.all_gather(parts, own(3), async_op=True)
    while not gathering.is_completed():
        time.sleep(1e-3)
    assert all(map(torch.equal, parts, every(3)))

    def call_again(future):
        return dist.all_reduce(own(3), async_op=True).get_future().wait()[0]

    chained = dist.all_reduce(own(2), async_op=True).get_future().then(call_again)
    assert torch.equal(chained.wait(), sum(every(3)))
    tensors = [own(3), own(4)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    assert torch.equal(tensors[1], sum(every(4)))


@ranks(2)
@grouped
def test_calls_on_one_tensor_run_one_after_the_other(size):
    for count in (3, 1 << 20):  # the large one may move to memory that ranks share
        tensor = torch.ones(count)
        works = [dist.all_reduce(tensor, async_op=True) for _ in range(4)]
        for work in works:
            work.wait()
        assert (tensor == size**4).all()


@ranks(2)
@grouped
def test_functional_collectives_and_their_gradients(size):
    import torch.distributed._functional_collectives as functional

    total = functional.all_reduce(own(4), "sum", dist.group.WORLD)
    assert torch.equal(total + 0, sum(every(4)))
    gathered = functional.all_gather_single(own((2, 3)), 0, dist.group.WORLD)
    assert torch.equal(gathered + 0, torch.cat(every((2, 3))))
    part = functional.reduce_scatter_single(own((size, 3)), "sum", 0, dist.group.WORLD)
    assert torch.equal(part + 0, sum(every((size, 3)))[dist.get_rank() : dist.get_rank() + 1])
    weights = own(3).requires_grad_()
    (functional.all_reduce(weights, "sum", dist.group.WORLD) ** 2).sum().backward()
    assert torch.equal(weights.grad, 2 * size * sum(every(3)))


@ranks(4)
@grouped
def test_groups_that_their_members_alone_make(size):
    rank = dist.get_rank()
    with pytest.raises(RuntimeError, match="No device associated with the default pg"):
        dist.split_group(split_ranks=[[0, 1]])  # as the page on torch.distributed says
    if rank < 2:
        pair = dist.new_group([0, 1], use_local_synchronization=True)
        tensor = own(3)
        dist.all_reduce(tensor, group=pair)
        assert torch.equal(tensor, own(3, rank=0) + own(3, rank=1))
        dist.destroy_process_group(pair)
    others = dist.new_group([*range(1, size)])
    again = dist.new_group([*range(1, size)])  # of the same ranks
    if rank:
        for each in (others, again):
            tensor = own(3)
            dist.broadcast(tensor, 2, group=each)
            assert torch.equal(tensor, own(3, rank=2))
    tensor = own(1)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, sum(every(1)))


@ranks(2)
@grouped
def test_a_group_of_gloo_beside_it(size):
    beside = dist.new_group(backend="gloo")
    for each in (beside, None):
        tensor = own(3)
        dist.all_reduce(tensor, group=each)
        assert torch.equal(tensor, sum(every(3)))


@ranks(2)
@grouped
def test_disagreements_are_errors_on_all_ranks_and_calls_go_on(size):
    is_first = dist.get_rank() == 0
    dtype = [torch.int32, torch.float32][is_first]
    for call, found in [
        (lambda: dist.all_reduce(torch.ones(2 + is_first)), "shape is .3,. on rank 0, .2,. on"),
        (
            lambda: dist.all_reduce(torch.ones(2, dtype=dtype)),
            "dtype",
        ),
        (lambda: dist.all_reduce(torch.ones(2), [Op.MIN, Op.MAX][is_first]), "op is Max on rank 0"),
        (lambda: dist.broadcast(torch.ones(2), int(is_first)), "root_rank is 1 on rank 0"),
        (
            lambda: dist.all_reduce(torch.ones(2)) if is_first else dist.barrier(),
            "the operation is allreduce on rank 0, barrier on rank",
        ),
        (
            lambda: dist.all_to_all_single(
                torch.empty(size + is_first), torch.ones(size), [1 + is_first] + [1] * (size - 1)
            ),
            "rank 0 sends 1 elements to rank 0, which expects 2",
        ),
    ]:
        with pytest.raises(hvd.HorovodInternalError, match=found):
            call()
        tensor = own(2)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, sum(every(2)))


@ranks(2)
@grouped
def test_mistakes_of_a_rank_are_named_at_once(size):
    if dist.get_rank() == 0:
        with pytest.raises(ValueError, match="tensor on meta; the backend 'hvdlite' exchanges"):
            dist.all_reduce(torch.ones(2, device="meta"))
    else:  # pairs with it, and not with the next
        work = dist.all_reduce(torch.ones(2), async_op=True)
    with pytest.raises(ValueError, match="rank 9"):
        dist.group.WORLD.send([torch.ones(1)], 9, 0)
    with pytest.raises(ValueError, match="a tensor for each of the 2 ranks; found 1"):
        dist.all_gather([torch.ones(1)], torch.ones(1))
    with pytest.raises(ValueError, match="Bitwise_and is not defined for dtype float32"):
        dist.all_reduce(torch.ones(1), Op.BAND)
    for numel in (3, 8):
        with pytest.raises(ValueError, match=rf"part of 3 .* whole of {numel} .*\[3, 3\]"):
            dist.reduce_scatter_single(torch.ones(3), torch.ones(numel))
        with pytest.raises(ValueError, match=rf"part of 3 .* whole of {numel} .*\[3, 3\]"):
            dist.all_gather_single(torch.ones(numel), torch.ones(3))
    eighths = torch.ones(4).to(torch.float8_e5m2)
    dist.broadcast(eighths, 0)
    with pytest.raises(TypeError, match="float8"):
        dist.reduce(eighths, 0)
    assert dist.get_rank() == 0 or not work.is_completed()
    dist.barrier()


@ranks(2)
@grouped
def test_waiting_has_a_bound(size):
    second = datetime.timedelta(seconds=1)
    if dist.get_rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"ank 1 (failed|succ).* monit"):
            dist.monitored_barrier(timeout=second)
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with pytest.raises(hvd.HorovodInternalError, match=r"waited 1 s .*1' \(all_reduce\)"):
            work.wait(second)
        with pytest.raises(hvd.HorovodInternalError, match=r"waited 1.* in receive from rank 1"):
            dist.irecv(torch.ones(1), 1).wait(second)
    dist.group.WORLD.engine.world.comm.Barrier()  # over MPI: the other rank comes late
    if dist.get_rank():
        dist.all_reduce(torch.ones(1))
        dist.send(torch.ones(1), 0)
        with pytest.raises(hvd.HorovodInternalError, match=r"ank 1 (failed|succ).* monit"):
            dist.monitored_barrier(timeout=second)
    work.wait() if dist.get_rank() == 0 else None
    dist.monitored_barrier()


@ranks(2)
@grouped
def test_a_group_waits_as_long_as_its_timeout(size):
    brief = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if dist.get_rank() == 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"waited .* for rank 1 in 'call 1'"):
            dist.all_reduce(torch.ones(1), group=brief)
    dist.group.WORLD.engine.world.comm.Barrier()
    dist.barrier()


@ranks(2)
def test_destroyed_and_initialised_again(size):
    for _ in range(3):
        dist.init_process_group("hvdlite")
        tensor = own(2)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, sum(every(2)))
        pair = dist.new_group([0, 1])
        dist.destroy_process_group(pair)
        with pytest.raises(RuntimeError, match=f"rank {dist.get_rank()}: the group.* destroyed"):
            pair.barrier()
        dist.destroy_process_group()


@ranks(2)
@grouped
def test_a_group_that_shutdown_has_ended_says_so(size):
    rank = dist.get_rank()
    hvd.shutdown()
    for begin in (lambda: None, hvd.init):
        begin()
        assert dist.get_rank() == rank
        with pytest.raises(RuntimeError, match=r"has been destroyed, by hvd\.shutdown"):
            dist.all_reduce(torch.ones(1))


@ranks(2)
def test_a_destroyed_group_leaves_no_garbage(size):
    """Its store has a thread: a forked child that collects garbage might wait for its end."""
    gc.disable()
    try:
        dist.init_process_group("hvdlite")
        dist.all_reduce(own(1))
        group = weakref.ref(dist.group.WORLD)
        dist.destroy_process_group()
        assert group() is None
    finally:
        gc.enable()


@ranks(2)
def test_substitutes_for_gloo_mpi_and_nothing(size, monkeypatch):
    monkeypatch.setattr(c10d.c10d, "BackendConfig", c10d.c10d.BackendConfig)
    distributed.substitute()
    for backend in ("gloo", "mpi", None):
        dist.init_process_group(backend)
        assert isinstance(dist.group.WORLD, distributed.ProcessGroup)
        dist.barrier()
        if backend == "gloo":
            dist.monitored_barrier()
            assert dist.get_backend() == "gloo"
        dist.destroy_process_group()


class Net(torch.nn.Sequential):
    """A model whose weights depend on the arguments alone."""

    def __init__(self, width=64, seed=0):
        torch.manual_seed(seed)
        super().__init__(
            torch.nn.Linear(8, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, width),
            torch.nn.ReLU(),
            torch.nn.Linear(width, 4),
        )


def train(model, parameters, steps=4, rank=None, optimizer=None):
    """Train on a rank's batches; without a rank, on those of all ranks together."""
    optimizer = optimizer or torch.optim.SGD(parameters, 0.1, momentum=0.9)
    for step in range(steps):
        sources = range(dist.get_world_size()) if rank is None else [rank]
        samples = [own((4, 8), rank=10 * step + source) for source in sources]
        optimizer.zero_grad()
        model(torch.cat(samples)).square().mean().backward()
        optimizer.step()


def weights_of(model):
    """Return all parameters, gathered where they are cut."""
    whole = [
        each.full_tensor() if hasattr(each, "full_tensor") else each for each in model.parameters()
    ]
    return torch.cat([each.detach().reshape(-1) for each in whole])


def alone():
    """Return the weights of one process that trains on all batches."""
    model = Net()
    train(model, model.parameters())
    return weights_of(model)


@ranks(2, settings={"HVDLITE_OVERLAP": "0"})  # in a world that reads the parameter
@pytest.mark.parametrize("overlap", "01")
def test_ddp_trains_as_one_process(size, overlap, monkeypatch):
    monkeypatch.setenv("HVDLITE_OVERLAP", overlap)
    grouped(_train_by_ddp)()


def _train_by_ddp():
    for options in (
        {},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 1e-4},
        {"find_unused_parameters": True},
        {"static_graph": True},
    ):
        model = DistributedDataParallel(Net(seed=dist.get_rank()), **options)
        model.module.load_state_dict(Net().state_dict())
        train(model, model.parameters(), rank=dist.get_rank())
        torch.testing.assert_close(weights_of(model), alone())


@ranks(2, settings={"HVDLITE_OVERLAP": "0"})
@grouped
def test_without_cores_to_spare_allreduces_of_ddp_begin_at_the_end_of_the_backward_pass(size):
    model, begun = DistributedDataParallel(Net(), bucket_cap_mb=1e-3), []
    first, *_ = model.parameters()
    for _ in range(3):
        first.register_hook(lambda _: begun.extend(dist.group.WORLD._end._handles))
        model(torch.ones(2, 8)).sum().backward()
    assert begun
    assert all(handle.finished for handle in begun)


@ranks(2, settings={"HVDLITE_OVERLAP": "0"})
@grouped
@pytest.mark.parametrize("way", ["poll", "wait", "future", "reducer", "hook"])
def test_a_hook_may_wait_in_the_backward_pass(size, way):
    """Without cores to spare, DDP's own allreduces begin at the end of it."""

    def hook(_, bucket):
        tensor = bucket.buffer()
        if way == "reducer":
            future = model.reducer._run_allreduce_hook(bucket)
        elif way == "hook":
            future = hvd.comm_hook(state, bucket)
        else:
            work = dist.all_reduce(tensor, async_op=True)
            future = work.get_future()
        deadline = time.monotonic() + 10
        while way == "poll" and not work.is_completed():
            assert time.monotonic() < deadline
            time.sleep(1e-3)
        if way == "wait":
            work.wait()
        torch.futures.wait_all([future])
        done = torch.futures.Future()
        done.set_result(future.value() if way == "hook" else tensor / size)
        return done

    model, state = DistributedDataParallel(Net(), bucket_cap_mb=1e-3), hvd.comm_hook_state()
    model.register_comm_hook(None, hook)
    train(model, model.parameters(), rank=dist.get_rank())
    torch.testing.assert_close(weights_of(model), alone())


@ranks(2)
@grouped
def test_an_error_in_the_backward_pass_of_ddp_is_named(size):
    model = DistributedDataParallel(Net())
    if dist.get_rank():
        with pytest.raises(hvd.HorovodInternalError, match="the ranks disagree"):
            dist.all_reduce(own(3))
    else:  # C++ makes a RuntimeError of it
        with pytest.raises(RuntimeError, match="MismatchError: the ranks disagree"):
            model(own((4, 8))).sum().backward()
    dist.barrier()


@ranks(3)
@grouped
def test_fsdp_trains_as_one_process_and_its_checkpoint_loads(size, tmp_path):
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = Net()
    for part in (model[0], model[2], model):
        fully_shard(part)
    train(model, model.parameters(), rank=dist.get_rank())
    torch.testing.assert_close(weights_of(model), alone())
    checkpoint.save(get_model_state_dict(model), checkpoint_id=tmp_path)
    whole = Net(seed=1).state_dict()
    checkpoint.load(whole, checkpoint_id=tmp_path)
    loaded = torch.cat([whole[name].reshape(-1) for name, _ in Net().named_parameters()])
    torch.testing.assert_close(loaded, alone())


@ranks(2)
@grouped
def test_what_would_mix_up_parts_of_a_dtensor_is_refused(size, tmp_path):
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(Net())
    optimizer = torch.optim.Adam(model.parameters())
    train(model, model.parameters())
    states = model.state_dict()
    for refused in (
        lambda: hvd.allreduce(states["0.weight"]),
        lambda: hvd.broadcast_parameters(states, 0),
        lambda: hvd.broadcast_optimizer_state(optimizer, 0),
        lambda: hvd.DistributedOptimizer(optimizer),
        lambda: hvd.checkpoint(tmp_path / "one.pt").save(states),
        lambda: hvd.checkpoint(tmp_path / "one.npz").save(states),
    ):
        with pytest.raises(TypeError, match="DTensor of shape"):
            refused()
    assert not [*tmp_path.iterdir()]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == size


@ranks(2)
@grouped
def test_tensor_parallel_trains_as_one_process(size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (size,))
    model = parallelize_module(Net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, model.parameters())
    torch.testing.assert_close(weights_of(model), alone())


@ranks(2)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@grouped
def test_zero_redundancy_optimizer_and_pipeline(size):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    model = DistributedDataParallel(Net())
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)
    train(model, None, rank=dist.get_rank(), optimizer=zero)
    torch.testing.assert_close(weights_of(model), alone())
    layers, rank = [*Net()], dist.get_rank()
    part = torch.nn.Sequential(*(layers[2:] if rank else layers[:2]))
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2)
    samples = own((4, 8), rank=0)
    found = schedule.step(samples) if rank == 0 else schedule.step()
    if rank:
        torch.testing.assert_close(found, Net()(samples))


@ranks(2)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@grouped
def test_compiled_ddp(size):
    model = DistributedDataParallel(Net())
    compiled = torch.compile(model, backend="aot_eager")  # test_compile.py has inductor
    train(compiled, model.parameters(), rank=dist.get_rank())
    torch.testing.assert_close(weights_of(model), alone())


@ranks(2)
@grouped
def test_sparse_gradients(size):
    embedding = DistributedDataParallel(torch.nn.Embedding(10, 3, sparse=True))
    rows = [own(4, torch.int64, rank) for rank in range(size)]
    embedding(rows[dist.get_rank()]).sum().backward()
    expected = torch.zeros(10, 3)
    for each in rows:
        expected.index_add_(0, each, torch.ones(4, 3))
    torch.testing.assert_close(embedding.module.weight.grad.to_dense(), expected / size)


def _some(parameter):
    return hvd.Compression.fp16 if len(parameter.shape) > 1 else hvd.Compression.none


COMPRESSIONS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "top-k": hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.1)),
    "low rank": hvd.Compression.PowerSGD(2),
    "some": hvd.Compression.ByParameter(_some, [hvd.Compression.none, hvd.Compression.fp16]),
}


@ranks(2)
@grouped
def test_hook_sends_what_the_optimizer_sends(size):
    for name, compression in COMPRESSIONS.items():
        plain = Net()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9),
            plain.named_parameters(),
            compression,
        )
        train(plain, None, rank=dist.get_rank(), optimizer=optimizer)
        model = DistributedDataParallel(Net())
        state = hvd.comm_hook_state(compression, model.module.named_parameters())
        model.register_comm_hook(state, hvd.comm_hook)
        train(model, model.parameters(), rank=dist.get_rank())
        found = weights_of(model)
        if name != "top-k":  # of equal entries those count that come first, in DDP's own order
            torch.testing.assert_close(found, weights_of(plain), msg=name)
        mine = found.clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, found), name


@ranks(2)
@grouped
def test_hook_goes_on_after_torch_has_moved_a_bucket(size):
    """It does so where a gradient in the bucket gets into a queue of torch.multiprocessing."""
    whole, model = Net(), DistributedDataParallel(Net(), gradient_as_bucket_view=True)
    model.register_comm_hook(hvd.comm_hook_state(), hvd.comm_hook)
    for _ in range(2):
        train(whole, whole.parameters())
        train(model, model.parameters(), rank=dist.get_rank())
        for parameter in model.parameters():
            parameter.grad.share_memory_()
    torch.testing.assert_close(weights_of(model), weights_of(whole))


@ranks(2, 3)
@grouped
def test_ranks_with_the_hook_compare_their_weights(size):
    """A difference is found within a rotation; ranks in `join` are left alone."""
    rank = dist.get_rank()
    is_last = rank == size - 1
    model = DistributedDataParallel(Net(), bucket_cap_mb=1e-3)
    state = hvd.comm_hook_state(named_parameters=model.module.named_parameters())
    model.register_comm_hook(state, hvd.comm_hook)
    with logged() as messages:
        train(model, model.parameters(), rank=rank)
        with model.join():
            train(model, model.parameters(), steps=6 if is_last else 3, rank=rank)
        train(model, model.parameters(), rank=rank)
        assert messages == []
        if is_last:
            model.module[0].bias.data[3] += 1.0
        with pytest.raises(hvd.MismatchError, match=r"element \[3\] of the weight '0.bias' is "):
            train(model, model.parameters(), steps=8, rank=rank)
    dist.barrier()  # DDP itself cannot go on after an error in a hook


@ranks(2)
@grouped
def test_join_with_unused_parameters(size):
    """Where it joins, DDP asks the group itself for an allreduce of one tensor."""
    rank = dist.get_rank()
    model = DistributedDataParallel(Net(), find_unused_parameters=True)
    with model.join(divide_by_initial_world_size=False):
        train(model, model.parameters(), steps=3 + rank, rank=rank)
    whole = Net()
    optimizer = torch.optim.SGD(whole.parameters(), 0.1, momentum=0.9)
    train(whole, (), steps=3, optimizer=optimizer)
    optimizer.zero_grad()
    whole(own((4, 8), rank=31)).square().mean().backward()  # the last batch of rank 1
    optimizer.step()
    torch.testing.assert_close(weights_of(model), weights_of(whole))


@ranks(2)
@grouped
def test_ranks_with_the_hook_compare_their_data(size):
    model = DistributedDataParallel(Net())
    model.register_comm_hook(hvd.comm_hook_state(), hvd.comm_hook)
    with logged() as messages:
        train(model, model.parameters(), steps=8, rank=0)
    assert len(messages) == (dist.get_rank() == 0)
    assert all("ranks 0, 1 computed the same gradients" in each for each in messages)


@ranks(2)
@grouped
def test_hook_takes_every_strategy(size):
    for strategy in ONE_OF_EACH:
        model = DistributedDataParallel(Net(), bucket_cap_mb=1e-2)
        model.register_comm_hook(hvd.comm_hook_state(strategy), hvd.comm_hook)
        train(model, model.parameters(), rank=dist.get_rank())
        found = weights_of(model)
        dist.broadcast(mine := found.clone(), 0)
        assert torch.equal(mine, found), strategy
        assert torch.isfinite(found).all(), strategy


@ranks(2)
@pytest.mark.slow
@grouped
def test_a_step_with_the_hook_counts_as_one_call(size):
    brief = dist.new_group(timeout=datetime.timedelta(seconds=5))
    model = DistributedDataParallel(Net(), process_group=brief, bucket_cap_mb=1e-4)
    model.register_comm_hook(hvd.comm_hook_state(process_group=brief), hvd.comm_hook)
    train(model, model.parameters(), rank=dist.get_rank())
    if dist.get_rank():
        with pytest.raises(hvd.HorovodInternalError, match="rank 0 is in 'DDP"):
            dist.barrier(brief)
    else:
        with pytest.raises(RuntimeError, match="rank 1 is in 'call"):
            model(own((4, 8))).sum().backward()
    dist.group.WORLD.engine.world.comm.Barrier()
    dist.barrier(brief)


@ranks(2)
@grouped
def test_hook_refuses_what_is_no_strategy(size):
    with pytest.raises(TypeError, match="compression='fp16' is no compression"):
        hvd.comm_hook_state(compression="fp16")


@ranks(3)
@grouped
def test_models_of_some_ranks_shift_no_labels_of_others(size):
    pair, rank = dist.new_group([0, 1]), dist.get_rank()
    for group, members in ((pair, 2), (None, 3)):
        if rank < members:
            model = DistributedDataParallel(torch.nn.Linear(1, 1), process_group=group)
            model.register_comm_hook(hvd.comm_hook_state(process_group=group), hvd.comm_hook)
            model(torch.full((1, 1), float(rank))).sum().backward()
            assert model.module.weight.grad.item() == (members - 1) / 2


@ranks(3)
@grouped
def test_hook_refuses_some_ranks_of_another_backend(size):
    pair = dist.new_group([0, 1], backend="gloo")
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match="has 2 of 3 ranks and is none of hvdlite's"):
            hvd.comm_hook_state(process_group=pair)
