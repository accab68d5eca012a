"""Optimizers with local steps, whose ranks exchange weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch

from hvdlite.base.reduction import ReduceOp
from hvdlite.gradients.options import Options
from hvdlite.schedule.local_steps import LocalSteps, Moment, Weights, check_unweighted
from hvdlite.torch.dynamo import untraced, untraced_methods
from hvdlite.torch.hooks import remove_hooks
from hvdlite.torch.reducer import in_order
from hvdlite.torch.tensors import properties_of, to_array, to_tensor
from hvdlite.torch.wrapping import Distributed


@untraced_methods("synchronize", "average_weights", "_before_step", "_after_step")
class Scheduled(Distributed):
    """The methods of an optimizer with a schedule of local steps, or with Adasum."""

    _local_steps: LocalSteps
    _local_weights: Weights  # of the parameters that are attached, for `_local_steps`
    _scheduled: list[torch.Tensor]
    _scheduled_properties: Any  # of those attached, when they were compared last

    def _begin(self, options: Options, label: str) -> None:
        self._local_steps = self._exchange_state.steps = LocalSteps(options, label)
        self._scheduled = []
        optimizer = cast(torch.optim.Optimizer, self)
        self._local_weights = tensor_weights(
            self._scheduled, lambda number: optimizer.state.get(self._scheduled[number], {})
        )
        self._scheduled_properties = properties_of(self._scheduled)
        self._attach_weights()

    def _attach_weights(self) -> None:
        """Attach the parameters that are not attached yet; the same ones on all ranks."""
        if properties_of(self._scheduled) != self._scheduled_properties:
            self._local_steps.convert(self._reducer.describe_weights(self._scheduled))
        known = {*map(id, self._scheduled)}
        if fresh := [each for each in self._trainable() if id(each) not in known]:
            fresh = in_order(self._reducer.names, fresh)
            if self._local_steps.is_local:
                remove_hooks(fresh)
            self._scheduled += fresh
            self._local_steps.add(self._reducer.describe_weights(fresh))
        self._scheduled_properties = properties_of(self._scheduled)
        self._attach_reducer()

    def _attach_reducer(self) -> None:
        """Attach the reducer to the gradients, or detach it, as the next step needs it."""
        if self._local_steps.is_local:
            self._reducer.detach()
        else:
            self._reducer.attach(self._trainable())

    @property
    def _is_adasum(self) -> bool:
        return self._reducer.op is ReduceOp.ADASUM

    def synchronize(self, batch_size: int | None = None) -> None:
        """Exchange the gradients, unless the step is local: then they stay this rank's own.

        Raises:
            ValueError: ``batch_size`` is given.
        """
        check_unweighted(batch_size)
        if not self._local_steps.is_local:
            super().synchronize()

    def _combine_loss(self, loss: Any) -> Any:
        if self._local_steps.is_local:
            return loss
        return super()._combine_loss(loss)

    @contextlib.contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Let ``step()`` use the gradients as they are; weights are exchanged all the same.

        Raises:
            RuntimeError: with op=hvd.Adasum, where it is the step that is exchanged.
        """
        if self._is_adasum:
            raise RuntimeError(
                "with op=hvd.Adasum it is the step itself that is exchanged, which cannot be "
                "skipped; clip or unscale the gradients after backward(), and call step() alone"
            )
        if self._local_steps.is_local:
            yield
            return
        with super().skip_synchronize():
            yield

    def average_weights(self) -> None:
        """Average the weights over all ranks now: before an evaluation, or at the end.

        Afterwards they are the same bits on all ranks. All ranks call it, between the same
        steps; it takes the place of no exchange that the schedule has.

        Raises:
            HorovodInternalError: the ranks disagree, or communication failed.
        """
        self._attach_weights()
        self._local_steps.average(self._local_weights)

    def _load(self, state_dict: Mapping[str, Any], is_own: bool) -> None:
        super()._load(state_dict, is_own)
        self._attach_reducer()

    def _before_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        check_unweighted(kwargs.pop("batch_size", None))
        self._attach_weights()
        self._local_steps.begin(self._local_weights.read)
        return super()._before_step(args, kwargs)

    def _after_step(self, args: tuple[Any, ...] = (), kwargs: Any = None) -> None:
        super()._after_step()
        if not self._local_steps.in_step:
            return  # a step that calls its parent's comes here twice
        try:
            self._local_steps.end(self._local_weights)
        finally:
            self._attach_reducer()

    def _restart(self) -> None:
        super()._restart()
        self._local_steps.restart()

    def _prepare_unscaling(self, enabled: bool) -> None:
        if enabled:
            self._prepare_scaled_step(None)

    def _prepare_scaled_step(self, batch_size: int | None) -> NoReturn:
        name = (
            "op=hvd.Adasum" if self._is_adasum else f"schedule=hvd.{self._local_steps.schedule!r}"
        )
        raise RuntimeError(
            "GradScaler leaves out the step of a rank whose gradients overflow, and with "
            f"{name} the others would wait for it; use torch.autocast with "
            "bfloat16, which needs no GradScaler, or exchange gradients in every step by "
            "op=hvd.Average"
        )


def tensor_weights(
    tensors: Sequence[torch.Tensor], moments: Callable[[int], Mapping[str, Any]]
) -> Weights:
    """Return weights for `LocalSteps` in tensors, with what the optimizer keeps for each number.

    One on a device is copied when it is read.
    """

    def averaged(number: int) -> list[Moment]:
        return [
            Moment(key, to_array(tensor.detach()), partial(_copy, tensor))
            for key, tensor in sorted(moments(number).items())
            if isinstance(tensor, torch.Tensor)
            and (tensor.is_floating_point() or tensor.is_complex())
            and tensor.shape == tensors[number].shape
        ]

    return Weights(
        lambda number: to_array(tensors[number].detach()),
        lambda number, array: _copy(tensors[number], array),
        averaged,
    )


def tensor_steps(
    steps: LocalSteps, variables: Sequence[Any], moments: Sequence[Mapping[str, Any]]
) -> SimpleNamespace:
    """Return the local steps of Keras variables on PyTorch, as `VariableSteps` of TensorFlow.

    Args:
        moments: those of the optimizer's variables that are averaged with each, by name.
    """
    kept = [{name: each.value for name, each in own.items()} for own in moments]
    weights = tensor_weights([each.value for each in variables], kept.__getitem__)
    # Untraced, since Keras may compile the training step that calls them.
    return SimpleNamespace(
        begin=untraced(lambda: steps.begin(weights.read)),
        gradients=lambda own, reduce: list(own) if steps.is_local else reduce(),
        end=untraced(lambda: steps.end(weights)),
        average=untraced(lambda: steps.average(weights)),
    )


@torch.no_grad()
def _copy(tensor: torch.Tensor, array: Any) -> None:
    tensor.copy_(to_tensor(array))
