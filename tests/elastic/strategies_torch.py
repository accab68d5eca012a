"""A PyTorch job with several compressions and schedules: process 1 dies, and then all fail.

Each compression and schedule has an optimizer and a parameter of its own. Gradients are whole
numbers that depend on the process and the step alone. Prints, on each rank, what is left at the
end; what holds in each step is checked here.
"""

import hashlib
import json
import os
import pickle
import signal

import numpy as np
import torch

import hvdlite.torch as hvd
from hvdlite.torch import Compression, Schedule

STEPS, COMMIT, DEATH, FAILURE = 14, 3, 7, 8
FEEDBACK = Compression.ErrorFeedback
# And whether the sums of what they send are exact.
COMPRESSIONS = {
    "topk": (FEEDBACK(Compression.TopK(0.1)), True),
    "randomk": (FEEDBACK(Compression.RandomK(0.1)), True),
    "powersgd": (FEEDBACK(Compression.WarmUp(Compression.PowerSGD(2), 3)), False),
    "dgc": (
        Compression.DeepGradientCompression(
            0.05, momentum=0.0, warm_up_steps=10, warm_up_ratio=0.5
        ),
        True,
    ),
    "qsgd": (Compression.QSGD(7), None),
}
SCHEDULES = {
    "local": {"schedule": Schedule.LocalSGD(every=4)},
    "diloco": {"schedule": Schedule.DiLoCo(every=4, outer_lr=0.5, outer_momentum=0.5)},
    "diloco, topk": {
        "schedule": Schedule.DiLoCo(every=4, outer_lr=0.5, outer_momentum=0.5),
        "compression": FEEDBACK(Compression.TopK(0.25)),
    },
}

me = int(os.environ["OMPI_COMM_WORLD_RANK"])
hvd.init()
torch.set_num_threads(1)
weights = {name: torch.full((12, 10), float(me), requires_grad=True) for name in COMPRESSIONS}
weights |= {name: torch.zeros(4, dtype=torch.float64, requires_grad=True) for name in SCHEDULES}
options = {name: {"compression": each, "op": hvd.Sum} for name, (each, _) in COMPRESSIONS.items()}
optimizers = {
    name: hvd.DistributedOptimizer(
        torch.optim.SGD([weight], lr=1.0), [("w", weight)], **(options | SCHEDULES)[name]
    )
    for name, weight in weights.items()
}
schedulers = {
    f"{name}'s rate": torch.optim.lr_scheduler.StepLR(optimizers[name], 5, 0.5)
    for name in COMPRESSIONS
}


def remembered(name):
    """Return what the compression remembers: common to all ranks, and this rank's own."""
    state = optimizers[name].state_dict().get("hvdlite", {})
    found = state.get("schedule", state).get("compression", {}).get("parameters", {}).get("w", {})
    arrays = {key: tensor.numpy().copy() for key, tensor in found.items()}
    common = {key: array for key, array in arrays.items() if key in ("exchanges", "q")}
    return common, {key: array for key, array in arrays.items() if key not in common}


def unsent(name):
    own = remembered(name)[1]
    kept = [own[key] for key in ("residual", "accumulated") if key in own]
    return kept[0] if kept else np.zeros((12, 10), np.float32)


def same_everywhere(value):
    return len(set(hvd.allgather_object(pickle.dumps(value)))) == 1


def compress(name, step):
    """Make a step, and check that what has been sent and what is left are all gradients."""
    optimizer, (_, is_exact) = optimizers[name], COMPRESSIONS[name]
    gradient = np.random.default_rng([me, step]).integers(-8, 9, (12, 10)).astype(np.float32)
    before = unsent(name)
    optimizer.zero_grad()
    (weights[name] * torch.from_numpy(gradient)).sum().backward()
    optimizer.synchronize()
    if is_exact is not None:
        mine = torch.from_numpy(gradient + before - unsent(name))
        sent = hvd.allreduce(mine, op=hvd.Sum, name="sent")
        difference = float((sent - weights[name].grad).abs().max())
        assert difference <= (0 if is_exact else 1e-3), (name, step, difference)
    with optimizer.skip_synchronize():
        optimizer.step()


def train_locally(name, step):
    optimizers[name].zero_grad()
    factor = torch.arange(1, 5, dtype=torch.float64) * ((me + 1) * (step + 1))
    (weights[name] * factor).sum().backward()
    optimizers[name].step()


class State(hvd.elastic.TorchState):
    """Remembers what a commit has kept of this rank's own."""

    own = None

    def save(self):
        super().save()
        if self.commits and self.step % COMMIT == 0:
            self.own = {name: remembered(name)[1] for name in weights}


entered = []


@hvd.elastic.run
def train(state):
    entered.append(state.step)
    if state.step:
        check_entry(state)
    while state.step < STEPS:
        if state.step == DEATH and me == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if state.step == FAILURE and entered == [0]:
            raise hvd.HorovodInternalError("made up")
        for name in COMPRESSIONS:
            compress(name, state.step)
            getattr(state, f"{name}'s rate").step()
        for name in SCHEDULES:
            train_locally(name, state.step)
        state.step += 1
        if state.step % COMMIT == 0:
            state.commit()


def check_entry(state):
    """Check what a rank has when it comes in, or has been there before."""
    is_new = len(entered) == 1
    for name in weights:
        common, own = remembered(name)
        assert same_everywhere(common), name
        if name in COMPRESSIONS:
            assert common["exchanges"] == state.step, (name, common)
            assert ("q" in common) == (name == "powersgd")
        if is_new:
            assert not own, (name, own)
        else:
            assert own.keys() == state.own[name].keys()
            assert all((own[key] == state.own[name][key]).all() for key in own), name


class Weights:
    """The parameters as one object with a state."""

    def state_dict(self):
        return {name: weight.detach().clone() for name, weight in weights.items()}

    def load_state_dict(self, state):
        with torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(state[name])


state = State(None, None, weights=Weights(), **optimizers, **schedulers, step=0)
train(state)
digests = {
    name: hashlib.sha256(weights[name].detach().numpy().tobytes()).hexdigest()
    for name in COMPRESSIONS
}
found = {name: weights[name].tolist() for name in SCHEDULES}
rates = sorted({optimizers[name].param_groups[0]["lr"] for name in COMPRESSIONS})
print(json.dumps([me, entered, digests, found, rates]), flush=True)
