"""Elastic training with Keras, of any version and on any backend: state and callbacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from hvdlite._keras.state import variables_of
from hvdlite.elastic.state import State
from hvdlite.elastic.variables import VariableState


class ModelState(VariableState):
    """The state of a Keras model, its optimizer, and other attributes.

    Weights, the optimizer's variables (the learning rate among them) and random seeds are kept
    in memory. The seeds stay each rank's own.

    Args:
        model: a built one, of Keras 3 or legacy Keras; the attribute ``model``.
        optimizer: None: the model's own; the attribute ``optimizer``. It is built, if it is not.
        **kwargs: the other attributes, and their values at the start.

    Raises:
        ValueError: the model has not been built, or the class has an attribute or a method of
            such a name.
    """

    def __init__(self, model: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if not model.built:
            raise ValueError(
                "the model has no weights yet that could be kept; call model.build(input_shape), "
                "or the model on a batch, before"
            )
        self.model = model
        self.optimizer = getattr(model, "optimizer", None) if optimizer is None else optimizer
        # Variables that come later could not be set back to what they were before.
        if hasattr(self.optimizer, "build") and not getattr(self.optimizer, "built", False):
            self.optimizer.build(model.trainable_variables)
        super().__init__(**kwargs)
        self._compression = self._remembered()

    def save(self) -> None:
        """Keep copies of all values, and of what the compression remembers."""
        super().save()
        self._compression = self._remembered()

    def restore(self) -> None:
        """Assign what was saved last."""
        super().restore()
        if self._compression is not None:
            self.optimizer.load_exchange_state_dict(self._compression)

    def _remembered(self) -> Any:
        remembers = getattr(self.optimizer, "exchange_state_dict", None)
        return None if remembers is None else remembers()

    def variables_kept(self) -> Sequence[Any]:
        """Everything that training changes."""
        return _unique([*self.model.variables, *_state_of(self.optimizer)])

    def variables_shared(self) -> Sequence[Any]:
        """All but the random seeds."""
        return _unique([*self.model.weights, *_state_of(self.optimizer)])


def _state_of(optimizer: Any) -> list[Any]:
    found = variables_of(optimizer)
    rate = getattr(optimizer, "learning_rate", None)
    return [*found, rate] if hasattr(rate, "assign") else found


def _unique(variables: Sequence[Any]) -> list[Any]:
    return list({id(variable): variable for variable in variables}.values())


# Of each state, the callbacks that keep its ``batch`` and its ``epoch`` up to date.
_trackers: WeakKeyDictionary[State, dict[str, Any]] = WeakKeyDictionary()


class Callbacks(NamedTuple):
    """The callback classes for one Keras."""

    commit: type[Any]
    update_batch: type[Any]
    update_epoch: type[Any]


def make_callbacks(base: type[Any], module: str) -> Callbacks:
    """Make the callback classes of one Keras.

    Args:
        base: its ``callbacks.Callback``.
        module: in which the classes will be found.
    """
    named = {
        "CommitStateCallback": _CommitState,
        "UpdateBatchStateCallback": _UpdateBatchState,
        "UpdateEpochStateCallback": _UpdateEpochState,
    }
    return Callbacks(
        *(
            type(name, (kind, base), {"__module__": module, "__doc__": kind.__doc__})
            for name, kind in named.items()
        )
    )


class _StateCallback:
    """A callback that has to do with a state.

    Attributes:
        state: as given.
        model: whose ``fit`` runs; set by Keras.
        params: of that ``fit``, one object for all of its callbacks; likewise.
    """

    model: Any
    params: Any

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state: Any = state


class _CommitState(_StateCallback):
    """Commits a state every so many batches, and at the end of each epoch.

    ``state.batch`` and ``state.epoch`` are up to date in what is committed, wherever their
    callbacks stand in the list.

    Args:
        state: of which `commit` is called.
        batches_per_commit: batches of training between two commits.

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
        """Count from here."""
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Commit, if it is time."""
        if any(tracker.skips(batch) for tracker in self._trackers()):
            return
        self._batches += 1
        if self._batches % self.batches_per_commit == 0:
            for tracker in self._trackers():
                tracker.on_train_batch_end(batch)
            self.state.commit()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Commit."""
        for tracker in self._trackers():
            tracker.on_epoch_end(epoch)
        self.state.commit()

    def _trackers(self) -> Iterator[Any]:
        """Those that have to do with this ``fit``, and not with one that was left."""
        found = _trackers.get(self.state, {})
        return (tracker for tracker in found.values() if tracker.params is self.params)


class _Tracker(_StateCallback):
    """A callback that keeps an attribute of a state up to date; its hooks may come twice."""

    keeps: str

    def on_train_begin(self, logs: Any = None) -> None:
        _trackers.setdefault(self.state, {})[self.keeps] = self

    def skips(self, batch: int) -> bool:
        """Whether a batch is not trained on."""
        return False

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Take note of a batch that has been trained on."""

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Take note of an epoch that has ended."""


class _UpdateBatchState(_Tracker):
    """Keeps ``state.batch``: how many batches of the current epoch have been trained on.

    Where ``fit`` begins with a ``state.batch`` above 0, so many batches of its first epoch are
    taken from the data and left out, and the numbers of the others are what they would have
    been: a data set in a fixed order goes on where it was. The logs of such an epoch are those of
    its rest.

    Args:
        state: with an attribute ``batch``.
    """

    keeps = "batch"

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._left_out = 0

    def on_train_begin(self, logs: Any = None) -> None:
        super().on_train_begin(logs)
        self._left_out = int(self.state.batch)
        train = self.model.train_function
        if isinstance(train, _LeaveOut):  # of a fit that was left
            self.model.train_function = train.train

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        train = self.model.train_function
        if self.skips(batch):
            if not isinstance(train, _LeaveOut):
                train = self.model.train_function = _LeaveOut(train, _batches_per_call(self.model))
            train.next = True
        elif isinstance(train, _LeaveOut):
            self.model.train_function = train.train

    def skips(self, batch: int) -> bool:
        """Whether a batch was trained on before this ``fit`` began."""
        return batch < self._left_out

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self.skips(batch):
            self.state.batch = batch + 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.state.batch = self._left_out = 0


class _LeaveOut:
    """Stands in the place of a model's training function, for batches to leave out.

    Attributes:
        train: the function itself.
        next: whether to leave the next call out.
    """

    def __init__(self, train: Callable[[Any], Any], batches: int) -> None:
        self.train = train
        self.next = False
        self._batches = batches

    def __call__(self, data: Any) -> Any:
        if not self.next:
            return self.train(data)
        self.next = False
        if isinstance(data, Iterator):  # else the batches have been taken from it
            for _ in range(self._batches):
                next(data)
        return {}


def _batches_per_call(model: Any) -> int:
    count = getattr(model, "_steps_per_execution", None) or getattr(model, "steps_per_execution", 1)
    return int(count.numpy() if hasattr(count, "numpy") else count)


class _UpdateEpochState(_Tracker):
    """Keeps ``state.epoch``: how many epochs have ended, over all calls of ``fit``.

    Both ways to call ``fit`` after a failure are fine: ``epochs=total - state.epoch``, and
    ``epochs=total, initial_epoch=state.epoch``.

    Args:
        state: with an attribute ``epoch``.
    """

    keeps = "epoch"

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self._first: int | None = None
        self._ended = 0

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
