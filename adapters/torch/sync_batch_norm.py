"""Batch normalisation with the statistics of all ranks' batches."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdlite.base.reduction import Sum
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.torch.collectives import allgather, allreduce
from hvdlite.torch.dynamo import untraced_methods
from hvdlite.world import parts, world


@untraced_methods("forward")
class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with the statistics of all ranks' batches.

    In training, mean and variance are those of all ranks' samples, each counted once; the batches
    of the ranks may have different sizes, or be empty. A layer exchanges a few numbers per channel
    in each forward and backward pass, so all ranks must run their layers in the same order. In
    evaluation it is equivalent to `torch.nn.BatchNorm2d`, and exchanges nothing.

    As in `torch.nn.SyncBatchNorm`, the gradient of the input is that of the sum of all ranks'
    losses; the gradients of weight and bias are this rank's part, which a `DistributedOptimizer`
    averages. Second derivatives raise an error.

    Args:
        num_features: channels, the second axis of inputs of shape (N, C, ...).
        eps: added to the variance.
        momentum: weight of a batch in the running statistics; None: cumulative average.
        affine: whether the layer has a weight and a bias.
        track_running_stats: whether the layer has running statistics, for evaluation.
        process_set: the ranks whose batches are normalised together.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        self.process_set = process_set

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise an input.

        Args:
            input: shape (N, C, ...); N and the axes after C may differ from rank to rank.

        Raises:
            ValueError: it has another number of axes or channels, or there is only one value
                per channel on all ranks together.
            HorovodInternalError: The ranks disagree, or communication failed.
        """
        self._check_input_dim(input)
        if self.training:
            parts.current.refuse(
                "SyncBatchNorm", "use torch.nn.BatchNorm, and pass model= to DistributedOptimizer"
            )
        if not self.training or runtime.engine(self.process_set).size == 1:
            if self.training:
                self._check_count(input, input.numel() // max(1, self.num_features))
            return super().forward(input)
        moments = _whole_moments(input, self.process_set)
        self._check_count(input, moments.count)
        self._track(moments)
        output: torch.Tensor = _Normalise.apply(
            input, self.weight, self.bias, moments, self.eps, self.process_set
        )
        return output

    @classmethod
    def convert_sync_batchnorm(
        cls, module: torch.nn.Module, process_set: ProcessSet = global_process_set
    ) -> torch.nn.Module:
        """Call `convert_sync_batchnorm`; a class method as in `torch.nn.SyncBatchNorm`."""
        return convert_sync_batchnorm(module, process_set)

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.size(1) != self.num_features:
            raise ValueError(
                f"rank {world.rank() if world.is_initialized() else 0}: expected an input of "
                f"shape (N, {self.num_features}, ...), found {tuple(input.shape)}"
            )

    def _check_count(self, input: torch.Tensor, count: int) -> None:
        if count == 1:
            raise ValueError(
                f"{type(self).__name__} found one value per channel on all ranks together (this "
                f"rank's input has the shape {tuple(input.shape)}), of which there is no "
                "variance; use larger batches, or call model.eval()"
            )

    def _track(self, moments: Moments) -> None:
        """Count a batch, and move the running statistics by its weight."""
        momentum = self.momentum or 0.0
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                momentum = 1.0 / float(self.num_batches_tracked)
        if not self.track_running_stats or moments.count == 0:
            return
        if self.running_mean is None or self.running_var is None:
            return
        unbiased = moments.variance * (moments.count / (moments.count - 1))
        with torch.no_grad():
            for running, found in ((self.running_mean, moments.mean), (self.running_var, unbiased)):
                running.mul_(1 - momentum).add_(found.to(running.dtype), alpha=momentum)


def convert_sync_batchnorm(
    module: torch.nn.Module, process_set: ProcessSet = global_process_set
) -> torch.nn.Module:
    """Replace every batch normalisation in a module by a `SyncBatchNorm`.

    Parameters, buffers, hooks and the mode are preserved; a shared layer stays shared. Call it
    on all ranks, before or after the optimizer is made.

    Args:
        module: modified in place; a batch normalisation itself is replaced by the result.
        process_set: as for `SyncBatchNorm`.

    Returns:
        The module.

    Raises:
        ValueError: a lazy layer does not know its number of features yet.
    """
    return _converted(module, process_set, {})


def _converted(
    module: torch.nn.Module, process_set: ProcessSet, done: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    if id(module) in done:
        return done[id(module)]
    result = module
    if isinstance(module, _BatchNorm):
        if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
            raise ValueError(
                f"{module} does not know its number of features yet; run the model once before "
                "convert_sync_batchnorm()"
            )
        result = SyncBatchNorm.__new__(SyncBatchNorm)
        result.__dict__.update(module.__dict__)
        result.process_set = process_set
    done[id(module)] = result
    for name, child in module._modules.items():  # named_children() leaves out repetitions
        if child is not None:
            setattr(result, name, _converted(child, process_set, done))
    return result


class Moments(NamedTuple):
    """Mean and variance of all ranks' batches, per channel.

    Attributes:
        count: values per channel, on all ranks.
        mean: of shape (C,).
        variance: of shape (C,), biased.
        name: of the exchange; prefix of the name in the backward pass.
    """

    count: int  # type: ignore[assignment]  # a tuple's method is called that, too
    mean: torch.Tensor
    variance: torch.Tensor
    name: str


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics, for which 16 bits are too few."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _axes(input: torch.Tensor) -> list[int]:
    return [axis for axis in range(input.dim()) if axis != 1]


@torch.no_grad()
def _whole_moments(input: torch.Tensor, process_set: ProcessSet) -> Moments:
    """Return the moments of all ranks' inputs together.

    Ranks send moments about their own means instead of sums of squares, whose difference would
    lose the variance of values far from 0 (Chan et al. 1979, STAN-CS-79-773).
    """
    name = runtime.engine(process_set).unnamed("sync_batch_norm")
    channels, wide = input.size(1), _wide(input.dtype)
    count = input.numel() // channels if channels else 0
    # float64 counts exactly, and does not add to the error of the sums.
    own = torch.zeros(1, 2 * channels + 1, dtype=torch.float64, device=input.device)
    if count:
        variance, mean = torch.var_mean(input.to(wide), _axes(input), correction=0)
        own[0, :channels], own[0, channels:-1], own[0, -1] = mean, variance, count
    rows = allgather(own, name=name, process_set=process_set)
    means, variances, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    total = counts.sum()
    shares = counts / total.clamp(min=1)
    mean = (shares * means).sum(0)
    variance = (shares * (variances + (means - mean).square())).sum(0)
    return Moments(int(total), mean.to(wide), variance.to(wide), name)


@untraced_methods("forward", "backward")
class _Normalise(torch.autograd.Function):
    """Normalisation with given moments, differentiable through them."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        moments: Moments,
        eps: float,
        process_set: ProcessSet,
    ) -> torch.Tensor:
        scale = torch.rsqrt(moments.variance + eps)
        ctx.save_for_backward(input, weight, moments.mean, scale)
        ctx.count, ctx.name, ctx.process_set = moments.count, moments.name, process_set
        ctx.bias_dtype = None if bias is None else bias.dtype
        output = _normal(input, moments.mean, _factor(scale, weight))
        if bias is not None:
            output += _per_channel(bias.to(output.dtype), input)
        return output.to(input.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        input, weight, mean, scale = ctx.saved_tensors
        with torch.no_grad():
            upstream = gradients[0].to(scale.dtype)
            normal = _normal(input, mean, scale)
            axes = _axes(input)
            of_shift, of_scale = upstream.sum(axes), (upstream * normal).sum(axes)
            of_weight = None if weight is None else of_scale.to(weight.dtype)
            of_bias = None if ctx.bias_dtype is None else of_shift.to(ctx.bias_dtype)
            # All ranks take part, even if this one does not need the result.
            sums = torch.stack([of_shift, of_scale])  # a copy: gradients must not share memory
            whole = allreduce(
                sums, name=f"{ctx.name}.gradient", op=Sum, process_set=ctx.process_set
            )
            first, second = whole / max(1, ctx.count)
            of_input = upstream - normal.mul_(_per_channel(second, input))
            of_input -= _per_channel(first, input)
            of_input *= _per_channel(_factor(scale, weight), input)
            of_input = of_input.to(input.dtype)
        if torch.is_grad_enabled():  # with create_graph=True
            sources = (gradients[0], input, weight)
            of_input = _Once.apply(of_input, *sources)
            of_weight = None if of_weight is None else _Once.apply(of_weight, *sources)
            of_bias = None if of_bias is None else _Once.apply(of_bias, *sources)
        return of_input, of_weight, of_bias, None, None, None


@untraced_methods("forward", "backward")
class _Once(torch.autograd.Function):
    """Identity that marks a gradient of the layer as not differentiable any further."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, *sources: torch.Tensor | None) -> torch.Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise NotImplementedError(
            "SyncBatchNorm has no second derivative; leave its layers out of what is "
            "differentiated twice, or use model.eval() or torch.nn.GroupNorm there"
        )


def _normal(input: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    centred = input.to(mean.dtype) - _per_channel(mean, input)
    return centred.mul_(_per_channel(scale, input))


def _factor(scale: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return scale if weight is None else scale * weight.to(scale.dtype)


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return values.view(1, -1, *[1] * (like.dim() - 2))
