"""The collectives as torch functions that gradients flow through.

Three of them take a list of tensors, for the call with one tensor and for the grouped one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite import collectives
from hvdlite.base.reduction import ReduceOp
from hvdlite.collectives import Route, run_alltoall
from hvdlite.collectives.recorded import RecordedCall
from hvdlite.engine import runtime
from hvdlite.torch.device_memory import device_array, device_converter
from hvdlite.torch.dynamo import untraced_methods
from hvdlite.torch.tensors import on_current_stream, to_array, to_tensor_like
from hvdlite.world import world

_REMEDY = "detach its input"


@untraced_methods("forward", "backward")
class Allreduce(torch.autograd.Function):
    """Gradients are reduced by the same op."""

    @staticmethod
    def forward(ctx: Any, call: RecordedCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return _reduced(call, tensors, collectives.allreduce, collectives.grouped_allreduce)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.call.check_differentiable("allreduce", _REMEDY)
        return None, *Allreduce.apply(ctx.call.backward(), *gradients)


@untraced_methods("forward", "backward")
class Allgather(torch.autograd.Function):
    """The gradient of a rank's rows is the average of the ranks', as in Horovod."""

    @staticmethod
    def forward(ctx: Any, call: RecordedCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        arrays = [to_array(tensor, device_array) for tensor in tensors]
        results = [on_current_stream(each) for each in on_current_stream(call.gather(arrays))]
        ctx.call = call
        ctx.shapes = [tensor.shape for tensor in tensors]
        ctx.spans = [result.span for result in results]
        return tuple(
            to_tensor_like(result.whole, tensor)
            for result, tensor in zip(results, tensors, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        reduced = Allreduce.apply(ctx.call.backward_average(), *gradients)
        own = (
            gradient.narrow(0, *span).reshape(shape)
            for gradient, span, shape in zip(reduced, ctx.spans, ctx.shapes, strict=True)
        )
        return None, *own


@untraced_methods("forward", "backward")
class Broadcast(torch.autograd.Function):
    """The root's gradient is the average of the ranks', as in Horovod; the others' is zero."""

    @staticmethod
    def forward(ctx: Any, call: RecordedCall, root_rank: int, tensor: torch.Tensor) -> torch.Tensor:
        # Asked now: a rank may have another number in the backward pass.
        ctx.is_root = world.rank() == root_rank
        ctx.call = call
        array = to_array(tensor, device_array)
        result = collectives.broadcast(array, root_rank, call.name, process_set=call.process_set)
        return to_tensor_like(result, tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (reduced,) = Allreduce.apply(ctx.call.backward_average(), *gradients)
        return None, None, reduced if ctx.is_root else torch.zeros_like(reduced)


@untraced_methods("forward", "backward")
class Alltoall(torch.autograd.Function):
    """The gradients of rows go back to where the rows came from."""

    @staticmethod
    def forward(
        ctx: Any, call: RecordedCall, splits: Any, back: Route | None, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        array = to_array(tensor, device_array)
        result, route = run_alltoall(array, splits, call.name, call.process_set, back)
        ctx.call, ctx.route = call, route
        counts = torch.tensor(route.received, dtype=torch.int32, device="cpu")
        ctx.mark_non_differentiable(counts)
        return to_tensor_like(result, tensor), counts

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        returned, _ = Alltoall.apply(ctx.call.backward(), None, ctx.route, gradients[0])
        return None, None, None, returned


@untraced_methods("forward", "backward")
class Reducescatter(torch.autograd.Function):
    """The gradients of all rows are gathered; times the number of ranks for sums, as in Horovod."""

    @staticmethod
    def forward(ctx: Any, call: RecordedCall, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        group = collectives.grouped_reducescatter
        return _reduced(call, tensors, collectives.reducescatter, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        call = ctx.call
        call.check_differentiable("reducescatter", _REMEDY)
        factor = call.prescale_factor * call.postscale_factor
        if call.op is ReduceOp.SUM:
            factor *= runtime.engine(call.process_set).size
        own = [gradient * factor for gradient in gradients]
        return None, *Allgather.apply(call.backward(), *own)


def _reduced(
    call: RecordedCall,
    tensors: Sequence[torch.Tensor],
    one: Callable[..., Any],
    several: Callable[..., Any],
) -> tuple[torch.Tensor, ...]:
    factors = call.prescale_factor, call.postscale_factor
    on_device = device_converter(tensors, *factors, compression=call.compression)
    results = call.reduce([to_array(tensor, on_device) for tensor in tensors], one, several)
    return tuple(map(to_tensor_like, on_current_stream(results), tensors))
