"""pytorch-ignite with its backend for Horovod, which finds hvdlite."""

import sys
from pathlib import Path

import ignite.distributed as idist
import torch
from ignite.engine import Engine

from tests.torch.frameworks.toys.common import BATCH, RATE, Net, Samples, loss_of


def train(_, folder):
    samples = Samples()
    model = idist.auto_model(Net())
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), RATE))
    # Without shuffling, each step takes the samples of one batch of both ranks.
    loader = idist.auto_dataloader(samples, batch_size=2 * BATCH, shuffle=False)

    def step(engine, batch):
        optimizer.zero_grad()
        model(**batch)["loss"].backward()
        optimizer.step()

    Engine(step).run(loader)
    losses = idist.all_gather(torch.tensor([loss_of(model, samples)]))
    assert losses[0] == losses[1]
    assert idist.all_gather(f"of {idist.get_rank()}") == ["of 0", "of 1"]
    found = {"weights": model.state_dict(), "group": type(optimizer).__module__}
    torch.save(found, Path(folder, f"rank{idist.get_rank()}.pt"))


if __name__ == "__main__":
    with idist.Parallel(backend="horovod") as parallel:
        parallel.run(train, sys.argv[1])
