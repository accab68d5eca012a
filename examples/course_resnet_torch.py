"""Measure images/s of ResNet-34 on synthetic images with PyTorch, on N processes.

    hvdliterun -np 2 python course_resnet_torch.py --num_steps 20
    hvdliterun -np 4 python course_resnet_torch.py --image_size 224 --batch_size 64

Every rank takes the same batch in every step: reading data is not measured.
"""

from __future__ import annotations

import time

import course_common
import torch
from resnet import resnet34
from torch.nn.functional import cross_entropy

import hvdlite.torch as hvd

_CLASSES = 1000
_UNTIMED = 3  # steps in which memory is allocated, and in which ranks compare their weights


def main() -> None:
    """Train for some steps, and print the images per second."""
    options = course_common.parse_benchmark_options(__doc__)
    hvd.init()
    device = hvd.pin_device()

    # Synthetic images, so that only computation and exchange are measured; each rank has others.
    torch.manual_seed(hvd.rank())
    size = options.image_size
    images = torch.randn(options.batch_size, 3, size, size, device=device)
    labels = torch.randint(_CLASSES, (options.batch_size,), device=device)

    model = resnet34(_CLASSES, options.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=hvd.scale_lr(0.01))
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    seconds = []
    for _ in range(_UNTIMED + options.num_steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()  # waits for the device
        seconds.append(time.perf_counter() - start)
    course_common.report_rates(hvd, seconds[_UNTIMED:], options)


if __name__ == "__main__":
    main()
