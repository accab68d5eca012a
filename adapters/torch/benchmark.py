"""PyTorch's part of ``hvdlite bench``: its contenders, and the models that they train."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hvdlite.torch as hvd
from hvdlite.tools.bench.allreduce_ranks import Library
from hvdlite.tools.bench.job import naming
from hvdlite.tools.bench.workloads import (
    CLASSES,
    LEARNING_RATE,
    MOMENTUM,
    RESNET_GROUPS,
    WORKLOADS,
)
from hvdlite.torch import distributed  # noqa: F401 - by which torch.distributed finds the ranks

Trained = tuple[nn.Module, torch.optim.Optimizer]


@contextlib.contextmanager
def gloo(comm: MPI.Comm) -> Iterator[None]:
    """Provide torch.distributed on gloo within a context; hvdlite's backend finds the ranks."""
    with naming("gloo"):
        dist.init_process_group("gloo")
    yield
    comm.Barrier()
    dist.destroy_process_group()
    comm.Barrier()  # rank 0's store serves the others until here


# Sums


@contextlib.contextmanager
def libraries(comm: MPI.Comm, names: Collection[str]) -> Iterator[dict[str, Library]]:
    """Provide the libraries that sum tensors in place, by contender; gloo only if it is named."""
    torch.set_num_threads(1)
    found = {
        "hvdlite": Library(
            lambda tensor, name: hvd.allreduce_(tensor, name=name, op=hvd.Sum),
            lambda tensor, name: hvd.allreduce_async_(tensor, name=name, op=hvd.Sum),
            lambda handles: [hvd.synchronize(each) for each in handles],
            view=torch.from_numpy,
        ),
        "gloo": Library(
            lambda tensor, _: dist.all_reduce(tensor),
            lambda tensor, _: dist.all_reduce(tensor, async_op=True),
            view=torch.from_numpy,
        ),
    }
    with gloo(comm) if "gloo" in names else contextlib.nullcontext():
        yield found


# Training steps


class Replica:
    """A copy of a workload's model, as a contender wraps it, with an optimizer of its own."""

    def __init__(
        self, name: str, workload: str, batch: int, seed: int, wrap: Callable[[nn.Module], Trained]
    ) -> None:
        self.name = name
        samples, labels = WORKLOADS[workload].data(batch, seed)
        inputs = torch.from_numpy(samples)
        if inputs.dim() == 4:
            inputs = inputs.permute(0, 3, 1, 2).contiguous()
        self._inputs, self._labels = inputs, torch.from_numpy(labels)
        model = build(workload)
        with naming(name):
            self.model, self.optimizer = wrap(model)

    def step(self) -> None:
        """Train on the batch once."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(self._inputs), self._labels)
        loss.backward()
        self.optimizer.step()
        self.loss = loss.detach()

    def gradients(self) -> np.ndarray[Any, Any]:
        """Return the last step's gradients, flat."""
        found = [parameter.grad for parameter in self.model.parameters()]
        gradients = [getattr(each, "full_tensor", lambda each=each: each)() for each in found]
        flat = torch.cat([torch.flatten(each) for each in gradients if each is not None])
        return flat.cpu().numpy()


@contextlib.contextmanager
def replicas(comm: MPI.Comm, names: Collection[str], workload: str) -> Iterator[list[Replica]]:
    """Provide a replica for each contender.

    By default DDP also broadcasts buffers (of batch normalisation) in every step, which the
    others do not. Where there are none, ``ddp-no-buffers`` is the same and left out.
    """
    torch.set_num_threads(1)
    hvd.init(comm)
    ways: dict[str, Callable[[nn.Module], Trained]] = {
        "alone": alone,
        "hvdlite": hvdlite,
        "mpi": partial(_averaging, comm),
        "ddp": _ddp,
        "ddp-no-buffers": partial(_ddp, broadcast_buffers=False),
        "ddp-hvdlite": lambda model: _ddp(model, process_group=dist.new_group(backend="hvdlite")),
        "ddp-hook": _hooked,
        "fsdp": lambda model: _fsdp(model, dist.group.WORLD),
        "fsdp-hvdlite": lambda model: _fsdp(model, dist.new_group(backend="hvdlite")),
    }
    chosen = [name for name in ways if name in names]
    batch, is_dense = WORKLOADS[workload].batch, bool(WORKLOADS[workload].widths)
    if is_dense and "ddp" in chosen:  # without batch normalisation
        chosen = [name for name in chosen if name != "ddp-no-buffers"]
    on_gloo = any(name.startswith(("ddp", "fsdp")) for name in chosen)
    with gloo(comm) if on_gloo else contextlib.nullcontext():
        yield [Replica(name, workload, batch, comm.rank, ways[name]) for name in chosen]
    hvd.shutdown()


def alone(model: nn.Module) -> Trained:
    """Return the model and an optimizer that exchanges nothing."""
    return model, torch.optim.SGD(model.parameters(), LEARNING_RATE, momentum=MOMENTUM)


def hvdlite(model: nn.Module) -> Trained:
    """Return the model and hvdlite's optimizer."""
    _, optimizer = alone(model)
    return model, hvd.DistributedOptimizer(optimizer, model.named_parameters())


def _ddp(model: nn.Module, **options: Any) -> Trained:
    with warnings.catch_warnings():
        # Newer versions call broadcast_buffers otherwise, older ones know only this name.
        warnings.simplefilter("ignore", FutureWarning)
        return alone(DistributedDataParallel(model, gradient_as_bucket_view=True, **options))


def _hooked(model: nn.Module) -> Trained:
    trained, optimizer = _ddp(model)
    trained.register_comm_hook(hvd.comm_hook_state(), hvd.comm_hook)  # type: ignore[operator]
    return trained, optimizer


def _fsdp(model: nn.Module, group: Any) -> Trained:
    mesh = DeviceMesh.from_group(group, "cpu")
    for part in model.children():
        if sum(each.numel() for each in part.parameters()) >= 2**20:
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return alone(model)


def _averaging(comm: MPI.Comm, model: nn.Module) -> Trained:
    """Average the gradients after the backward pass, one by one, by plain MPI."""
    parameters = list(model.parameters())

    def average(*_: Any) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                comm.Allreduce(MPI.IN_PLACE, parameter.grad.numpy(), MPI.SUM)
                parameter.grad /= comm.size

    _, optimizer = alone(model)
    optimizer.register_step_pre_hook(average)
    return model, optimizer


# Models


def build(name: str) -> nn.Module:
    """Make a workload's model with the weights that it has on every rank."""
    torch.manual_seed(0)
    chosen = WORKLOADS[name]
    model = _dense([*chosen.sample, *chosen.widths, CLASSES]) if chosen.widths else _resnet()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # torch's own initialization lets signals die within 200 layers.
            nn.init.kaiming_normal_(parameter)
    return model


class _Block(nn.Module):
    """Two convolutions and a shortcut (He et al. 2015, arXiv:1512.03385)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels_in, channels, 3, stride),
            nn.ReLU(),
            *_convolution(channels, channels, 3, 1),
        )
        same = channels_in == channels and stride == 1
        self.shortcut = nn.Sequential(
            *([] if same else _convolution(channels_in, channels, 1, stride))
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def _convolution(channels_in: int, channels: int, kernel: int, stride: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False)
    return [convolution, nn.BatchNorm2d(channels)]


def _resnet() -> nn.Module:
    channels_in = RESNET_GROUPS[0][0]
    parts = [*_convolution(3, channels_in, 3, 1), nn.ReLU()]
    for channels, stride in RESNET_GROUPS:
        parts += [_Block(channels_in, channels, stride), _Block(channels, channels, 1)]
        channels_in = channels
    return nn.Sequential(
        *parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, CLASSES)
    )


def _dense(widths: list[int]) -> nn.Module:
    parts: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        parts += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*parts[:-1])
