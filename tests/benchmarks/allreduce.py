"""``hvdlite bench allreduce`` as for the published tables: more ranks and sizes, for longer."""

from __future__ import annotations

from tests.benchmarks import files

_SIZES = "4KiB,16KiB,64KiB,256KiB,1MiB,4MiB,16MiB,64MiB,256MiB"
_WORDS = ["--np", "2,4", "--sizes", _SIZES, "--burst", "--rounds", "60", "--seconds", "9"]


def main() -> None:
    """Measure, print, write the JSON and the plot."""
    files.bench("allreduce", _WORDS)


if __name__ == "__main__":
    main()
