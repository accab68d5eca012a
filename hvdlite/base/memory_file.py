"""Files in memory, which have no name.

`hvdlite.launch.rank` imports this file without the rest of hvdlite, so it imports nothing of it.
"""

from __future__ import annotations

import ctypes
import os


def create(name: str) -> int:
    """Return the descriptor of a new file, which programs that this process starts do not get.

    Pythons that are built for older systems, as those of conda and uv, lack `os.memfd_create`.

    Args:
        name: what `/proc` shows.

    Raises:
        OSError: the system or its C library has none.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    library = ctypes.CDLL(None, use_errno=True)
    try:
        file: int = library.memfd_create(name.encode(), 1)  # MFD_CLOEXEC
    except AttributeError:
        raise OSError("neither Python nor the C library has memfd_create") from None
    if file < 0:
        raise OSError(ctypes.get_errno(), f"memfd_create: {os.strerror(ctypes.get_errno())}")
    return file
