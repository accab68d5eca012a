"""Elastic training with any Keras on any framework: state, and callbacks as mixins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from hvdlite.elastic import HostUpdate, ObjectState, State, run
from hvdlite.elastic.state import ExchangeHandler, VariablesHandler
from hvdlite.gradients.keras_replica import variables_of
from hvdlite.keras._optimizer import distributed_part
from hvdlite.keras._values import batches_per_call, build_optimizer, deriving_anew, weights_of

# The public names, of any Keras.
__all__ = [
    "CommitStateCallback",
    "HostUpdate",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class KerasState(ObjectState):
    """The state of a Keras model, its optimizer, and other attributes.

    Weights, the optimizer's variables (including the learning rate), what its compression and
    schedule remember, and random seeds are kept in memory. The seeds stay each rank's own, and so
    do residuals of a compression: a rank that joins begins with none.

    Args:
        model: A built model of Keras 3 or legacy Keras; the attribute ``model``.
        optimizer: Its optimizer, which is built if necessary; None: the model's own. The attribute
            ``optimizer``.
        backend: Accepted as in Horovod, without effect.
        **kwargs: Other attributes and their initial values: ``batch=0, epoch=0``.

    Raises:
        ValueError: The model is not built, or the class has an attribute or a method of such a
            name.
    """

    def __init__(
        self, model: Any, optimizer: Any = None, backend: Any = None, **kwargs: Any
    ) -> None:
        if not model.built:
            raise ValueError(
                "the model has no weights yet that could be kept; call model.build(input_shape), "
                "or the model on a batch, before"
            )
        if optimizer is None:
            optimizer = getattr(model, "optimizer", None)
        # Variables created later could not be restored to their initial values.
        build_optimizer(optimizer, model)
        super().__init__(
            # What all ranks get is without random seeds.
            model=VariablesHandler(
                model, partial(weights_of, attribute="variables"), weights_of, deriving_anew
            ),
            optimizer=VariablesHandler(optimizer, _variables_of_optimizer),
            **kwargs,
        )
        # Behind the variables: a schedule begins again with the weights that it finds.
        self._handlers.append(("optimizer", ExchangeHandler(optimizer, _of_optimizer)))


def _variables_of_optimizer(optimizer: Any) -> Sequence[Any]:
    found = list(variables_of(optimizer))
    rate = getattr(optimizer, "learning_rate", None)
    if hasattr(rate, "assign") and all(rate is not each for each in found):
        found.append(rate)
    return found


def _of_optimizer(optimizer: Any, keys: Iterable[Any]) -> dict[Any, Any]:
    """Return what an optimizer's compression and schedule remember; {}: it is not distributed."""
    part = distributed_part(optimizer)
    if part is None:
        return {}
    options = part._hvdlite.options
    return {"optimizer": (part._hvdlite.state, options.reduction.op, options.process_set)}


# For each state, the callbacks that update its ``batch`` and its ``epoch``.
_trackers: WeakKeyDictionary[State, dict[str, _StateCallback]] = WeakKeyDictionary()


class _StateCallback:
    """A callback of a state; the hooks of one that updates an attribute may be called twice."""

    model: Any
    params: Any
    attribute: str  # that it updates; `CommitStateCallback` updates none

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state

    def on_train_begin(self, logs: Any = None) -> None:
        _trackers.setdefault(self.state, {})[self.attribute] = self

    def skips(self, batch: int) -> bool:
        return False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Do nothing."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Record the end of an epoch."""


class CommitStateCallback(_StateCallback):
    """Commit a state every few batches and at the end of each epoch.

    ``state.batch`` and ``state.epoch`` are up to date when they are committed, wherever their
    callbacks stand in the list.

    Args:
        state: The state to commit.
        batches_per_commit: Training batches between two commits; with ``steps_per_execution``
            up to the end of the call of Keras.

    Raises:
        ValueError: ``batches_per_commit`` is below 1.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__(state)
        if batches_per_commit < 1:
            raise ValueError(f"batches_per_commit={batches_per_commit} is below 1")
        self.batches_per_commit = batches_per_commit
        self._batches = 0

    def on_train_begin(self, logs: Any = None) -> None:
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if any(tracker.skips(batch) for tracker in self._trackers()):
            return
        before, every = self._batches, self.batches_per_commit
        self._batches += batches_per_call(self.model)
        if self._batches // every > before // every:
            for tracker in self._trackers():
                tracker.on_train_batch_end(batch)
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        for tracker in self._trackers():
            tracker.on_epoch_end(epoch)
        self.state.commit()

    def _trackers(self) -> Iterator[_StateCallback]:
        """Yield the trackers of this ``fit``; those of an interrupted one are out of date."""
        found = _trackers.get(self.state, {})
        return (tracker for tracker in found.values() if tracker.params is self.params)


class UpdateBatchStateCallback(_StateCallback):
    """Keep ``state.batch`` up to date: the number of batches trained on in the current epoch.

    If ``state.batch`` is above 0 when ``fit`` begins, its first epoch takes so many batches from
    the data and leaves them out; the others keep their numbers. A data set in a fixed order
    continues where it was. The logs of such an epoch are those of its rest.

    Args:
        state: A state with an attribute ``batch``.
    """

    attribute = "batch"
    _left_out = 0

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._left_out = int(self.state.batch)
        train = self.model.train_function
        if isinstance(train, _LeaveOut):  # of an interrupted fit
            self.model.train_function = train.train

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        train = self.model.train_function
        if self.skips(batch):
            if not isinstance(train, _LeaveOut):
                train = self.model.train_function = _LeaveOut(train, batches_per_call(self.model))
            train.next = True
        elif isinstance(train, _LeaveOut):
            self.model.train_function = train.train

    def skips(self, batch: int) -> bool:
        """Return whether a batch was trained on before this ``fit`` began."""
        return batch < self._left_out

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.skips(batch):
            self.state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = self._left_out = 0


@dataclass(eq=False)
class _LeaveOut:
    """A replacement for a model's training function that leaves batches out."""

    train: Callable[[Any], Any]
    batches: int
    next: bool = False

    def __call__(self, data: Any) -> Any:
        if not self.next:
            return self.train(data)
        self.next = False
        if isinstance(data, Iterator):  # else Keras has taken the batches from it
            for _ in range(self.batches):
                next(data)
        return {}


class UpdateEpochStateCallback(_StateCallback):
    """Keep ``state.epoch`` up to date: the number of epochs completed, over all calls of ``fit``.

    After a failure ``fit`` may be called in both ways: with ``epochs=total - state.epoch``, or with
    ``epochs=total, initial_epoch=state.epoch``.

    Args:
        state: A state with an attribute ``epoch``.
    """

    attribute = "epoch"
    _first: int | None = None
    _ended = 0

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._first = None
        self._ended = int(self.state.epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._first is None:
            self._first = epoch
        self.state.epoch = self._ended + epoch - self._first

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.epoch = self._ended + epoch - (self._first or 0) + 1
