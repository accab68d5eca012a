"""Files in memory, which have no name.

`hvdlite.launch.rank` loads this file without the rest of hvdlite, of which it imports nothing.
"""

from __future__ import annotations

import ctypes
import errno
import os


def create(name: str) -> int:
    """Return the descriptor of a new file, which programs that this process starts do not get."""
    # Pythons that are built for older systems, as those of conda and uv, lack it.
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    library = ctypes.CDLL(None, use_errno=True)
    file = getattr(library, "memfd_create", lambda *_: -1)(name.encode(), 1)  # MFD_CLOEXEC
    if file < 0:
        number = ctypes.get_errno() or errno.ENOSYS
        raise OSError(number, os.strerror(number))
    return int(file)
