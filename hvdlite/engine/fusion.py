"""Fusion: operations that run together as one exchange."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from hvdlite.engine.operation import Operation


def fuse(operations: Iterable[Operation], limit: float) -> list[list[Operation]]:
    """Group operations that may run together, up to ``limit`` bytes a group.

    Groups come in the order of their first members, so ranks that have the same operations
    make the same groups. An operation that has failed, or has no fusion key, is a group by itself.
    """
    operations = list(operations)
    if len(operations) == 1:
        return [operations]
    groups: list[list[Operation]] = []
    growing: dict[Hashable, tuple[list[Operation], int]] = {}
    signature, kind = None, None
    for operation in operations:
        if operation.failure is not None:
            signature, kind = None, None
        elif operation.signature is not signature:  # else it is of the same kind as the last
            signature, kind = operation.signature, operation.fusion
        if kind is None or limit == 0:
            groups.append([operation])
            continue
        group, filled = growing.get(kind, (None, 0))
        if group is None or filled + operation.nbytes > limit:
            group, filled = [], 0
            groups.append(group)
        group.append(operation)
        growing[kind] = group, filled + operation.nbytes
    return groups
