"""``python -m hvdlite`` is ``hvdlite``."""

from __future__ import annotations

import sys

from hvdlite.tools.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
