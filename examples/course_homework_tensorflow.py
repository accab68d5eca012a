"""Solve the course's homework with TensorFlow: time and accuracy on N processes, by warm-up.

    hvdliterun -np 4 python course_homework_tensorflow.py --data-dir mnist

`course_homework.py` is the same with PyTorch.
"""

from __future__ import annotations

import argparse
import time

import course_comparison
import keras
from course_mnist_tensorflow import as_arrays, evaluate, make_model, make_step, train_epoch
from course_plot import Accuracies
from digits import Digits

import hvdlite.tensorflow as hvd


def main() -> None:
    """Train with and without warm-up, print a table and draw the curves."""
    options = course_comparison.parse_options(__doc__)
    hvd.init()
    hvd.pin_device()
    course_comparison.compare(hvd, train, options)


def train(
    data: Digits, warmup_epochs: float, options: argparse.Namespace
) -> tuple[Accuracies, float]:
    """Train once, and return the accuracies and the mean seconds of an epoch."""
    keras.utils.set_random_seed(options.seed)
    batches = hvd.shard(as_arrays(data.train), options.batch_size)
    test_batches = hvd.shard(as_arrays(data.test), batch_size=256, shuffle=False)

    model = make_model(*data.train.images.shape[1:])
    optimizer = keras.optimizers.SGD(options.lr, momentum=0.9)
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)
    step = make_step(model, optimizer, batches.element_spec)
    rate = hvd.warmup(options.lr, warmup_epochs)

    accuracies, seconds = Accuracies([], []), []
    for epoch in range(options.epochs):
        start = time.perf_counter()
        use = optimizer.learning_rate.assign
        trained = train_epoch(step, course_comparison.with_rates(batches, rate, epoch, use))
        seconds.append(time.perf_counter() - start)
        accuracies.training.append(trained["accuracy"])
        accuracies.validation.append(evaluate(model, test_batches)["accuracy"])
    return accuracies, course_comparison.mean_of_later(seconds)


if __name__ == "__main__":
    main()
