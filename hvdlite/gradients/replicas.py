"""The comparison of the ranks' replicas: the weights, the optimizer's class and its options."""

from __future__ import annotations

import logging
import pickle
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hvdlite.engine.agreement import find_difference
from hvdlite.engine.operation import Signature
from hvdlite.errors import MismatchError
from hvdlite.settings import Settings
from hvdlite.transport import Transport

_log = logging.getLogger("hvdlite")

_CLASS = "the optimizer's class"
_WEIGHT = "the CRC-32 of the weight "
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


@dataclass(frozen=True)
class Snapshot:
    """A rank's part of a comparison.

    Attributes:
        check: the comparison.
        signature: everything that must be equal on all ranks.
        raises: whether a difference is an error rather than a warning.
    """

    check: ReplicaCheck
    signature: Signature
    raises: bool

    @property
    def digest(self) -> bytes:
        """Return bytes that represent it; the first tells whether a difference is an error."""
        return bytes([self.raises]) + self.signature.digest


class ReplicaCheck:
    """Compare the replicas of one model across ranks, together with an exchange of gradients.

    Ranks compare with their second exchange in a world: some scripts broadcast weights after the
    first step. As long as not all ranks have taken part (one has joined, say), or they differ,
    they compare again with the next one; afterwards every ``HVDLITE_CHECK_RANKS_EVERY``.

    Args:
        describe: returns pairs of a label and a value that must be equal on all ranks; see
            `describe_optimizer` and `describe_weights`.
        remedy: the call that gives all ranks the same weights, for messages.
        uncompared: returns the number of exchanges in a world before the first comparison.
    """

    def __init__(
        self,
        describe: Callable[[], Iterable[tuple[str, Any]]],
        remedy: str,
        uncompared: Callable[[], int] = lambda: 1,
    ) -> None:
        self.remedy = remedy
        self._describe = describe
        self._uncompared = uncompared
        self._world: Callable[[], object | None] = lambda: None
        self._exchanges, self._due, self._every = 0, 1, 0

    def begin(self, world: object, settings: Settings) -> Snapshot | None:
        """Return this rank's part of the comparison; None: there is none with the next exchange.

        Args:
            world: another object after ``init()`` has been called again: counting begins anew.
            settings: of the world.
        """
        if self._world() is not world:
            self._world = weakref.ref(world)
            self._exchanges, self._due = 0, self._uncompared()
        if settings.check_ranks == "off" or not 0 < self._due <= self._exchanges:
            return None
        self._every = settings.check_ranks_every
        return Snapshot(self, Signature(self._describe()), settings.check_ranks == "error")

    def end(self) -> None:
        """Count an exchange."""
        self._exchanges += 1

    def succeed(self) -> None:
        """Record that all ranks have compared."""
        self._exchanges, self._due = 0, self._every


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


def describe_weights(weights: Iterable[tuple[str, Any]]) -> list[tuple[str, str]]:
    """Describe weights for comparison, by their CRC-32.

    It is the fastest checksum that finds every single changed element with certainty.

    Args:
        weights: pairs of a name and an array.
    """
    return [(f"{_WEIGHT}{name!r}", f"{_checksum(array):08x}") for name, array in weights]


def compare(digests: Sequence[bytes], snapshot: Snapshot | None, transport: Transport) -> None:
    """Compare replicas; collective, with the same digests on all ranks.

    Args:
        digests: of the snapshots, by rank; empty where a rank has none.
        snapshot: this rank's.
        transport: of the ranks.

    Raises:
        MismatchError: on all ranks; the replicas differ.
    """
    known = [digest for digest in digests if digest]
    if len(set(known)) > 1:
        own = snapshot and (snapshot.signature, snapshot.check.remedy)
        messages = map(pickle.loads, transport.gather(pickle.dumps(own)))
        given = {
            rank: each for rank, each in zip(transport.members, messages, strict=False) if each
        }
        remedy = next(iter(given.values()))[1]
        text = _explain({rank: signature for rank, (signature, _) in given.items()}, remedy)
        if any(digest[0] for digest in known):
            raise MismatchError(text)
        if transport.rank == 0:
            _log.warning(text)
    if snapshot is not None and len(known) == len(digests):
        snapshot.check.succeed()


def _explain(signatures: Mapping[int, Signature], remedy: str) -> str:
    what, found = find_difference(signatures)
    first, *others = map(dict, signatures.values())
    weights = [label for label in first if label.startswith(_WEIGHT)]
    differ = [label for label in weights if any(each.get(label) != first[label] for each in others)]
    if what in weights:
        cause = (
            f"{len(differ)} of {len(weights)} weights differ. Probably they were not broadcast, or "
            f"were changed on some ranks afterwards: call {remedy} on all ranks, before training "
            "or after its first step"
        )
        exception = "processors of different kinds round differently"
    else:
        also = f", and call {remedy}, because weights differ, too" if differ else ""
        cause = f"make the same optimizer, with the same arguments, on all ranks{also}"
        exception = "the optimizers are meant to differ"
    return (
        f"the ranks train replicas that differ: {what} is {found}; {cause}. Where {exception}, "
        "HVDLITE_CHECK_RANKS=warn makes this error a warning, and HVDLITE_CHECK_RANKS=off leaves "
        "the comparison out"
    )


def _checksum(array: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


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
