"""Train a convolutional network on handwritten digits with TensorFlow, on one process.

    python course_mnist_tensorflow_sequential.py --data-dir mnist

`course_mnist_tensorflow.py` is this script for N processes: compare them with `diff`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import course_common
import keras
import tensorflow as tf
from digits import CLASSES, Samples

loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def main() -> None:
    """Train, and print the metrics of each epoch."""
    options = course_common.parse_options(__doc__)
    keras.utils.set_random_seed(options.seed)

    data = course_common.load_digits(options.data_dir)
    train_set, test_set = as_arrays(data.train), as_arrays(data.test)
    batches = tf.data.Dataset.from_tensor_slices(train_set)
    batches = batches.shuffle(len(data.train.images)).batch(options.batch_size)
    test_batches = tf.data.Dataset.from_tensor_slices(test_set).batch(256)

    model = make_model(*data.train.images.shape[1:])
    optimizer = keras.optimizers.SGD(options.lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    step = make_step(model, optimizer, batches.element_spec)

    for epoch in range(1, options.epochs + 1):
        start = time.perf_counter()
        train = train_epoch(step, batches)
        seconds = time.perf_counter() - start
        if options.checkpoint:
            model.save(options.checkpoint)
        test = evaluate(model, test_batches)
        print(
            f"epoch {epoch}: {seconds:.1f} s, loss {train['loss']:.4f}, "
            f"accuracy {train['accuracy']:.4f}, test accuracy {test['accuracy']:.4f}"
        )


def make_step(
    model: keras.Model, optimizer: keras.optimizers.Optimizer, signature: tuple
) -> Callable:
    """Return the function that takes one step, and returns the mean loss and the outputs."""

    # With the signature, in which the batch size is open, one graph serves the last batch, too.
    @tf.function(input_signature=signature)
    def step(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            outputs = model(images, training=True)
            loss = loss_function(labels, outputs)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss, outputs

    return step


def train_epoch(step: Callable, batches: tf.data.Dataset) -> dict[str, float]:
    """Take one step for each batch, and return the means over the images."""
    loss_sum, correct, count = 0.0, 0, 0
    for images, labels in batches:
        loss, outputs = step(images, labels)
        loss_sum += float(loss) * len(labels)
        correct += int(tf.math.count_nonzero(tf.argmax(outputs, axis=1) == labels))
        count += len(labels)
    return {"loss": loss_sum / count, "accuracy": correct / count}


def evaluate(model: keras.Model, batches: tf.data.Dataset) -> dict[str, float]:
    """Return the accuracy on the batches."""
    correct, count = 0, 0
    for images, labels in batches:
        outputs = model(images, training=False)
        correct += int(tf.math.count_nonzero(tf.argmax(outputs, axis=1) == labels))
        count += len(labels)
    return {"accuracy": correct / count}


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


if __name__ == "__main__":
    main()
