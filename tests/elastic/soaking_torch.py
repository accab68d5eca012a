"""A PyTorch job with spares that reports what its processes hold: ``soaking_torch.py FOLDER``.

It trains until there is a file "stop" in FOLDER.

Each process appends to a file of its own in FOLDER: JSON lines with what it holds, about twice a
second while it is a rank, once it has made some steps with the same ranks. SIGUSR1 has a rank raise
``HorovodInternalError`` in its next step.
"""

import gc
import hashlib
import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

import hvdlite.torch as hvd
from hvdlite.engine import runtime
from hvdlite.world import world

FOLDER = Path(sys.argv[1])
PACE = float(os.environ.get("SOAK_PACE", "0.03"))
# After a change of the ranks: what the old world had is freed by then.
SETTLED = 10
NUMBER = int(os.environ["OMPI_COMM_WORLD_RANK"])
report = (FOLDER / f"{NUMBER}.jsonl").open("a", buffering=1)
asked = []


def tell(**values):
    report.write(json.dumps({"time": time.time(), "pid": os.getpid(), **values}) + "\n")


def usage():
    """Return what this process holds: memory in KiB, and numbers of the rest."""
    status = Path("/proc/self/status").read_text()
    memory = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if "kB" in line}
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {
        "memory": int(memory["RssAnon"]),
        "resident": int(memory["VmRSS"]),
        "virtual": int(memory["VmSize"]),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "segments": sum("memfd:" in line for line in maps),
        "mounted": sum("/dev/shm/" in line for line in maps),
        # Open MPI gives the lowest number that is free.
        "communicators": int(world.current().comm.py2f()),
    }


tell(event="start")
signal.signal(signal.SIGUSR1, lambda *_: asked.append(True))
hvd.init()
torch.manual_seed(hvd.rank() + 100)  # rank 0's weights count
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10)
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
    named_parameters=model.named_parameters(),
)
large = np.arange(1 << 16)
seen = None
since = time.monotonic()
settled = 0


def check_sums(step):
    """Add up what tells whether a sum is that of the ranks, each with its part, once."""
    before = hvd.size()
    handles = [
        hvd.allreduce_async(torch.full((7,), float(step)), name="mean"),
        hvd.allreduce_async(torch.tensor([1.0]), name="ranks", op=hvd.Sum),
    ]
    mean, ranks = (hvd.synchronize(handle) for handle in handles)
    assert mean.tolist() == [step] * 7, (step, mean)
    total = hvd.allreduce(torch.from_numpy(large + step), name="large", op=hvd.Sum).numpy()
    counts = np.unique(total / (large + step + (large + step == 0)))
    counts = counts[counts > 0]
    assert hvd.size() <= int(ranks) <= before, (before, ranks, hvd.size())
    assert len(counts) == 1, counts
    assert hvd.size() <= counts[0] <= before, (before, counts, hvd.size())


def watch(step):
    """Report, if nothing has changed for some steps."""
    global seen, settled, since
    now = (id(runtime.engine()), runtime.engine().supervisor.recoveries)
    if now != seen:
        seen, settled = now, 0
        tell(event="change", step=step, size=hvd.size(), rank=hvd.rank())
    settled += 1
    if settled == SETTLED or (settled > SETTLED and time.monotonic() > since + 0.5):
        since = time.monotonic()
        gc.collect()
        first = settled == SETTLED
        tell(event="usage", first=first, step=step, size=hvd.size(), rank=hvd.rank(), **usage())


@hvd.elastic.run
def train(state):
    while not state.ends:
        generator = torch.Generator().manual_seed(1000 * state.step + NUMBER)
        images = torch.randn(8, 1, 8, 8, generator=generator)
        labels = torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        check_sums(state.step)
        if asked:
            asked.clear()
            raise hvd.HorovodInternalError("asked by a signal")
        state.step += 1
        if state.step % 5 == 0:
            asks = torch.tensor(float((FOLDER / "stop").exists()))
            state.ends = bool(hvd.allreduce(asks, name="ends", op=hvd.Max))
            state.commit()
        watch(state.step)
        time.sleep(PACE)


train(state := hvd.elastic.TorchState(model, optimizer, step=0, ends=False))
weights = [value.tolist() for value in model.state_dict().values()]
momenta = [each["momentum_buffer"].tolist() for each in optimizer.state_dict()["state"].values()]
digest = hashlib.sha256(pickle.dumps((weights, momenta))).hexdigest()
tell(event="end", step=state.step, digest=digest, size=hvd.size())
print(f"left {NUMBER}: {state.step} {hvd.size()} {digest}", flush=True)
