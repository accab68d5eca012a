"""``python -m hvdlite.launch`` is ``hvdliterun``."""

from __future__ import annotations

from hvdlite.launch.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
