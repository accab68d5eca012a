"""Stands in for Horovod in a process that a script under ``hvdlite.horovod`` has started.

It installs the finder, and is replaced by what that finds.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

try:
    from hvdlite.horovod.finder import install
except ModuleNotFoundError:
    # hvdlite may be on its starter's path only.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from hvdlite.horovod.finder import install

del sys.modules[__name__]
install()
importlib.import_module(__name__)
