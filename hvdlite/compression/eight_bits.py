"""What strategies have in common that write values in 8 bits, with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hvdlite.arguments import check_count
from hvdlite.compression.blocks import LARGEST_BLOCK, BlockCodec
from hvdlite.compression.bucket import Bucket
from hvdlite.compression.codec import Codec
from hvdlite.compression.quantised import Quantised


@dataclass(frozen=True, repr=False)
class EightBits(Quantised):
    """Values by a `BlockCodec` of 8 bits, added up by slices.

    Args:
        block: how many values have a scale in common, which is as wide as they are (16-bit
            gradients': 32 bits).

    Raises:
        ValueError: ``block`` is out of range.
    """

    block: int = 256

    by_slices = True
    #: What writes values.
    block_codec: ClassVar[type[BlockCodec]]

    def __post_init__(self) -> None:
        check_count("block", self.block, 1, LARGEST_BLOCK)

    def codec(self, bucket: Bucket, rank: int) -> Codec:
        """The same for all ranks."""
        return self.block_codec(self.block, 8, bucket.send.dtype)
