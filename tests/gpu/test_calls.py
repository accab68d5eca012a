"""Calls on tensors of a device do what they do on tensors of the host."""

from __future__ import annotations

import pytest

from tests.gpu.arrays import SHARING, each_transport, start
from tests.harness import ranks

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("torch_cuda")]


def _values(hvd, *shape, dtype=torch.float32):
    """Whole numbers, whose sums are exact in any order, other ones on each rank."""
    count = int(torch.tensor(shape).prod())
    flat = torch.arange(count) % 7 + 1 + hvd.rank()
    return flat.reshape(shape).to(dtype)


def _allreduce(hvd, device, dtype):
    x = _values(hvd, 5, 3, dtype=dtype).to(device)
    ops = [hvd.Sum, hvd.Min, hvd.Max, hvd.Product]
    if dtype.is_complex:
        ops = [hvd.Sum]
    results = [hvd.allreduce(x, op=op, name=f"{op}") for op in ops]
    if dtype.is_floating_point:
        results.append(hvd.allreduce(x, prescale_factor=0.5, postscale_factor=4.0, name="scaled"))
        results.append(hvd.allreduce(x, op=hvd.Adasum, name="adasum"))
        results.append(hvd.allreduce(x, compression=hvd.Compression.fp16, name="fp16"))
    results.append(hvd.allreduce(x, name="average"))
    hvd.allreduce_(x, op=hvd.Sum, name="inplace")
    return [*results, x]


def _sizes(hvd, device, dtype):
    results = []
    for shape in ((), (0,), (1,), (0, 3), (3, 0), (2**20 + 3,)):
        x = _values(hvd, *shape, dtype=dtype).to(device)
        results.append(hvd.allreduce(x, op=hvd.Sum))
        if shape:
            results.append(hvd.allgather(x))
        hvd.broadcast_(x, hvd.size() - 1)
        results.append(x)
    strided = _values(hvd, 6, 8, dtype=dtype).to(device)[::2, 1::3]
    results.append(hvd.allreduce(strided, op=hvd.Sum))
    results.append(hvd.allgather(strided.t()))
    hvd.allreduce_(strided, op=hvd.Sum)
    return [*results, strided]


def _rows(hvd, device, dtype):
    rank, size = hvd.rank(), hvd.size()
    x = _values(hvd, 2 * rank + 1, 3, dtype=dtype).to(device)
    results = [hvd.allgather(x)]
    splits = torch.tensor([rank + to for to in range(size)])
    y = _values(hvd, int(splits.sum()), 2, dtype=dtype).to(device)
    results += list(hvd.alltoall(y, splits=splits))
    results += list(hvd.alltoall(y, splits=splits.to(device)))
    z = _values(hvd, 2 * size, 3, dtype=dtype).to(device)
    results.append(hvd.alltoall(z))
    if dtype is not torch.bool:
        results.append(hvd.reducescatter(z, op=hvd.Sum))
        results += hvd.grouped_reducescatter([z, z + 1], op=hvd.Sum)
    results += hvd.grouped_allgather([x, x])
    results.append(hvd.broadcast(z, 0))
    return results


def _groups(hvd, device, dtype):
    tensors = [_values(hvd, n, dtype=dtype).to(device) for n in (1, 0, 1000, 3)]
    results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
    hvd.grouped_allreduce_(tensors, op=hvd.Sum)
    only = hvd.add_process_set([hvd.size() - 1])
    mine = [hvd.allreduce(tensors[2], op=hvd.Sum, process_set=only)] if only.included() else []
    hvd.remove_process_set(only)
    return [*results, *tensors, *mine]


def _gradients(hvd, device, dtype):
    if not dtype.is_floating_point:
        return []
    x = _values(hvd, 2 * hvd.size(), 3, dtype=dtype).to(device).requires_grad_()
    (hvd.allreduce(x, op=hvd.Sum, name="g") ** 2).sum().backward()
    (hvd.allgather(x) * 2).sum().backward()
    (hvd.broadcast(x, 0) * 3).sum().backward()
    (hvd.alltoall(x) * 4).sum().backward()
    (hvd.reducescatter(x, op=hvd.Sum) * 5).sum().backward()
    return [x.grad]


def _sparse(hvd, device, dtype):
    if not dtype.is_floating_point:
        return []
    rows = torch.tensor([[0, hvd.rank(), 3]])
    x = torch.sparse_coo_tensor(
        rows, _values(hvd, 3, 2, dtype=dtype), (8, 2), check_invariants=True
    )
    x = x.to(device)
    wait = hvd.sparse_allreduce_async(x, name="s", op=hvd.Sum)
    return [wait().coalesce().to_dense()]


def _objects(hvd, device, dtype):
    found = hvd.broadcast_object(_values(hvd, 3, dtype=dtype).to(device), 0)
    return [found, *hvd.allgather_object(_values(hvd, 2, dtype=dtype).to(device))]


CALLS = [_allreduce, _sizes, _rows, _groups, _gradients, _sparse, _objects]
DTYPES = ["float32", "float64", "float16", "bfloat16", "int8", "int32", "int64", "complex64"]


@ranks(1, 2, 3, fresh=True, env=SHARING)
@each_transport
def test_collectives(transport):
    hvd = start(transport)
    torch.sparse.check_sparse_tensor_invariants.enable()  # torch 2.11 warns where nobody has chosen
    for name in DTYPES:
        for call in CALLS:
            dtype = getattr(torch, name)
            try:
                expected = call(hvd, "cpu", dtype)
            except (ValueError, TypeError):
                with pytest.raises((ValueError, TypeError)):
                    call(hvd, "cuda", dtype)
                continue
            found = call(hvd, "cuda", dtype)
            assert len(found) == len(expected)
            for at, (one, other) in enumerate(zip(found, expected, strict=True)):
                assert (one.dtype, one.shape) == (other.dtype, other.shape), (call, name, at)
                assert torch.equal(one.cpu(), other), (call, name, at, one, other)
                where = {"cpu", "cuda"} if call is _rows else {"cuda"}  # received splits
                assert one.device.type in where, (call, name, at)


def _network():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.Tanh(), torch.nn.Linear(32, 4)
    )


def _train(hvd, device, steps=4, model=None, **options):
    model = (model or _network()).to(device)
    # Not Adam, which makes steps of full length of gradients that are zero but for rounding.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for step in range(steps):
        torch.manual_seed(10 * step + hvd.rank())
        batch = torch.randn(8, 16).to(device)
        for part in batch.chunk(options.get("backward_passes_per_step", 1)):
            model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def _options(hvd):
    """Yield names and options; how far from the host's the weights may be."""
    compression = hvd.Compression
    yield "plain", {}, 2e-3
    yield "sum", {"op": hvd.Sum}, 2e-3
    yield "adasum", {"op": hvd.Adasum}, 2e-3
    yield "passes", {"backward_passes_per_step": 2}, 2e-3
    yield "predivided", {"gradient_predivide_factor": 2.0}, 2e-3
    yield "groups", {"num_groups": 2}, 2e-3
    strategies = {
        "fp16": compression.fp16,
        "bf16": compression.bf16,
        "scaled": compression.Cast("fp16", scale="auto"),
        "top-k": compression.TopK(0.5),
        "PowerSGD": compression.PowerSGD(2),
        "QSGD": compression.QSGD(127),
        "sign": compression.Sign(),
        "8 bits": compression.Blockwise8(),
    }
    # What a strategy chooses or rounds depends on the last bits of a gradient.
    for name, strategy in strategies.items():
        yield name, {"compression": strategy}, 2e-2


@ranks(1, 2, fresh=True, env=SHARING)
@each_transport
def test_optimizers(transport):
    hvd = start(transport)
    for name, options, near in _options(hvd):
        torch.backends.cuda.matmul.allow_tf32 = False
        expected, _ = _train(hvd, "cpu", **options)
        model, _ = _train(hvd, "cuda", **options)
        found = torch.cat([each.detach().flatten() for each in model.parameters()])
        assert found.is_cuda
        wanted = torch.cat([each.detach().flatten() for each in expected.parameters()])
        assert len(set(hvd.allgather_object(found.cpu().numpy().tobytes()))) == 1, name
        distance = float((found.cpu() - wanted).norm() / wanted.norm())
        assert distance < near, (name, distance)


@ranks(1, 2, fresh=True, env=SHARING)
@each_transport
def test_sync_batch_norm(transport):
    hvd = start(transport)
    results = {}
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        layer = hvd.SyncBatchNorm(4).to(device)
        torch.manual_seed(hvd.rank())
        x = torch.randn(6 + hvd.rank(), 4).to(device).requires_grad_()
        layer(x).pow(3).sum().backward()
        found = [x.grad, layer.weight.grad, layer.running_mean, layer.running_var]
        results[device] = [each.cpu() for each in found]
    torch.testing.assert_close(results["cuda"], results["cpu"], rtol=1e-4, atol=1e-5)


@ranks(1, 2, fresh=True, env=SHARING)
@each_transport
def test_an_optimizer_s_state_is_broadcast_where_it_lies(transport):
    hvd = start(transport)

    def digest(optimizer):
        moments = [each["exp_avg_sq"] for each in optimizer.state.values()]
        assert all(each.is_cuda for each in moments)
        flat = torch.cat([each.flatten() for each in moments])
        return flat.cpu().numpy().tobytes(), optimizer.param_groups[0]["lr"]

    model = _network().to("cuda")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (hvd.rank() + 1))
    model(torch.randn(8, 16, device="cuda") * (hvd.rank() + 1)).square().mean().backward()
    optimizer.step()
    before = hvd.allgather_object(digest(optimizer))
    hvd.broadcast_optimizer_state(optimizer, 0)
    assert hvd.allgather_object(digest(optimizer)) == before[:1] * hvd.size()


@ranks(2, fresh=True, env=SHARING)
def test_after_a_join_arrays_of_a_device_are_refused():
    hvd = start("auto")
    if hvd.rank() == 1:
        with pytest.raises(hvd.HorovodInternalError, match="join"):
            hvd.allreduce(torch.ones(3, device="cuda"), name="late")
    assert hvd.join() in (0, 1)
    assert hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum).tolist() == [2.0] * 3


@ranks(2, fresh=True, env=SHARING)
@each_transport
def test_automatic_mixed_precision(transport):
    hvd = start(transport)
    model = _network().to("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), 0)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step in range(20):
        torch.manual_seed(hvd.rank())
        batch = torch.randn(32, 16, device="cuda")
        if step == 3 and hvd.rank() == 1:
            batch = batch * float("inf")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).square().mean()
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    weights = torch.cat([each.detach().flatten() for each in model.parameters()]).cpu()
    assert torch.isfinite(weights).all()
    assert len(set(hvd.allgather_object(weights.numpy().tobytes()))) == 1
    assert hvd.allgather_object(scaler.get_scale()) == [512.0, 512.0]


@ranks(2, fresh=True, env=SHARING)
def test_errors_name_the_rank_and_work_goes_on():
    hvd = start("auto")
    shape = (3, 2 + hvd.rank())
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        hvd.allreduce(torch.ones(shape, device="cuda"), name="shape")
    assert hvd.allreduce(torch.ones(2, device="cuda"), op=hvd.Sum).tolist() == [2.0, 2.0]
    kind = torch.float32 if hvd.rank() else torch.float64
    with pytest.raises(hvd.HorovodInternalError, match="float64"):
        hvd.allreduce(torch.ones(3, device="cuda", dtype=kind), name="dtype")
    assert hvd.allreduce(torch.ones(2, device="cuda"), op=hvd.Sum).tolist() == [2.0, 2.0]
