"""Benchmark sums over all ranks of one float32 array on each rank's GPU, in place.

    python -m tests.benchmarks.gpu [--ranks N] [--quick]

Contenders: hvdlite on NCCL, and torch's NCCL, where NCCL serves these ranks (each has a device of
its own, or NCCL is 2.30 and ``NCCL_MULTI_RANK_GPU_ENABLE=1``); hvdlite through host memory; and,
as the limit, both passes of a copy on the device. Each time includes waiting for the device.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from hvdlite.base.reduction import Scaling, Sum
from hvdlite.tools.bench import job, measurement, report
from hvdlite.tools.bench.measurement import Ranks, order, rounds, timed
from hvdlite.tools.cli.arguments import positive
from hvdlite.transport.gpu.base import DeviceTransport
from hvdlite.transport.gpu.cuda import Cuda
from hvdlite.transport.gpu.nccl import NCCLTransport
from hvdlite.transport.registry import connect, connect_device
from hvdlite.world.world import World
from tests.benchmarks import files

_SIZES = [4 * 2**10 * 4**step for step in range(9)]  # 4 KiB to 256 MiB
_SMALL, _CALLS_IF_SMALL = 2**20, 20

Contenders = dict[str, Callable[[], None]]


def main() -> None:
    """Measure, print, write the JSON; without a device, say so and measure nothing."""
    parser = files.make_parser(__doc__)
    parser.add_argument("--ranks", type=positive, help="one for each device, and 2 at least")
    files.add_limits(parser, rounds=100, seconds=5.0)
    options = parser.parse_args()
    devices = _count_devices()
    ranks = options.ranks or max(2, devices)
    arguments = {"sizes": _SIZES, "limit": files.limits(options)}
    document = files.measure("gpu", options, ranks, arguments)
    print(_table(document["results"]))
    shared = "" if ranks <= devices else f", shared by {ranks} ranks"
    print(f"{', '.join(sorted(set(document['results'][0]['devices'])))}{shared}")
    print(report.describe(document))


def measure(comm: MPI.Comm, sizes: Sequence[int], limit: dict[str, Any]) -> list[dict[str, Any]]:
    """Time sums of float32 in place, of arrays of so many bytes; collective."""
    cuda = Cuda()
    device = comm.rank % cuda.device_count()
    name = import_module("cupy").cuda.runtime.getDeviceProperties(device)["name"].decode()
    names = comm.allgather(f"{name} ({cuda.bus_id(device)})")
    control = connect(MPI, World.split(MPI, comm.Dup()))
    transports = {"hvdlite staged": DeviceTransport(cuda, control, device)}
    preferred = connect_device(control, device, cuda)
    if isinstance(preferred, NCCLTransport):
        transports["hvdlite nccl"] = preferred
    with torch_nccl(comm, device) if "hvdlite nccl" in transports else nullcontext() as distributed:
        return [
            {
                "case": "sum",
                "ranks": comm.size,
                "devices": names,
                "bytes": nbytes,
                **_measure_size(comm, cuda, device, transports, distributed, nbytes, limit),
            }
            for nbytes in sizes
        ]


def nccl_serves(comm: MPI.Comm, cuda: Cuda, device: int) -> bool:
    """Return whether NCCL serves these ranks; collective."""
    control = connect(MPI, World.split(MPI, comm.Dup()))
    transport = connect_device(control, device, cuda)
    transport.close()
    control.close()
    return isinstance(transport, NCCLTransport)


def _measure_size(
    comm: MPI.Comm,
    cuda: Cuda,
    device: int,
    transports: dict[str, DeviceTransport],
    distributed: Any,
    nbytes: int,
    limit: dict[str, Any],
) -> dict[str, Any]:
    job.say(comm, f"{report.size_text(nbytes)} on {comm.size} ranks")
    calls = _CALLS_IF_SMALL if nbytes <= _SMALL else 1
    stream = cuda.stream(device)
    with cuda.on(device, stream):
        array = cuda.empty(nbytes // 4, np.dtype(np.float32))
        contenders = _contenders(cuda, stream, array, transports, distributed, device)
        for name, call in contenders.items():
            _check(comm, name, call, array, stream)
        rows = []
        for turn in rounds(Ranks(comm), **limit):
            row = np.empty(len(contenders))
            for index in order(len(contenders), turn):
                array.fill(0)  # sums stay what they are
                stream.synchronize()
                Ranks(comm).meet()
                row[index] = timed(list(contenders.values())[index], calls)
            rows.append(row)
    slowest = np.array(rows)
    comm.Allreduce(MPI.IN_PLACE, slowest, MPI.MAX)
    seconds = dict(zip(contenders, slowest.T, strict=True))
    return {
        "rounds": len(rows),
        "seconds": {name: measurement.summary(samples) for name, samples in seconds.items()},
    }


def _contenders(
    cuda: Cuda,
    stream: Any,
    array: Any,
    transports: dict[str, DeviceTransport],
    distributed: Any,
    device: int,
) -> Contenders:
    def by(transport: DeviceTransport) -> Callable[[], None]:
        def reduce() -> None:
            ready = transport.record(stream.ptr)
            transport.enqueue(
                lambda: transport.allreduce(array, array, Sum, Scaling()), [ready]
            ).wait()

        return reduce

    other = cuda.empty(array.size, array.dtype)

    def copy() -> None:
        cuda.copy(other, array)
        cuda.copy(array, other)
        stream.synchronize()

    contenders: Contenders = {name: by(transport) for name, transport in transports.items()}
    if distributed is not None:
        contenders["torch nccl"] = _by_torch(distributed, array, device)
    contenders["copy"] = copy
    return contenders


def _by_torch(distributed: Any, array: Any, device: int) -> Callable[[], None]:
    import torch

    tensor = torch.from_dlpack(array)

    def reduce() -> None:
        distributed.all_reduce(tensor)
        torch.cuda.synchronize(device)

    return reduce


def _check(comm: MPI.Comm, name: str, call: Callable[[], None], array: Any, stream: Any) -> None:
    """Assert that a contender sums, but for the copy; it also warms up."""
    array.fill(comm.rank + 1)
    stream.synchronize()
    call()
    expected = comm.rank + 1 if name == "copy" else comm.size * (comm.size + 1) / 2
    if not bool((array == expected).all()):
        raise RuntimeError(f"rank {comm.rank}: {name} gave {array[:4]}, expected {expected}")
    for _ in range(3):
        call()


@contextmanager
def torch_nccl(comm: MPI.Comm, device: int) -> Iterator[Any]:
    """Return torch.distributed on NCCL, or None where this torch has no CUDA."""
    try:
        import torch
        import torch.distributed as dist

        usable = torch.cuda.is_available() and dist.is_nccl_available()
    except ImportError:
        usable = False
    if not comm.allreduce(usable, MPI.LAND):
        yield None
        return
    torch.cuda.set_device(device)
    own = tempfile.TemporaryDirectory(prefix="nccl-") if comm.rank == 0 else nullcontext()
    with own as folder:
        store = Path(comm.bcast(folder), "store")
        dist.init_process_group("nccl", f"file://{store}", rank=comm.rank, world_size=comm.size)
        yield dist
        comm.Barrier()
        dist.destroy_process_group()


def _count_devices() -> int:
    try:
        devices = Cuda().device_count()
    except ImportError:
        sys.exit("cupy is not installed (pip install 'hvdlite[cuda13]'); nothing was measured")
    if not devices:
        sys.exit("there is no CUDA device on this machine; nothing was measured")
    return devices


def _table(records: Sequence[dict[str, Any]]) -> str:
    names = list(records[0]["seconds"])
    rows = []
    for record in records:
        times = (report.time_text(record["seconds"][name]["median"]) for name in names)
        rows.append([report.size_text(record["bytes"]), str(record["rounds"]), *times])
    title = f"In-place sum of float32 on GPUs, {records[0]['ranks']} ranks, medians"
    return f"{title}\n{report.table(['size', 'rounds', *names], rows)}"


if __name__ == "__main__":
    main()
