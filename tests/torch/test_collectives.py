import gc
import math
import threading
import weakref
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest

from hvdlite.engine import runtime
from hvdlite.world import mpi
from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.torch.handles import caches, keep
from hvdlite.transport.shared_memory.transport import SharedMemoryTransport

DTYPES = [
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.complex128,
]


@ranks(2)
def test_asynchronous_operations_and_handles(size):
    hvd.init()
    handles = [
        hvd.allreduce_async(torch.full((3,), float(i)), name=f"a{i}", op=hvd.Sum) for i in range(20)
    ]
    in_place = torch.ones(4)
    last = hvd.allreduce_async_(in_place, name="in place", op=hvd.Sum)
    for number, handle in enumerate(handles):
        assert torch.equal(hvd.synchronize(handle), torch.full((3,), float(number * size)))
    assert hvd.synchronize(last) is in_place
    assert torch.equal(in_place, torch.full((4,), float(size)))
    assert hvd.poll(last)
    with pytest.raises(ValueError, match="synchronized before"):
        hvd.synchronize(last)
    with pytest.raises(ValueError, match="not a handle"):
        hvd.synchronize(17)


@ranks(2, 3)
def test_gradients_flow_through_collectives(size):
    hvd.init()
    rank = hvd.rank()
    weights = torch.arange(1.0, 4.0) * (rank + 1)
    x = torch.ones(3, requires_grad=True)
    (hvd.allreduce(x, op=hvd.Sum) * weights).sum().backward()
    total = size * (size + 1) / 2
    assert torch.allclose(x.grad, torch.arange(1.0, 4.0) * total)
    x.grad = None
    (hvd.allreduce(x) * weights).sum().backward()
    assert torch.allclose(x.grad, torch.arange(1.0, 4.0) * total / size)

    rows = torch.ones(rank + 1, requires_grad=True)
    whole = hvd.allgather(rows)
    (whole * torch.arange(len(whole), dtype=torch.float32)).sum().backward()
    start = rank * (rank + 1) // 2
    assert torch.allclose(rows.grad, torch.arange(start, start + rank + 1, dtype=torch.float32))

    y = torch.ones(2, requires_grad=True)
    (hvd.broadcast(y, root_rank=0) * (rank + 1)).sum().backward()
    expected = total / size if rank == 0 else 0.0
    assert torch.allclose(y.grad, torch.full((2,), expected))


@ranks(2)
def test_max_has_no_gradient_and_says_so():
    hvd.init()
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(NotImplementedError, match="Max has no gradient"):
        hvd.allreduce(x, op=hvd.Max).sum().backward()
    assert hvd.allreduce(torch.ones(1)).item() == 1


@ranks(2)
def test_in_place_result_counts_as_a_change_for_autograd():
    hvd.init()
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    z = y * y  # saves y for the backward pass
    hvd.allreduce_(y.detach(), op=hvd.Sum)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@ranks(2)
def test_mismatch_is_raised_on_all_ranks_and_the_next_call_works(size):
    hvd.init()
    with pytest.raises(hvd.HorovodInternalError, match=r"'x'.*shape.*\(3,\) on ranks? 0"):
        hvd.allreduce(torch.zeros(3 + (hvd.rank() == 1)), name="x")
    dtype = torch.float64 if hvd.rank() == 1 else torch.float32
    handle = hvd.allreduce_async(torch.zeros(3, dtype=dtype), name="x")
    with pytest.raises(hvd.HorovodInternalError, match=r"dtype is float32 on ranks? 0"):
        hvd.synchronize(handle)
    with pytest.raises(ValueError, match="synchronized before"):
        hvd.synchronize(handle)
    assert hvd.allreduce(torch.ones(1), name="x", op=hvd.Sum).item() == size


@ranks(2)
def test_a_refusal_on_one_rank_does_not_shift_the_names_of_later_calls():
    hvd.init()
    names = None
    if hvd.rank() == 0:
        with pytest.raises(ValueError, match="not both"):
            hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)
        with pytest.raises(TypeError, match="to_dense"):
            hvd.allgather_async(torch.eye(3).to_sparse())
    else:
        waiting = [hvd.allreduce_async(torch.ones(1)), hvd.allgather_async(torch.ones(1))]
        names = [handle.name for handle in waiting]
    assert hvd.allreduce(torch.full((2,), 3.0), op=hvd.Sum).tolist() == [6.0, 6.0]
    assert hvd.allgather(torch.ones(1)).tolist() == [1.0, 1.0]
    names = hvd.broadcast_object(names, root_rank=1)
    if hvd.rank() == 0:
        waiting = [
            hvd.allreduce_async(torch.ones(1), name=names[0]),
            hvd.allgather_async(torch.ones(1), name=names[1]),
        ]
    assert [hvd.synchronize(handle).tolist() for handle in waiting] == [[1.0], [1.0, 1.0]]


def reduce_in_place(tensor, **arguments):
    """The sum under one name, as users write it in a loop; alternately in both ways."""
    arguments = {"name": "again", "op": hvd.Sum, **arguments}
    assert hvd.allreduce_(tensor, **arguments) is tensor
    return hvd.synchronize(hvd.allreduce_async_(tensor, **arguments))


@ranks(2)
def test_the_same_tensor_again_and_again(size):
    hvd.init()
    for dtype in DTYPES:
        tensor = torch.ones(2, 3, dtype=dtype)
        for step in range(4):
            tensor.fill_(hvd.rank() + step)
            expected = size * sum(rank + step for rank in range(size))
            version = tensor._version
            result = reduce_in_place(tensor)
            assert result is tensor
            assert torch.equal(tensor, torch.full((2, 3), expected, dtype=dtype)), (dtype, step)
            assert tensor._version > version


@ranks(2)
def test_a_tensor_that_is_not_in_shared_memory_is_looked_for_there_once(monkeypatch):
    hvd.init()
    looked, find = [], SharedMemoryTransport._find
    monkeypatch.setattr(
        SharedMemoryTransport, "_find", lambda *args: looked.append(args) or find(*args)
    )
    tensor = torch.ones(2**16)
    counts = []
    for _ in range(4):
        reduce_in_place(tensor)
        counts.append(len(looked))
    assert counts[0] == counts[-1] > 0
    assert (tensor == 4**4).all()


@ranks(2)
def test_a_call_of_the_same_name_for_something_else(size):
    """The operation kept for the first must not be taken for it."""
    hvd.init()

    def check(tensor, **arguments):
        values = torch.arange(tensor.numel()).reshape(tensor.shape) + 2**22
        tensor.copy_(values)
        scale = arguments.get("prescale_factor", 1) * arguments.get("postscale_factor", 1)
        times = 1 if arguments.get("op") == hvd.Average else size
        reduce_in_place(tensor, **arguments)
        assert torch.equal(tensor, (values * (times * scale) ** 2).to(tensor.dtype)), arguments

    memory = torch.zeros(8, 4)
    tensor = memory[:4]
    check(tensor)
    check(tensor, op=hvd.Average)
    check(tensor, prescale_factor=2.0)
    check(tensor, prescale_factor=2)
    check(tensor, postscale_factor=0.5)
    check(tensor)
    check(torch.zeros(4, 4))
    check(tensor)
    kept = tensor.data
    for other in (
        torch.zeros(4, 4),  # elsewhere
        kept.view(2, 8),  # of another shape
        kept.view(torch.int32),  # of another dtype
        kept.t(),  # in another order
        memory[::2],  # with gaps
        kept[:2],  # of another size
    ):
        tensor.data = other
        check(tensor)
        tensor.data = kept
        check(tensor)


@ranks(2)
def test_a_kept_call_and_errors(size):
    hvd.init()
    tensor = torch.ones(4)
    reduce_in_place(tensor)
    for _ in range(2):
        with pytest.raises(hvd.HorovodInternalError, match="disagree on 'again'"):
            hvd.allreduce_(tensor if hvd.rank() == 0 else torch.ones(5), name="again", op=hvd.Sum)
        tensor.fill_(1)
        reduce_in_place(tensor)
        assert tensor.tolist() == [4.0] * 4
    tensor.fill_(1)
    if hvd.rank() == 0:
        first = hvd.allreduce_async_(tensor, name="again", op=hvd.Sum)
        with pytest.raises(ValueError, match="'again' is still on its way"):
            hvd.allreduce_async_(tensor, name="again", op=hvd.Sum)
    mpi.load().COMM_WORLD.Barrier()
    if hvd.rank() == 1:
        first = hvd.allreduce_async_(tensor, name="again", op=hvd.Sum)
    assert hvd.synchronize(first).tolist() == [2.0] * 4
    hvd.shutdown()
    hvd.init()
    tensor.fill_(1)
    reduce_in_place(tensor)
    assert tensor.tolist() == [4.0] * 4


@ranks(2)
def test_nothing_kept_holds_a_tensor(size):
    hvd.init()
    tensor = torch.ones(4)
    reduce_in_place(tensor)
    gone = weakref.ref(tensor)
    persistent = caches[runtime.engine()]
    kept = weakref.ref(persistent["again"])
    del tensor
    assert gone() is None
    assert len(persistent) == 0
    assert kept() is None
    first, second = torch.ones(4), torch.ones(2**20)
    reduce_in_place(first)
    reduce_in_place(second)  # in the place of the first
    del first
    assert "again" in persistent
    del second
    assert len(persistent) == 0


def test_what_is_kept_needs_no_garbage_collector():
    kept, tensor = OrderedDict(), torch.ones(4)
    gc.disable()
    try:
        keep(kept, 1, SimpleNamespace(name="again"), tensor, ())
        gone = [weakref.ref(kept), weakref.ref(kept["again"])]
        del kept
        assert [each() for each in gone] == [None, None]
    finally:
        gc.enable()


def test_the_oldest_makes_room():
    kept, tensor = OrderedDict(), torch.ones(4)
    for name in "abcbd":  # b twice
        keep(kept, 2, SimpleNamespace(name=name), tensor, ())
    assert [*kept] == ["b", "d"]


@pytest.mark.parametrize("capacity", [0, 10])
def test_many_threads_keep_calls(capacity):
    kept = OrderedDict()

    def keep_many(first):
        for number in range(first, first + 2000):
            keep(kept, capacity, SimpleNamespace(name=str(number % 50)), torch.ones(1), ())
            kept.get(str(number % 37))
        keep(kept, capacity, SimpleNamespace(name="last"), tensor, ())

    tensor = torch.ones(4)
    threads = [threading.Thread(target=keep_many, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(map(threading.Thread.is_alive, threads))
    assert len(kept) <= capacity


@ranks(2)
def test_conjugates_and_negatives_are_reduced_in_place(size):
    """Their elements do not lie in memory as they are."""
    hvd.init()
    base = torch.full((3,), 1 + 2j)
    for step in range(3):  # the second could find something kept
        conjugate = base.clone().conj()
        assert conjugate.is_conj()
        assert hvd.allreduce_(conjugate, name="c", op=hvd.Sum) is conjugate
        assert conjugate.tolist() == [2 - 4j] * 3
        negative = base.clone().conj().imag
        assert negative.is_neg()
        hvd.synchronize(hvd.allreduce_async_(negative, name="n", op=hvd.Sum))
        assert negative.tolist() == [-4.0] * 3
        received = torch.full((3,), 1 + 1j * (hvd.rank() + step)).conj()
        hvd.broadcast_(received, root_rank=1)
        assert received.tolist() == [1 - 1j * (1 + step)] * 3
    for zeros in (
        torch._efficientzerotensor(3),
        torch._efficientzerotensor(3, dtype=torch.bfloat16),
    ):
        assert hvd.allreduce(zeros).tolist() == [0.0] * 3


@ranks(2)
def test_a_default_device_is_for_the_users_tensors_alone():
    """As "cuda" is set where there is a GPU; "meta" tells tensors of ours that would be there."""
    hvd.init()
    size, ones = hvd.size(), torch.ones(4)
    model = torch.nn.Linear(4, 2)
    sparse = torch.eye(4).to_sparse()
    torch.set_default_device("meta")
    try:
        for dtype in (torch.float32, torch.bfloat16):
            assert hvd.allreduce(ones.to(dtype), op=hvd.Sum).tolist() == [size] * 4
        rows, splits = hvd.alltoall(ones, splits=[2, 2])
        handle = hvd.alltoall_async(ones, splits=[2, 2])
        assert [rows.tolist(), splits.tolist()] == [[1] * 4, [2, 2]]
        assert hvd.synchronize(handle)[1].tolist() == [2, 2]
        assert hvd.reducescatter(ones).tolist() == [1, 1]
        assert hvd.sparse_allreduce_async(sparse, "s", hvd.Sum)().to_dense().device.type == "cpu"
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        norm = hvd.SyncBatchNorm(4, device="cpu")
        optimizer = hvd.DistributedOptimizer(
            torch.optim.Adam([*model.parameters(), *norm.parameters()]),
            compression=hvd.Compression.ErrorFeedback(hvd.Compression.fp16),
        )
        for _ in range(3):
            model(norm(ones.reshape(1, 4) * hvd.rank())).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert len(hvd.ShardSampler(10, 2)) == 3
    finally:
        torch.set_default_device(None)
    assert len({str(each) for each in hvd.allgather_object(model.weight.tolist())}) == 1


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor")
@ranks(2)
def test_tensors_that_cannot_be_exchanged_are_refused_at_once():
    hvd.init()
    quantised = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for tensor, words in (
        (torch.ones(2, device="meta"), "on the device meta"),
        (quantised, r"torch.qint8 .* cannot be exchanged; convert it first, by .dequantize\(\)"),
        (torch.ones(2).to(torch.float8_e4m3fn), r"float8_e4m3fn .* first, by .float\(\)"),
        (torch.eye(2).to_sparse(), r"expected a dense tensor.*to_dense\(\)"),
        (np.ones(2), r"expected a torch.Tensor, found ndarray; use torch\.as_tensor"),
    ):
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, hvd.alltoall, hvd.reducescatter):
            with pytest.raises((TypeError, ValueError), match=words):
                call(tensor)
    for name, value in (("name", 5), ("prescale_factor", "2"), ("postscale_factor", math.nan)):
        for call in (hvd.allreduce, hvd.allreduce_, hvd.reducescatter):
            with pytest.raises(ValueError, match=f"{name}="):
                call(torch.ones(2), **{name: value})
    with pytest.raises(RuntimeError, match="Adasum is not defined"):
        hvd.reducescatter(torch.ones(2), op=hvd.Adasum)
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [2, 2]


@ranks(1)
def test_the_warning_of_average_points_at_the_line_that_gives_it():
    hvd.init()
    one = torch.ones(1)
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.grouped_allreduce_):
        given = [one] if call is hvd.grouped_allreduce_ else one
        with pytest.warns(DeprecationWarning, match="average= is deprecated") as caught:
            result = call(given, average=True)
        assert [each.filename for each in caught] == [__file__]
        if call is hvd.allreduce_async:
            hvd.synchronize(result)


@ranks(2)
def test_predictions_of_types_that_numpy_lacks():
    hvd.init()
    rank, everyone = hvd.rank(), np.arange(float(hvd.size()))
    found = hvd.gather([torch.full((1,), rank, dtype=torch.bfloat16, requires_grad=True)])
    np.testing.assert_array_equal(found, everyone)
    assert found.dtype == np.float32
    found = hvd.gather(torch.tensor([rank * 1j]).conj())
    np.testing.assert_array_equal(found, -1j * everyone)
