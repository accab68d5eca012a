"""The warning about ranks that train on the same data: their gradients are equal to the bit."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping
from typing import Any

from hvdlite.base.arrays import as_bytes
from hvdlite.errors import ranks_text

_log = logging.getLogger("hvdlite")

#: The checksum of gradients that say nothing, and where there are none.
UNKNOWN = bytes(4)

# The number of exchanges that are compared: one may be of inputs that are zeros, say.
_EXCHANGES = 3
# Bytes of gradients that are compared.
_MOST = 2**20


def checksum(gradients: Any) -> bytes:
    """Return the CRC-32 of the first of some flat gradients; `UNKNOWN` if these are zeros."""
    first = as_bytes(gradients[: _MOST // gradients.itemsize])
    return zlib.crc32(first.data).to_bytes(4, "little") if first.any() else UNKNOWN


class DataCheck:
    """Compare the gradients of the first exchanges across ranks, before they are averaged.

    Ranks that have the same ones in each of them train on the same data: nobody has divided it.
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
        ranks: dict[tuple[bytes, ...], list[int]] = {}
        for rank in checksums:
            own = tuple(each.get(rank, UNKNOWN) for each in self._found.values())
            if UNKNOWN not in own:
                ranks.setdefault(own, []).append(rank)
        same = [ranks_text(each) for each in ranks.values() if len(each) > 1]
        if same:
            _log.warning(
                "%s computed the same gradients, to the bit, in steps %d to %d: they train on the "
                "same data, and more ranks bring nothing; give each rank its own part, by "
                "hvd.shard(), or by a sampler or a shard() with hvd.size() and hvd.rank()",
                "; ".join(same),
                min(self._found),
                step,
            )
