"""The reducer and the optimizer for virtual ranks: several parts of each step in a process."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hvdlite import runtime, virtual_ranks, world
from hvdlite.compression import Parameter, Reduction, Strategy
from hvdlite.gradients.virtual import Outcome, VirtualExchange
from hvdlite.process_sets import ProcessSet, global_process_set
from hvdlite.recipe.seeding import seed_part
from hvdlite.reduction import ReduceOp
from hvdlite.torch.reducer import describe, in_order, next_label
from hvdlite.torch.replicas import make_check
from hvdlite.torch.tensors import dtype_of, to_array, to_tensor_like
from hvdlite.torch.wrapping import Distributed, find_closure
from hvdlite.virtual_ranks import turns_of


class VirtualReducer:
    """Average the gradients of all virtual ranks, once the last of them have been computed.

    To an optimizer it is what `hvdlite.torch.reducer.Reducer` is; but there are no hooks: gradients
    are taken in ``finish``, which ends the part of one virtual rank.

    Args:
        names: of the parameters, in the order of their registration; later ones are added.
        strategy: how gradients travel.
        reduction: sum or average.
        sparse_as_dense: whether to exchange sparse gradients as dense ones.
        optimizer: compared across processes, with its weights.
        model: whose buffers are averaged; None: none are.

    Attributes:
        averaged: whether the gradients are averages, or there are none because parts are missing.
        stepped: whether they are averages.
        process_set: all ranks.
        passes_per_step: 1.
        in_flight: False: nothing is exchanged before the end.
        weight: 1.0.
    """

    process_set: ProcessSet = global_process_set
    passes_per_step = 1
    in_flight = False
    weight = 1.0

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        strategy: Strategy,
        reduction: Reduction,
        sparse_as_dense: bool,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
    ) -> None:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # the bits of a result depend on it
        self.names = names
        self.averaged = self.stepped = False
        self._sparse_as_dense = sparse_as_dense
        self._parameters: list[torch.Tensor] = []
        self._buffers = ModelBuffers(model)
        self._find_optimizer = weakref.ref(optimizer)
        self._rates: list[Any] = []
        self.exchange = VirtualExchange(
            runtime.engine(),
            next_label("DistributedOptimizer", None),
            virtual_ranks.virtual_size(),
            [],
            strategy,
            reduction,
            self._buffers.parameters,
            make_check(self._find_optimizer, names, self._parameters),
        )

    @property
    def op(self) -> ReduceOp:
        """Return the reduction: sum or average."""
        return self.exchange.reduction.op

    def attach(self, parameters: Sequence[torch.Tensor]) -> None:
        """Exchange these parameters' gradients."""
        self._parameters[:] = in_order(self.names, parameters)

    def finish(self, samples: int | None = None) -> None:
        """End the part of a virtual rank; after the last one, average over all.

        Afterwards ``grad`` of the parameters is the average, or, if there are parts left, None.

        Raises:
            HorovodInternalError, ValueError: as `VirtualExchange.finish` and ``add``.
            RuntimeError: as `Turns.end`; or a learning rate has changed in the middle of a step.
            TypeError: a gradient is sparse.
        """
        self.exchange.follow(runtime.engine(), describe(self.names, self._parameters))
        self._check_rates()
        gradients = [self._gradient(parameter) for parameter in self._parameters]
        self.stepped = False
        outcome = self.exchange.end_part(gradients, *self._buffers.take(), samples)
        if outcome is None:
            for parameter in self._parameters:
                parameter.grad = None  # so that no optimizer changes anything
        else:
            self._hand_over(outcome)
            self.stepped = True
        self.averaged = True
        seed_part()

    def _check_rates(self) -> None:
        """Require the learning rates with which the step has begun."""
        optimizer = self._find_optimizer()
        groups = [] if optimizer is None else optimizer.param_groups
        rates = [float(group["lr"]) for group in groups if "lr" in group]
        if virtual_ranks.is_within_step() and self._rates and rates != self._rates:
            raise RuntimeError(
                f"rank {world.rank()}: the learning rate was {self._rates} when the step began, "
                f"and is {rates} in its middle; call scheduler.step() only if optimizer.stepped"
            )
        self._rates = rates

    def _hand_over(self, outcome: Outcome) -> None:
        with torch.no_grad():
            for parameter, average in zip(self._parameters, outcome.averages, strict=True):
                if average is None:
                    parameter.grad = None
                    continue
                tensor = to_tensor_like(average, parameter)
                if parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = tensor.clone()
                else:
                    parameter.grad.copy_(tensor)
        self._buffers.set(outcome.buffers)

    def _gradient(self, parameter: torch.Tensor) -> Any:
        gradient = parameter.grad
        if gradient is None:
            return None
        if gradient.is_sparse:
            if not self._sparse_as_dense:
                raise TypeError(
                    f"the gradient of {self.names[parameter]!r} is sparse; with virtual ranks, "
                    "pass sparse_as_dense=True to hvd.DistributedOptimizer"
                )
            gradient = gradient.to_dense()
        return to_array(gradient)

    def reset_passes(self) -> None:
        """Forget averages; parts that have been computed stay."""
        self.averaged = False

    def restart(self) -> None:
        """Forget a step that was given up, and move to the current world."""
        self.averaged = False
        self.exchange.connect(runtime.engine())
        turns = turns_of(self.exchange.size)
        turns.begin_step(turns.step)


class ModelBuffers:
    """The buffers of a model that change with every batch, such as running averages.

    Each part of a step begins with the same values, and ends with its own. Their average is what
    the next step begins with, as far as any part has changed them.

    Args:
        model: None: there are no buffers.

    Attributes:
        parameters: describe the buffers.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        named = {} if model is None else dict(model.named_buffers())
        self._buffers = [b for b in named.values() if b.dtype != torch.bool and not b.is_complex()]
        self.parameters = [
            Parameter(name, tuple(buffer.shape), dtype_of(buffer.dtype))
            for name, buffer in named.items()
            if any(buffer is each for each in self._buffers)
        ]
        self._start: list[torch.Tensor] = []
        self._model = None if model is None else weakref.ref(model)
        if model is not None and self._buffers:
            model.register_forward_pre_hook(self._make_hook())

    def _make_hook(self) -> Callable[[torch.nn.Module, Any], None]:
        """Return a hook that keeps the values with which the first part of a step begins."""
        reference = weakref.ref(self)

        def keep(module: torch.nn.Module, inputs: Any) -> None:
            buffers, turns = reference(), virtual_ranks.current
            if buffers is None or turns is None or turns.done or not module.training:
                return
            buffers._start = buffers._start or [b.detach().clone() for b in buffers._buffers]

        return keep

    def take(self) -> tuple[list[Any], frozenset[int]]:
        """Return the values after a part, and the numbers of those that it has changed.

        The buffers get back the values with which the step has begun.

        Raises:
            RuntimeError: the model is in training mode, and only parts of it have been called.
        """
        model = self._model() if self._model is not None else None
        if not self._start:
            if self._buffers and model is not None and model.training:
                raise RuntimeError(
                    f"rank {world.rank()}: the {type(model).__name__} that was passed as model= to "
                    "hvd.DistributedOptimizer has not been called in this step, so its buffers "
                    "cannot be averaged; call it as a whole, or pass the module that is called"
                )
            self._start = [buffer.detach().clone() for buffer in self._buffers]
        values = [to_array(buffer.detach().clone()) for buffer in self._buffers]
        pairs = list(zip(self._buffers, self._start, strict=True))
        changed = frozenset(
            n for n, (now, start) in enumerate(pairs) if not torch.equal(now, start)
        )
        with torch.no_grad():
            for buffer, start in pairs:
                buffer.copy_(start)
        return values, changed

    def set(self, averages: Sequence[Any]) -> None:
        """Set the buffers that any part has changed to their averages."""
        with torch.no_grad():
            for buffer, average in zip(self._buffers, averages, strict=True):
                if average is not None:
                    buffer.copy_(to_tensor_like(average, buffer))
        self._start = []


class Virtual(Distributed):
    """The methods that `DistributedOptimizer` adds to an optimizer's class with virtual ranks."""

    _reducer: Any

    @property
    def stepped(self) -> bool:
        """True if the last ``step()`` has changed the weights; False: parts of it are missing."""
        stepped: bool = self._reducer.stepped
        return stepped

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if find_closure(args, kwargs)[0] is not None:
            raise ValueError(
                "step(closure) evaluates a closure for one virtual rank, and cannot wait for the "
                "others; call backward() before step(), or leave virtual_ranks out"
            )
        return super()._before_step(args, kwargs)

    def _prepare_unscaling(self, enabled: bool) -> None:
        self._refuse_scaling(enabled)
        super()._prepare_unscaling(enabled)

    def _prepare_scaled_step(self, batch_size: int | None) -> None:
        self._refuse_scaling(True)

    def _refuse_scaling(self, enabled: bool) -> None:
        if enabled:
            raise ValueError(
                "a GradScaler cannot be used with virtual ranks: it would be updated for every "
                "virtual rank; use bfloat16, which needs no scaling"
            )
