"""Train SINGA's CNN in one of its modes, and count the bytes that a rank sends in a step.

    hvdliterun -np 2 python -m tests.benchmarks.singa --data-dir DIR --dist-option fp16

The options are those of `examples/singa_cnn.py`. The count includes the messages by which the
ranks agree on what to exchange; see `CountingTransport` for how collectives count.
"""

from __future__ import annotations

import sys

from tests.benchmarks import traffic
from tests.harness.mpirun import ROOT


def main() -> None:
    """Train, and print the count on rank 0."""
    sys.path.insert(0, str(ROOT / "examples"))
    import digits
    import singa_cnn

    import hvdlite as hvd

    options = singa_cnn.parse_options()
    with traffic.counting() as counter:
        singa_cnn.train(options)
    samples = len(digits.load(options.data_dir).train.labels)
    steps = options.epochs * hvd.Sharding(samples, options.batch_size).steps
    singa_cnn.say(f"Steps = {steps}, bytes per step = {counter.sent() / steps:,.0f}")


if __name__ == "__main__":
    main()
