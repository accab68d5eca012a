"""The collectives as torch functions that gradients flow through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hvdlite import collectives, runtime
from hvdlite.collectives import describe_allgather, describe_alltoall, describe_group
from hvdlite.compression import Compression, Strategy
from hvdlite.engine import Operation
from hvdlite.process_sets import ProcessSet
from hvdlite.reduction import Average, ReduceOp
from hvdlite.torch.device_memory import device_array, device_converter
from hvdlite.torch.dynamo import untraced_methods
from hvdlite.torch.tensors import taken, to_array, to_tensor_like


@untraced_methods("forward", "backward")
class Allreduce(torch.autograd.Function):
    """The gradient is reduced by the same op."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str,
        compression: Strategy,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        ctx.arguments = name, compression, op, prescale, postscale, process_set
        on_device = device_converter([tensor], prescale, postscale, compression=compression)
        result = collectives.allreduce(
            to_array(tensor, on_device),
            name=name,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            compression=compression,
            process_set=process_set,
        )
        return to_tensor_like(result, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, compression, op, *rest = ctx.arguments
        _check_differentiable("allreduce", op)
        reduced = Allreduce.apply(gradients[0], _gradient_name(name), compression, op, *rest)
        return reduced, None, None, None, None, None, None


@untraced_methods("forward", "backward")
class GroupedAllreduce(torch.autograd.Function):
    """The gradients are reduced by the same op, as a group."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        compression: Strategy,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = name, compression, op, prescale, postscale, process_set
        on_device = device_converter(tensors, prescale, postscale, compression=compression)
        results = collectives.grouped_allreduce(
            [to_array(tensor, on_device) for tensor in tensors],
            name=name,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            compression=compression,
            process_set=process_set,
        )
        return tuple(map(to_tensor_like, taken(results), tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, compression, op, *rest = ctx.arguments
        _check_differentiable("grouped_allreduce", op)
        reduced = GroupedAllreduce.apply(_gradient_name(name), compression, op, *rest, *gradients)
        return None, None, None, None, None, None, *reduced


@untraced_methods("forward", "backward")
class Allgather(torch.autograd.Function):
    """The gradient of a rank's rows is the average of the ranks', as in Horovod."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
        ctx.name, ctx.process_set, ctx.shape = name, process_set, tensor.shape
        result = runtime.engine(process_set).run(
            "allgather",
            name,
            lambda name: describe_allgather(to_array(tensor, device_array), name, with_rows=True),
        )
        whole, rows = taken(result)
        ctx.span = _own_rows(rows, process_set)
        return to_tensor_like(whole, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduced = _averaged(gradients[0], ctx.name, ctx.process_set)
        return reduced.narrow(0, *ctx.span).reshape(ctx.shape), None, None


@untraced_methods("forward", "backward")
class GroupedAllgather(torch.autograd.Function):
    """The same for several tensors, as a group."""

    @staticmethod
    def forward(
        ctx: Any, name: str, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.name, ctx.process_set = name, process_set
        ctx.shapes = [tensor.shape for tensor in tensors]

        def describe_member(tensor: torch.Tensor, member: str) -> Operation:
            return describe_allgather(to_array(tensor, device_array), member, with_rows=True)

        results = runtime.engine(process_set).run(
            "grouped_allgather",
            name,
            lambda name: describe_group("grouped allgather", name, tensors, describe_member),
        )
        results = taken(results)
        ctx.spans = [_own_rows(rows, process_set) for _, rows in results]
        return tuple(
            to_tensor_like(whole, tensor)
            for (whole, _), tensor in zip(results, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, process_set = _gradient_name(ctx.name), ctx.process_set
        arguments = name, Compression.none, Average, 1.0, 1.0, process_set
        reduced = GroupedAllreduce.apply(*arguments, *gradients)
        own = (
            gradient.narrow(0, *span).reshape(shape)
            for gradient, span, shape in zip(reduced, ctx.spans, ctx.shapes, strict=True)
        )
        return None, None, *own


@untraced_methods("forward", "backward")
class Broadcast(torch.autograd.Function):
    """The root's gradient is the average of the ranks', as in Horovod; the others' is zero."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str, process_set: ProcessSet
    ) -> torch.Tensor:
        ctx.root_rank, ctx.name, ctx.process_set = root_rank, name, process_set
        array = to_array(tensor, device_array)
        result = collectives.broadcast(array, root_rank, name, process_set=process_set)
        return to_tensor_like(result, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduced = _averaged(gradients[0], ctx.name, ctx.process_set)
        world = runtime.engine(ctx.process_set).world
        is_root = world.ranks[world.comm.rank] == ctx.root_rank
        return reduced if is_root else torch.zeros_like(reduced), None, None, None


@untraced_methods("forward", "backward")
class Alltoall(torch.autograd.Function):
    """The gradients of rows go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, splits: Any, name: str, process_set: ProcessSet
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.name, ctx.process_set = name, process_set
        engine = runtime.engine(process_set)
        result, received = taken(
            engine.run(
                "alltoall",
                name,
                lambda name: describe_alltoall(
                    to_array(tensor, device_array), splits, name, engine.size
                ),
            )
        )
        ctx.received = received
        counts = torch.tensor(received, dtype=torch.int32, device="cpu")
        ctx.mark_non_differentiable(counts)
        return to_tensor_like(result, tensor), counts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        arguments = ctx.received, _gradient_name(ctx.name), ctx.process_set
        returned, _ = Alltoall.apply(gradients[0], *arguments)
        return returned, None, None, None


@untraced_methods("forward", "backward")
class Reducescatter(torch.autograd.Function):
    """The gradients of all rows are gathered; times the number of ranks for sums, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        name: str,
        compression: Strategy,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        on_device = device_converter([tensor], prescale, postscale, compression=compression)
        result = collectives.reducescatter(
            to_array(tensor, on_device),
            name,
            op,
            prescale,
            postscale,
            compression=compression,
            process_set=process_set,
        )
        ctx.arguments = name, op, prescale * postscale, process_set
        return to_tensor_like(taken(result), tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, op, factor, process_set = ctx.arguments
        _check_differentiable("reducescatter", op)
        own = gradients[0] * _reducescatter_factor(op, factor, process_set)
        whole = Allgather.apply(own, _gradient_name(name), process_set)
        return whole, None, None, None, None, None, None


@untraced_methods("forward", "backward")
class GroupedReducescatter(torch.autograd.Function):
    """The same for several tensors, as a group."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        compression: Strategy,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        on_device = device_converter(tensors, prescale, postscale, compression=compression)
        results = collectives.grouped_reducescatter(
            [to_array(tensor, on_device) for tensor in tensors],
            name,
            op,
            prescale,
            postscale,
            compression=compression,
            process_set=process_set,
        )
        ctx.arguments = name, op, prescale * postscale, process_set
        return tuple(map(to_tensor_like, taken(results), tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, op, factor, process_set = ctx.arguments
        _check_differentiable("grouped_reducescatter", op)
        factor = _reducescatter_factor(op, factor, process_set)
        own = [gradient * factor for gradient in gradients]
        wholes = GroupedAllgather.apply(_gradient_name(name), process_set, *own)
        return None, None, None, None, None, None, *wholes


def _averaged(gradient: torch.Tensor, name: str, process_set: ProcessSet) -> torch.Tensor:
    arguments = _gradient_name(name), Compression.none, Average, 1.0, 1.0, process_set
    result: torch.Tensor = Allreduce.apply(gradient, *arguments)
    return result


def _own_rows(rows: Sequence[int], process_set: ProcessSet) -> tuple[int, int]:
    """Return where this rank's rows begin in the whole, and how many there are."""
    rank = runtime.engine(process_set).rank
    return sum(rows[:rank]), rows[rank]


def _reducescatter_factor(op: ReduceOp, factor: float, process_set: ProcessSet) -> float:
    return factor * (runtime.engine(process_set).size if op is ReduceOp.SUM else 1)


def _check_differentiable(call: str, op: ReduceOp) -> None:
    if op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        raise NotImplementedError(
            f"{call} with op={op.name.capitalize()} has no gradient; detach its input, or use Sum "
            "or Average"
        )


def _gradient_name(name: str) -> str:
    return f"{name}.gradient"
