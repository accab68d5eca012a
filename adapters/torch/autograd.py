"""The collectives as torch functions that gradients flow through.

Three of them take a list of tensors, for the call with one tensor and for the grouped one.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from hvdlite import collectives
from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.collectives import Route, describe_allgather, describe_group, run_alltoall
from hvdlite.compression import Compression, Strategy
from hvdlite.engine import Operation, runtime
from hvdlite.engine.process_sets import ProcessSet
from hvdlite.torch.device_memory import device_array, device_converter
from hvdlite.torch.dynamo import untraced_methods
from hvdlite.torch.tensors import on_current_stream, to_array, to_tensor_like
from hvdlite.world import world


@untraced_methods("forward", "backward")
class Allreduce(torch.autograd.Function):
    """Gradients are reduced by the same op."""

    @staticmethod
    def forward(
        ctx: Any,
        grouped: bool,
        name: str,
        compression: Strategy,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = grouped, name, compression, op, prescale, postscale, process_set
        on_device = device_converter(tensors, prescale, postscale, compression=compression)
        arrays = [to_array(tensor, on_device) for tensor in tensors]
        reduce: Any = collectives.grouped_allreduce if grouped else collectives.allreduce
        result = reduce(
            arrays if grouped else arrays[0],
            name=name,
            op=op,
            prescale_factor=prescale,
            postscale_factor=postscale,
            compression=compression,
            process_set=process_set,
        )
        results = on_current_stream(result) if grouped else [result]
        return tuple(map(to_tensor_like, results, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        grouped, name, compression, op, *rest = ctx.arguments
        _check_differentiable("allreduce", grouped, op)
        arguments = grouped, _gradient_name(name), compression, op, *rest
        return *[None] * len(arguments), *Allreduce.apply(*arguments, *gradients)


@untraced_methods("forward", "backward")
class Allgather(torch.autograd.Function):
    """The gradient of a rank's rows is the average of the ranks', as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any, grouped: bool, name: str, process_set: ProcessSet, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        engine = runtime.engine(process_set)

        def describe(tensor: torch.Tensor, name: str) -> Operation:
            return describe_allgather(to_array(tensor, device_array), name, with_rows=True)

        def describe_all(name: str) -> Operation:
            return describe_group("grouped allgather", name, tensors, describe)

        if grouped:
            results = on_current_stream(engine.run("grouped_allgather", name, describe_all))
        else:
            results = [engine.run("allgather", name, partial(describe, tensors[0]))]
        results = [on_current_stream(result) for result in results]
        ctx.arguments = grouped, name, process_set
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.spans = [result.span for result in results]
        return tuple(
            to_tensor_like(result.whole, tensor)
            for result, tensor in zip(results, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduced = _averaged(*ctx.arguments, *gradients)
        own = (
            gradient.narrow(0, *span).reshape(shape)
            for gradient, span, shape in zip(reduced, ctx.spans, ctx.shapes, strict=True)
        )
        return None, None, None, *own


@untraced_methods("forward", "backward")
class Broadcast(torch.autograd.Function):
    """The root's gradient is the average of the ranks', as in Horovod; the others' is zero."""

    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, root_rank: int, name: str, process_set: ProcessSet
    ) -> torch.Tensor:
        # Asked now: a rank may have another number in the backward pass.
        ctx.is_root = world.rank() == root_rank
        ctx.name, ctx.process_set = name, process_set
        array = to_array(tensor, device_array)
        result = collectives.broadcast(array, root_rank, name, process_set=process_set)
        return to_tensor_like(result, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (reduced,) = _averaged(False, ctx.name, ctx.process_set, gradients[0])
        return reduced if ctx.is_root else torch.zeros_like(reduced), None, None, None


@untraced_methods("forward", "backward")
class Alltoall(torch.autograd.Function):
    """The gradients of rows go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any,
        tensor: torch.Tensor,
        splits: Any,
        name: str,
        process_set: ProcessSet,
        back: Route | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.name, ctx.process_set = name, process_set
        array = to_array(tensor, device_array)
        result, ctx.route = run_alltoall(array, splits, name, process_set, back)
        counts = torch.tensor(ctx.route.received, dtype=torch.int32, device="cpu")
        ctx.mark_non_differentiable(counts)
        return to_tensor_like(result, tensor), counts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        arguments = None, _gradient_name(ctx.name), ctx.process_set, ctx.route
        returned, _ = Alltoall.apply(gradients[0], *arguments)
        return returned, None, None, None, None


@untraced_methods("forward", "backward")
class Reducescatter(torch.autograd.Function):
    """The gradients of all rows are gathered; times the number of ranks for sums, as in Horovod."""

    @staticmethod
    def forward(
        ctx: Any,
        grouped: bool,
        name: str,
        compression: Strategy,
        op: ReduceOp,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        on_device = device_converter(tensors, prescale, postscale, compression=compression)
        arrays = [to_array(tensor, on_device) for tensor in tensors]
        reduce: Any = collectives.grouped_reducescatter if grouped else collectives.reducescatter
        result = reduce(
            arrays if grouped else arrays[0],
            name,
            op,
            prescale,
            postscale,
            compression=compression,
            process_set=process_set,
        )
        ctx.arguments = grouped, name, op, prescale * postscale, process_set
        results = on_current_stream(result) if grouped else [result]
        return tuple(map(to_tensor_like, results, tensors))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        grouped, name, op, factor, process_set = ctx.arguments
        _check_differentiable("reducescatter", grouped, op)
        if op is ReduceOp.SUM:
            factor *= runtime.engine(process_set).size
        own = [gradient * factor for gradient in gradients]
        wholes = Allgather.apply(grouped, _gradient_name(name), process_set, *own)
        return None, None, None, None, None, None, None, *wholes


def _averaged(
    grouped: bool, name: str, process_set: ProcessSet, *gradients: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    arguments = grouped, _gradient_name(name), Compression.none, Average, 1.0, 1.0, process_set
    result: tuple[torch.Tensor, ...] = Allreduce.apply(*arguments, *gradients)
    return result


def _check_differentiable(call: str, grouped: bool, op: ReduceOp) -> None:
    if op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
        raise NotImplementedError(
            f"{'grouped_' * grouped}{call} with op={op.name.capitalize()} has no gradient; detach "
            "its input, or use Sum or Average"
        )


def _gradient_name(name: str) -> str:
    return f"{name}.gradient"
