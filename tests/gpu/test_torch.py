"""torch's CUDA tensors, on real devices, by NCCL where it serves these ranks and by the host."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.gpu.arrays import SHARING, each_transport, start
from tests.harness import ranks

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300), pytest.mark.usefixtures("torch_cuda")]


@ranks(1, 2, fresh=True, env=SHARING)
@pytest.mark.parametrize("name", ["float32", "bool"])
def test_many_handles_at_once(size, name):
    hvd = start()
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


@ranks(1, 2, fresh=True, env=SHARING)
@each_transport
@pytest.mark.parametrize("streams", [False, True])
def test_training_on_the_device_equals_training_on_the_host(streams, transport):
    hvd = start(transport)
    torch.backends.cuda.matmul.allow_tf32 = False
    expected = _train(hvd, "cpu")
    found = _train(hvd, "cuda", streams)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert len(set(hvd.allgather_object(found.numpy().tobytes()))) == 1
    compressed = _train(hvd, "cuda", compression=hvd.Compression.fp16)
    torch.testing.assert_close(compressed, expected, rtol=1e-2, atol=1e-2)


# Calls of CUDA in which the host waits for the device.
WAITS = {
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "cudaMemcpy",
    "cudaStreamSynchronize",
    "cuCtxSynchronize",
    "cuEventSynchronize",
    "cuStreamSynchronize",
}


@ranks(1, 2, fresh=True, env=SHARING)
@pytest.mark.parametrize("compression", ["none", "fp16", "bf16"])
def test_no_step_waits_on_the_host_for_the_device(compression):
    from torch.profiler import ProfilerActivity, profile

    hvd = start()
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(20))).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    chosen = getattr(hvd.Compression, compression)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=chosen)
    batch = torch.randn(32, 256, device="cuda")

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    def calls(function, *arguments):
        torch.cuda.synchronize()
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
        with profile(activities=activities, acc_events=True) as trace:  # else torch 2.11 warns
            function(*arguments)
        return [event.name for event in trace.events()]

    train(20)
    steps = 32
    seen = calls(train, steps)
    assert any("aunchKernel" in name for name in seen)
    waits = Counter(name for name in seen if name in WAITS)
    assert waits.pop("cudaDeviceSynchronize", 0) <= 1  # the profiler's own, at its end
    # In every 16th step several ranks read a part of their replicas, to compare it.
    assert waits.total() < (steps if hvd.size() > 1 else 1), waits


@ranks(2, fresh=True, env=SHARING)
def test_what_grad_scaler_changes_unseen_is_noticed_a_step_later():
    hvd = start()
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


@ranks(2, fresh=True, env=SHARING)
def test_a_tensor_on_the_host_of_one_rank_alone():
    hvd = start()
    device = "cuda" if hvd.rank() == 0 else "cpu"
    with pytest.raises(hvd.HorovodInternalError, match="device is cuda on rank 0, cpu on rank 1"):
        hvd.allreduce(torch.ones(3, device=device), name="x")
    assert hvd.allreduce(torch.ones(3, device="cuda"), op=hvd.Sum).tolist() == [2.0] * 3


@ranks(1, 2, 3, fresh=True, env=SHARING)
@each_transport
def test_ranks_give_the_weights_of_one_process(transport):
    hvd = start(transport)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    def train(first, count, distribute):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Flatten()),
            *(torch.nn.Linear(1024, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10)),
        ).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if distribute:
            optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
        for step in range(20):
            torch.manual_seed(step)
            images, labels = torch.randn(24, 3, 8, 8), torch.randint(10, (24,))
            mine = slice(first, first + count)
            outputs = model(images[mine].cuda())
            torch.nn.functional.cross_entropy(outputs, labels[mine].cuda()).backward()
            optimizer.step()
            optimizer.zero_grad()
        return torch.cat([each.detach().flatten() for each in model.parameters()])

    share = 24 // hvd.size()
    found = train(hvd.rank() * share, share, distribute=True)
    expected = train(0, 24, distribute=False)
    assert float((found - expected).norm() / expected.norm()) < 1e-5
    assert len(set(hvd.allgather_object(found.cpu().numpy().tobytes()))) == 1
