"""Distributed optimizers of any Keras: arguments, class, models that train with them.

This module imports no Keras and no framework. `_keras3` and `_legacy` hold what differs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn

from hvdlite.base.arguments import check_count, check_groups
from hvdlite.base.reduction import Average, ReduceOp
from hvdlite.compression import Compression, Conversion, Reduction
from hvdlite.engine import runtime
from hvdlite.engine.process_sets import ProcessSet, global_process_set, is_outside
from hvdlite.gradients.keras_exchange import LocalVariables, Synchronizer
from hvdlite.gradients.options import CompressionArgument, ExchangeSchedule, Options, make_options
from hvdlite.world import world


@dataclass(frozen=True)
class KerasAdapter:
    """The public functions that make optimizers distributed, for one Keras and its framework."""

    conversion: Conversion
    distribute: Callable[[Any, Options], Any]
    keras: Callable[[], Any]

    def DistributedOptimizer(  # noqa: N802 - Horovod's name
        self,
        optimizer: Any,
        name: str | None = None,
        device_dense: str = "",
        device_sparse: str = "",
        compression: CompressionArgument = Compression.none,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        op: ReduceOp | int = Average,
        backward_passes_per_step: int = 1,
        average_aggregated_gradients: bool = False,
        num_groups: int = 0,
        groups: int | list[Any] | None = None,
        process_set: ProcessSet = global_process_set,
        scale_local_gradients: bool = True,
        schedule: ExchangeSchedule | None = None,
        model: Any = None,
    ) -> Any:
        """Make a Keras optimizer average its gradients over all ranks before it applies them.

        Gradients are averaged at the beginning of ``apply`` (Keras 3) or ``apply_gradients``
        (legacy Keras), which ``fit``, ``train_on_batch`` and custom loops all call. What Keras does
        next (clipping, weight decay, moving averages) works on the averages. If Keras accumulates
        gradients (``gradient_accumulation_steps``), they are exchanged once per update. If Keras
        scales the loss (``LossScaleOptimizer``, around this optimizer or inside it), gradients are
        averaged before Keras looks for overflows, so all ranks apply a step or none does; every
        pass is exchanged then.

        The optimizer itself is changed and returned. Its class becomes a subclass with the same
        name; variables, schedules and settings stay. So is an optimizer that this process makes
        from its configuration, with the same options, and that of a copy of its model. A file has
        nothing of hvdlite: a saved model loads without it, and `load_model` makes its optimizer
        distributed again.

        Ranks whose batches differ in size pass the size in every step: ``apply(gradients,
        variables, batch_size=n)`` or ``apply_gradients(pairs, batch_size=n)``, in a custom loop or
        in a model's own ``train_step``. In a plain ``fit`` all ranks have the same weight: give
        them batches of one size, and drop a smaller last batch.

        XLA cannot compile the exchange. With Keras 3, ``fit`` compiles its steps without XLA and
        logs that; legacy Keras refuses ``jit_compile=True`` when the step is traced.

        Args:
            optimizer: A Keras optimizer, or the name of one.
            name, device_dense, device_sparse: Accepted for compatibility with Horovod; no effect.
            compression: Compression of dense gradients.
            sparse_as_dense: Exchange ``tf.IndexedSlices`` as dense gradients.
            gradient_predivide_factor: The part of an average's division that happens before the
                sum.
            op: Average or Sum.
            backward_passes_per_step: Calls of ``apply`` whose gradients add up before an exchange
                and an update. Sets ``gradient_accumulation_steps`` in Keras 3; legacy Keras has
                none, and they add up in variables outside the optimizer.
            average_aggregated_gradients: Average these gradients instead of summing them.
            num_groups, groups: Accepted for compatibility with Horovod; buckets serve the purpose.
            process_set: The ranks that take part. On any other rank the optimizer works by itself,
                as in Horovod.
            scale_local_gradients: Divide the gradients of local variables by the number of ranks,
                which gives them the weight of an average. In a local step they stay whole.
            schedule: When to exchange what, one of ``hvd.Schedule``; None: gradients, for every
                update. With local steps, weights are exchanged at the end of ``apply``.
            model: With virtual ranks (`init`), the model, which is built, whose buffers are
                averaged over them after each step, such as the moving averages of a batch
                normalization. ``apply`` ends the part of one virtual rank then; the last one of
                this process exchanges and updates, and ``optimizer.stepped`` tells that.

        Returns:
            The optimizer, with ``register_local_var(variable)``, and with ``average_weights()`` if
            the schedule has local steps.

        Raises:
            ValueError: The optimizer is distributed already, an argument is out of range, or the
                schedule conflicts with another argument, or with Keras' accumulation or loss
                scaling.
            TypeError: ``optimizer`` is no optimizer, ``compression`` no strategy, or ``schedule``
                no schedule.
        """
        check_groups(num_groups, groups)
        if process_set is not global_process_set and not is_outside(process_set):
            runtime.engine(process_set)
        check_count("backward_passes_per_step", backward_passes_per_step)
        options = make_options(
            compression,
            schedule,
            self.conversion,
            Reduction(ReduceOp(op), gradient_predivide_factor),
            int(backward_passes_per_step),
            sparse_as_dense,
            process_set,
            model,
            average_passes=average_aggregated_gradients,
            scale_local=scale_local_gradients,
        )
        if options.schedule is not None and options.passes > 1:
            raise ValueError(
                f"backward_passes_per_step={options.passes}, and with {options.schedule!r} a step "
                "is what Keras applies; leave one of them out"
            )
        if distributed_part(optimizer) is not None:
            raise ValueError("this optimizer is a DistributedOptimizer already; wrap it once")
        return self.distribute(optimizer, options)

    def PartialDistributedOptimizer(  # noqa: N802 - Horovod's name
        self, optimizer: Any, *args: Any, local_layers: Any = None, **kwargs: Any
    ) -> Any:
        """Make an optimizer distributed, but keep the gradients of some layers on their rank.

        Args:
            optimizer, args, kwargs: As for `DistributedOptimizer`.
            local_layers: A layer or a list of layers; they need not be built yet.

        Returns:
            The optimizer.

        Raises:
            ValueError, TypeError: As for `DistributedOptimizer`; or there is no layer where one is
                expected.
        """
        distributed = self.DistributedOptimizer(optimizer, *args, **kwargs)
        distributed_part(distributed)._hvdlite.local.add(layers=local_layers)
        return distributed

    def load_model(
        self,
        filepath: str | os.PathLike[str],
        custom_optimizers: Iterable[type[Any]] | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        compression: CompressionArgument = Compression.none,
    ) -> Any:
        """Load a model and make its optimizer, with the state it has, distributed.

        Every rank reads the file. If only rank 0 can, let the others write what
        ``hvd.broadcast_object`` gives them of its bytes to a file of their own, and load that.

        Args:
            filepath: A file that ``model.save`` has written, with hvdlite or without.
            custom_optimizers: Classes of optimizers that Keras does not know.
            custom_objects: Other classes and functions of the model, by name.
            compression: Compression of gradients.

        Returns:
            The model; without an optimizer if it was saved without one.
        """
        named = {kind.__name__: kind for kind in custom_optimizers or ()}
        custom_objects = {**named, **(custom_objects or {})}
        model = self.keras().models.load_model(filepath, custom_objects=custom_objects)
        if getattr(model, "optimizer", None) is not None:
            self.DistributedOptimizer(model.optimizer, compression=compression)
        return model

    def summary_writer(self, log_dir: Any = "logs", **options: Any) -> Any:
        """Return Keras' callback for TensorBoard on rank 0, and one without effect on other ranks.

        Put it after `callbacks.MetricAverageCallback` in the list, so that it writes averages.

        Args:
            log_dir: Folder of the event files.
            options: Other arguments of ``keras.callbacks.TensorBoard``.

        Raises:
            NotInitializedError: hvdlite is not initialized.
        """
        callbacks = self.keras().callbacks
        if world.rank() == 0:
            return callbacks.TensorBoard(str(log_dir), **options)
        return callbacks.Callback()


@dataclass(frozen=True, eq=False)
class Wrapping:
    """The way in which an optimizer was made distributed, for others that are made from it."""

    distribute: Callable[[Any, Options], Any]
    options: Options
    local: LocalVariables

    def apply(self, optimizer: Any) -> Any:
        """Make another optimizer distributed alike, unless some options belong to a model."""
        argument = "model=" if self.options.model is not None else "local layers or variables"
        if self.options.model is not None or self.local:
            raise ValueError(
                f"an optimizer with {argument} belongs to one model, and another optimizer cannot "
                "be made from its configuration or by a copy of its model: make one with its "
                "class, and wrap it for the other model"
            )
        return self.distribute(optimizer, self.options)

    def __deepcopy__(self, memo: object) -> Wrapping:
        return self  # its options have no state

    def __getstate__(self) -> dict[str, Any]:
        if self.options.process_set is not global_process_set or self.local:
            raise TypeError(
                "the model's optimizer is distributed among the ranks of a process set, or has "
                "local layers, which another process does not know; save the model "
                "(model.save), and wrap the optimizer of the loaded one"
            )
        return vars(self)


class MarkedName(str):
    """The name of a distributed optimizer in its configuration, with its `Wrapping`.

    Keras passes strings on unchanged, so the wrapping survives serialization in memory. A file
    has the plain name.
    """

    wrapping: Wrapping

    def __deepcopy__(self, memo: object) -> MarkedName:
        return self

    def __reduce__(self) -> Any:
        return str, (str(self),)


def keep_wrapping(kind: Any) -> None:
    """Have ``from_config`` of a class return distributed optimizers for their configurations.

    So does that of its subclasses, which may have one of their own.
    """
    for each in kind.__subclasses__():
        keep_wrapping(each)
    original = kind.from_config.__func__

    @functools.wraps(original)
    def from_config(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        name = config.get("name")
        if not isinstance(name, MarkedName):
            return original(cls, config, *args, **kwargs)
        made = original(cls, {**config, "name": str(name)}, *args, **kwargs)
        return name.wrapping.apply(made)

    kind.from_config = classmethod(from_config)


def with_wrapping(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a model's ``__reduce__`` or ``__deepcopy__``, whose copies train as it does."""

    @functools.wraps(original)
    def copy(self: Any, *memo: Any) -> Any:
        part = distributed_part(getattr(self, "optimizer", None))
        if part is None:
            return original(self, *memo)
        if memo:  # of ``__deepcopy__``
            return _copied(original, (self, *memo), part._wrapping)
        reduced = original(self)
        return reduced if len(reduced) > 2 else (_copied, (*reduced, part._wrapping))

    return copy


def _copied(make: Callable[..., Any], args: tuple[Any, ...], wrapping: Wrapping) -> Any:
    model = make(*args)
    if distributed_part(model.optimizer) is None:
        wrapping.apply(model.optimizer)
    return model


class Distributed:
    """A mixin for the class of every distributed optimizer."""

    _hvdlite: Synchronizer
    _original: type[Any]  # the class without hvdlite
    _wrapping: Wrapping

    @property
    def stepped(self) -> bool:
        """True if the last ``apply`` was a step; with virtual ranks it may be a part of one."""
        path = self._hvdlite.path
        return path is None or path.stepped

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of a variable on this rank instead of exchanging them."""
        self._hvdlite.local.add([var])

    def exchange_state_dict(self) -> dict[str, Any]:
        """Return what compression and schedule remember on this rank: numbers and arrays, or {}.

        A saved model does not contain it, so that it loads without hvdlite. Save it beside.
        """
        return self._hvdlite.state.state_dict(self._hvdlite.options.process_set)

    def load_exchange_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load this rank's part of a result of `exchange_state_dict`."""
        options = self._hvdlite.options
        self._hvdlite.state.load_state_dict(state_dict, options.reduction.op, options.process_set)

    def consolidate_exchange_state(self) -> None:
        """Make what compression remembers the same on all ranks; collective.

        Call this before one rank saves `exchange_state_dict` for all. Nothing is lost: every rank
        gets the average of what all ranks have left to send.

        Raises:
            HorovodInternalError: Communication failed.
        """
        self._hvdlite.state.consolidate(self._hvdlite.options.process_set)

    def average_weights(self) -> None:
        """Average the weights over all ranks now, before an evaluation or at the end.

        This is for optimizers with a schedule of local steps. All ranks call it between the same
        steps, and have the same weights, bit by bit, afterwards. Ranks outside the process set keep
        their own.

        Raises:
            ValueError: There is no such schedule, or there has been no step.
            HorovodInternalError: The ranks disagree, or communication failed.
        """
        path = self._hvdlite.path
        if is_outside(self._hvdlite.options.process_set):
            return
        if path is None or path.steps is None:
            raise ValueError(
                "average_weights() is for an optimizer with a schedule of local steps, after its "
                "first step"
            )
        path.steps.average()

    # What the optimizer keeps for a weight, by name, and what it keeps for each of all weights.
    _kept_for: Callable[[Any], dict[str, Any]]
    _kept: Callable[[], Iterable[Mapping[Any, Any]]]

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class without hvdlite: Keras saves its name and finds it again by that."""
        return self._original

    def _refuse_copy(self, *_: object) -> NoReturn:
        raise TypeError(
            "a DistributedOptimizer cannot be copied or pickled; "
            "type(optimizer).from_config(optimizer.get_config()) makes another one, without state"
        )

    __copy__ = __deepcopy__ = __reduce_ex__ = _refuse_copy


class DistributedKeras(Distributed):
    """A mixin for optimizers of any Keras, which have a configuration."""

    def get_config(self) -> dict[str, Any]:
        """Return Keras' configuration; what Keras makes from it here is distributed, too."""
        config: dict[str, Any] = super().get_config()  # type: ignore[misc]
        if "name" in config:
            name = config["name"] = MarkedName(config["name"])
            name.wrapping = self._wrapping
        return config

    @classmethod
    def from_config(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Create an optimizer that is distributed in the same way; see `Wrapping.apply`."""
        made = cls._original.from_config(config, *args, **kwargs)
        return made if distributed_part(made) is not None else cls._wrapping.apply(made)


def make_distributed(
    optimizer: Any,
    mixin: type[Distributed],
    synchronizer: Synchronizer,
    distribute: Callable[[Any, Options], Any],
) -> Any:
    """Change the class of an optimizer to a distributed subclass with the same name.

    Args:
        distribute: Makes other optimizers distributed in the same way.
    """
    original = type(optimizer)
    subclass = type(
        original.__name__,
        (mixin, original),
        {
            "__module__": original.__module__,
            "__doc__": original.__doc__,
            "_original": original,
            "_wrapping": Wrapping(distribute, synchronizer.options, synchronizer.local),
        },
    )
    # Plain setattr would make Keras track the value as a part of the optimizer's state.
    object.__setattr__(optimizer, "_hvdlite", synchronizer)
    object.__setattr__(optimizer, "__class__", subclass)
    return optimizer


def distributed_part(optimizer: Any) -> Any:
    """Return the optimizer, or the part of it, that is distributed; None if no part is."""
    if isinstance(optimizer, Distributed):
        return optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return distributed_part(inner)
    parts = getattr(optimizer, "optimizers", None) or ()
    return next((part for part in map(distributed_part, parts) if part is not None), None)


def with_recompilation(
    make: Callable[..., Any],
    context: Callable[[Any], AbstractContextManager[None]],
) -> Callable[..., Any]:
    """Return a model's ``make_train_function`` that respects distributed optimizers.

    A training step that was compiled before the optimizer became distributed would exchange
    nothing, so it is compiled again.
    """

    @functools.wraps(make)
    def make_train_function(self: Any, force: bool = False) -> Any:
        part = distributed_part(self.optimizer)
        if part is None:
            return make(self, force=force)
        made = part._hvdlite.train_functions
        known = self.train_function is not None and self.train_function in made
        with context(self):
            result = make(self, force=force or not known)
        made.add(self.train_function)
        return result

    return make_train_function


def kept_in(attributes: Mapping[str, Any], index: int, size: int) -> dict[str, Any]:
    """Return the variables that an optimizer keeps for one of its own, by the attribute's name.

    Keras keeps moments in lists that are parallel to the list of variables.
    """
    other_lists = {"_variables", "_trainable_variables"}
    return {
        name: kept[index]
        for name, kept in attributes.items()
        if name not in other_lists
        and isinstance(kept, list)
        and len(kept) == size
        and hasattr(kept[index], "assign")
    }
