"""The check that averages are finite, and the report of the ranks whose gradients are not."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from hvdlite.compression import Bucket
from hvdlite.compression.messages import find_not_finite
from hvdlite.errors import NotFiniteError
from hvdlite.transport import Transport
from hvdlite.world import world

_log = logging.getLogger("hvdlite")

_MOST_NAMED = 5


def tell_left_out(error: NotFiniteError) -> None:
    """Log on rank 0 that all ranks leave a step out, because of an error that all of them have."""
    if world.rank() == 0:
        _log.warning("this step is left out on all ranks: %s", error)


def check_finite(arrays: Bucket, transport: Transport) -> None:
    """Require that the averages of a bucket, which all ranks have, are finite.

    Averages are the same on all ranks, so that nothing is exchanged as long as they are finite.

    Args:
        arrays: After the exchange; its gradients are still there.

    Raises:
        NotFiniteError: They are not; on all ranks.
    """
    if find_not_finite(arrays, arrays.result) < 0:
        return
    arrays.copy_zero_copy_parts()
    everywhere = transport.gather_objects(_describe(arrays))
    found = [
        f"{name!r} on rank {rank} ({text})"
        for rank, own in zip(transport.members, everywhere, strict=False)
        for name, text in own
    ]
    more = f", and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    name = arrays.parameters[find_not_finite(arrays, arrays.result)].name
    where = (
        f"the gradients of {', '.join(found[:_MOST_NAMED])}{more}"
        if found
        else f"the average of {name!r}, but no rank's gradient (it overflows its type),"
    )
    verb = "are" if found else "is"
    raise NotFiniteError(
        f"rank {transport.members[transport.rank]}: {where} {verb} not finite; look at the data "
        "and the loss of that step there, lower the learning rate, or leave such steps out (by "
        "HVDLITE_NOT_FINITE=skip in a DistributedOptimizer; elsewhere catch this error, which all "
        "ranks raise)"
    )


def _describe(arrays: Bucket) -> list[tuple[str, str]]:
    """Return the names of this rank's gradients that are not finite, and what is in them."""
    found = []
    for position, parameter in enumerate(arrays.parameters):
        values: Any = np.asarray(arrays.send_slot(position)).astype(np.float64).reshape(-1)
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            first = np.unravel_index(bad[0], parameter.shape) if parameter.shape else ()
            at = f" at {[int(index) for index in first]}" if first else ""
            of = f"{bad.size} of {values.size} elements, the first{at}: {values[bad[0]]}"
            found.append((parameter.name, of))
    return found
