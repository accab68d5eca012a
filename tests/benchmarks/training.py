"""``hvdlite bench training`` as for the published tables, and the figure of the README."""

from __future__ import annotations

from tests.benchmarks import files, plots


def main() -> None:
    """Measure, print, write the JSON and the plots."""
    document, folder = files.bench("training", ["--seconds", "75"])
    if "ddp" in document["options"]["contenders"]:
        plots.overhead(document, folder / "step_overhead.svg")


if __name__ == "__main__":
    main()
