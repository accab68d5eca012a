"""The public callbacks as mixins, which `complete` combines with a base class of either Keras."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from hvdlite import collectives
from hvdlite.base import files
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import global_process_set
from hvdlite.gradients.keras_replica import variables_of
from hvdlite.keras._optimizer import distributed_part
from hvdlite.keras._values import (
    batches_per_call,
    build_optimizer,
    compare_adapted,
    deriving_anew,
    differ_by_rank,
    to_array,
    weights_of,
)
from hvdlite.observe import status
from hvdlite.recipe import average_metrics
from hvdlite.recipe.variables import broadcast_variables
from hvdlite.world import parts, world

_log = logging.getLogger("hvdlite")


# The public names, of any Keras.
__all__ = [
    "BroadcastGlobalVariablesCallback",
    "MetricAverageCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "BestModelCheckpoint",
]


def complete(mixins: Any, callbacks: Any, module: str) -> dict[str, Any]:
    """Return a public module's callbacks: the mixins of a private one, on the bases of a Keras."""
    bases = {"BestModelCheckpoint": callbacks.ModelCheckpoint}
    found = {}
    for name in mixins.__all__:
        if name.endswith(("Callback", "Checkpoint")):
            mixin, base = getattr(mixins, name), bases.get(name, callbacks.Callback)
            members = {"__doc__": mixin.__doc__, "__module__": module}
            found[name] = type(name, (mixin, base), members)
    return found


class BroadcastGlobalVariablesCallback:
    """Give every rank the weights and the optimizer's variables of rank ``root_rank``.

    Variables that exist on all ranks when training begins are broadcast then; variables that the
    first batch creates are broadcast after it. So it is in each ``fit``, of this model or another.
    Metrics stay each rank's own, and so do gradients that an earlier ``fit`` has left to the next
    update. The seeds of random layers become different on each rank, so that dropout differs. With
    a schedule of local steps, call ``optimizer.average_weights()`` between two calls of ``fit``, or
    the second one goes on with what rank ``root_rank`` has learnt.

    Args:
        root_rank: The rank that has the values.
        device: Accepted for compatibility with Horovod; no effect.
        local_variables: Weights that stay each rank's own, like those of local layers. The
            optimizer's variables for them are broadcast.

    Raises:
        TypeError: ``local_variables`` is a single variable.
    """

    model: Any

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        if hasattr(local_variables, "assign"):
            raise TypeError(f"expected a list of variables, found {local_variables!r}")
        self.root_rank = root_rank
        self.local_variables = list(local_variables or ())
        self.broadcast_done = False
        self._steps: int | None = None  # of all optimizers, before this fit
        self._are_shared = False  # the weights, by all ranks and after each step

    def on_train_begin(self, logs: Any = None) -> None:
        """Broadcast the variables that all ranks have; their optimizers have to be alike."""
        self.broadcast_done = self._are_shared = False
        self._steps = status.counts.total()
        name = "BroadcastGlobalVariablesCallback"
        weights = self._weights()
        if all(collectives.allgather_object(len(weights), f"{name}: weights")):
            self._broadcast_weights(weights)
            # On all ranks or on none: legacy Keras would choose other names in the first batch.
            optimizer = getattr(self.model, "optimizer", None)
            is_shared, is_exchanged = _describe(optimizer)
            mine = build_optimizer(optimizer, self.model), is_shared
            found = zip(*collectives.allgather_object(mine, name), strict=True)
            are_built, self._are_shared = map(all, found)
            if are_built:
                state = variables_of(optimizer)
                what = "whether it is a DistributedOptimizer", "the number of its variables"
                entries = dict(zip(what, (is_exchanged, len(state)), strict=True))
                collectives.agree_on("the optimizer, which all ranks have to make alike", entries)
                # Gradients that an earlier fit has left to the next update are each rank's own.
                state = [each for each in state if "gradient_accumulator" not in each.name]
                broadcast_variables(state, self.root_rank)
                self.broadcast_done = True
        self._expect_comparison()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Broadcast after the first batch if variables were missing before it."""
        if self.broadcast_done:
            return
        # Weights too: ranks whose optimizers differed have updated them differently.
        self._broadcast_weights(self._weights())
        broadcast_variables(variables_of(getattr(self.model, "optimizer", None)), self.root_rank)
        self.broadcast_done = True
        self._expect_comparison()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Warn after the first epoch if each rank has trained by itself, or a part of the model."""
        steps, self._steps = self._steps, None
        apart = self._find_apart() if steps is not None and self._are_shared else []
        optimizer = getattr(self.model, "optimizer", None)
        is_alone = steps == status.counts.total() and distributed_part(optimizer) is None
        if world.size() == 1 or world.rank() != 0:
            return
        if is_alone:
            _log.warning(
                "each rank trains by itself: in this epoch there was no exchange of gradients, and "
                f"the model's {type(optimizer).__name__} is no DistributedOptimizer. A model that "
                "Keras has loaded from a file has none: load it by hvd.load_model(path), or call "
                "hvd.DistributedOptimizer(model.optimizer)"
            )
        elif apart:
            _log.warning(
                f"after an epoch {len(apart)} of the model's trainable weights differ between "
                f"ranks, the first {apart[0]!r}: what updates them exchanges nothing: call "
                "hvd.DistributedOptimizer for each optimizer of the model (weights that are each "
                "rank's own are local_variables= of the callback that broadcasts)"
            )

    def _find_apart(self) -> list[str]:
        """Return the trainable weights that differ between ranks; collective."""
        weights = self._shared(self.model.trainable_weights)
        sums = {getattr(w, "path", w.name): zlib.crc32(to_array(w).tobytes()) for w in weights}
        everywhere = collectives.allgather_object(sums, "weights after an epoch")
        return [name for name in sums if len({each.get(name) for each in everywhere}) > 1]

    def _broadcast_weights(self, weights: list[Any]) -> None:
        compare_adapted(self.model)
        with deriving_anew(self.model):
            broadcast_variables(weights, self.root_rank)
        differ_by_rank(weights_of(self.model, "variables"))

    def _expect_comparison(self) -> None:
        """Make ranks compare their replicas after the broadcast, and not before."""
        distributed = distributed_part(getattr(self.model, "optimizer", None))
        if distributed is not None:
            steps = 1 if self.broadcast_done else batches_per_call(self.model)
            distributed._hvdlite.replica.uncompared = steps

    def _weights(self) -> list[Any]:
        return self._shared(weights_of(self.model)) if self.model.built else []

    def _shared(self, weights: Iterable[Any]) -> list[Any]:
        local = set(map(id, self.local_variables))
        return [weight for weight in weights if id(weight) not in local]


def _describe(optimizer: Any) -> tuple[bool, bool]:
    """Return whether all ranks have the same weights after a step, and whether they exchange it."""
    part, checks = distributed_part(optimizer), runtime.engine().settings.check_ranks
    if part is None or part._hvdlite.options.process_set is not global_process_set:
        return part is None and checks != "off", False
    is_shared = part._hvdlite.options.schedule is None and not part._hvdlite.local
    return is_shared and checks != "off", True


class MetricAverageCallback:
    """Average the logs of each epoch over the ranks.

    The logs are changed in place, so later callbacks in the list (checkpoints, early stopping) and
    the history see the averages and decide the same on all ranks. Every rank has the same weight,
    independent of its number of samples.

    Args:
        device: Accepted for compatibility with Horovod; no effect.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average the logs, which have the same metrics on all ranks."""
        logs = {} if logs is None else logs
        arrays = {key: to_array(logs[key]) for key in sorted(logs)}
        # Zeros stand for arrays, so that all names are compared.
        scalars = {key: 0.0 if array.ndim else array for key, array in arrays.items()}
        averages: dict[str, Any] = dict(average_metrics(scalars))
        for key, array in arrays.items():
            if array.ndim:
                averages[key] = collectives.allreduce(
                    array.astype(np.float64), name=f"MetricAverageCallback: {key}"
                )
        logs.update(averages)


class LearningRateScheduleCallback:
    """Set the learning rate of each epoch or batch: ``initial_lr * multiplier(epoch)``.

    With momentum correction (Goyal et al. 2017, arXiv:1706.02677, section 2.1) the velocity, which
    contains the rate of past steps, is scaled by new rate over old whenever the rate changes. This
    equals scaling the momentum for one batch, as Horovod does, and works in compiled steps, where
    the momentum is a constant.

    Args:
        initial_lr: The learning rate to multiply.
        multiplier: A number, or a function of the epoch, which counts from 0 and has fractions
            unless ``staircase``.
        start_epoch: First epoch in which the rate is set.
        end_epoch: First epoch in which it is no longer set; None: it is set to the end.
        staircase: Set the rate at the beginning of each epoch, not of each batch. Implied by a
            number as multiplier.
        momentum_correction: Correct the velocity of optimizers with momentum.
        steps_per_epoch: Batches per epoch; None: the number that Keras knows.

    Raises:
        ValueError: ``initial_lr`` is None.
    """

    model: Any
    params: dict[str, Any]

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr=None: pass the learning rate that is to be multiplied")
        self.initial_lr = initial_lr
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self._given_steps = self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            factor = float(multiplier)
            self.multiplier = lambda epoch: factor

    def on_train_begin(self, logs: Any = None) -> None:
        """Look up the number of batches per epoch, on which the rate of a batch depends."""
        if self.staircase:
            return
        parts.current.refuse(
            type(self).__name__, "use a schedule of keras.optimizers.schedules, by steps"
        )
        self.steps_per_epoch = self._given_steps or self.params.get("steps")  # of this fit
        if not self.steps_per_epoch:
            raise ValueError(
                "Keras does not know the number of batches per epoch; pass steps_per_epoch to "
                f"{type(self).__name__}"
            )

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            # With steps_per_execution, of the last batch that the call of Keras takes.
            last = min(batch + batches_per_call(self.model), self.steps_per_epoch) - 1
            self._set(self.initial_lr * self.multiplier(epoch + last / self.steps_per_epoch))
        elif batch == 0:
            self._set(self.initial_lr * self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Log the rate as ``lr``."""
        if logs is not None:
            logs["lr"] = _learning_rate(self.model.optimizer)

    def _set(self, rate: float) -> None:
        optimizer = self.model.optimizer
        old = _learning_rate(optimizer)
        optimizer.learning_rate = rate
        if self.momentum_correction and old > 0 and rate != old:
            for velocity in _velocities(optimizer):
                velocity.assign(velocity * (rate / old))


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increase the learning rate from ``initial_lr / size`` to ``initial_lr``, batch by batch.

    This is the gradual warm-up of Goyal et al. 2017 (arXiv:1706.02677, section 2.2). Each batch has
    the rate of its end, so the last batch of the warm-up has ``initial_lr``.

    Args:
        initial_lr: The rate after the warm-up, already scaled by the number of ranks.
        warmup_epochs: Length of the warm-up in epochs.
        momentum_correction, steps_per_epoch: As for `LearningRateScheduleCallback`.
        verbose: 1: rank 0 prints when the warm-up is over.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            done = min((epoch + 1.0 / self.steps_per_epoch) / warmup_epochs, 1.0)
            return (1.0 + done * (world.size() - 1)) / world.size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch == epoch + 1 and self.verbose > 0 and world.rank() == 0:
            rate = _learning_rate(self.model.optimizer)
            print(f"\nEpoch {epoch + 1}: the learning rate's warm-up has ended at {rate:g}.")


def _learning_rate(optimizer: Any) -> float:
    return float(to_array(optimizer.learning_rate))


def _velocities(optimizer: Any) -> list[Any]:
    """Return the momentum variables, which contain the learning rate of past steps."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not hasattr(optimizer, "momentum"):
        return []
    for name in ("momentums", "_momentums"):  # SGD's, RMSprop's
        variables = getattr(optimizer, name, None)
        if variables is not None:
            return [variable for variable in variables if variable is not None]
    if "momentum" in getattr(optimizer, "get_slot_names", list)():  # older legacy optimizers
        return [v for v in variables_of(optimizer) if "/momentum" in v.name]
    return []


class BestModelCheckpoint:
    """Save the best model so far, by ``monitor``, on rank 0.

    A file in one of Keras' own formats (``.keras``, ``.h5``) is replaced atomically. Put
    `MetricAverageCallback` before this callback, so that the best model is the best of all ranks.

    Args:
        monitor: Name of the metric.
        verbose: 1: print when a model is saved.
        save_weights_only: Save weights alone.
        mode: ``"min"`` or ``"max"``, whichever is better; ``"auto"``: by the metric's name.
        save_freq: ``"epoch"``, or a number of batches.
        filepath: Path of the model (``.keras``) or of the weights (``.weights.h5``); it may be set
            later as an attribute.
    """

    filepath: Any
    model: Any
    monitor_op: Any
    set_model: Callable[[Any], None]
    _set_monitor_op: Callable[[], None]

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: Any = None,
    ) -> None:
        later = "later.weights.h5" if save_weights_only else "later.keras"
        super().__init__(
            filepath=later if filepath is None else os.fspath(filepath),  # type: ignore[call-arg]
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Require a path."""
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no path; pass filepath= or set .filepath")
        super().on_train_begin(logs)  # type: ignore[misc]

    def _save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save on rank 0, and replace files atomically: a killed process leaves the old ones."""
        if world.rank() != 0:
            return
        if self.monitor_op is None:  # Keras 3 chooses it at the end of an epoch, which is late
            self._set_monitor_op()
        model = self.model
        self.set_model(_AtomicallySaved(model))
        try:
            super()._save_model(*args, **kwargs)  # type: ignore[misc]
        finally:
            self.set_model(model)


class _AtomicallySaved:
    """A model whose ``save`` and ``save_weights`` replace files atomically."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        return partial(_save, found) if name in ("save", "save_weights") else found


def _save(save: Callable[..., None], filepath: Any, *args: Any, **kwargs: Any) -> None:
    path = Path(filepath)
    # Other targets (TensorFlow's formats, a bucket) are no single local file.
    if path.suffix not in (".keras", ".h5") or "://" in str(filepath) or path.is_dir():
        save(filepath, *args, **kwargs)
        return
    with files.replacing_by_name(path) as temporary:
        save(str(temporary), *args, **kwargs)
