"""A script as it was written for Horovod: nothing in it knows of hvdlite.

    hvdliterun --horovod -np 2 python examples/horovod_style.py
    mpirun -np 2 python -m hvdlite.horovod examples/horovod_style.py

It fits a small network to a curve, each process on its share of the points.
"""

import argparse
import math

import horovod.torch as hvd
import torch
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_options():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Fit a curve on several processes.")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="points per process and step")
    parser.add_argument("--learning-rate", type=float, default=0.005, help="of one process")
    parser.add_argument("--fp16-allreduce", action="store_true", help="halve what is exchanged")
    return parser.parse_args()


def train(model, optimizer, loader, sampler, epoch):
    """Train for an epoch; return the loss, averaged over the processes."""
    sampler.set_epoch(epoch)
    total = 0.0
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()
    mean = torch.tensor(total / len(loader))
    return hvd.allreduce(mean, name="loss", op=hvd.Average).item()


def main():
    """Fit the curve, and compare the weights of all processes."""
    options = parse_options()
    hvd.init()
    torch.manual_seed(hvd.rank())  # The weights differ until they are broadcast.

    points = torch.linspace(-math.pi, math.pi, 1024).unsqueeze(1)
    dataset = TensorDataset(points, torch.sin(2 * points))
    sampler = DistributedSampler(dataset, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(dataset, options.batch_size, sampler=sampler)

    model = torch.nn.Sequential(
        torch.nn.Linear(1, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 64),
        torch.nn.Tanh(),
        torch.nn.Linear(64, 1),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=options.learning_rate * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
    )

    for epoch in range(options.epochs):
        loss = train(model, optimizer, loader, sampler, epoch)
        if hvd.rank() == 0:
            print(f"epoch {epoch + 1}: loss {loss:.5f}")

    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everybodys = hvd.allgather(weights.unsqueeze(0), name="weights")
    if hvd.rank() == 0:
        print(f"{hvd.size()} processes, equal weights: {bool((everybodys == everybodys[0]).all())}")


if __name__ == "__main__":
    main()
