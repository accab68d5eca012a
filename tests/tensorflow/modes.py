"""Helpers for the tests of the TensorFlow adapter."""

import numpy as np
import pytest
import tensorflow as tf

import hvdlite.tensorflow as hvd

each_mode = pytest.mark.parametrize("mode", ["eager", "function"])


def in_mode(mode, function):
    return tf.function(function) if mode == "function" else function


def reduced(loss, sources, **options):
    """Return the gradients of what a function returns, by a distributed tape."""
    with hvd.DistributedGradientTape(tf.GradientTape(), **options) as tape:
        target = loss()
    return tape.gradient(target, sources)


def equal(tensor, expected):
    """Check that the shape and every element are as expected."""
    found = tensor.numpy()
    expected = np.asarray(expected)
    return found.shape == expected.shape and bool((found == expected).all())


def close(tensor, expected, tolerance=1e-6):
    found, expected = (np.asarray(each).astype(np.float64) for each in (tensor, expected))
    scale = max(1.0, float(np.abs(expected).max(initial=0.0)))
    return found.shape == expected.shape and np.abs(found - expected).max(initial=0.0) <= (
        tolerance * scale
    )
