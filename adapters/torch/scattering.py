"""The collectives on torch tensors that give every rank something else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import reduction, scattering
from hvdlite.compression import Compression, Strategy
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.reduction import Average, ReduceOp
from hvdlite.torch import autograd
from hvdlite.torch.collectives import numbered
from hvdlite.torch.device_memory import lend, lender
from hvdlite.torch.handles import TensorHandle
from hvdlite.torch.tensors import taken, to_array, to_tensor_like


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TensorHandle:
    """Start `alltoall` and return a handle; leave the tensor alone until it is done."""
    name = numbered(name, "alltoall", process_set)
    convert = _received if splits is None else _received_with_splits
    array, handle = to_array(tensor, lend), TensorHandle(name, convert, tensor)
    scattering.alltoall_async(array, _host(splits), name, process_set=process_set, handle=handle)
    return handle


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Send every rank some rows of a tensor, and receive some of theirs.

    Gradients flow through it, back to where the rows came from.

    Args:
        tensor: at least one axis; all but the first alike on all ranks.
        splits: for each rank that takes part how many rows it gets, in their order; they add up
            to the number of rows. None: the same number for all.
        name: pairs this call with those of the other ranks; None: by order.
        process_set: the ranks that take part.

    Returns:
        The rows that came, in the order of the ranks they came from; with ``splits`` given, a
        pair of these and an int32 tensor of how many came from each.

    Raises:
        ValueError: the splits do not fit, an operation of this name is still on its way, or this
            rank is not in the process set.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    name = numbered(name, "alltoall", process_set)
    result, received = autograd.Alltoall.apply(tensor, _host(splits), name, process_set)
    return result if splits is None else (result, received)


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TensorHandle:
    """Start `reducescatter` and return a handle; leave the tensor alone until it is done."""
    name = numbered(name, "reducescatter", process_set)
    factors = prescale_factor, postscale_factor
    array = to_array(tensor, lender([tensor], *factors))
    handle = TensorHandle(name, to_tensor_like, tensor)
    scattering.reducescatter_async(
        array, name, op, *factors, process_set=process_set, handle=handle
    )
    return handle


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Strategy = Compression.none,
    op: ReduceOp | int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over all ranks, and return this rank's rows of the result.

    Gradients flow through it, for Sum and Average: those of all rows are gathered, and, as in
    Horovod, multiplied with the number of ranks for Sum (although it is Average that divides).

    Args:
        tensor: at least one axis; shape and dtype alike on all ranks. The first ranks get one
            row more where there are not as many for all.
        name: pairs this call with those of the other ranks; None: by order.
        compression: how floats travel: ``Compression.none``, ``.fp16`` or ``.bf16``.
        op: Average, Sum, Min, Max or Product.
        process_set: the ranks that take part.
        prescale_factor: multiplies the tensor before the reduction.
        postscale_factor: multiplies the result.

    Raises:
        ValueError: ``op`` is Adasum or has no meaning for the dtype, an operation of this name is
            still on its way, or this rank is not in the process set.
        HorovodInternalError: the ranks disagree, or communication failed.
    """
    name = numbered(name, "reducescatter", process_set)
    chosen = reduction.choose(None, op)
    factors = prescale_factor, postscale_factor
    result: torch.Tensor = autograd.Reducescatter.apply(
        tensor, name, compression, chosen, *factors, process_set
    )
    return result


def _host(splits: Any) -> Any:
    return splits.cpu().numpy() if isinstance(splits, torch.Tensor) else splits


def _received(result: Any, tensor: torch.Tensor) -> torch.Tensor:
    return _received_with_splits(result, tensor)[0]


def _received_with_splits(result: Any, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    whole, received = taken(result)
    return to_tensor_like(whole, tensor), torch.tensor(received, dtype=torch.int32, device="cpu")
