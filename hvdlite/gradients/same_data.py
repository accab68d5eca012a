"""The warnings about ranks that train on the same data, or that divide the data differently.

Gradients of the same data are equal to the bit.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from typing import Any

from hvdlite.base.arrays import as_bytes
from hvdlite.errors import ranks_text
from hvdlite.world import membership

_log = logging.getLogger("hvdlite")

_NOTHING = bytes(4)
#: The checksums of gradients that say nothing, and of data that nobody has divided.
UNKNOWN = 2 * _NOTHING

# The number of exchanges that are compared: one may be of inputs that are zeros, say.
_EXCHANGES = 3
# Bytes of gradients that are compared.
_MOST = 2**20


def checksum(gradients: Any) -> bytes:
    """Return the CRC-32 of the first of some flat gradients, unless they are zeros.

    That of the division of the data follows, see `membership.division`.
    """
    first = as_bytes(gradients[: _MOST // gradients.itemsize])
    given = first.data if first.any() else None
    divided = repr(division).encode() if (division := membership.division) else None
    return b"".join(
        _NOTHING if each is None else zlib.crc32(each).to_bytes(4, "little")
        for each in (given, divided)
    )


class DataCheck:
    """Compare the gradients of the first exchanges across ranks, before they are averaged.

    Ranks that have the same ones in each of them train on the same data: nobody has divided it. So
    do ranks that divide it differently in each of them, in part: by seeds of their own, say.
    """

    def __init__(self) -> None:
        # The checksums of each rank, by the number of the exchange.
        self._found: dict[int, Mapping[int, bytes]] = {}

    @property
    def is_due(self) -> bool:
        """Return whether there are exchanges to compare."""
        return len(self._found) < _EXCHANGES

    def record(self, checksums: Mapping[int, bytes], step: int, warns: bool) -> None:
        """Record the checksums of an exchange; once more changes nothing.

        Args:
            checksums: of the gradients, by rank, in ascending order.
            warns: whether this rank warns about what is found after the last one.
        """
        if not self.is_due:
            return
        self._found[step] = checksums
        if self.is_due or not warns:
            return
        steps = min(self._found), step
        same = [ranks_text(each) for each in self._ranks(slice(4)).values() if len(each) > 1]
        if same:
            _log.warning(
                "%s computed the same gradients, to the bit, in steps %d to %d: they train on the "
                "same data, and more ranks bring nothing; give each rank its own part, by "
                "hvd.shard(), or by a sampler or a shard() with hvd.size() and hvd.rank()",
                "; ".join(same),
                *steps,
            )
        divisions = self._ranks(slice(4, 8))
        # In one exchange some may have looked at other data.
        if len(divisions) > 1 and all(len({*each}) > 1 for each in zip(*divisions, strict=True)):
            _log.warning(
                "%s divide the data differently in steps %d to %d, so that some samples come twice "
                "and others never: give hvd.shard() and the samplers the same data (random_split "
                "needs a generator), seed and batch size on all ranks, and set the same epoch",
                " and ".join(map(ranks_text, divisions.values())),
                *steps,
            )

    def _ranks(self, part: slice) -> dict[tuple[bytes, ...], list[int]]:
        """Return the ranks by their checksums in all exchanges, if these say anything."""
        ranks: dict[tuple[bytes, ...], list[int]] = {}
        for rank in [*self._found.values()][-1]:
            own = tuple(each.get(rank, UNKNOWN)[part] for each in self._found.values())
            if _NOTHING not in own:
                ranks.setdefault(own, []).append(rank)
        return ranks
