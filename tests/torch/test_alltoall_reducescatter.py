import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd


@ranks(3)
def test_gradients_of_an_alltoall_go_back(size):
    hvd.init()
    rank = hvd.rank()
    splits = torch.tensor([(rank + r) % 3 for r in range(size)], dtype=torch.int32)
    for given in (splits, splits.tolist(), splits.numpy()):
        own = torch.zeros(int(splits.sum()), 2, dtype=torch.float64, requires_grad=True)
        result, received = hvd.alltoall(own, given)
        assert (received.dtype, received.requires_grad) == (torch.int32, False)
        assert received.tolist() == splits.tolist()
        (result * (rank + 1)).sum().backward()
        weights = [r + 1.0 for r in range(size) for _ in range(splits[r])]
        assert own.grad[:, 1].tolist() == weights


@ranks(2)
def test_factors_and_compression_of_a_reducescatter(size):
    hvd.init()
    rank = hvd.rank()
    values = torch.arange(float(size)) * (rank + 1)
    average = hvd.reducescatter(values)
    assert average.tolist() == [rank * (size + 1) / 2]
    handle = hvd.reducescatter_async(values, op=hvd.Max, prescale_factor=2.0)
    assert hvd.synchronize(handle).tolist() == [2.0 * rank * size]
    compressed = hvd.reducescatter(values, compression=hvd.Compression.fp16, op=hvd.Sum)
    assert compressed.tolist() == [rank * size * (size + 1) / 2]


@ranks(3)
def test_gradients_of_a_reducescatter_are_gathered(size):
    hvd.init()
    rank = hvd.rank()
    for op, factor in ((hvd.Average, 1), (hvd.Sum, size)):  # Horovod's factor for sums
        own = torch.zeros(2 * size + 1, dtype=torch.float64, requires_grad=True)
        result = hvd.reducescatter(own, op=op, prescale_factor=2.0, postscale_factor=0.25)
        (result * (rank + 1)).sum().backward()
        weights = [r + 1.0 for r in range(size) for _ in range(2 + (r == 0))]
        np.testing.assert_allclose(own.grad.numpy(), factor * 0.5 * np.array(weights))
    own = torch.zeros(size, requires_grad=True)
    with pytest.raises(NotImplementedError, match="reducescatter with op=Min has no gradient"):
        hvd.reducescatter(own, op=hvd.Min).sum().backward()


@ranks(2)
def test_asynchronous_groups_and_operations_in_place(size):
    hvd.init()
    own = torch.full((size,), float(hvd.rank()))
    gathered = hvd.grouped_allgather_async([own[:1], own[:0]], name="gathered")
    dealt = hvd.grouped_reducescatter_async([torch.ones(size), torch.ones(2 * size)])
    assert [each.tolist() for each in hvd.synchronize(gathered)] == [[*range(size)], []]
    assert [each.tolist() for each in hvd.synchronize(dealt)] == [[1.0], [1.0, 1.0]]
    assert hvd.synchronize(hvd.grouped_allreduce_async_([own], op=hvd.Sum))[0] is own
    total = size * (size - 1) / 2
    assert own.tolist() == [total] * size
    own += hvd.rank()
    assert hvd.synchronize(hvd.broadcast_async_(own, size - 1)) is own
    assert own.tolist() == [total + size - 1] * size


@ranks(2)
def test_gradients_through_groups(size):
    hvd.init()
    rank = hvd.rank()
    first = torch.ones(3, dtype=torch.float64, requires_grad=True)
    second = torch.ones(rank + 1, 2, dtype=torch.float64, requires_grad=True)
    reduced = hvd.grouped_allreduce([first, first * 2], op=hvd.Sum)
    (reduced[0].sum() * (rank + 1) + reduced[1].sum()).backward()
    assert first.grad.tolist() == [size * (size + 1) / 2 + 2 * size] * 3

    (gathered,) = hvd.grouped_allgather([second])
    (gathered * (rank + 1)).sum().backward()
    assert second.grad.tolist() == [[(size + 1) / 2] * 2] * (rank + 1)  # the average

    third = torch.ones(size, dtype=torch.float64, requires_grad=True)
    (scattered,) = hvd.grouped_reducescatter([third])
    (scattered * (rank + 1)).sum().backward()
    assert third.grad.tolist() == [r + 1.0 for r in range(size)]
    with pytest.raises(ValueError, match="needs one tensor at least"):
        hvd.grouped_allreduce([])
    with pytest.raises(TypeError, match="expected a list of tensors"):
        hvd.grouped_allgather(first)


@ranks(2)
def test_double_backward(size):
    hvd.init()
    for function in (
        lambda x: hvd.allreduce(x, op=hvd.Sum),
        lambda x: hvd.grouped_allreduce([x], op=hvd.Sum)[0],
        lambda x: hvd.alltoall(x),
        lambda x: hvd.reducescatter(x),
        lambda x: hvd.allgather(x),
    ):
        x = torch.full((size,), 2.0, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad((function(x) ** 3).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sum(), x)
        assert torch.isfinite(second).all()
        assert (second > 0).all()


@pytest.mark.slow
@ranks(3)
def test_process_sets():
    hvd.shutdown()
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    rank = hvd.rank()
    if not pair.included():
        with pytest.raises(ValueError, match="rank 1 is not in"):
            hvd.allreduce(torch.ones(1), process_set=pair)
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [3.0]
        return
    own = torch.full((2,), float(rank), requires_grad=True)
    total = hvd.allreduce(own, op=hvd.Sum, process_set=pair)
    assert total.tolist() == [2.0, 2.0]
    total.sum().backward()
    assert own.grad.tolist() == [2.0, 2.0]
    assert hvd.allgather(torch.tensor([rank]), process_set=pair).tolist() == [0, 2]
    assert hvd.broadcast(torch.tensor([rank]), 2, process_set=pair).tolist() == [2]
    in_place = torch.tensor([rank])
    hvd.broadcast_(in_place, 2, process_set=pair)
    assert in_place.tolist() == [2]
    assert hvd.allreduce_(in_place, op=hvd.Sum, name="kept", process_set=pair).tolist() == [4]
    assert hvd.allreduce_(in_place, op=hvd.Sum, name="kept", process_set=pair).tolist() == [8]
    assert hvd.alltoall(torch.tensor([rank, rank]), process_set=pair).tolist() == [0, 2]
    root = torch.zeros(1, requires_grad=True)
    hvd.broadcast(root, 2, process_set=pair).sum().backward()
    assert root.grad.tolist() == [1.0 if rank == 2 else 0.0]
    hvd.barrier(process_set=pair)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).tolist() == [3.0]


@pytest.mark.slow
@ranks(3)
def test_optimizers_of_process_sets():
    hvd.shutdown()
    hvd.init()
    pair = hvd.add_process_set([0, 2])
    rank = hvd.rank()

    def trained(process_set, steps):
        torch.manual_seed(rank)
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).double()
        model = hvd.SyncBatchNorm.convert_sync_batchnorm(model, process_set)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        hvd.broadcast_parameters(model.state_dict(), 2, process_set)
        hvd.broadcast_optimizer_state(optimizer, 2, process_set=process_set)
        optimizer = hvd.DistributedOptimizer(
            optimizer, model.named_parameters(), process_set=process_set
        )
        for _ in range(steps):
            optimizer.zero_grad()
            (model(torch.randn(4, 3).double()) ** 2).sum().backward()
            optimizer.step()
        return [tensor.tolist() for tensor in model.state_dict().values()]

    if pair.included():  # as many more optimizers than on rank 1
        weights = trained(pair, 3)
        others = hvd.allgather_object(weights, process_set=pair)
        assert others[0] == others[1]
    everybody = hvd.allgather_object(trained(hvd.global_process_set, 2))
    assert everybody[0] == everybody[1] == everybody[2]
    if not pair.included():
        with pytest.raises(ValueError, match="rank 1 is not in"):
            trained(pair, 1)
    table = torch.sparse_coo_tensor([[rank]], [1.0], (4,), check_invariants=True)
    if pair.included():
        total = hvd.sparse_allreduce_async(table, "table", hvd.Sum, pair)()
        assert total.to_dense().tolist() == [1.0, 0.0, 1.0, 0.0]
