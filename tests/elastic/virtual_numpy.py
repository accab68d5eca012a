"""A job with virtual ranks that saves after step 3, or goes on from the file; without a framework.

Step 2 is refused on all ranks, because of a NaN in the bucket that is exchanged last. Afterwards
the ranks DEAD end. Each of the others prints its number at the start and a hash of the weights.

python tests/elastic/virtual_numpy.py FILE STEPS [DEAD ...]
"""

import hashlib
import os
import pickle
import signal
import sys
from pathlib import Path

import numpy as np

import hvdlite as hvd
from hvdlite.compression import Compression, Parameter, Reduction
from hvdlite.errors import GradientError
from hvdlite.virtual.gradients import VirtualExchange
from hvdlite.world import parts

VIRTUAL, SAVED, REFUSED = 4, 3, 2

file, stop, dead = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
os.environ["HVDLITE_FUSION_THRESHOLD"] = "1"  # a bucket for each parameter
hvd.init(virtual_ranks=VIRTUAL)
start = hvd.rank()
weights = [np.ones(shape, np.float32) for shape in ((6, 7), (4, 8))]
parameters = [Parameter(str(n), each.shape, each.dtype) for n, each in enumerate(weights)]
exchange = VirtualExchange("gradients", Compression.PowerSGD(1), Reduction())


def train(stop):
    while (step := parts.current.step) < stop:
        exchange.follow(parameters)
        generator = np.random.default_rng([step, hvd.virtual_rank()])
        gradients = [each * generator.standard_normal(each.shape, np.float32) for each in weights]
        if step == REFUSED and hvd.virtual_rank() == VIRTUAL - 1:
            gradients[exchange.plan[-1][0]][0, 0] = np.nan
        try:
            outcome = exchange.end_part(gradients)
        except GradientError:
            if step != REFUSED:
                raise
            parts.current.begin_step(step + 1)
            continue
        if outcome is not None:
            for number, average in enumerate(outcome.averages):
                weights[number] = weights[number] - np.float32(0.1) * average


if file.exists():
    saved, weights = pickle.loads(file.read_bytes())
    exchange.load_state_dict(saved, hvd.Average, hvd.global_process_set)
else:
    train(SAVED)
    if str(start) in dead:
        os.kill(os.getpid(), signal.SIGKILL)
    exchange.consolidate(hvd.global_process_set)
    if hvd.rank() == 0:
        file.write_bytes(pickle.dumps((exchange.state_dict(hvd.global_process_set), weights)))
train(stop)
digest = hashlib.sha256(b"".join(each.tobytes() for each in weights))
print(start, digest.hexdigest(), flush=True)
