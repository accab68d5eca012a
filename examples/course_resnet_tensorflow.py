"""Measure images/s of ResNet-34 on synthetic images with TensorFlow, on N processes.

    hvdliterun -np 2 python course_resnet_tensorflow.py --num_steps 20
    hvdliterun -np 4 python course_resnet_tensorflow.py --image_size 224 --batch_size 64

Every rank takes the same batch in every step: reading data is not measured.
"""

from __future__ import annotations

import time

import course_common
import keras
import tensorflow as tf
from resnet_keras import resnet34

import hvdlite.tensorflow as hvd

_CLASSES = 1000
_UNTIMED = 3  # steps in which the graph is built, and in which ranks compare their weights


def main() -> None:
    """Train for some steps, and print the images per second."""
    options = course_common.parse_benchmark_options(__doc__)
    hvd.init()
    hvd.pin_device()

    # Synthetic images, so that only computation and exchange are measured; each rank has others.
    keras.utils.set_random_seed(hvd.rank())
    size = options.image_size
    images = tf.random.normal((options.batch_size, size, size, 3))
    labels = tf.random.uniform((options.batch_size,), maxval=_CLASSES, dtype=tf.int32)

    model = resnet34(size, _CLASSES, options.width)
    loss_function = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(hvd.scale_lr(0.01))
    optimizer.build(model.trainable_variables)
    hvd.broadcast_variables(model.variables, root_rank=0)
    hvd.broadcast_variables(optimizer.variables, root_rank=0)

    @tf.function
    def step() -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = loss_function(labels, model(images, training=True))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    seconds = []
    for _ in range(_UNTIMED + options.num_steps):
        start = time.perf_counter()
        float(step())  # waits for the device
        seconds.append(time.perf_counter() - start)
    course_common.report_rates(hvd, seconds[_UNTIMED:], options)


if __name__ == "__main__":
    main()
