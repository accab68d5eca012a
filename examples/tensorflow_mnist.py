"""Train a small convolutional network on handwritten digits, in a custom loop of TensorFlow 2.

    python tensorflow_mnist.py
    mpirun -np 2 python tensorflow_mnist.py --data-dir mnist

The numbered comments are the steps that make a script for one process one for N.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import console
import failures
import keras
import tensorflow as tf
from digits import CLASSES, Samples
from plan import Plan

import hvdlite.tensorflow as hvd


def main() -> None:
    """Train, evaluate and report."""
    options = console.parse_options(__doc__)

    # 1. Initialise: from here on, this process has a rank.
    hvd.init()

    # 2. Pin one accelerator to this process or, where there is none, its share of the cores.
    hvd.pin_device()

    # 3. Shard the data: every image exactly once per epoch, over all ranks.
    data = failures.load_data(hvd, options.data_dir)
    sharding = hvd.Sharding(len(data.train.images), options.batch_size)

    # The ranks begin with different weights on purpose: step 6 makes them equal.
    hvd.seed(options.seed)
    model = make_model(*data.train.images.shape[1:])
    optimizer = keras.optimizers.SGD(options.lr, momentum=0.9)
    optimizer.build(model.trainable_variables)

    # 4. Scale the learning rate with the number of ranks, after a warm-up.
    plan = Plan(options, steps_per_epoch=sharding.steps)
    warmup = hvd.warmup(options.lr, plan.warmup_steps)

    # 5. Wrap the gradient tape: its gradients are the average of all ranks'.
    train_step = make_train_step(
        model, optimizer, compression=getattr(hvd.Compression, options.compression)
    )

    checkpoint = hvd.checkpoint(Path(options.checkpoint_dir or ".", "tensorflow_mnist.npz"))
    first_epoch = 0
    if options.checkpoint_dir and (state := checkpoint.load(default=None)):
        first_epoch = state["epoch"]
        hvd.assign_variables(model.variables, state["model"])
        hvd.assign_variables(optimizer.variables, state["optimizer"])

    # 6. Broadcast the initial state: all ranks begin with that of rank 0.
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    batches = hvd.shard(
        as_arrays(data.train), options.batch_size, seed=options.seed, first_epoch=first_epoch
    )
    train_loss = None
    with hvd.progress(plan.last_step, initial=first_epoch * sharding.steps) as bar:
        for epoch, steps in plan.epochs(first_epoch):
            loss_sum, count = 0.0, 0
            for step, (images, labels), weight in zip(
                steps, batches, sharding.weights, strict=False
            ):
                optimizer.learning_rate = warmup(step) * plan.decay(step)
                loss = train_step(images, labels, weight)
                loss_sum += float(loss) * len(labels)
                count += len(labels)
                bar.update(len(labels))

            # 7. Checkpoint: rank 0 alone writes the file.
            if options.checkpoint_dir and len(steps) == sharding.steps:
                checkpoint.save(
                    {
                        "epoch": epoch + 1,
                        "model": model.variables,
                        "optimizer": optimizer.variables,
                    }
                )

            # 8. Average the metrics over all ranks, weighted by their numbers of images.
            train_loss = hvd.average_metrics({"loss": loss_sum / count}, weight=count)["loss"]
            bar.set_postfix(epoch=epoch + 1, loss=train_loss)

    result = {
        "framework": "tensorflow",
        "processes": hvd.size(),
        "images_per_s": bar.samples_per_s or None,
        "train_loss": train_loss,
        "test_accuracy": evaluate(model, data.test),
    }
    console.report(hvd, options.json, result, model.get_weights())


def as_arrays(samples: Samples) -> tuple:
    """Return images of shape (height, width, 1) and their labels."""
    return samples.images[..., None], samples.labels


def make_model(height: int, width: int) -> keras.Model:
    """Return the network, for images of this size."""
    return keras.Sequential(
        [
            keras.Input((height, width, 1)),
            keras.layers.Conv2D(16, kernel_size=5, padding="same", activation="relu"),
            keras.layers.MaxPool2D(pool_size=3, strides=2, padding="same"),
            keras.layers.Conv2D(32, kernel_size=5, padding="same", activation="relu"),
            keras.layers.MaxPool2D(pool_size=3, strides=2, padding="same"),
            keras.layers.Flatten(),
            keras.layers.Dense(CLASSES),
        ]
    )


def make_train_step(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, compression: Any
) -> tf.types.experimental.PolymorphicFunction:
    """Return the function that takes one step, and returns this rank's mean loss.

    The weight is 1, except where a remainder gives one rank an image more than another: it
    makes the average over the ranks the average over the images.
    """
    mean_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    # The signature keeps TensorFlow from tracing again for the last, smaller batch.
    @tf.function(
        input_signature=[
            tf.TensorSpec((None, *model.input_shape[1:]), tf.float32),
            tf.TensorSpec((None,), tf.int64),
            tf.TensorSpec((), tf.float32),
        ]
    )
    def train_step(images: tf.Tensor, labels: tf.Tensor, weight: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = mean_loss(labels, model(images, training=True))
            weighted_loss = weight * loss
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(weighted_loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return train_step


def evaluate(model: keras.Model, test: Samples) -> float:
    """Return the accuracy on the test images, each counted once over all ranks."""
    correct, count = 0, 0
    for images, labels in hvd.shard(as_arrays(test), batch_size=256, shuffle=False):
        predictions = tf.argmax(model(images), axis=1)
        correct += int(tf.math.count_nonzero(predictions == labels))
        count += len(labels)
    return hvd.average_metrics({"accuracy": correct / count}, weight=count)["accuracy"]


if __name__ == "__main__":
    try:
        main()
    except hvd.CheckpointError as error:
        failures.exit_all(hvd, str(error))
