"""The reducer and the optimizer for virtual ranks: several parts of each step in a process."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import threading
import weakref
import zlib
from collections.abc import Sequence, Set
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler

from hvdlite.compression import Parameter
from hvdlite.engine import Signature
from hvdlite.engine.process_sets import ProcessSet, global_process_set
from hvdlite.gradients.options import Options
from hvdlite.gradients.replicas import describe_optimizer
from hvdlite.recipe import seeding
from hvdlite.torch.hooks import remove_hooks
from hvdlite.torch.reducer import Names, describe, in_order
from hvdlite.torch.replicas import find_frozen, host_options, make_check
from hvdlite.torch.tensors import to_array, to_tensor_like
from hvdlite.torch.wrapping import Distributed, find_closure
from hvdlite.virtual import ranks as virtual_ranks
from hvdlite.virtual.gradients import Outcome, VirtualExchange, refuse_options
from hvdlite.virtual.ranks import turns_of
from hvdlite.world import parts, world

_log = logging.getLogger("hvdlite")
# The parts at whose end we look whether they have changed a state that is not the virtual ranks'.
_PARTS_WATCHED = 8


class VirtualReducer:
    """Average the gradients of all virtual ranks, once the last of them have been computed.

    To an optimizer it is what `hvdlite.torch.reducer.Reducer` is; but there are no hooks: gradients
    are taken in ``finish``, which ends the part of one virtual rank.

    Args:
        names: of the parameters, in the order of their registration; later ones are added.
        label: unique, and the same on all processes.
        optimizer: compared across processes, with its weights.

    Attributes:
        averaged: whether the gradients are averages, or there are none because parts are missing.
        stepped: whether they are averages.
    """

    process_set: ProcessSet = global_process_set
    passes_per_step = 1
    in_flight = False
    weight = 1.0

    def __init__(
        self,
        names: Names,
        options: Options,
        label: str,
        optimizer: torch.optim.Optimizer,
    ) -> None:
        if "OMP_NUM_THREADS" not in os.environ:
            torch.set_num_threads(1)  # the bits of a result depend on it
        self.names = names
        self.averaged = self.stepped = False
        self.op = options.reduction.op
        self._sparse_as_dense = options.sparse_as_dense
        self._parameters: list[torch.Tensor] = []
        self._buffers = ModelBuffers(options.model)
        self._find_optimizer = weakref.ref(optimizer)
        self._schedulers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._constants: dict[tuple[str, int], Any] = {}  # with which the step has begun
        self._has_begun = False
        self._look_around()
        frozen = partial(find_frozen, names)
        check = make_check(self._find_optimizer, names, self._parameters, frozen)
        self.exchange = VirtualExchange(label, options.strategy, options.reduction, check)

    def may_have_new(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Return False: there are no hooks to tell, and torch clips each virtual rank's own."""
        return False

    def attach(self, parameters: Sequence[torch.Tensor]) -> None:
        """Exchange these parameters' gradients."""
        known = len(self.names)
        self._parameters[:] = in_order(self.names, parameters)
        if len(self.names) > known:
            self._look_around()

    def _look_around(self) -> None:
        """Find the modules of the parameters, and the schedulers of the optimizer.

        It is done when the optimizer is wrapped, and in its first step, since some may be made in
        between.
        """
        modules, schedulers = [], []
        for each in gc.get_objects():
            # Not isinstance(), which asks proxies for their class.
            if issubclass(type(each), torch.nn.Module):
                if "_modules" in each.__dict__:  # the others failed in their constructor
                    modules.append(each)
            elif issubclass(type(each), LRScheduler):
                schedulers.append(each)
        self._buffers.require(modules, {*map(id, self.names)})
        optimizer = self._find_optimizer()
        self._schedulers.update(s for s in schedulers if s.__dict__.get("optimizer") is optimizer)

    def finish(self, samples: int | None = None) -> None:
        """End the part of a virtual rank; after the last one, average over all.

        Afterwards ``grad`` of the parameters is the average, or, if there are parts left, None.

        Raises:
            HorovodInternalError, ValueError: as `VirtualExchange.end_part`.
            RuntimeError: as `Turns.check_request`, `VirtualExchange.end_part` and
                `ModelBuffers.take`; or what stays the same within a step has changed.
            TypeError: a gradient is sparse.
        """
        turns_of(self.exchange.size).check_request()
        if not self._has_begun:
            self._look_around()
            self._has_begun = True
        self._check_constants()
        gradients: list[Any] = []
        axes: dict[int, int] = {}
        for number, parameter in enumerate(self._parameters):
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                if not self._sparse_as_dense:
                    raise TypeError(
                        f"the gradient of {self.names[parameter]!r} is sparse; with virtual ranks, "
                        "pass sparse_as_dense=True to hvd.DistributedOptimizer"
                    )
                axes[number] = gradient.sparse_dim()
                gradient = gradient.to_dense()
            gradients.append(None if gradient is None else to_array(gradient))
        described, values, changed = self._buffers.take()
        self.exchange.follow(describe(self.names, self._parameters), described)
        self.exchange.start = Signature(
            [
                ("the seed of hvd.seed", seeding.last),
                ("the number of threads", torch.get_num_threads()),
                *self._buffers.checksums(),
            ]
        )
        self.stepped = False
        outcome = self.exchange.end_part(gradients, values, changed, samples, axes)
        if outcome is None:
            for parameter in self._parameters:
                parameter.grad = None  # so that no optimizer changes anything
        else:
            self._hand_over(outcome)
            self._buffers.begin_step(outcome.buffers)
            self.stepped = True
        self.averaged = True
        seeding.seed_part()

    def _check_constants(self) -> None:
        """Require what all parts of a step have to begin with: options, weights, schedules."""
        optimizer = self._find_optimizer()
        assert optimizer is not None  # it calls this
        kind = type(optimizer).__name__
        groups = (host_options(each, waits=True) for each in optimizer.param_groups)
        constants = {(name, 0): value for name, value in describe_optimizer(kind, *groups)}
        for each in self._schedulers:
            constants[f"the number of steps of {type(each).__name__}", id(each)] = each.last_epoch
        for parameter in self._parameters:
            name = f"the version of the weight {self.names[parameter]!r}"
            constants[name, id(parameter)] = parameter._version
        if parts.current.is_within_step():
            for key, value in self._constants.items():
                if value not in (constants.get(key, value),):  # NaN is equal to itself
                    raise RuntimeError(
                        f"rank {world.rank()}: {key[0]} was {value} when the step began, and is "
                        f"{constants[key]} in its middle; call scheduler.step() only if "
                        "optimizer.stepped, and change options and weights only then, too"
                    )
        self._constants = constants

    def _hand_over(self, outcome: Outcome) -> None:
        pairs = zip(self._parameters, outcome.averages, strict=True)
        with torch.no_grad():
            for number, (parameter, average) in enumerate(pairs):
                if average is None:
                    parameter.grad = None
                    continue
                tensor = to_tensor_like(average, parameter)
                if number in outcome.axes:  # SparseAdam takes no others
                    parameter.grad = tensor.to_sparse(outcome.axes[number])
                elif parameter.grad is None or parameter.grad.is_sparse:
                    parameter.grad = tensor.clone()
                else:
                    parameter.grad.copy_(tensor)

    def reset_passes(self) -> None:
        """Forget averages; parts that have been computed stay."""
        self.averaged = False

    def restart(self) -> None:
        """Forget a step that was given up, and move to the current world."""
        self.averaged = False
        self._buffers.restart()
        self.exchange.connect()
        turns = turns_of(self.exchange.size)
        turns.begin_step(turns.step)


class _Buffer(NamedTuple):
    """A buffer of a module, which may be replaced, and a copy of what it holds."""

    module: torch.nn.Module
    key: str
    tensor: torch.Tensor | None
    value: Any


class ModelBuffers:
    """The buffers of a model that change with every batch, such as running averages.

    A step begins when data for its first part are asked for. Each part begins with what the buffers
    held then, and ends with its own values. Their average is what the next step begins with, as far
    as any part has changed them. Entries of bool buffers that any part has changed are changed.

    Buffers are looked up by module and name each time: a module may replace them, and add some.
    """

    def __init__(self, model: torch.nn.Module | None) -> None:
        self._model = model
        self._thread = threading.get_ident()
        self._failure = ""
        self._watched = _PARTS_WATCHED
        self._outside: dict[str, Any] = {}
        # What each buffer held when the step began, or None, and after the part that ended last.
        self._pairs: list[tuple[_Buffer | None, _Buffer]] = []
        self.restart()
        virtual_ranks.listeners.add(self)

    def require(self, modules: Sequence[torch.nn.Module], parameters: Set[int]) -> None:
        """Require that the buffers of all modules of the parameters, by id, are the model's.

        Raises:
            ValueError: a module that has a parameter has a buffer, too, and is not in the model.
        """
        model = self._model
        known = set() if model is None else {*model.modules()}
        for top in modules:
            if top in known or parameters.isdisjoint(map(id, top.parameters())):
                continue
            for name, module in top.named_modules():
                keys = [key for key, buffer in module._buffers.items() if buffer is not None]
                if keys and module not in known:
                    given = "no model=" if model is None else f"model= a {type(model).__name__}"
                    raise ValueError(
                        f"rank {world.rank()}: the {type(top).__name__} whose parameters are "
                        f"optimized has a buffer, {'.'.join(filter(None, (name, keys[0])))!r}, and "
                        f"hvd.DistributedOptimizer got {given} that has it; pass model=, the "
                        "module with all of them, so that they are averaged over the virtual ranks"
                    )

    def restart(self) -> None:
        """Begin a step with what the buffers hold now."""
        self._start = self._read()
        self._has_begun = self._is_loaded = False

    def _read(self) -> dict[str, _Buffer]:
        found = {}
        for path, module in () if self._model is None else self._model.named_modules():
            for key, tensor in module._buffers.items():
                name = f"{path}.{key}" if path else key
                try:
                    value = None if tensor is None else np.array(to_array(tensor.detach()))
                except TypeError as error:
                    raise TypeError(f"the buffer {name!r} of the model: {error}") from None
                found[name] = _Buffer(module, key, tensor, value)
        return found

    def on_request(self, source: object | None) -> None:
        """Note with what the step begins, when the data of a part are asked for.

        Only a part may change the buffers. The changes between its first request and its end are
        its own, and those before it come from outside of a loop: they are allowed between steps.
        """
        if threading.get_ident() != self._thread:
            return  # a thread takes batches in advance
        is_own_loop = source is None
        if self._has_begun and is_own_loop and self._is_loaded:
            return  # it asks whose turn it is, after a batch has been loaded
        found = self._read()
        if not (self._has_begun or parts.current.is_within_step()):
            self._start = found
        elif changed := [
            name
            for name in {**self._start, **found}
            if not _are_equal(self._start.get(name), found.get(name))
        ]:
            self._failure = (
                f"rank {world.rank()}: the buffer {changed[0]!r} of the model was changed in a "
                "step, but not between a request for the data of a virtual rank (a batch of "
                "hvd.shard, or hvd.virtual_rank()) and its optimizer.step(); with virtual ranks, "
                "call the model in training mode there, or between two steps (if "
                "optimizer.stepped); elsewhere call model.eval() before"
            )
        if not self._has_begun and self._watched:
            self._outside = _states_outside(self._model)
        self._has_begun, self._is_loaded = True, self._is_loaded or not is_own_loop

    def _watch(self) -> None:
        """Warn once if a part has changed a state that the next virtual rank here goes on with."""
        before, self._outside = self._outside, {}
        if not (before and self._watched):
            return
        now, self._watched = _states_outside(self._model), self._watched - 1
        changed = [name for name, state in before.items() if now.get(name, state) != state]
        if changed and world.rank() == 0:
            self._watched = 0
            _log.warning(
                "rank 0: %s changes with every batch; with virtual ranks it goes on from one to "
                "the next of the same process, so what depends on it depends on the number of "
                "processes: make it a buffer (register_buffer), or draw from the generators that "
                "hvd.seed seeds",
                ", ".join(changed),
            )

    def take(self) -> tuple[list[Parameter], list[Any], list[int]]:
        """Take what a part has left, and give the buffers back what the step has begun with.

        Returns:
            Descriptions of the buffers; what they held, in the form in which it is averaged; and
            the numbers of those that the part has changed.

        Raises:
            RuntimeError: they were changed where no part can be told to have done so.
            TypeError: they cannot be averaged.
        """
        self._watch()
        self._thread = threading.get_ident()
        failure, self._failure = self._failure, ""
        found = self._read()
        for name, buffer in found.items():
            before = self._start.get(name)
            if before is None:
                del buffer.module._buffers[buffer.key]
            elif before.tensor is not buffer.tensor or not _are_equal(before, buffer):
                _set(before, before.value)
        self._has_begun = self._is_loaded = False
        if failure:
            raise RuntimeError(failure)
        there = {name: buffer for name, buffer in found.items() if buffer.tensor is not None}
        begun = {name: buffer for name, buffer in self._start.items() if buffer.tensor is not None}
        if lost := [name for name in begun if name not in there]:
            raise RuntimeError(
                f"rank {world.rank()}: the buffer {lost[0]!r} of the model is None or gone after "
                "the part of a virtual rank; with virtual ranks, buffers stay once they are there"
            )
        self._pairs = [(begun.get(name), buffer) for name, buffer in there.items()]
        values = [_averaged_form(buffer.value) for buffer in there.values()]
        described = [Parameter(n, v.shape, v.dtype) for n, v in zip(there, values, strict=True)]
        changed = [n for n, pair in enumerate(self._pairs) if not _are_equal(*pair)]
        return described, values, changed

    def checksums(self) -> list[tuple[str, str]]:
        """Return names and checksums of what the step has begun with."""
        return [
            (f"the CRC-32 of the buffer {name!r}", f"{zlib.crc32(buffer.value.tobytes()):08x}")
            for name, buffer in self._start.items()
            if buffer.tensor is not None
        ]

    def begin_step(self, averages: Sequence[Any]) -> None:
        """Set the buffers that any part has changed to the averages of what `take` returned."""
        for (before, now), average in zip(self._pairs, averages, strict=True):
            if average is not None:
                _set(now if before is None else before, _value_form(before, now, average))
        self.restart()


def _states_outside(model: torch.nn.Module | None) -> dict[str, Any]:
    """Return states that a batch may change: a model's plain attributes, the script's generators.

    Tensors that are computed from parameters, as by weight normalisation, are none.
    """
    found: dict[str, Any] = {}
    for path, module in () if model is None else model.named_modules():
        for key, value in vars(module).items():
            name = f"the attribute {f'{path}.{key}'.lstrip('.')!r} of the model"
            if type(value) in (int, float, complex):
                found[name] = value
            elif isinstance(value, torch.Tensor) and not value.requires_grad:
                found[name] = id(value), value._version
    for key, value in [*vars(sys.modules["__main__"]).items()]:
        if isinstance(value, torch.Generator):
            found[f"the generator {key!r}"] = value.get_state().cpu().numpy().tobytes()
        elif isinstance(value, np.random.Generator):
            found[f"the generator {key!r}"] = repr(value.bit_generator.state)
        elif isinstance(value, random.Random):
            found[f"the generator {key!r}"] = value.getstate()
    return found


def _are_equal(before: _Buffer | None, now: _Buffer | None) -> bool:
    old, new = (None if each is None else each.value for each in (before, now))
    if old is None or new is None:
        return old is new
    is_like = (old.shape, old.dtype) == (new.shape, new.dtype)
    return is_like and bool(old.tobytes() == new.tobytes())


def _set(buffer: _Buffer, value: Any) -> None:
    """Set a buffer, in the memory that it had if that fits."""
    tensor = buffer.tensor
    if tensor is not None:
        new = to_tensor_like(np.array(value), tensor)
        if (tensor.shape, tensor.dtype) == (new.shape, new.dtype):
            with torch.no_grad():
                tensor.copy_(new)
        else:
            tensor = new
    buffer.module._buffers[buffer.key] = tensor


def _averaged_form(value: Any) -> Any:
    """Return a buffer's value as numbers whose average says what all parts have made of it."""
    if value.dtype == np.bool_:
        return value.astype(np.float32)
    return value.reshape(-1).view(value.real.dtype) if value.dtype.kind == "c" else value


def _value_form(before: _Buffer | None, now: _Buffer, average: Any) -> Any:
    """Return the value that belongs to an average of what `_averaged_form` returns."""
    if now.value.dtype == np.bool_:  # a part has changed those that not all have left as they were
        is_like = before is not None and before.value.shape == now.value.shape
        was_set = before.value if before is not None and is_like else False
        return np.where(was_set, average == 1, average > 0)
    if now.value.dtype.kind == "c":
        return average.view(now.value.dtype).reshape(now.value.shape)
    return average


class Virtual(Distributed):
    """The methods that `DistributedOptimizer` adds to an optimizer's class with virtual ranks."""

    _reducer: Any

    @classmethod
    def wrap(cls, optimizer: torch.optim.Optimizer, names: Names, options: Options) -> Any:
        """Make an optimizer one of this class; refuse what virtual ranks cannot do."""
        refuse_options(options)
        return super().wrap(optimizer, names, options)

    @classmethod
    def _make(
        cls,
        optimizer: torch.optim.Optimizer,
        names: Names,
        options: Options,
        label: str,
    ) -> tuple[Any, Any]:
        remove_hooks(names)
        reducer = VirtualReducer(names, options, label, optimizer)
        return reducer, reducer.exchange

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
        if enabled:
            self._prepare_scaled_step(None)
        super()._prepare_unscaling(enabled)

    def _prepare_scaled_step(self, batch_size: int | None) -> NoReturn:
        raise ValueError(
            "a GradScaler cannot be used with virtual ranks: it would be updated for every "
            "virtual rank; use bfloat16, which needs no scaling"
        )
