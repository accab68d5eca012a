"""The optimizer for Adasum: every rank steps by itself, and the steps are combined."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from hvdlite import runtime
from hvdlite.exchange import Parameter, Reduction, Strategy
from hvdlite.gradients import GradientExchange
from hvdlite.process_sets import ProcessSet
from hvdlite.torch.labels import next_label
from hvdlite.torch.parameter_set import release
from hvdlite.torch.tensors import dtype_of, to_tensor
from hvdlite.torch.wrapping import Wrapped, change_class, checked_passes


def wrap_for_adasum(
    optimizer: torch.optim.Optimizer,
    names: dict[torch.Tensor, str],
    strategy: Strategy,
    reduction: Reduction,
    process_set: ProcessSet,
) -> Any:
    """Make an optimizer combine the ranks' steps.

    Args:
        optimizer: is changed and returned.
        names: of its parameters, in the order of their registration.
        strategy: how the changes of the weights travel.
        reduction: Adasum.
        process_set: the ranks that take part.
    """
    steps = Steps(names, strategy, reduction, process_set)
    wrapped = change_class(optimizer, _DistributedAdasum)
    wrapped._steps = steps
    wrapped._parameter_names = names
    steps.attach(wrapped._trainable())
    optimizer.register_step_pre_hook(_before_step)
    optimizer.register_step_post_hook(_after_step)
    return optimizer


class _DistributedAdasum(Wrapped):
    """What `DistributedOptimizer` adds to an optimizer's class for Adasum."""

    _steps: Steps

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own, and the step's outcome is exchanged."""

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Refuse: without its exchange a step would let the ranks' weights drift apart.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError(
            "with op=hvd.Adasum it is the step itself that is exchanged, which cannot be skipped; "
            "clip or unscale the gradients after backward(), and call step() alone"
        )
        yield

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Check the number, and do nothing more: any number of passes may precede a step."""
        checked_passes(passes)

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # GradScaler asks for it before each step that it takes, or leaves out.
        raise RuntimeError(
            "GradScaler leaves out the step of a rank whose gradients overflow, and with "
            "op=hvd.Adasum the others would wait for it; use torch.autocast with bfloat16, which "
            "needs no GradScaler, or op=hvd.Average"
        )


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer._steps.attach(optimizer._trainable())
    optimizer._steps.begin()


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    optimizer._steps.combine()


class Steps:
    """The changes that an optimizer's steps make to parameters, combined over all ranks.

    Args:
        names: of the parameters, in the order of their registration.
        strategy: how changes travel.
        reduction: how they are combined.
        process_set: the ranks that take part.
    """

    def __init__(
        self,
        names: dict[torch.Tensor, str],
        strategy: Strategy,
        reduction: Reduction,
        process_set: ProcessSet,
    ) -> None:
        self._names = names
        self._strategy = strategy
        self._reduction = reduction
        self._process_set = process_set
        self._engine = runtime.engine(process_set)
        self._sets: list[_Set] = []
        self._attached: set[int] = set()  # by id; the sets keep them alive

    def attach(self, parameters: Sequence[torch.Tensor]) -> None:
        """Take care of these parameters too, where that is not done yet; alike on all ranks."""
        fresh = [parameter for parameter in parameters if id(parameter) not in self._attached]
        if not fresh:
            return
        order = {parameter: number for number, parameter in enumerate(self._names)}
        for parameter in fresh:
            self._names.setdefault(parameter, f"parameter.{len(self._names)}")
        fresh.sort(key=lambda parameter: order.get(parameter, len(order)))
        release(fresh)
        label = next_label("DistributedOptimizer for Adasum", self._process_set)
        self._sets.append(_Set(fresh, label))
        self._connect(self._sets[-1])
        self._attached.update(map(id, fresh))

    def _connect(self, members: _Set) -> None:
        described = [
            Parameter(self._names[parameter], tuple(parameter.shape), dtype_of(parameter.dtype))
            for parameter in members.parameters
        ]
        members.exchange = GradientExchange(
            self._engine, members.label, described, self._strategy, self._reduction
        )

    def begin(self) -> None:
        """Remember the weights as they are, before a step."""
        engine = runtime.engine(self._process_set)
        if engine is not self._engine:  # after shutdown() and init()
            self._engine = engine
            for members in self._sets:
                self._connect(members)
        if engine.size > 1:
            for members in self._sets:
                members.begin()

    def combine(self) -> None:
        """Let the weights be the remembered ones, changed by what all ranks' steps come to.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed; the weights are
                the remembered ones then.
        """
        errors: list[Exception] = []
        for members in self._sets:  # to the last, whatever becomes of one
            try:
                members.combine()
            except Exception as error:
                errors.append(error)
        if errors:
            for members in self._sets:
                members.restore()
            raise errors[0]


class _Set:
    """Parameters that share an exchange."""

    exchange: GradientExchange

    def __init__(self, parameters: Sequence[torch.Tensor], label: str) -> None:
        self.parameters = list(parameters)
        self.label = label
        self._starts: list[torch.Tensor] = []
        self._versions: list[int] | None = None  # of the parameters; None: no step has begun

    def begin(self) -> None:
        if not self._starts:
            self._starts = [torch.empty_like(parameter) for parameter in self.parameters]
        with torch.no_grad():
            torch._foreach_copy_(self._starts, self.parameters)
        self._versions = [parameter._version for parameter in self.parameters]

    @torch.no_grad()
    def combine(self) -> None:
        if self._versions is None:
            return  # a step that calls its parent's comes here twice
        versions, self._versions = self._versions, None
        self.exchange.begin()
        for number, (parameter, start) in enumerate(
            zip(self.parameters, self._starts, strict=True)
        ):
            # Some optimizers change weights through .data, which leaves the version as it is.
            if parameter.grad is not None or parameter._version != versions[number]:
                to_tensor(self.exchange.slot(number)).copy_(parameter - start)
                self.exchange.mark(number)
        for number, anywhere in enumerate(self.exchange.finish()):
            if anywhere:
                combined = to_tensor(self.exchange.result_slot(number))
                start = self._starts[number]
                self.parameters[number].copy_(start + combined.to(start.device))

    def restore(self) -> None:
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self._starts)
