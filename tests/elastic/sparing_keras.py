"""A Keras job, trained by fit, with spares; prints on each rank what is left at the end."""

import hashlib
import json
import os

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np

import hvdlite.keras as hvd
from hvdlite.keras import Compression
from hvdlite.keras.elastic import (
    CommitStateCallback,
    KerasState,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
)

me = int(os.environ["OMPI_COMM_WORLD_RANK"])
hvd.init()
keras.utils.set_random_seed(1 + me)  # rank 0's weights count
model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(10), keras.layers.Dense(4)])
rate = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.5)
compression = Compression.ErrorFeedback(Compression.WarmUp(Compression.PowerSGD(1), 2))
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate), compression=compression)
model.compile(optimizer, "mse", jit_compile=False)
generator = np.random.default_rng(me)
inputs = generator.normal(size=(64, 12)).astype(np.float32)
labels = generator.normal(size=(64, 4)).astype(np.float32)


def digest(values):
    texts = [repr(np.asarray(value).tolist()) for value in values]
    return hashlib.sha256("".join(texts).encode()).hexdigest()


def left():
    """Return this rank's steps and digests, and what its compression remembers."""
    state = model.optimizer.exchange_state_dict()
    entries = sorted(state.get("compression", {}).get("parameters", {}).items())
    common = [entry[key] for _, entry in entries for key in ("q", "exchanges") if key in entry]
    return {
        "process": me,
        "steps": int(model.optimizer.iterations.numpy()),
        "weights": digest(each.numpy() for each in model.weights),
        "optimizer": digest(each.numpy() for each in model.optimizer.variables),
        "common": digest(common),
        "keys": sorted({key for _, entry in entries for key in entry}),
    }


reports = []


@hvd.elastic.run
def train(state):
    reports.append(left())
    callbacks = [
        UpdateEpochStateCallback(state),
        UpdateBatchStateCallback(state),
        CommitStateCallback(state, 3),
    ]
    model.fit(
        inputs,
        labels,
        batch_size=8,
        epochs=2 - state.epoch,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )


train(KerasState(model, batch=0, epoch=0))
print(json.dumps([reports[-1], left()]), flush=True)
