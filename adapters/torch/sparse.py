"""The allreduce of sparse tensors and gradients: all entries are gathered and added up."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from hvdlite.base import reduction
from hvdlite.base.reduction import ReduceOp
from hvdlite.collectives import describe_allgather, describe_group
from hvdlite.engine import Operation, runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.errors import MismatchError, by_value
from hvdlite.torch.collectives import allreduce_async
from hvdlite.torch.device_memory import device_array
from hvdlite.torch.tensors import (
    dtype_of,
    gradient_dtype,
    on_current_stream,
    to_array,
    to_tensor,
    to_tensor_like,
)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: ReduceOp | int | None,
    process_set: ProcessSet = global_process_set,
    note: str = "",
) -> Callable[[], torch.Tensor]:
    """Start to reduce a sparse tensor over all ranks.

    Each rank sends its entries, so it pays as long as they are few. Entries with the same index are
    added up, on a rank and across ranks, 16-bit floats in float32.

    Args:
        tensor: sparse (COO), with any number of entries; its shape, dtype and number of sparse axes
            are the same on all ranks. It must not change until the end.
        name: matches this call with those of the other ranks; None: calls are matched by order.
        op: Sum or Average.
        process_set: the ranks that take part.
        note: on the operation, for messages.

    Returns:
        A function that waits, and returns the reduced tensor, coalesced. It raises
        HorovodInternalError where the ranks disagree or communication failed.

    Raises:
        ValueError: the tensor is not sparse, or its dtype cannot be reduced so.
        NotImplementedError: another op.
    """
    # Before anything can be refused: a refusal must not shift the names of later calls.
    engine = runtime.engine(process_set)
    name = name or engine.unnamed("sparse_allreduce")
    chosen = reduction.choose(None, op)
    _check(tensor, chosen)
    own = _coalesced(tensor.detach())
    parts = [
        to_array(part, device_array) for part in (_described(own, chosen), own.values().reshape(-1))
    ]

    def describe(name: str) -> Operation:
        gather = functools.partial(describe_allgather, with_rows=True)
        operation = describe_group("sparse allreduce", name, parts, gather)
        operation.note = note
        return operation

    # As one unit: should a rank die, both parts are from the same ranks.
    handle = engine.submit("sparse_allreduce", name, describe)

    def wait() -> torch.Tensor:
        (described, rows, _), (values, *_) = on_current_stream(handle.wait())
        described, values = to_tensor(described), to_tensor_like(values, own.values())
        members = engine.named.transport.members
        indices = _indices(name, described.split(rows), own, chosen, members)
        size = len(rows) if chosen is ReduceOp.AVERAGE else 1
        return _sum(indices, values, own, size)

    return wait


def zero_gradient(parameter: torch.Tensor, sparse_axes: int) -> torch.Tensor:
    """Return a sparse gradient without entries, or, without sparse axes, a dense one of zeros."""
    if not sparse_axes:
        return torch.zeros_like(parameter, dtype=gradient_dtype(parameter))
    indices = torch.empty((sparse_axes, 0), dtype=torch.int64, device=parameter.device)
    entry = parameter.shape[sparse_axes:]
    values = torch.empty((0, *entry), dtype=gradient_dtype(parameter), device=parameter.device)
    return _sparse(indices, values, parameter.shape, is_coalesced=True)


def _check(tensor: torch.Tensor, op: ReduceOp) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        kind = getattr(tensor, "layout", type(tensor).__name__)
        raise ValueError(
            f"expected a sparse tensor (torch.sparse_coo), found {kind}; call .to_sparse() "
            "first, or use hvd.allreduce"
        )
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise NotImplementedError(
            f"sparse tensors are reduced by hvd.Sum or hvd.Average, not {op.name.capitalize()}; "
            "use hvd.allreduce(tensor.to_dense(), op=...) for the others"
        )
    reduction.check(op, dtype_of(tensor.dtype))


def _coalesced(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with one entry per index; 16-bit floats are added up in float32."""
    if tensor.is_coalesced() or tensor.dtype not in (torch.float16, torch.bfloat16):
        return tensor.coalesce()
    return tensor.float().coalesce().to(tensor.dtype)


def _described(tensor: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Return a header that ranks compare, then the indices, (entries, sparse axes), flat."""
    head = [int(op), tensor.sparse_dim(), tensor.dim(), *tensor.shape]
    headed = torch.tensor(head, dtype=torch.int64, device=tensor.device)
    return torch.cat([headed, tensor.indices().t().reshape(-1)])


def _indices(
    name: str,
    parts: Sequence[torch.Tensor],
    own: torch.Tensor,
    op: ReduceOp,
    members: Sequence[int],
) -> torch.Tensor:
    """Return all ranks' indices, of shape (sparse axes, entries), if the headers agree."""
    heads = [part[: 3 + int(part[2])].tolist() for part in parts]
    if any(head != heads[0] for head in heads):
        texts = dict(zip(members, map(_text, heads), strict=True))
        raise MismatchError(
            f"the ranks submitted different sparse tensors as {name!r}: "
            f"{'; '.join(by_value(texts))}; "
            "submit the same operation with the same shape on all ranks"
        )
    flat = torch.cat([part[len(heads[0]) :] for part in parts])
    return flat.reshape(-1, own.sparse_dim()).t()


def _text(head: Sequence[int]) -> str:
    op, sparse_axes, _, *shape = head
    return f"{ReduceOp(op).name.capitalize()} of shape {shape}, {sparse_axes} of its axes sparse"


def _sum(
    indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor, divisor: int
) -> torch.Tensor:
    wide = torch.float32 if like.dtype in (torch.float16, torch.bfloat16) else like.dtype
    values = values.reshape(indices.shape[1], *like.shape[like.sparse_dim() :]).to(wide)
    if divisor > 1 and not (wide.is_floating_point or wide.is_complex):
        return _integer_mean(indices, values, like, divisor)
    total = _sparse(indices, values, like.shape).coalesce()
    sums = total.values()
    if divisor > 1:
        sums = sums / divisor
    return _sparse(total.indices(), sums.to(like.dtype), like.shape, is_coalesced=True)


def _integer_mean(
    indices: torch.Tensor, values: torch.Tensor, like: torch.Tensor, divisor: int
) -> torch.Tensor:
    """Add up integers and divide, truncated towards zero, where sums may overflow the type."""
    values = values.long()
    multiples = torch.div(values, divisor, rounding_mode="floor")
    rests = _sparse(indices, values - divisor * multiples, like.shape).coalesce().values()
    total = _sparse(indices, multiples, like.shape).coalesce()
    mean = total.values() + torch.div(rests, divisor, rounding_mode="floor")
    mean += (mean < 0) & (rests % divisor != 0)
    return _sparse(total.indices(), mean.to(like.dtype), like.shape, is_coalesced=True)


def _sparse(
    indices: torch.Tensor, values: torch.Tensor, shape: torch.Size, is_coalesced: bool | None = None
) -> torch.Tensor:
    # The indices come from valid tensors; torch warns unless it is told whether to check them.
    return torch.sparse_coo_tensor(
        indices,
        values,
        shape,
        device=values.device,
        is_coalesced=is_coalesced,
        check_invariants=False,
    )


_NOTE = " (a sparse gradient; with sparse_as_dense=True it is reduced as a dense one)"


def start_reduction(
    name: str, gradient: torch.Tensor, op: ReduceOp, process_set: ProcessSet
) -> Callable[[], torch.Tensor]:
    """Start to reduce a gradient that has no slot in a bucket, and return what waits for it.

    Args:
        gradient: sparse, or dense where those of the same parameter were sparse before.
    """
    if gradient.layout is torch.sparse_coo:
        return sparse_allreduce_async(gradient, name, op, process_set, _NOTE)
    return allreduce_async(gradient.detach(), name=name, op=op, process_set=process_set).wait
