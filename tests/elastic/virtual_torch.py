"""A PyTorch job with virtual ranks: prints a hash of the weights, the same whoever dies.

python tests/elastic/virtual_torch.py STEPS [COMPRESSION]
"""

import hashlib
import sys

import numpy as np
import torch

import hvdlite.torch as hvd

COMPRESSIONS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "topk": hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.1)),
    "powersgd": hvd.Compression.PowerSGD(2),
}
VIRTUAL = 8

steps = int(sys.argv[1])
compression = COMPRESSIONS[sys.argv[2] if len(sys.argv) > 2 else "none"]
hvd.init(virtual_ranks=VIRTUAL)
start = hvd.rank()
torch.manual_seed(1)
model = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3),
    torch.nn.BatchNorm2d(8),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.2),
    torch.nn.Flatten(),
    torch.nn.Linear(8 * 36, 10),
)
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    named_parameters=model.named_parameters(),
    compression=compression,
    model=model,
)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)
hvd.seed(2)
generator = np.random.default_rng(3)
images = generator.standard_normal((10 * VIRTUAL * 4 - 5, 1, 8, 8), np.float32)
labels = generator.integers(0, 10, len(images))
batches = hvd.shard((images, labels), batch_size=4)
done = 0
while done < steps:
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(x)), torch.from_numpy(y))
        loss.backward()
        optimizer.step(batch_size=len(y))
        if optimizer.stepped:
            scheduler.step()
            done += 1
            if done == steps:
                break
digest = hashlib.sha256(b"".join(v.numpy().tobytes() for v in model.state_dict().values()))
print(f"left {start}: {done} {digest.hexdigest()}", flush=True)
