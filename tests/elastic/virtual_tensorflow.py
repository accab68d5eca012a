"""A TensorFlow job with virtual ranks: prints a hash of the weights, the same whoever dies.

python tests/elastic/virtual_tensorflow.py STEPS [COMPRESSION]
"""

import hashlib
import sys

import keras
import numpy as np
import tensorflow as tf

import hvdlite
import hvdlite.tensorflow as hvd

COMPRESSIONS = {
    "none": hvd.Compression.none,
    "fp16": hvd.Compression.fp16,
    "topk": hvd.Compression.ErrorFeedback(hvd.Compression.TopK(0.1)),
    "powersgd": hvd.Compression.PowerSGD(2),
}
VIRTUAL = 8

steps = int(sys.argv[1])
compression = COMPRESSIONS[sys.argv[2] if len(sys.argv) > 2 else "none"]
tf.config.threading.set_intra_op_parallelism_threads(1)
hvd.init(virtual_ranks=VIRTUAL)
start = hvd.rank()
keras.utils.set_random_seed(1)
model = keras.Sequential(
    [
        keras.layers.Conv2D(8, 3),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dropout(0.2),
        keras.layers.Flatten(),
        keras.layers.Dense(10),
    ]
)
model.build((None, 8, 8, 1))
optimizer = hvd.DistributedOptimizer(
    keras.optimizers.SGD(0.05, momentum=0.9), compression=compression, model=model
)
hvd.seed(2)
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function(reduce_retracing=True)
def train_step(images: tf.Tensor, labels: tf.Tensor) -> None:
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(images, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(
        zip(gradients, model.trainable_variables, strict=True), batch_size=tf.shape(labels)[0]
    )


generator = np.random.default_rng(3)
images = generator.standard_normal((10 * VIRTUAL * 4 - 5, 8, 8, 1), np.float32)
labels = generator.integers(0, 10, len(images))
batches = hvdlite.shard((images, labels), batch_size=4)
done = 0
while done < steps:
    for x, y in batches:
        train_step(tf.constant(x), tf.constant(y))
        if optimizer.stepped:
            done += 1
            if done == steps:
                break
weights = b"".join(each.numpy().tobytes() for each in model.weights)
print(f"left {start}: {done} {hashlib.sha256(weights).hexdigest()}", flush=True)
