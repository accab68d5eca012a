"""``python -m hvdlite`` is ``hvdlite``."""

from __future__ import annotations

from hvdlite.tools.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
