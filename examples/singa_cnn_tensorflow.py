"""Train the CNN of Apache SINGA's page on distributed training with TensorFlow, in all its modes.

    hvdliterun -np 2 python singa_cnn_tensorflow.py --dist-option sparseTopK --spars 0.05
    python singa_cnn_tensorflow.py --spawn 2 --data-dir mnist

docs/tutorials/singa.md explains it; `singa_cnn.py` is its form for PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import time

import digits
import failures
import singa_common
from singa_common import report_evaluation, report_training, say

try:
    import keras
    import tensorflow as tf
    from keras import layers

    import hvdlite.tensorflow as hvd
except ImportError as error:
    sys.exit(f"{error}: run `pip install 'hvdlite[tensorflow]'`")


def train(options: argparse.Namespace) -> None:
    """Train, and report each epoch as SINGA does."""
    hvd.init()
    hvd.pin_device()
    data = failures.load_data(hvd, options.data_dir)
    train_set, test_set = to_arrays(data.train), to_arrays(data.test)
    sharding = hvd.Sharding(len(train_set[0]), options.batch_size, seed=options.seed)
    batches = hvd.shard(train_set, options.batch_size, seed=options.seed)
    test_batches = hvd.shard(test_set, 256, shuffle=False)

    keras.utils.set_random_seed(options.seed)
    model = make_model()
    optimizer = keras.optimizers.SGD(0.005, momentum=0.9, weight_decay=1e-5)
    optimizer = hvd.DistributedOptimizer(optimizer, compression=options.compression)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    # With a signature, in which the batch size is open, one graph serves the last batch, too.
    @tf.function(input_signature=(*batches.element_spec, tf.TensorSpec(())))
    def step(images: tf.Tensor, labels: tf.Tensor, weight: tf.Tensor) -> tuple:
        with tf.GradientTape() as tape:
            output = model(images, training=True)
            loss = loss_function(labels, output)
            weighted = weight * loss
        gradients = tape.gradient(weighted, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, count_correct(output, labels)

    for epoch in range(options.epochs):
        start = time.perf_counter()
        say(hvd, f"Starting Epoch {epoch}:")
        loss_sum, correct = 0.0, 0
        # The weight is 1, except where a remainder gives one rank an image more than another.
        for (images, labels), weight in zip(batches, sharding.weights, strict=True):
            loss, found = step(images, labels, weight)
            loss_sum += float(loss)
            correct += int(found)
        report_training(hvd, loss_sum, correct, sharding.samples)

        if options.dist_option == "partialUpdate":  # until here, weights differ between the ranks
            optimizer.average_weights()
        found = sum(int(count_correct(model(each), labels)) for each, labels in test_batches)
        report_evaluation(hvd, found, len(test_set[0]), time.perf_counter() - start)


def to_arrays(samples: digits.Samples) -> tuple:
    """Return images of shape (samples, 28, 28, 1), smaller ones enlarged, and their labels."""
    return digits.resize(samples.images, singa_common.SIDE)[..., None], samples.labels


def make_model() -> keras.Model:
    """Return the network, of 431,080 weights."""
    return keras.Sequential(
        [
            keras.Input((singa_common.SIDE, singa_common.SIDE, 1)),
            layers.Conv2D(20, kernel_size=5, activation="relu"),
            layers.MaxPool2D(2),
            layers.Conv2D(50, kernel_size=5, activation="relu"),
            layers.MaxPool2D(2),
            layers.Flatten(),
            layers.Dense(500, activation="relu"),
            layers.Dense(digits.CLASSES),
        ]
    )


def count_correct(output: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return how many images got the highest score for their label."""
    return tf.math.count_nonzero(tf.argmax(output, axis=1) == labels)


if __name__ == "__main__":
    singa_common.start(train, singa_common.parse_options(__doc__))
