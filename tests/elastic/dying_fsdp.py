"""Train by FSDP on hvdlite's backend until a rank dies; tell how long the others take to see it.

python dying_fsdp.py VICTIM SECONDS FILE
"""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import hvdlite.torch as hvd
import hvdlite.torch.distributed  # noqa: F401 - registers the backend

victim, seconds, path = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])


def die():
    time.sleep(seconds)
    path.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL)


dist.init_process_group("hvdlite")
torch.set_num_threads(1)
net = torch.nn.Sequential(*(torch.nn.Linear(128, 128) for _ in range(4)))
for part in (*net, net):
    fully_shard(part)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
rank = dist.get_rank()
if rank == victim:
    threading.Thread(target=die, daemon=True).start()
try:
    while True:
        optimizer.zero_grad()
        net(torch.randn(4, 128)).square().mean().backward()
        optimizer.step()
except hvd.HorovodInternalError as error:
    seconds = time.time() - float(path.read_text())
    print(f"lost {rank}: {seconds} {error}", flush=True)
    sys.exit(3)
