"""The optimizer that steps on the average of all ranks' gradients."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from hvdlite.base.arguments import check_count, check_groups
from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.compression import Compression, Reduction
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.gradients import options
from hvdlite.gradients.options import (
    CompressionArgument,
    ExchangeSchedule,
    gradient_path,
    make_options,
)
from hvdlite.torch.reducer import Names
from hvdlite.torch.tensors import CONVERSION, check_whole
from hvdlite.torch.wrapping import Distributed, Wrapped


def DistributedOptimizer(  # noqa: N802 - Horovod's name
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: CompressionArgument = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp | int = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: int | list[list[torch.Tensor]] | None = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
    schedule: ExchangeSchedule | None = None,
    model: torch.nn.Module | None = None,
) -> Any:
    """Make an optimizer average its gradients over all ranks before it steps.

    Gradients are exchanged while the backward pass goes on, in buckets. ``step()`` waits
    for them; so does ``synchronize()``, for those who need the averaged gradients before
    the step. (``torch.nn.utils.clip_grad_norm_`` waits, too, and then clips.) ::

        optimizer.synchronize()
        norms = [p.grad.norm() for p in model.parameters()]
        with optimizer.skip_synchronize():
            optimizer.step()

    A `torch.amp.GradScaler` waits for them, too, in ``unscale_()`` and ``step()``: all ranks skip
    the step in which one rank's gradients overflow.

    The optimizer itself is changed and returned: its class becomes a subclass of what it
    was, of the same name, and its state, hooks, groups and schedulers stay as they are. A
    parameter without a gradient counts as zeros where another rank has one.

    With a closure, every evaluation is exchanged, and the loss that ``step`` gets is that of all
    ranks, averaged (or summed, with op=Sum) as the gradients are. So optimizers that decide by
    the loss, such as `torch.optim.LBFGS`, decide the same on all ranks. The loss keeps its type: a
    number, or a tensor of one element; anything else stays this rank's own. Ranks that evaluate
    their closures a different number of times, because of different options for example, get an
    error. With a schedule of local steps, and with Adasum, ranks decide by their own losses.

    If batches differ in size between ranks, pass the size in every step, on all ranks:
    ``optimizer.step(batch_size=n)`` or ``optimizer.synchronize(batch_size=n)``. Each rank's
    gradient, the average over its batch, is then weighted by its number of samples, and the result
    is the gradient of all samples.

    From the second step on the ranks compare the options of their optimizers, and, all in the
    second and then a part of 512 in each step, their weights and their optimizers' states
    (``HVDLITE_CHECK_RANKS=error``, ``warn`` or ``off``): a forgotten broadcast is an error, and so
    is what one rank changes alone. Schedules of local steps, and Adasum, let ranks differ.

    What a compression remembers from step to step (error feedback, say) is a part of
    ``state_dict()``, and each rank's own. Before one rank saves it for all, call
    ``optimizer.consolidate_exchange_state()`` on all ranks.

    Args:
        optimizer: any torch optimizer; on all ranks over the same parameters.
        named_parameters: ``model.named_parameters()``; gives messages their names.
        compression: how gradients travel: one of ``hvd.Compression``, or a class of your own with
            ``compress(tensor)`` and ``decompress(tensor, ctx)``, as in Horovod, or the name of one
            of SINGA's modes, see ``hvd.singa``.
        backward_passes_per_step: backward passes that add up before an exchange. A step
            after fewer of them is fine.
        op: Average, Sum or Adasum. With Adasum (Maleki et al. 2020, arXiv:2006.02924) every
            rank takes its own step, and the changes of the weights are combined, tensor by
            tensor, as in Horovod: in ``step()``, so gradients stay this rank's own, and may be
            clipped at any time. It takes a copy of the weights.
        gradient_predivide_factor: with Average, the part of the division that happens
            before the sum.
        num_groups: accepted for compatibility with Horovod: buckets take the place of groups.
        groups: the same; a number, or lists of parameters.
        sparse_as_dense: exchange sparse gradients as dense ones; the averages are sparse again.
            Else the entries of all ranks are gathered and added up, which pays while they are few;
            they are not compressed.
        process_set: the ranks that take part. On a rank that is not among them the optimizer
            steps by itself, on this rank's own gradients, and its methods exchange nothing.
        schedule: when to exchange what, one of ``hvd.Schedule``; None: gradients, for every
            step. Where a schedule lets ranks step by themselves, gradients stay this rank's own,
            and weights are exchanged in ``step()``. All ranks make as many steps.
        model: with virtual ranks, the module whose buffers are averaged over them after each step,
            such as the running averages of a batch normalisation; required if a module of the
            parameters has buffers. Without virtual ranks each rank has its own.

    With virtual ranks (`init`), ``step()`` ends the part of one virtual rank; the last one of this
    process exchanges and steps, and ``optimizer.stepped`` says whether it was the last. Between
    them ``p.grad`` is None.

    Returns:
        The optimizer, with ``stepped``, ``synchronize()``, ``skip_synchronize()``,
        ``set_backward_passes_per_step(n)`` and ``consolidate_exchange_state()``; with a
        schedule of local steps, and with Adasum, also ``average_weights()``.

    Raises:
        ValueError: it is wrapped already, ``named_parameters`` is malformed, has a name
            twice or lacks a parameter, ``groups`` has something else than parameters of the
            optimizer, the process set is not registered, an argument is out of range, or the
            schedule does not go together with another one.
        TypeError: it is no torch optimizer, or a parameter is a DTensor (of FSDP2, say), or
            ``compression`` is no strategy, or ``schedule`` is none.
    """
    _check_optimizer(optimizer)
    _check_groups(optimizer, num_groups, groups)
    names = _names_of(optimizer, named_parameters)
    reduction = Reduction(ReduceOp(op), gradient_predivide_factor)
    check_count("backward_passes_per_step", backward_passes_per_step)
    passes = int(backward_passes_per_step)
    made = make_options(
        compression, schedule, CONVERSION, reduction, passes, sparse_as_dense, process_set, model
    )
    if reduction.op is ReduceOp.ADASUM:
        made = replace(made, schedule=options.adasum())
    kind = gradient_path("torch", made.schedule) or Distributed
    return kind.wrap(optimizer, names, made)


def _check_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"expected a torch.optim.Optimizer, found {type(optimizer).__name__}")
    if isinstance(optimizer, Wrapped):
        raise ValueError("this optimizer is a DistributedOptimizer already; wrap it once")
    if "_optimizer_step_pre_hooks" in vars(optimizer):  # torch does so in its constructor
        optimizer._patch_step_function()
    if not getattr(type(optimizer).step, "hooked", False):
        raise TypeError(
            f"{type(optimizer).__name__} does not run torch's step hooks, on which the exchange "
            "relies; call super().__init__() in its constructor"
        )


def _names_of(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None,
) -> Names:
    """Return names by parameter, in the order of registration."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    check_whole(*own)
    if named_parameters is None:
        return Names((parameter, f"parameter.{number}") for number, parameter in enumerate(own))
    pairs = list(named_parameters) if isinstance(named_parameters, Iterable) else [None]
    if not all(map(_is_named, pairs)):
        raise ValueError(
            f"named_parameters is a {type(named_parameters).__name__}, and must be pairs of a name "
            "and a parameter, such as model.named_parameters()"
        )
    twice = sorted(name for name, n in Counter(name for name, _ in pairs).items() if n > 1)
    if twice:
        raise ValueError(f"named_parameters has these names more than once: {', '.join(twice)}")
    unnamed = len(set(own) - {parameter for _, parameter in pairs})
    if unnamed:
        raise ValueError(
            f"{unnamed} of the optimizer's {len(own)} parameters are not in named_parameters; "
            "pass the named parameters of every module that the optimizer updates"
        )
    members = set(own)
    named = Names((parameter, name) for name, parameter in pairs if parameter in members)
    named.given = WeakTensorKeyDictionary({parameter: name for name, parameter in pairs})
    return named


def _is_named(pair: Any) -> bool:
    return (
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], torch.Tensor)
    )


def _check_groups(
    optimizer: torch.optim.Optimizer,
    num_groups: int,
    groups: int | list[Any] | None,
) -> None:
    """Check Horovod's arguments for groups of gradients, which buckets do not need."""
    check_groups(num_groups, groups)
    if groups is None or isinstance(groups, int):
        return
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    seen: set[int] = set()
    for number, members in enumerate(groups):
        if not isinstance(members, (list, tuple)):
            raise ValueError(
                f"groups[{number}] is a {type(members).__name__}; groups is a list of lists of "
                "parameters"
            )
        for parameter in members:
            if id(parameter) not in own:
                raise ValueError(
                    f"groups[{number}] has a {type(parameter).__name__} that is no parameter of "
                    "the optimizer"
                )
            if id(parameter) in seen:
                raise ValueError(f"groups[{number}] has a parameter that stands in groups twice")
            seen.add(id(parameter))
