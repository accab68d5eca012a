"""Buckets as strategies see them: gradients of several parameters as one flat array, and state.

What strategies keep of parameters from one exchange to the next is in a `StrategyState`.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from hvdlite.base.arguments import check_positive
from hvdlite.base.reduction import ReduceOp, Scaling
from hvdlite.transport import Transport
from hvdlite.transport.transport import copy_parts

_UNSCALED = Scaling()
_COUNT = "exchanges"


@dataclass(frozen=True)
class Parameter:
    """A parameter as it is known before it has a gradient.

    Attributes:
        name: unique within its model, and the same on all ranks.
        shape: of its gradient.
        dtype: of its gradient, as numpy's (``ml_dtypes`` has bfloat16).
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def size(self) -> int:
        """Return the number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes."""
        return self.size * self.dtype.itemsize


@dataclass(frozen=True)
class Reduction:
    """The reduction of gradients: a sum, an average (with Horovod's predivision), or Adasum.

    An average over n ranks with ``predivide`` f is a sum of gradients divided by f that is
    multiplied by f/n: it moves a part of the division before the sum.
    """

    op: ReduceOp = ReduceOp.AVERAGE
    predivide: float = 1.0

    def __post_init__(self) -> None:
        if self.op not in (ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.ADASUM):
            raise ValueError(
                "gradients are reduced by hvd.Average, hvd.Sum or hvd.Adasum, not "
                f"{self.op.name.capitalize()}"
            )
        if self.predivide != 1.0 and self.op is not ReduceOp.AVERAGE:
            raise ValueError("gradient_predivide_factor needs op=hvd.Average")
        check_positive("gradient_predivide_factor", self.predivide)

    def scalings(self, dtype: np.dtype[Any], size: int) -> tuple[Scaling, Scaling]:
        """Return the scaling of a dtype's elements before and after the sum over ``size`` ranks."""
        if self.predivide == 1.0 or dtype.kind in "iu":  # which would lose a remainder before it
            return _UNSCALED, self.combined(size)
        return Scaling(1.0 / self.predivide), Scaling(self.predivide, size)

    def combined(self, size: int) -> Scaling:
        """Return both scalings as one, for strategies that scale once."""
        return Scaling(1.0, size) if self.op is ReduceOp.AVERAGE else _UNSCALED


class StrategyState:
    """State of each parameter, by the parameter's name.

    It belongs to a list of parameters, not to their buckets, which may be packed again. Arrays
    are residuals and other values of this rank's own, or low-rank factors, which are the same on
    all ranks.

    Attributes:
        is_common: whether all ranks have the same state, see `ExchangeState.consolidate`.
        common: keys of the arrays that are the same on all ranks in any case.
        owner: the rank of the last exchange and the number of ranks; None before the first one.
    """

    def __init__(self) -> None:
        self.is_common = False
        self.common = {_COUNT}
        self.owner: tuple[int, int] | None = None
        self._entries: dict[str, dict[str, Any]] = {}

    def entry(self, name: str) -> dict[str, Any]:
        """Return the arrays of a parameter, which the caller may change."""
        return self._entries.setdefault(name, {})

    def state_dict(self, names: Iterable[str] | None = None) -> dict[str, dict[str, Any]]:
        """Return copies of the arrays of some parameters or all, by their names and keys."""
        chosen = list(self._entries) if names is None else names
        # A lane's thread may be changing them: copy each dict at once.
        entries = {name: dict(self._entries.get(name, {})) for name in chosen}
        return {
            name: {key: np.array(array) for key, array in entry.items()}
            for name, entry in entries.items()
            if entry
        }

    def load_state_dict(
        self, state: Mapping[str, Mapping[str, Any]], names: Iterable[str] | None = None
    ) -> None:
        """Load the result of `state_dict`, called here or elsewhere.

        Args:
            names: the parameters to be loaded; None: all, and others are forgotten.
        """
        self.is_common = False
        if names is None:
            self._entries.clear()
        for name in state if names is None else names:
            entry = state.get(name, {})
            self._entries[name] = {key: np.array(array) for key, array in entry.items()}

    def __bool__(self) -> bool:
        return any(self._entries.values())


class BucketState:
    """State of a bucket's parameters, in their order, kept in the state of all parameters."""

    def __init__(self, parameters: Sequence[Parameter], whole: StrategyState) -> None:
        self._parameters = tuple(parameters)
        self._whole = whole
        self._flat: dict[str, tuple[Any, list[Any]]] = {}

    @property
    def count(self) -> int:
        """Return the number of exchanges so far, on which all ranks agree."""
        counts = [int(entry[_COUNT]) for entry in self._entries() if _COUNT in entry]
        return max(counts, default=0)

    @count.setter
    def count(self, value: int) -> None:
        for entry in self._entries():
            entry[_COUNT] = np.array(value, np.int64)
        self._whole.is_common = False

    def set_owner(self, rank: int, size: int) -> None:
        """Record the rank that exchanges, and the number of ranks."""
        self._whole.owner = rank, size

    def copy(self) -> dict[str, dict[str, Any]]:
        """Return copies of all arrays, by the parameter's name and the array's key."""
        return self._whole.state_dict([parameter.name for parameter in self._parameters])

    def restore(self, copies: Mapping[str, Mapping[str, Any]]) -> None:
        """Set all arrays to what `copy` has returned."""
        self._whole.load_state_dict(copies, [parameter.name for parameter in self._parameters])

    def flat(self, key: str, dtype: Any) -> Any:
        """Return an array like the bucket's, at first of zeros, to be changed in place."""
        array, views = self._flat.get(key, (None, []))
        entries = self._entries()
        if array is None or any(e.get(key) is not v for e, v in zip(entries, views, strict=True)):
            array, views = self._concatenate(key, np.dtype(dtype))
            self._flat[key] = array, views
        return array

    def _concatenate(self, key: str, dtype: np.dtype[Any]) -> tuple[Any, list[Any]]:
        """Move the parameters' arrays into one, of which they become views."""
        array = np.zeros(sum(parameter.size for parameter in self._parameters), dtype)
        views, start = [], 0
        for parameter, entry in zip(self._parameters, self._entries(), strict=True):
            view = array[start : start + parameter.size].reshape(parameter.shape)
            earlier = entry.get(key)
            if earlier is not None and earlier.shape == parameter.shape:
                view[...] = earlier
            entry[key] = view
            views.append(view)
            start += parameter.size
        return array, views

    def get(self, position: int, key: str) -> Any:
        """Return an array of the parameter at a position; None if there is none yet."""
        return self._whole.entry(self._parameters[position].name).get(key)

    def set(self, position: int, key: str, array: Any, is_common: bool = False) -> None:
        """Keep an array of any shape for the parameter at a position.

        Args:
            is_common: whether arrays of this key are the same on all ranks. A rank that comes in
                later gets them from another rank, and none of the others.
        """
        if is_common:
            self._whole.common.add(key)
        self._whole.entry(self._parameters[position].name)[key] = array

    def _entries(self) -> list[dict[str, Any]]:
        return [self._whole.entry(parameter.name) for parameter in self._parameters]


class Bucket:
    """The send and the result array of several parameters of one dtype.

    An exchange reads ``send`` and writes ``result``: the gradients stay intact until the step is
    complete.

    Args:
        parameters: in their order within the arrays.
        reduction: to be computed by the exchange.
        empty: makes a flat array of a given size and dtype; None: there are no arrays before
            `derive`.
        state: what strategies remember of the parameters; None: nothing yet.

    Attributes:
        bounds: the offset of each parameter in the arrays, and the end of the last one.
        send: the gradients, flat. It may be ``result``: read it before writing there.
        result: the reduced gradients, flat.
        count: the number of exchanges before this one, the same on all ranks.
        absent: positions of parameters of which no rank has a gradient in this step.
        zero_copy: flat arrays that stand for parts of ``send`` until `copy_zero_copy_parts` copies
            them, by their offset there.
        unsent: None, or an array like ``send`` in which the exchange leaves the part of ``send``
            that is missing from the result.
        sent: the bytes that the last exchange has sent to other ranks; see `CountingTransport`.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        reduction: Reduction,
        empty: Callable[[int, np.dtype[Any]], Any] | None = np.empty,
        state: StrategyState | None = None,
    ) -> None:
        self.parameters = tuple(parameters)
        self.reduction = reduction
        self._empty = empty
        self.bounds = np.cumsum([0, *(parameter.size for parameter in parameters)]).tolist()
        self.state = BucketState(parameters, StrategyState() if state is None else state)
        self.count = 0
        self.absent: Collection[int] = ()
        self.zero_copy: dict[int, Any] = {}
        self.unsent: Any = None
        self.sent = 0
        self.send: Any = None
        self.result: Any = None
        if empty is not None:
            self.send = empty(self.bounds[-1], parameters[0].dtype)
            self.allocate_result()

    def allocate_result(self) -> None:
        """Allocate a new result array; its users may keep the old one."""
        assert self._empty is not None
        self.result = None  # so that its memory can be reused
        self.result = self._empty(self.bounds[-1], self.parameters[0].dtype)

    def copy_zero_copy_parts(self) -> None:
        """Copy all zero-copy parts into ``send``."""
        copy_parts([*self.zero_copy.items()], self.send)
        self.zero_copy = {}

    def derive(self, send: Any, result: Any, unsent: Any = None) -> Bucket:
        """Return a bucket of the same parameters with other arrays of the same size."""
        derived = copy.copy(self)
        derived.send, derived.result, derived.unsent = send, result, unsent
        derived.zero_copy = {}
        return derived

    def reduce(self, transport: Transport, send: Any, result: Any, scaling: Scaling) -> None:
        """Write ``scaling.apply(the reduction of all ranks' send)`` into ``result``.

        Both are of the bucket's size and of one float type, and may be one array.
        """
        if self.reduction.op is ReduceOp.ADASUM:
            self.copy_zero_copy_parts()
            transport.adasum(send, result, scaling, self.bounds)
        elif self.zero_copy:
            transport.allreduce_zero_copy(
                send, sorted(self.zero_copy.items()), result, ReduceOp.SUM, scaling
            )
        else:
            transport.allreduce(send, result, ReduceOp.SUM, scaling)

    def send_slot(self, position: int) -> Any:
        """Return a parameter's part of ``send``, in the parameter's shape."""
        return self.slot(self.send, position)

    def result_slot(self, position: int) -> Any:
        """Return a parameter's part of ``result``, in the parameter's shape."""
        return self.slot(self.result, position)

    def slot(self, array: Any, position: int) -> Any:
        """Return a parameter's part of an array like ``send``, in the parameter's shape."""
        start, stop = self.bounds[position : position + 2]
        return array[start:stop].reshape(self.parameters[position].shape)

    def generator(self, seed: int, *more: int, position: int | None = None) -> np.random.Generator:
        """Return a generator that depends on the step and on all parameters, or one, alone."""
        chosen = self.parameters if position is None else (self.parameters[position],)
        names = "\n".join(parameter.name for parameter in chosen)
        entropy = [seed, self.count, zlib.crc32(names.encode()), *more]
        return np.random.Generator(np.random.SFC64(entropy))
