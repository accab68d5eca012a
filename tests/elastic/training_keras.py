"""A Keras job, trained by fit, that goes on when ranks die; prints the steps and the weights."""

import hashlib
import os
import sys

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np

import hvdlite.keras as hvd

steps = int(sys.argv[1])
hvd.init()
start = hvd.rank()
keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.layers.Conv2D(8, 3, activation="relu"),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.build((None, 8, 8, 1))
optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.05, momentum=0.9))
model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
generator = np.random.default_rng(start)
images = generator.standard_normal((16 * steps, 8, 8, 1), np.float32)
labels = generator.integers(0, 10, 16 * steps)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
]
history = model.fit(images, labels, 16, epochs=2, verbose=0, callbacks=callbacks, shuffle=False)
weights = b"".join(np.asarray(value).tobytes() for value in model.trainable_variables)
digest = hashlib.sha256(weights).hexdigest()
done, loss = int(model.optimizer.iterations), history.history["loss"][-1]
print(f"left {start}: {hvd.size()} {done} {digest} {loss}", flush=True)
