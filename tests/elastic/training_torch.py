"""A PyTorch job that goes on when ranks die: prints the steps and a hash of the weights.

And how much longer than the others its slowest step took.
"""

import hashlib
import statistics
import sys
import time

import torch

import hvdlite.torch as hvd

steps = int(sys.argv[1])
hvd.init()
start = hvd.rank()
torch.manual_seed(1)
torch.set_num_threads(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10)
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
seconds = []
for step in range(steps):
    began = time.perf_counter()
    generator = torch.Generator().manual_seed(1000 * step + start)
    images = torch.randn(16, 1, 8, 8, generator=generator)
    labels = torch.randint(0, 10, (16,), generator=generator)
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    scheduler.step()
    mean = hvd.allreduce(loss.detach(), name="loss")
    seconds.append(time.perf_counter() - began)
weights = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
digest = hashlib.sha256(weights).hexdigest()
print(f"left {start}: {hvd.size()} {len(seconds)} {digest} {float(mean)}", flush=True)
print(f"longer {start}: {max(seconds[1:]) - statistics.median(seconds)}", flush=True)
