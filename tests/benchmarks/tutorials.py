"""Train as in the tutorials after SINGA and Gluon, and count the bytes that a rank sends in a step.

    hvdliterun -np 2 python -m tests.benchmarks.tutorials singa_cnn.py --data-dir DIR --epochs 3
    hvdliterun -np 2 python -m tests.benchmarks.tutorials gluon_lenet.py --compression fp16

The options are those of the script in `examples/`; without the one that says how gradients travel,
all ways are taken in turn. The count includes the messages by which the ranks agree on what to
exchange; see `CountingTransport` for how collectives count.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from tests.benchmarks import traffic
from tests.harness.mpirun import ROOT


def main() -> None:
    """Train in each way, and print the count on rank 0."""
    sys.path.insert(0, str(ROOT / "examples"))
    import digits

    import hvdlite as hvd

    name = Path(sys.argv.pop(1)).stem
    script = importlib.import_module(name)
    common = importlib.import_module(f"{name.partition('_')[0]}_common")
    is_singa = name.startswith("singa")
    flag, ways = ("--dist-option", common.MODES) if is_singa else ("--compression", common.WAYS)
    more = {} if name != "gluon_lenet" else {"add_more": script.add_devices}
    for way in [None] if flag in sys.argv else ways:
        arguments = sys.argv[1:] + ([flag, way] if way else [])
        options = common.parse_options(script.__doc__, arguments, **more)
        with traffic.counting() as counter:
            script.train(options)
        samples = len(digits.load(options.data_dir).train.labels)
        # SINGA's batch is that of a rank, Gluon's that of all.
        batch_size = options.batch_size // (1 if is_singa else hvd.size())
        steps = options.epochs * hvd.Sharding(samples, batch_size).steps
        hvd.on_rank_zero(print)(
            f"{' '.join(arguments)}: {steps} steps, {counter.sent() / steps:,.0f} bytes per step",
            flush=True,
        )
        hvd.shutdown()


if __name__ == "__main__":
    main()
