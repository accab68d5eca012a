"""The classes of wrapped optimizers."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Real
from operator import attrgetter, itemgetter
from typing import Any, NoReturn, cast

import numpy as np
import torch
from torch.amp import GradScaler

from hvdlite.base.arguments import check_count
from hvdlite.compression import StrategyState
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import is_outside
from hvdlite.errors import NotFiniteError
from hvdlite.gradients.exchange_state import ExchangeState
from hvdlite.gradients.finite import tell_left_out
from hvdlite.gradients.loss import LossExchange
from hvdlite.gradients.metadata import checked_samples
from hvdlite.gradients.options import Options
from hvdlite.recipe._tree import map_leaves
from hvdlite.torch.dynamo import untraced, untraced_methods
from hvdlite.torch.hooks import FREEZE, remove_hooks
from hvdlite.torch.reducer import Names, Reducer, next_label
from hvdlite.torch.state import loading_in_place
from hvdlite.torch.tensors import leaf_to_array, leaf_to_tensor

#: The key of hvdlite's part of an optimizer's state dict.
STATE = "hvdlite"

#: The module that classes of wrapped optimizers name as theirs; empty: their own. The alias sets it
#: to Horovod's, since programs look for that.
alias = ""

_requires_grad, _params = attrgetter("requires_grad"), itemgetter("params")

# The distributed optimizers that there are, in the order in which all ranks have wrapped them.
_wrapped: list[weakref.ref[Distributed]] = []


@untraced_methods("clip_grad_norm_")
class Wrapped:
    """The methods that `DistributedOptimizer` adds to every optimizer's class."""

    _parameter_names: Names
    param_groups: list[dict[str, Any]]

    @property
    def stepped(self) -> bool:
        """True if the last ``step()`` was one; with virtual ranks it may have been a part of one.

        Whatever counts steps, such as a learning rate schedule, is called if it was.
        """
        return True

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> torch.Tensor:
        """Clip the norm of the averaged gradients, between ``backward()`` and ``step()``.

        It waits for the exchange first, so all ranks clip by the same factor, and ``step()`` needs
        no `skip_synchronize`. Where ranks do not exchange gradients (in a schedule of local steps,
        with op=hvd.Adasum, outside the process set), each clips its own.

        Args:
            max_norm: as those that follow, of ``torch.nn.utils.clip_grad_norm_``.
            norm_type: the p of the norm, ``math.inf`` for the largest absolute value.
            error_if_nonfinite: whether to raise RuntimeError if the norm is not finite.
            foreach: whether to use the faster implementation; None: if the device has it.

        Returns:
            The norm of all gradients of the optimizer as one vector, before clipping.

        Raises:
            HorovodInternalError, RuntimeError: as for `synchronize`.
        """
        self._prepare_clipping()
        return torch.nn.utils.clip_grad_norm_(
            self._trainable(), max_norm, norm_type, error_if_nonfinite, foreach
        )

    def _trainable(self) -> list[torch.Tensor]:
        groups = map(_params, self.param_groups)
        return [*filter(_requires_grad, itertools.chain.from_iterable(groups))]

    def _prepare_clipping(self) -> None:
        """Let the gradients be what `clip_grad_norm_` clips."""

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Prepare a step, as a hook of torch; return its arguments."""
        checked_samples(kwargs.pop("batch_size", None))
        return args, kwargs

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled: a copy's parameters would not "
            "be exchanged; copy optimizer.state_dict(), or the model, and wrap a new optimizer"
        )

    __deepcopy__ = __reduce_ex__


@untraced_methods("synchronize", "zero_grad", "_before_step", "_after_step")
class Distributed(Wrapped):
    """The methods that `DistributedOptimizer` adds to the class of an optimizer."""

    _reducer: Reducer
    _exchange_state: ExchangeState
    _skipping = False
    _samples: int | None = None  # in the last exchange
    _synchronized_by = ""  # the last method that did
    _losses: LossExchange
    # The batch_size of each closure that runs: a step() that calls its parent's wraps it twice.
    _evaluating: list[int | None]

    @classmethod
    def wrap(cls, optimizer: torch.optim.Optimizer, names: Names, options: Options) -> Any:
        """Make an optimizer one of this class, or one that steps by itself; return it."""
        if is_outside(options.process_set):
            remove_hooks(names)
            return change_class(optimizer, Outside, names)
        losses = next_label("the closure of DistributedOptimizer", options.process_set)
        label = next_label("DistributedOptimizer", options.process_set)
        reducer, state = cls._make(optimizer, names, options, label)
        wrapped = change_class(optimizer, cls, names)
        wrapped.register_step_post_hook(cls._after_step)
        wrapped._reducer = reducer
        wrapped._exchange_state = state
        wrapped._evaluating = []
        wrapped._losses = LossExchange(losses, reducer.op, options.process_set)
        extend_torch()
        _wrapped.append(weakref.ref(wrapped, _wrapped.remove))
        wrapped._begin(options, label)
        return optimizer

    @classmethod
    def _make(
        cls,
        optimizer: torch.optim.Optimizer,
        names: Names,
        options: Options,
        label: str,
    ) -> tuple[Any, Any]:
        """Return the reducer of an optimizer, and what the exchange keeps from step to step."""
        state = ExchangeState(StrategyState())
        # Ranks with a schedule and ranks without meet under one name, and see the difference.
        label = label if options.schedule is None else f"{label}, gradients"
        return Reducer(names, options, state.state, label, optimizer), state

    def _begin(self, options: Options, label: str) -> None:
        self._reducer.attach(self._trainable())

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
        self._samples = samples
        self._reducer.finish(samples)
        self._synchronized_by = "synchronize()"

    def _prepare_clipping(self) -> None:
        if not self._synchronized:
            self.synchronize()
        self._synchronized_by = "clip_grad_norm_()"

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
        self._load(state_dict, is_own=False)

    def _load(self, state_dict: Mapping[str, Any], is_own: bool) -> None:
        """Load a state, which this process may have saved under another number."""
        with loading_in_place(cast(Any, self)):
            super().load_state_dict(state_dict)  # type: ignore[misc]
        saved = map_leaves(leaf_to_array, state_dict.get(STATE, {}))
        if self._exchange_state.steps is None:  # saved by an optimizer with a schedule
            saved = {key: part for key, part in saved.items() if key != "schedule"}
        reducer = self._reducer
        self._exchange_state.load_state_dict(saved, reducer.op, reducer.process_set, is_own)

    def _common_state_dict(self) -> dict[str, Any]:
        """Return the part of `state_dict` with which another rank may begin."""
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        common = self._exchange_state.common_state_dict(self._reducer.process_set)
        return {**state, STATE: map_leaves(leaf_to_tensor, common)} if common else state

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
        check_count("backward_passes_per_step", passes)
        self._reducer.passes_per_step = int(passes)
        self._reducer.reset_passes()

    def _restart(self) -> None:
        self._losses.restart()
        self._reducer.restart()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch does; those of another optimizer's loss once exchanged.

        Raises:
            HorovodInternalError: communication failed.
            RuntimeError: the backward pass or a ``step()`` has ended half-way on this rank alone;
                or a compression would send later what it remembers of these gradients.
        """
        self._forget_gradients()
        super().zero_grad(set_to_none=set_to_none)  # type: ignore[misc]

    def _forget_gradients(self) -> None:
        if self._reducer.in_flight:
            if self._reducer.is_cut_short or self._reducer.remembers:
                self._refuse_in_flight("zero_grad()")
            with contextlib.suppress(NotFiniteError):
                self.synchronize(None if self._samples is None else 1)
            self._reducer.has_discarded = True
        self._reducer.reset_passes()

    def _refuse_in_flight(self, call: str) -> None:
        if self._reducer.in_flight:
            raise RuntimeError(
                f"{call} was called after backward() and before step() or synchronize(), "
                f"while gradients are being exchanged; call one of these first; {FREEZE}. If "
                "backward() has failed half-way on this rank, leave all gradients as they are, and "
                "call optimizer.step(batch_size=0): then those of the other ranks count alone, "
                "where all ranks pass their batch_size in every step"
            )

    @property
    def _synchronized(self) -> bool:
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
            self._synchronize_or_skip(batch_size)
            # A step() that calls its parent's comes here twice.
            self._synchronized_by = "step()"

    def _synchronize_or_skip(self, batch_size: int | None) -> None:
        """Average the gradients; remove all if a step without finite averages is to be left out."""
        try:
            self.synchronize(batch_size)
        except NotFiniteError as error:
            if runtime.engine().settings.not_finite != "skip" or self._evaluating:
                raise
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None  # which torch's optimizers skip
            self._reducer.averaged = True
            tell_left_out(error)

    def _evaluate(self, closure: Callable[[], Any], batch_size: int | None) -> Any:
        """Run a closure, exchange its gradients, and return the loss of all ranks."""
        self._evaluating.append(batch_size)
        if len(self._evaluating) > 1:
            return closure()
        try:
            loss = closure()
        finally:
            given, self._evaluating = self._evaluating, []
        self._prepare_step(next((each for each in given if each is not None), None))
        return self._combine_loss(loss)

    def _combine_loss(self, loss: Any) -> Any:
        own = _value_of_loss(loss)
        total = self._losses.combine(own, self._reducer.weight)
        return loss if total is None else _loss_like(loss, total)

    def _prepare_unscaling(self, enabled: bool) -> None:
        """Prepare for a GradScaler that unscales gradients, or would do so if it were enabled."""
        # Also for a scaler that is not enabled: what follows, clipping mostly, is for averages.
        if not self._synchronized:
            self.synchronize()
            self._synchronized_by = "unscale_()"

    def _prepare_scaled_step(self, batch_size: int | None) -> None:
        """Prepare for a GradScaler that decides whether a step is taken."""
        if self._skipping or not self._synchronized:
            self._prepare_step(batch_size)

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Exchange before the step, or, if there is a closure, whenever it has run.

        As a hook, it also runs where ``step`` has been replaced on the instance, as learning
        rate schedulers do.
        """
        batch_size = kwargs.pop("batch_size", None)  # which the optimizer's own step does not know
        closure, replace = find_closure(args, kwargs)
        if closure is None:
            self._prepare_step(batch_size)
            return args, kwargs
        self._losses.begin_step()
        return replace(partial(self._evaluate, closure, batch_size))

    def _after_step(self, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        """End a step; a GradScaler calls this, too, because it may skip the step."""
        # Exchange the next step even without a new gradient here: another rank may have one.
        self._reducer.averaged = False


class Outside(Wrapped):
    """The methods on a rank that is not in the process set, and steps by itself."""

    def synchronize(self, batch_size: int | None = None) -> None:
        """Leave the gradients as they are."""
        checked_samples(batch_size)

    def skip_synchronize(self) -> contextlib.AbstractContextManager[None]:
        """Let ``step()`` use the gradients as they are, as it always does here."""
        return contextlib.nullcontext()

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Check the number, as on the other ranks; gradients add up here in any case."""
        check_count("backward_passes_per_step", passes)

    def consolidate_exchange_state(self) -> None:
        """Do nothing: there is no exchange that remembers anything."""

    def average_weights(self) -> None:
        """Leave the weights as they are."""


def change_class(optimizer: torch.optim.Optimizer, addition: type[Wrapped], names: Names) -> Any:
    """Change an optimizer's class to a subclass of the same name with the addition's methods."""
    kind = type(optimizer)
    own = {"__module__": alias or kind.__module__}
    # Python takes the first base's layout, which must be the optimizer's, whatever that is derived
    # from; methods are looked up in the addition first.
    order = [*addition.__mro__[:-1], *kind.__mro__]
    meta = type(type(kind).__name__, (type(kind),), {"mro": lambda cls: [cls, *order]})
    optimizer.__class__ = meta(kind.__name__, (kind, addition), own)
    optimizer.register_step_pre_hook(addition._before_step)
    wrapped: Any = optimizer
    wrapped._parameter_names = names
    return wrapped


def find_closure(
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


@functools.cache
def extend_torch() -> None:
    """Let torch's scaling, clipping and resetting of gradients wait for their exchange.

    An infinity on one rank is one in the average, so ranks that scale by averages take a step
    together or none. Programs import the functions that clip by name, so what is replaced is what
    these call. A module's ``zero_grad()`` is that of all optimizers that have no parameter of
    another module. Nothing changes for optimizers that are not distributed.
    """
    unscale, step, zero_grad = GradScaler.unscale_, GradScaler.step, torch.nn.Module.zero_grad

    @functools.wraps(unscale)
    def unscale_averages(self: GradScaler, optimizer: Any) -> None:
        if isinstance(optimizer, Distributed):
            optimizer._prepare_unscaling(self.is_enabled())
        unscale(self, cast(Any, optimizer))

    @functools.wraps(step)
    def step_on_averages(self: GradScaler, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if not (isinstance(optimizer, Distributed) and self.is_enabled()):
            return step(self, optimizer, *args, **kwargs)
        optimizer._prepare_scaled_step(kwargs.get("batch_size"))
        result = step(self, cast(Any, optimizer), *args, **kwargs)
        optimizer._after_step()  # the optimizer's hooks are not called if it is skipped
        return result

    @functools.wraps(zero_grad)
    def zero_averages(self: torch.nn.Module, set_to_none: bool = True) -> None:
        parameters = {*map(id, self.parameters())}
        for optimizer in living():
            if parameters.issuperset(map(id, optimizer._parameter_names)):
                optimizer._forget_gradients()
        zero_grad(self, set_to_none)

    GradScaler.unscale_ = unscale_averages  # type: ignore[method-assign]
    GradScaler.step = step_on_averages  # type: ignore[method-assign]
    torch.nn.Module.zero_grad = zero_averages  # type: ignore[method-assign]
    for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
        inner: Any = getattr(clip, "__wrapped__", None)
        for cell in getattr(clip, "__closure__", None) or ():
            if cell.cell_contents is inner:
                cell.cell_contents = _after_exchange(inner)


def _after_exchange(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def clip_averages(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        _wait_for_averages(parameters)
        return clip(parameters, *args, **kwargs)

    return clip_averages


@untraced
def _wait_for_averages(clipped: list[torch.Tensor]) -> None:
    """Exchange the gradients of parameters if there are new ones, here or elsewhere."""
    parameters = {*map(id, clipped)}
    for optimizer in living():  # of two with the same parameters, the last exchanges them
        own = optimizer._trainable()
        if parameters.isdisjoint(map(id, own)):
            continue
        parameters = parameters.difference(map(id, own))
        if optimizer._reducer.may_have_new(own) or all(each.grad is None for each in own):
            optimizer._prepare_clipping()


def living() -> list[Distributed]:
    """Return the distributed optimizers that there are, the last first."""
    return [each for reference in reversed(_wrapped) if (each := reference()) is not None]
