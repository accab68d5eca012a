"""Several collectives that run as one operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from hvdlite.engine.device import DeviceMemory, DeviceOperation
from hvdlite.engine.fusion import fuse
from hvdlite.engine.operation import Operation, Signature
from hvdlite.engine.overlap import Extent
from hvdlite.transport import Transport
from hvdlite.transport.gpu.base import DeviceTransport


class Group(Operation):
    """Operations of one kind on host arrays, which begin and end together.

    None of them begins before every rank has submitted all, and if one is refused, all are.

    Args:
        name: the operation's name.
        label: what it is called in messages.
        operations: which have not been submitted; on all ranks as many.
    """

    def __init__(self, name: str, label: str, operations: Sequence[Operation]) -> None:
        super().__init__(name, _signature(label, operations), _payload(operations))
        self._operations = list(operations)
        self.nbytes = sum(operation.nbytes for operation in operations)
        self.several = True
        self.stands_in = all(operation.stands_in for operation in operations)

    def execute(self, transport: Transport, payloads: Sequence[bytes]) -> list[Any]:
        """Run all, those together that may, and return their results."""
        results: dict[int, Any] = {}
        known = _split(payloads, self._operations)
        for group in fuse(self._operations, math.inf):
            first, *others = group
            for operation in group:
                operation.lane = self.lane
            if others:
                found = first.execute_together(others, transport)
            else:
                found = [first.execute(transport, known[id(first)])]
            results.update(zip(map(id, group), found, strict=True))
        return [results[id(operation)] for operation in self._operations]

    def extents(self) -> Sequence[Extent]:
        """The memory of all."""
        return [extent for operation in self._operations for extent in operation.extents()]

    def stand_in(self) -> Callable[[], Operation]:
        """What makes a group of stand-ins."""
        label = self.signature[0][1]
        makers = [operation.stand_in() for operation in self._operations]
        return partial(_make, self.name, label, makers)


class DeviceGroup(DeviceOperation):
    """The same on arrays of one device; arguments as in `Group`."""

    def __init__(
        self,
        name: str,
        label: str,
        operations: Sequence[DeviceOperation],
        memory: DeviceMemory,
    ) -> None:
        super().__init__(name, _signature(label, operations), memory, _payload(operations))
        self._operations = list(operations)
        self.nbytes = sum(operation.nbytes for operation in operations)

    def prepare(self, payloads: Sequence[bytes], rank: int) -> None:
        """Let all prepare."""
        known = _split(payloads, self._operations)
        for operation in self._operations:
            operation.lane = self.lane
            operation.prepare(known[id(operation)], rank)
        self.ready = [event for operation in self._operations for event in operation.ready]
        self.tensors = tuple(
            tensor for operation in self._operations for tensor in operation.tensors
        )
        self.value = [operation.value for operation in self._operations]

    def exchange(self, transport: DeviceTransport) -> None:
        """Send all to the device, one after the other."""
        for operation in self._operations:
            operation.exchange(transport)


def _make(name: str, label: str, makers: Sequence[Callable[[], Operation]]) -> Group:
    return Group(name, label, [make() for make in makers])


def _signature(label: str, operations: Sequence[Operation]) -> Signature:
    """The label and, array by array, what has to be alike."""
    parts = [
        (f"{what} of array {number}", value)
        for number, operation in enumerate(operations)
        for what, value in operation.signature[1:]
    ]
    return Signature((("the operation", label), ("the number of arrays", len(operations)), *parts))


def _payload(operations: Sequence[Operation]) -> bytes:
    return b"".join(operation.payload for operation in operations)


def _split(payloads: Sequence[bytes], operations: Sequence[Operation]) -> dict[int, list[bytes]]:
    """Every rank's payload of each operation; those of one kind have one length."""
    parts: dict[int, list[bytes]] = {}
    start = 0
    for operation in operations:
        stop = start + len(operation.payload)
        parts[id(operation)] = [payload[start:stop] for payload in payloads]
        start = stop
    return parts
