"""Runs at the start of each Python that tests start: Keras does not find what it can do without.

Keras imports scikit-learn, with SciPy, and matplotlib where it finds them, and needs them for calls
that no test makes. They take a third of the time in which TensorFlow and Keras are imported, and
tests start a thousand processes.
"""

from __future__ import annotations

import sys
from typing import Any


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raise for an import statement of Keras; None: others may look."""
        if name not in ("matplotlib", "sklearn"):
            return
        frame = sys._getframe(1)
        while frame.f_back and frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("keras."):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, _Finder())
