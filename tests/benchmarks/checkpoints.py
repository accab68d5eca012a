"""Measure how long a save of a checkpoint stops training, with and without a thread that writes.

``python -m tests.benchmarks.checkpoints [FOLDER]`` saves a torch model of 200 MB in turns with
``blocking=True`` and ``blocking=False``, in each format, and prints the median seconds, with the
least and the greatest, of the call and of the wait for the file after it. FOLDER is on the disk to
measure; it is the current folder unless given. The steps between two saves are left out: the thread
has ended before the next save.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

from tests.benchmarks.files import median_text

_TURNS = 9
_BYTES = 200_000_000
_LAYERS = 10


def main() -> None:
    """Print a line for each format and way to save."""
    import torch

    import hvdlite.torch as hvd

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path())
    folder = parser.parse_args().folder
    hvd.init()
    layer = _BYTES // _LAYERS // 4
    state = {f"layer{number}": torch.randn(layer) for number in range(_LAYERS)}
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        for suffix in ("pt", "safetensors", "npz"):
            saved = hvd.checkpoint(Path(temporary) / f"model.{suffix}")
            seconds: dict[tuple[bool, str], list[float]] = {}
            for turn in range(2 * (_TURNS + 1)):
                blocking = turn % 2 == 0
                start = time.perf_counter()
                saved.save(state, blocking=blocking)
                returned = time.perf_counter()
                saved.exists()  # waits for the thread
                written = time.perf_counter()
                if turn >= 2:  # the first of each is a warm-up
                    seconds.setdefault((blocking, "save"), []).append(returned - start)
                    seconds.setdefault((blocking, "file after"), []).append(written - returned)
            for (blocking, what), times in seconds.items():
                label = f".{suffix:<12} blocking={blocking!s:<6} {what:<11}"
                print(f"{label} {median_text(times, 2)} s", flush=True)


if __name__ == "__main__":
    main()
