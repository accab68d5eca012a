"""A training step in PyTorch, once for each way to exchange gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from tests.benchmarks import libraries, torch_models
from tests.benchmarks.workloads import LEARNING_RATE, MOMENTUM, WORKLOADS

Wrapping = Callable[[torch.nn.Module], tuple[torch.nn.Module, torch.optim.Optimizer]]


class Replica:
    """A copy of a workload's model with an optimizer of its own.

    Args:
        name: of the contender.
        workload: the name of the workload.
        batch: samples per step.
        seed: of this rank's data.
        wrap: makes of the model what is trained, and its optimizer.
    """

    def __init__(self, name: str, workload: str, batch: int, seed: int, wrap: Wrapping) -> None:
        self.name = name
        samples, labels = WORKLOADS[workload].data(batch, seed)
        inputs = torch.from_numpy(samples)
        if inputs.dim() == 4:
            inputs = inputs.permute(0, 3, 1, 2).contiguous()
        self._inputs, self._labels = inputs, torch.from_numpy(labels)
        model = torch_models.build(workload)
        self._parameters = list(model.parameters())
        self._model, self._optimizer = wrap(model)
        self._loss = torch.zeros(())

    def step(self) -> None:
        """Train on the batch once."""
        self._optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self._model(self._inputs), self._labels)
        loss.backward()
        self._optimizer.step()
        self._loss = loss.detach()

    def broadcast(self) -> None:
        """Give all ranks the weights and the optimizer's state of rank 0."""
        hvd.broadcast_parameters(self._model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(self._optimizer, root_rank=0)

    def loss(self) -> float:
        """Return the last step's loss."""
        return self._loss.item()

    def gradients(self) -> np.ndarray[Any, Any]:
        """Return the last step's gradients, flat."""
        gradients = (parameter.grad for parameter in self._parameters)
        return torch.cat([torch.flatten(gradient) for gradient in gradients]).numpy()


@contextlib.contextmanager
def replicas(comm: MPI.Comm, workload: str, batch: int) -> Iterator[list[Replica]]:
    """Return a replica for each contender: alone, hvdlite, DDP on gloo, Horovod if it is there.

    By default DDP also broadcasts buffers (of batch normalisation) in every step, which the
    others do not. Where there are any, it takes part without that, too.
    """
    torch.set_num_threads(1)
    hvd.init(comm)
    with libraries.gloo(comm):
        ways: dict[str, Wrapping] = {"alone": alone, "hvdlite": hvdlite, "ddp": _ddp}
        if any(True for _ in torch_models.build(workload).buffers()):
            ways["ddp, no buffers"] = _ddp_without_buffers
        other = libraries.horovod("torch")
        if other is not None:
            ways["horovod"] = lambda model: _distributed(other, model)
        yield [Replica(name, workload, batch, comm.rank, wrap) for name, wrap in ways.items()]
    hvd.shutdown()


def alone(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the model and an optimizer that exchanges nothing."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM)
    return model, optimizer


def hvdlite(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return the model and hvdlite's optimizer."""
    return _distributed(hvd, model)


def _distributed(
    library: Any, model: torch.nn.Module
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    _, optimizer = alone(model)
    return model, library.DistributedOptimizer(optimizer, model.named_parameters())


def _ddp(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return alone(DistributedDataParallel(model, gradient_as_bucket_view=True))


def _ddp_without_buffers(
    model: torch.nn.Module,
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    with warnings.catch_warnings():
        # Newer versions call this argument otherwise, older ones know only this name.
        warnings.simplefilter("ignore", FutureWarning)
        wrapped = DistributedDataParallel(
            model, gradient_as_bucket_view=True, broadcast_buffers=False
        )
    return alone(wrapped)
