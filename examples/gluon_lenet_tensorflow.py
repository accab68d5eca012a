"""Train LeNet on handwritten digits as MXNet's Gluon does, with TensorFlow, on several ranks.

    python gluon_lenet_tensorflow.py
    hvdliterun -np 2 python gluon_lenet_tensorflow.py --data-dir mnist --compression 1bit

docs/tutorials/gluon.md explains it; `gluon_lenet.py` is its form for PyTorch.
"""

from __future__ import annotations

import argparse
import sys
import time

import digits
import failures
import gluon_common

try:
    import keras
    import tensorflow as tf
    from keras import layers

    import hvdlite.tensorflow as hvd
except ImportError as error:
    sys.exit(f"{error}: run `pip install 'hvdlite[tensorflow]'`")


def train(options: argparse.Namespace) -> keras.Model:
    """Train, report accuracy and time after each epoch, and return the network."""
    hvd.init()
    hvd.pin_device()
    gluon_common.check_batch_size(hvd, options)
    data = failures.load_data(hvd, options.data_dir)
    train_set, test_set = to_arrays(data.train), to_arrays(data.test)
    batch_size = options.batch_size // hvd.size()
    sharding = hvd.Sharding(len(train_set[0]), batch_size, seed=options.seed)
    batches = hvd.shard(train_set, batch_size, seed=options.seed)
    test_batches = hvd.shard(test_set, 256, shuffle=False, allow_empty=True)

    keras.utils.set_random_seed(options.seed)
    model = make_lenet()
    optimizer = keras.optimizers.SGD(options.lr)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    compression = gluon_common.WAYS[options.compression]
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits  # a loss for each image

    # With a signature, in which the batch size is open, one graph serves the last batch, too.
    @tf.function(input_signature=(*batches.element_spec, tf.TensorSpec((), tf.int32)))
    def step(images: tf.Tensor, labels: tf.Tensor, global_batch_size: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            losses = cross_entropy(labels, outputs)
            if options.loss == "sum":
                # op=Sum adds the ranks' gradients; the division by all images is left to do.
                loss = tf.reduce_sum(losses) / tf.cast(global_batch_size, losses.dtype)
            else:
                loss = tf.reduce_mean(losses)
        op = hvd.Sum if options.loss == "sum" else hvd.Average
        tape = hvd.DistributedGradientTape(tape, compression=compression, op=op)
        # batch_size=n weights the mean over this rank's images by their number.
        weight = None if options.loss == "sum" else tf.shape(images)[0]
        gradients = tape.gradient(loss, model.trainable_variables, batch_size=weight)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return count_correct(outputs, labels)

    for epoch in range(options.epochs):
        start, correct = time.perf_counter(), 0
        for batch, size in zip(batches, sharding.global_batch_sizes, strict=True):
            correct += int(step(*batch, size))
        seconds = time.perf_counter() - start
        found = sum(int(count_correct(model(each), labels)) for each, labels in test_batches)
        total = hvd.sum_metrics({"training": correct, "test": found})
        training, test = total["training"] / len(train_set[0]), total["test"] / len(test_set[0])
        gluon_common.report(hvd, epoch, training, test, seconds)
    return model


def to_arrays(samples: digits.Samples) -> tuple:
    """Return images of shape (samples, 28, 28, 1), smaller ones enlarged, and their labels."""
    return digits.resize(samples.images, gluon_common.SIDE)[..., None], samples.labels


def make_lenet() -> keras.Model:
    """Return Gluon's network; Keras draws weights as Gluon's ``init.Xavier()`` does."""
    return keras.Sequential(
        [
            keras.Input((gluon_common.SIDE, gluon_common.SIDE, 1)),
            layers.Conv2D(6, kernel_size=5, activation="relu"),
            layers.MaxPool2D(2),
            layers.Conv2D(16, kernel_size=3, activation="relu"),
            layers.MaxPool2D(2),
            layers.Flatten(),
            layers.Dense(120, activation="relu"),
            layers.Dense(84, activation="relu"),
            layers.Dense(digits.CLASSES),
        ]
    )


def count_correct(outputs: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Return how many images got the highest score for their label."""
    return tf.math.count_nonzero(tf.argmax(outputs, axis=1) == labels)


if __name__ == "__main__":
    train(gluon_common.parse_options(__doc__))
