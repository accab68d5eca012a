"""Train a small convolutional network on handwritten digits with Keras's fit.

    KERAS_BACKEND=tensorflow python keras_digits.py
    KERAS_BACKEND=torch mpirun -np 2 python keras_digits.py --data-dir mnist

The numbered comments are the steps that make a script for one process one for N.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import console
import failures
import keras
import numpy as np
from digits import CLASSES, Samples

import hvdlite.keras as hvd


def main() -> None:
    """Train, evaluate and report."""
    options = parse_options()

    # 1. Initialise: from here on, this process has a rank.
    hvd.init()

    # 2. Pin one accelerator to this process or, where there is none, its share of the cores.
    hvd.pin_device()

    # 3. Shard the data: every image exactly once per epoch, over all ranks.
    data = failures.load_data(hvd, options.data_dir)
    images, labels = data.train.images[..., None], data.train.labels
    batches = hvd.shard((images, labels), options.batch_size, seed=options.seed)

    # The ranks begin with different weights on purpose: step 6 makes them equal.
    hvd.seed(options.seed)
    model = make_model(*data.train.images.shape[1:])

    # 4. Scale the learning rate with the number of ranks, after a warm-up.
    rate = hvd.scale_lr(options.lr)

    # 5. Wrap the optimizer: it applies the average of all ranks' gradients.
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(rate, momentum=0.9),
        compression=getattr(hvd.Compression, options.compression),
    )
    model.compile(
        optimizer=optimizer,
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
        jit_compile=False,
    )
    callbacks = [
        # 6. Broadcast the initial state: all ranks begin with that of rank 0.
        hvd.callbacks.BroadcastGlobalVariablesCallback(root_rank=0),
        # 7. Average the metrics over all ranks, before anything else looks at them.
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=options.warmup_epochs),
        hvd.callbacks.LearningRateScheduleCallback(
            rate,
            multiplier=lambda epoch: 1 - epoch / options.epochs,
            start_epoch=options.warmup_epochs,
        ),
    ]
    if options.checkpoint_dir:
        # 8. Checkpoint: rank 0 alone writes the file.
        path = Path(options.checkpoint_dir, "keras_digits.keras")
        callbacks.append(hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath=path))

    history = model.fit(
        batches,
        epochs=options.epochs,
        callbacks=callbacks,
        verbose=2 if hvd.rank() == 0 and not options.json else 0,
    )

    result = {
        "framework": f"keras on {keras.backend.backend()}",
        "processes": hvd.size(),
        "train_loss": history.history["loss"][-1],
        "test_accuracy": evaluate(model, data.test),
    }
    console.report(hvd, options.json, result, model.get_weights())


def parse_options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--data-dir", help="folder of MNIST's IDX files; without it: scikit-learn's digits")
    add("--epochs", type=int, default=12)
    add("--warmup-epochs", type=int, default=2, help="until the learning rate is scaled")
    add("--batch-size", type=int, default=32, help="images per process and step")
    add("--lr", type=float, default=0.03, help="learning rate of one process")
    add("--seed", type=int, default=1)
    add("--compression", choices=("none", "fp16", "bf16"), default="none")
    add("--checkpoint-dir", help="keep the best model there")
    add("--json", action="store_true", help="end with a line of JSON on standard output")
    return parser.parse_args()


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


def evaluate(model: keras.Model, test: Samples) -> float:
    """Return the accuracy on the test images, each counted once over all ranks."""
    indices = np.arange(len(test.labels))[hvd.rank() :: hvd.size()]
    logits = model.predict(test.images[indices, ..., None], batch_size=256, verbose=0)
    accuracy = float(np.mean(logits.argmax(axis=1) == test.labels[indices]))
    return hvd.average_metrics({"accuracy": accuracy}, weight=len(indices))["accuracy"]


if __name__ == "__main__":
    main()
