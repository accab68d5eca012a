"""The rolling comparison of the ranks' replicas: weights, the optimizer's options, and its state.

Options are compared with every exchange of gradients, arrays in slices, another one each time.
"""

from __future__ import annotations

import logging
import math
import struct
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from hvdlite.base.settings import Settings
from hvdlite.errors import MismatchError
from hvdlite.gradients.difference import WEIGHT, explain
from hvdlite.gradients.same_data import UNKNOWN, DataCheck, checksum
from hvdlite.transport import Transport

_log = logging.getLogger("hvdlite")

#: After this many exchanges, at most, each element of each array has been compared.
ROTATION = 512
# Bytes in a slice, at least: the cost of two arrays. An array costs as much as `_OVERHEAD` bytes.
_LEAST, _OVERHEAD = 2**16, 2**15
# The arrays are looked up again after this many exchanges, at least: an optimizer seldom gets new
# ones, and to find those of a small model takes longer than to compare them.
_SAME_ARRAYS = 16
#: Slices of arrays on a GPU are copied, and waited for, in one of so many exchanges.
DEVICE_STRIDE = 16
_FULL = 2**32 - 1  # the position of a comparison of everything
# Whether a difference is an error; the number of the exchange; the position in the rotation; the
# digests of the options and of the arrays; the checksums of gradients and of the data's division.
_DIGEST = struct.Struct("<?QI8s8s8s")
REPLICA_DIGEST_SIZE = _DIGEST.size

_CLASS = "the optimizer's class"
# Options that are no hyperparameters, or that may differ between devices or ranks.
_NOT_COMPARED = {
    "params",
    "param_names",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "name",
    "jit_compile",
    "is_legacy_optimizer",
}

#: Returns an array, or a tensor that can be sliced and has a shape, a dtype and an itemsize, as it
#: is now; None: there is none any more.
Find = Callable[[], Any]


def weight_label(name: str) -> str:
    """Return the label of a weight."""
    return f"{WEIGHT}{name!r}"


def state_label(key: str, name: str = "") -> str:
    """Return the label of an array of an optimizer's state, of a weight by its name or of none."""
    return f"the optimizer's {key} of {name!r}" if name else f"the optimizer's {key}"


def describe_optimizer(kind: str, *groups: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Describe an optimizer for comparison: numbers and strings, but no tensors or callables.

    Args:
        kind: the name of its class.
        *groups: for each group of parameters, its options by name.
    """
    options = [
        (f"the optimizer's {name}" + (f" in group {number}" if len(groups) > 1 else ""), value)
        for number, group in enumerate(groups)
        for name, value in _comparable(group).items()
    ]
    return [(_CLASS, kind), ("the number of the optimizer's groups", len(groups)), *options]


class Snapshot(NamedTuple):
    """A rank's part of a comparison.

    Attributes:
        find_check: returns the comparison; None: it is gone with its optimizer, which an exchange
            that has lost its waiter must not keep.
        step: the number of the exchange.
        position: of the slice in the rotation.
        digest: bytes that stand for all of it, without gradients.
        compares_data: whether the gradients are to be compared, too.
    """

    find_check: Callable[[], ReplicaCheck | None]
    step: int
    position: int
    digest: bytes
    compares_data: bool

    def with_gradients(self, gradients: Any) -> bytes:
        """Return the digest with a checksum of flat gradients on the host."""
        return self.digest[: -len(UNKNOWN)] + checksum(gradients)

    def succeed(self) -> None:
        """Record that all ranks have sent the same digest."""
        check = self.find_check()
        if check is not None:
            check.succeed(self.position, self.step)


class ReplicaCheck:
    """Compare the replicas of one model across ranks, together with the exchanges of gradients.

    Ranks compare all they have with their second exchange in a world: some scripts broadcast
    weights after the first step. Afterwards they compare the options each time, and one slice of
    the arrays, so that `ROTATION` exchanges compare everything; and everything at once again every
    ``HVDLITE_CHECK_RANKS_EVERY``, and where they have not taken part in the same number of
    exchanges, after a join for example.

    The arrays must not change from `begin` until the exchange has ended.

    Args:
        options: returns pairs of a label and a plain value that must be equal on all ranks, see
            `describe_optimizer`.
        values: returns pairs of a label, see `weight_label` and `state_label`, and a `Find`, in an
            order that is the same on all ranks: the arrays that must be equal.
        remedy: the call that gives all ranks the same weights, for messages.
        uncompared: returns the number of exchanges in a world before the first comparison.
        to_array: returns a slice of what a `Find` returns as a numpy array.
        stride: the number of exchanges from slice to slice, which is longer accordingly: more than
            one where it costs something to begin to read.
        constants: returns what ``values`` does, of arrays that training does not change, such as
            frozen weights: they are compared where everything is, but in no slice.
    """

    def __init__(
        self,
        options: Callable[[], Iterable[tuple[str, Any]]],
        values: Callable[[], Iterable[tuple[str, Find]]],
        remedy: str,
        uncompared: Callable[[], int] = lambda: 1,
        to_array: Callable[[Any], Any] = np.asarray,
        stride: Callable[[], int] = lambda: 1,
        constants: Callable[[], Iterable[tuple[str, Find]]] = tuple,
    ) -> None:
        self.remedy = remedy
        self.data = DataCheck()
        self._to_array = to_array
        self._options = options
        self._values = values
        self._uncompared = uncompared
        self._stride = stride
        self._constants = constants
        self._world: Callable[[], object | None] = lambda: None
        self._steps = 0  # completed ones
        self._until_all: float = 0  # the number of exchanges before one that compares everything
        self._rolls = False  # whether slices are compared
        self._every: float = math.inf
        self._last_options: tuple[tuple[tuple[str, Any], ...], bytes] = ((), b"")
        self._equal_options = 0  # the last step in which all ranks had the same
        self.rotation = Rotation((), to_array, 1, None)
        self._position = 0
        self._found_at = 0  # the exchange for which the arrays of the rotation were looked up

    def begin(self, world: object, settings: Settings) -> Snapshot | None:
        """Return this rank's part of the comparison; None: there is none with the next exchange.

        Args:
            world: another object after ``init()`` has been called again: all checks are due again.
        """
        if self._world() is not world:
            self._world = weakref.ref(world)
            self._until_all, self._rolls = self._uncompared(), False
            self.data = DataCheck()
        is_full = not self._until_all
        if settings.check_ranks == "off" or not (is_full or self._rolls):
            return None
        self._every = settings.check_ranks_every or math.inf
        options = tuple(self._options())
        if options != self._last_options[0] or not self._last_options[1]:
            self._last_options = options, blake2b(repr(options).encode(), digest_size=8).digest()
        raises, step = settings.check_ranks == "error", self._steps + 1
        if is_full or self._position >= self.rotation.length:
            self._position = 0
            if is_full or step >= self._found_at + _SAME_ARRAYS:
                self._begin_rotation()
        position = _FULL if is_full else self._position
        values = self.rotation.digest(position)
        digest = _DIGEST.pack(raises, step, position, self._last_options[1], values, UNKNOWN)
        return Snapshot(weakref.ref(self), step, position, digest, self.data.is_due)

    @property
    def options(self) -> Sequence[tuple[str, Any]]:
        """Return the options of the last `begin`."""
        return self._last_options[0]

    def _begin_rotation(self) -> None:
        values, constants = self._values(), () if self._until_all else self._constants()
        self.rotation = Rotation(values, self._to_array, self._stride(), self.rotation, constants)
        self._position, self._found_at = 0, self._steps + 1

    def end(self) -> None:
        """Count an exchange."""
        self._steps += 1
        self._until_all = max(self._until_all - 1, 0)

    def succeed(self, position: int, step: int) -> None:
        """Record that the ranks have compared, and agree; once more changes nothing.

        Args:
            position: of the slice.
            step: the number of the exchange, the same on all ranks from now on.
        """
        self._steps, self._equal_options = step - 1, step
        self.rotation.record(position, step)
        if position == _FULL:
            self._until_all, self._rolls, self._position = self._every, True, 0
        else:
            self._position = position + 1

    def restart(self) -> Rotation:
        """Compare everything until the ranks agree; return the arrays as they are now."""
        self._until_all = 0
        self._begin_rotation()
        return self.rotation

    def rest(self) -> None:
        """Compare nothing, as ranks are known to differ, until everything is due again."""
        self._until_all, self._rolls = self._every, False

    def equal_since(self, label: str | None, element: int) -> int:
        """Return the last step in which an element (None: the options) was equal; 0: never."""
        return self._equal_options if label is None else self.rotation.equal_since(label, element)


class _Entry(NamedTuple):
    """An array of a rotation, described as it was at its beginning."""

    label: str
    find: Find
    shape: tuple[int, ...]
    dtype: Any
    itemsize: int
    size: int

    def read(self, start: int, stop: int, to_array: Callable[[Any], Any]) -> Any:
        """Return some elements, flat, in the order of C; None: the array is another one now."""
        found = self.find()
        if found is None or found.shape != self.shape or found.dtype != self.dtype:
            return None
        if stop - start == self.size:
            return np.ascontiguousarray(to_array(found)).reshape(-1)
        row = self.size // self.shape[0]
        first, last = start // row, -(-stop // row)
        # Of an array that is not contiguous, these rows alone are copied.
        rows = np.ascontiguousarray(to_array(found[first:last])).reshape(-1)
        return rows[start - first * row : stop - first * row]


def _entries_of(values: Iterable[tuple[str, Find]]) -> Iterator[_Entry]:
    for label, find in values:
        array = find()
        if array is not None:
            sizes = array.itemsize, math.prod(array.shape)
            yield _Entry(label, find, array.shape, array.dtype, *sizes)


class Rotation:
    """The arrays of a replica, cut into slices of equal costs.

    Args:
        values: as in `ReplicaCheck`, now.
        to_array, stride: as there.
        before: the rotation before, which knows when arrays have been equal.
        constants: as in `ReplicaCheck`, now.

    Attributes:
        length: the number of exchanges that compare all slices.
    """

    def __init__(
        self,
        values: Iterable[tuple[str, Find]],
        to_array: Callable[[Any], Any],
        stride: int,
        before: Rotation | None,
        constants: Iterable[tuple[str, Find]] = (),
    ) -> None:
        self._rolling = [*_entries_of(values)]
        self._entries = [*self._rolling, *_entries_of(constants)]
        self._to_array = to_array
        self._stride = stride
        # An array's elements come after its overhead, on an axis of costs.
        self._first = [0]
        for entry in self._rolling:
            self._first.append(self._first[-1] + _OVERHEAD + entry.size * entry.itemsize)
        self._cost = stride * max(_LEAST, -(-self._first[-1] // ROTATION))
        count = max(1, -(-self._first[-1] // self._cost))
        self.length = count * stride
        # Found now, because it takes a step longer than this loop to find each of them.
        self._slices = [[*self._slice(number)] for number in range(count)]
        self._described = [(*each[:1], *each[2:], stride) for each in self._rolling]
        # The last step in which a slice has been equal; and an array, in earlier rotations.
        self._equal: list[int] = [0] * count
        self._known: Mapping[str, int] = {}
        self._structure: int
        if before is not None and before._described == self._described:
            self._structure = before._structure
            self._known, self._equal = before._known, before._equal
            return
        texts = [(label, *shape, str(dtype)) for label, shape, dtype, *_ in self._described]
        self._structure = zlib.crc32(repr((texts, stride)).encode())
        if before is not None:
            since = {each.label: before._since(n) for n, each in enumerate(before._rolling)}
            self._known = {**before._known, **since}

    def digest(self, position: int) -> bytes:
        """Return 8 bytes that stand for the arrays' shapes, and one slice's values, or all's."""
        checksum = 0
        for entry, start, stop in self._parts(position):
            checksum = _checksum(entry.read(start, stop, self._to_array), checksum)
        return struct.pack("<II", self._structure, checksum)

    def _parts(self, position: int) -> Sequence[tuple[_Entry, int, int]]:
        """Return the arrays of a slice, and which elements of each."""
        if position == _FULL:
            return [(entry, 0, entry.size) for entry in self._entries if entry.size]
        number, between = divmod(position, self._stride)
        return () if between else self._slices[number]

    def _slice(self, number: int) -> Iterator[tuple[_Entry, int, int]]:
        start, stop = number * self._cost, (number + 1) * self._cost
        index = max(0, bisect_right(self._first, start) - 1)
        while index < len(self._rolling) and self._first[index] < stop:
            entry = self._rolling[index]
            begins = self._first[index] + _OVERHEAD
            first, last = (
                min(max(0, -(-(bound - begins) // entry.itemsize)), entry.size)
                for bound in (start, stop)
            )
            if first < last:
                yield entry, first, last
            index += 1

    def record(self, position: int, step: int) -> None:
        """Record that all ranks have the same values of a slice."""
        if position == _FULL:
            self._equal[:] = [step] * len(self._equal)
        elif position % self._stride == 0:
            self._equal[position // self._stride] = step

    def equal_since(self, label: str, element: int) -> int:
        """Return as `ReplicaCheck.equal_since`."""
        for index, entry in enumerate(self._rolling):
            if entry.label == label:
                offset = self._first[index] + _OVERHEAD + element * entry.itemsize
                return self._equal[min(offset // self._cost, len(self._equal) - 1)] or (
                    self._known.get(label, 0)
                )
        return self._known.get(label, 0)

    def _since(self, index: int) -> int:
        """Return the last step in which all of an array has been equal; 0: never."""
        first, last = (bound // self._cost for bound in self._first[index : index + 2])
        return min(self._equal[first : last + 1]) or self._known.get(self._rolling[index].label, 0)

    def describe(self) -> dict[str, tuple[str, tuple[int, ...], int]]:
        """Return for each array its dtype and shape as text, its shape, and its checksum."""
        result = {}
        for entry in self._entries:
            array = entry.read(0, entry.size, self._to_array)
            text = f"{array.dtype.name}{[*entry.shape]}"
            result[entry.label] = text, tuple(entry.shape), _checksum(array)
        return result

    def checksums(self, label: str, bounds: Sequence[int]) -> list[int]:
        """Return the checksums of an array's elements between successive bounds."""
        return [_checksum(self._elements(label, *pair)) for pair in pairwise(bounds)]

    def text(self, label: str, element: int) -> tuple[str, str]:
        """Return one element in decimal, and its bytes."""
        value = self._elements(label, element, element + 1)
        return str(value[0]), value.tobytes()[::-1].hex()

    def _elements(self, label: str, start: int, stop: int) -> Any:
        entry = next(each for each in self._entries if each.label == label)
        return entry.read(start, stop, self._to_array)


def compare(digests: Sequence[bytes], snapshot: Snapshot | None, transport: Transport) -> None:
    """Compare replicas; collective, with the same digests on all ranks.

    Args:
        digests: of the snapshots, by rank; empty where a rank has none.

    Raises:
        MismatchError: on all ranks; the replicas differ.
    """
    members = dict(zip(transport.members, digests, strict=False))
    known = {rank: _DIGEST.unpack(digest) for rank, digest in members.items() if digest}
    raises, steps, positions, options, values, _ = map(set, zip(*known.values(), strict=True))
    check = None if snapshot is None else snapshot.find_check()
    gather = partial(_gather, check, transport)
    position, step = min(positions), max(steps)
    if len(positions) > 1 or len(steps) > 1:
        position = _FULL
        values = {*gather(lambda own: own.restart().digest(_FULL)).values()}
    if len(options) > 1 or len(values) > 1:
        behind = [rank for rank, (_, own, *_) in known.items() if own < step]
        text = explain(gather, behind, step)
        if any(raises):
            raise MismatchError(text)
        if transport.rank == 0:
            _log.warning(text)
        if check is not None:
            check.rest()
    elif check is not None:
        check.succeed(position, step)
        gradients = {rank: own for rank, (*_, own) in known.items()}
        check.data.record(gradients, step, warns=transport.rank == 0)


def _gather(
    check: ReplicaCheck | None, transport: Transport, make: Callable[[ReplicaCheck], Any]
) -> dict[int, Any]:
    """Return what a function makes of each rank's comparison, by rank; collective."""
    own = None if check is None else make(check)
    made = zip(transport.members, transport.gather_objects(own), strict=False)
    return {rank: each for rank, each in made if each is not None}


def _checksum(array: Any, before: int = 0) -> int:
    """Return the CRC-32 of a flat array that follows others; of None, too.

    It is the fastest checksum that finds every single changed element with certainty.
    """
    return zlib.crc32(b"none" if array is None else array.view(np.uint8).data, before)


def _comparable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are plain values, sorted by name."""
    plain = {
        str(name): _plain(value) for name, value in options.items() if name not in _NOT_COMPARED
    }
    return {name: plain[name] for name in sorted(plain) if plain[name] is not _OTHER}


_OTHER = object()


def _plain(value: Any) -> Any:
    """Return a value as numbers and strings; `_OTHER` if it is something else."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return _comparable(value)
    if isinstance(value, list | tuple):
        parts = [_plain(each) for each in value]
        return _OTHER if _OTHER in parts else tuple(parts)
    return _OTHER
