"""Train by DDP with hvdlite's backend and hook, on ranks of which some may die meanwhile."""

import contextlib
import hashlib
import sys

import torch
import torch.distributed as dist

import hvdlite.torch as hvd
import hvdlite.torch.distributed  # noqa: F401 - registers the backend

_STEPS = int(sys.argv[1])

dist.init_process_group("hvdlite")
torch.manual_seed(0)
net = torch.nn.Sequential(
    torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.Linear(256, 256)
)
state = hvd.comm_hook_state(hvd.Compression.fp16)
model = None
while model is None:  # the ranks compare their models, which a death ends on all of them
    with contextlib.suppress(hvd.HorovodInternalError):
        # Buffers would come from rank 0, which may die.
        model = torch.nn.parallel.DistributedDataParallel(
            net, bucket_cap_mb=0.1, broadcast_buffers=False
        )
model.register_comm_hook(state, hvd.comm_hook)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
start = dist.get_rank()
for step in range(_STEPS):
    torch.manual_seed(1000 * step + start)
    optimizer.zero_grad()
    model(torch.randn(16, 64)).square().mean().backward()
    optimizer.step()
weights = torch.cat([parameter.detach().reshape(-1) for parameter in net.parameters()])
digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()
loss = torch.ones(1)
dist.all_reduce(loss)
assert loss.item() == dist.get_world_size()
print(f"left {start}: {digest} {dist.get_world_size()}", flush=True)
