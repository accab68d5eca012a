"""torch's CUDA tensors, on real devices; ranks that share one exchange by way of the host."""

from __future__ import annotations

import pytest

from tests.harness import ranks

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True)
def _needs_cuda(device_count):
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")


def _start():
    import hvdlite.torch as hvd

    hvd.init()
    torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())
    return hvd


@ranks(1, 2, fresh=True)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int32", "bool"])
def test_collectives(size, name):
    hvd = _start()
    dtype = getattr(torch, name)
    mine = torch.full((1000, 3), hvd.rank() + 1, device="cuda").to(dtype)
    op = hvd.Max if name == "bool" else hvd.Sum
    total = True if name == "bool" else size * (size + 1) // 2
    for _ in range(3):
        result = hvd.allreduce(mine, op=op)
        assert result.is_cuda
        assert (result == total).all()
    handles = [hvd.allreduce_async(mine, name=f"{n}", op=op) for n in range(50)]
    assert all(bool((hvd.synchronize(handle) == total).all()) for handle in handles)
    rows = hvd.allgather(mine[: hvd.rank() + 1])
    assert rows.shape == (size * (size + 1) // 2, 3)
    assert (rows[-1] == torch.tensor(size).to(dtype).item()).all()
    part = torch.full((8, 6), hvd.rank(), device="cuda")[:, ::2]
    hvd.broadcast_(part, size - 1)
    assert (part == size - 1).all()


def _train(hvd, device, streams=False, **options):
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(20)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    stream = torch.cuda.Stream() if streams else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    for step in range(6):
        torch.manual_seed(10 * step + hvd.rank())
        batch = torch.randn(32, 64).to(device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
        torch.cuda.current_stream().wait_stream(stream)
    return torch.cat([parameter.detach().cpu().flatten() for parameter in model.parameters()])


@ranks(1, 2, fresh=True)
@pytest.mark.parametrize("streams", [False, True])
def test_training_on_the_device_equals_training_on_the_host(streams):
    hvd = _start()
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = _train(hvd, "cpu")
    found = _train(hvd, "cuda", streams)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(set(hvd.allgather_object(found.numpy().tobytes()))) == 1
    compressed = _train(hvd, "cuda", compression=hvd.Compression.fp16)
    torch.testing.assert_close(compressed, expected, rtol=1e-2, atol=1e-2)


@ranks(2, fresh=True)
def test_what_grad_scaler_changes_unseen_is_noticed_a_step_later():
    hvd = _start()
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        for parameter in model.parameters():
            parameter.grad.data.mul_(2)
        optimizer.step()

    with pytest.raises(RuntimeError, match=r"was changed after backward"):  # noqa: PT012
        for _ in range(3):
            step()
            torch.cuda.synchronize()


@ranks(2, fresh=True)
def test_a_tensor_on_the_host_of_one_rank_alone():
    hvd = _start()
    device = "cuda" if hvd.rank() == 0 else "cpu"
    with pytest.raises(hvd.HorovodInternalError, match="device is cuda on rank 0, cpu on rank 1"):
        hvd.allreduce(torch.ones(3, device=device), name="x")
    assert hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum).tolist() == [2.0] * 3
