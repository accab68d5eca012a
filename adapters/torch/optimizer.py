"""The optimizer that steps on the average of all ranks' gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from numbers import Real
from typing import Any

import numpy as np
import torch

from hvdlite.compression import Compression, Reduction, StrategyState
from hvdlite.gradients import LossExchange, checked_samples
from hvdlite.process_sets import ProcessSet, global_process_set, is_outside
from hvdlite.recipe._tree import map_leaves
from hvdlite.reduction import Average, ReduceOp
from hvdlite.schedule import (
    EACH_CHANGE,
    CompressionArgument,
    ExchangeSchedule,
    ExchangeState,
    LocalSteps,
    check_exchange,
    check_unweighted,
)
from hvdlite.torch.dynamo import untraced, untraced_methods
from hvdlite.torch.hooks import remove_hooks
from hvdlite.torch.reducer import Reducer
from hvdlite.torch.scheduled import OptimizerSchedule, Scheduled
from hvdlite.torch.tensors import CONVERSION, leaf_to_array, leaf_to_tensor
from hvdlite.torch.wrapping import (
    STATE,
    Wrapped,
    average_before_scaling,
    change_class,
    check_groups,
    check_optimizer,
    checked_passes,
    names_of,
    next_label,
)


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
) -> Any:
    """Make an optimizer average its gradients over all ranks before it steps.

    Gradients are exchanged while the backward pass goes on, in buckets. ``step()`` waits
    for them; so does ``synchronize()``, for those who need the averaged gradients before
    the step (to clip them, say)::

        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
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

    With the second exchange of gradients the ranks compare their weights, and the class and the
    options of their optimizers (``HVDLITE_CHECK_RANKS=error``, ``warn`` or ``off``): a forgotten
    broadcast is an error. Schedules of local steps, and Adasum, let weights differ.

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

    Returns:
        The optimizer, with ``synchronize()``, ``skip_synchronize()``,
        ``set_backward_passes_per_step(n)`` and ``consolidate_exchange_state()``; with a
        schedule of local steps, and with Adasum, also ``average_weights()``.

    Raises:
        ValueError: it is wrapped already, ``named_parameters`` is malformed, has a name
            twice or lacks a parameter, ``groups`` has something else than parameters of the
            optimizer, the process set is not registered, an argument is out of range, or the
            schedule does not go together with another one.
        TypeError: it is no torch optimizer, or ``compression`` is no strategy, or ``schedule``
            is none.
    """
    check_optimizer(optimizer)
    check_groups(optimizer, num_groups, groups)
    names = names_of(optimizer, named_parameters)
    reduction = Reduction(ReduceOp(op), gradient_predivide_factor)
    passes = checked_passes(backward_passes_per_step)
    strategy, chosen, passes = check_exchange(
        compression, schedule, CONVERSION, reduction, passes, sparse_as_dense
    )
    if reduction.op is ReduceOp.ADASUM:
        chosen = EACH_CHANGE
    if is_outside(process_set):
        outside = change_class(optimizer, _Outside)
        outside._parameter_names = names
        remove_hooks(names)
        optimizer.register_step_pre_hook(_before_step_outside)
        return optimizer
    state = ExchangeState(StrategyState())
    wrapped = change_class(optimizer, _Distributed if chosen is None else _Scheduled)
    wrapped._reducer = reducer = Reducer(
        names,
        strategy,
        reduction,
        passes,
        sparse_as_dense,
        process_set,
        state.state,
        optimizer if chosen is None else None,
    )
    wrapped._exchange_state = state
    wrapped._parameter_names = reducer.names
    wrapped._skipping = False
    wrapped._synchronized_by = ""
    wrapped._evaluating = False
    label = next_label("the closure of DistributedOptimizer", process_set)
    wrapped._losses = LossExchange(label, reduction.op, process_set)
    average_before_scaling()
    if chosen is None:
        reducer.attach(wrapped._trainable())
        optimizer.register_step_pre_hook(_before_step)
        optimizer.register_step_post_hook(_after_step)
        return optimizer
    label = next_label("DistributedOptimizer", process_set)
    state.steps = LocalSteps(chosen, strategy, reduction, label, process_set)
    wrapped._schedule = OptimizerSchedule(optimizer, state.steps, reducer)
    wrapped._schedule.attach(wrapped._trainable())
    optimizer.register_step_pre_hook(_before_scheduled_step)
    optimizer.register_step_post_hook(_after_scheduled_step)
    return optimizer


@untraced_methods("synchronize", "zero_grad")
class _Distributed(Wrapped):
    """The methods that `DistributedOptimizer` adds to the class of an optimizer."""

    _reducer: Reducer
    _exchange_state: ExchangeState
    _skipping: bool
    _synchronized_by: str  # the last method that did
    _losses: LossExchange
    _evaluating: bool  # whether a closure runs

    def synchronize(self, batch_size: int | None = None) -> None:
        """Wait for the exchange; afterwards every ``p.grad`` is the average over the ranks.

        Args:
            batch_size: of how many samples this rank's gradients are averages; given on all
                ranks, and in every step, or never.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed.
            RuntimeError: a gradient was changed after its exchange had begun.
            ValueError: ``batch_size`` is no number of samples, comes after a step without it, or
                with another op than Average.
        """
        samples = checked_samples(batch_size)
        self._reducer.attach(self._trainable())
        self._reducer.finish(samples)
        self._synchronized_by = "synchronize()"

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with what compression and schedule remember, if they do.

        To be called between steps: while gradients are being exchanged, that changes.
        """
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        own = self._exchange_state.state_dict(self._reducer.process_set)
        if "compression" in own and self._reducer.in_flight:
            # No error: it may be the last chance to save anything.
            warnings.warn(
                "state_dict() was called after backward() and before step() or synchronize(), "
                "while gradients are being exchanged: what the compression has left to send is "
                "that of different steps; call optimizer.synchronize() first",
                stacklevel=2,
            )
        return {**state, STATE: map_leaves(leaf_to_tensor, own)} if own else state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` has returned, of this optimizer or of one that is not wrapped."""
        super().load_state_dict(state_dict)  # type: ignore[misc]
        saved = map_leaves(leaf_to_array, state_dict.get(STATE, {}))
        if self._exchange_state.steps is None:  # saved by an optimizer with a schedule
            saved = {key: part for key, part in saved.items() if key != "schedule"}
        reducer = self._reducer
        self._exchange_state.load_state_dict(saved, reducer.op, reducer.process_set)

    def consolidate_exchange_state(self) -> None:
        """Make what the compression remembers the same on all ranks; collective.

        To be called before one rank saves ``state_dict()`` for all. Nothing is lost: every rank
        gets the average of what all have left to send, so the sum stays what it is.

        Raises:
            HorovodInternalError: communication failed.
        """
        self._exchange_state.consolidate(self._reducer.process_set)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` use the gradients as they are, after ``synchronize()``."""
        self._skipping = True
        try:
            yield
        finally:
            self._skipping = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Set how many backward passes add up before an exchange.

        Raises:
            RuntimeError: an exchange has begun that no step or ``synchronize()`` has ended.
        """
        self._refuse_in_flight("set_backward_passes_per_step()")
        self._reducer.passes_per_step = checked_passes(passes)
        self._reducer.reset_passes()

    def _restart(self) -> None:
        """Abandon the step that a failure has interrupted."""
        self._losses.restart()
        self._reducer.restart()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does.

        Raises:
            RuntimeError: their exchange has begun and no step or ``synchronize()`` ended it.
        """
        self._refuse_in_flight("zero_grad()")
        self._reducer.reset_passes()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def _refuse_in_flight(self, call: str) -> None:
        if self._reducer.in_flight:
            raise RuntimeError(
                f"{call} was called after backward() and before step() or synchronize(), "
                "while gradients are being exchanged; call optimizer.synchronize() first"
            )

    @property
    def _synchronized(self) -> bool:
        """Return whether the gradients are averages."""
        return self._reducer.averaged and not self._reducer.in_flight

    def _prepare_step(self, batch_size: int | None = None) -> None:
        """Require averaged gradients, or average them now."""
        if self._synchronized:
            if batch_size is not None and self._synchronized_by != "step()":
                raise ValueError(
                    f"step(batch_size={batch_size}) comes after {self._synchronized_by}, which has "
                    "averaged the gradients already; call synchronize(batch_size=...) before that "
                    "instead"
                )
            if not self._skipping and self._synchronized_by == "synchronize()":
                warnings.warn(
                    # The first words are Horovod's: programs filter the warning by them.
                    "optimizer.step() called without optimizer.skip_synchronize() context after "
                    "optimizer.synchronize(); the gradients are not exchanged a second time. Use "
                    "`with optimizer.skip_synchronize():` around step() to say that this is meant",
                    stacklevel=4,
                )
        elif self._skipping:
            raise RuntimeError(
                "optimizer.step() inside skip_synchronize() would use gradients that have not "
                "been exchanged; call optimizer.synchronize() before"
            )
        else:
            self.synchronize(batch_size)
            # A step() that calls its parent's comes here twice.
            self._synchronized_by = "step()"

    def _evaluate(self, closure: Callable[[], Any], batch_size: int | None) -> Any:
        """Run a closure, exchange its gradients, and return the loss of all ranks."""
        if self._evaluating:  # a step() that calls its parent's has wrapped the closure twice
            return closure()
        self._evaluating = True
        try:
            loss = closure()
        finally:
            self._evaluating = False
        self._prepare_step(batch_size)
        return self._combine_loss(loss)

    def _combine_loss(self, loss: Any) -> Any:
        own = _value_of_loss(loss)
        total = self._losses.combine(own, self._reducer.weight)
        return loss if total is None else _loss_like(loss, total)

    def _prepare_unscaling(self, enabled: bool) -> None:
        # Also for a scaler that is not enabled: what follows, clipping mostly, is for averages.
        if not self._synchronized:
            self.synchronize()
            self._synchronized_by = "unscale_()"

    def _prepare_scaled_step(self, batch_size: int | None) -> None:
        if self._skipping or not self._synchronized:
            self._prepare_step(batch_size)

    def _end_scaled_step(self) -> None:
        self._reducer.averaged = False


class _Scheduled(Scheduled, _Distributed):
    """The same methods for an optimizer with a schedule, or with Adasum."""


class _Outside(Wrapped):
    """The methods on a rank that is not in the process set, and steps by itself."""

    def synchronize(self, batch_size: int | None = None) -> None:
        """Leave the gradients as they are."""
        checked_samples(batch_size)

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Let ``step()`` use the gradients as they are, as it always does here."""
        return contextlib.nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Check the number, as on the other ranks; gradients add up here in any case."""
        checked_passes(passes)

    def consolidate_exchange_state(self) -> None:
        """Do nothing: there is no exchange that remembers anything."""

    def average_weights(self) -> None:
        """Leave the weights as they are."""


def _before_step_outside(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    checked_samples(kwargs.pop("batch_size", None))
    return args, kwargs


@untraced
def _before_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Exchange before the step, or, if there is a closure, whenever it has run.

    As a hook, it also runs where ``step`` has been replaced on the instance, as learning
    rate schedulers do.
    """
    batch_size = kwargs.pop("batch_size", None)  # which the optimizer's own step does not know
    closure, replace = _find_closure(args, kwargs)
    if closure is None:
        optimizer._prepare_step(batch_size)
        return args, kwargs

    optimizer._losses.begin_step()
    return replace(partial(optimizer._evaluate, closure, batch_size))


@untraced
def _after_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # Exchange the next step even without a new gradient here: another rank may have one.
    optimizer._reducer.averaged = False


@untraced
def _before_scheduled_step(optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    check_unweighted(kwargs.pop("batch_size", None))
    optimizer._schedule.attach(optimizer._trainable())
    optimizer._schedule.steps.begin(optimizer._schedule.weights)
    return _before_step(optimizer, args, kwargs)


@untraced
def _after_scheduled_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    _after_step(optimizer, args, kwargs)
    optimizer._schedule.end()


def _find_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[[], Any] | None, Callable[[Any], Any]]:
    """Return the closure among ``step``'s arguments, the optimizer first, and a setter."""
    if kwargs.get("closure") is not None:
        return kwargs["closure"], lambda closure: (args, {**kwargs, "closure": closure})
    if len(args) > 1 and callable(args[1]):
        return args[1], lambda closure: ((args[0], closure, *args[2:]), kwargs)
    return None, lambda closure: None


def _value_of_loss(loss: Any) -> float | None:
    """Return a loss as a number; None if it is not one number."""
    if isinstance(loss, torch.Tensor):
        return float(loss.item()) if loss.numel() == 1 and not loss.is_complex() else None
    if isinstance(loss, np.ndarray):
        return float(loss.item()) if loss.size == 1 and loss.dtype.kind in "fiu" else None
    return float(loss) if isinstance(loss, Real) and not isinstance(loss, bool) else None


def _loss_like(loss: Any, value: float) -> Any:
    """Return a number as a loss of the type of another; a whole number becomes a float."""
    if isinstance(loss, torch.Tensor):
        return torch.full_like(loss.detach(), value)
    if isinstance(loss, np.ndarray):
        return np.full_like(loss, value)
    return type(loss)(value) if isinstance(loss, np.floating) else value
