"""Test seeds with Keras 3 on any framework: equal weights, and dropout that differs by rank."""

import keras
import numpy as np

import hvdlite.keras as hvd
from tests.keras import same_on_all_ranks


def make(seed=None):
    return keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dropout(0.5, seed=seed)]
    )


def masks(model):
    """Return which outputs two batches drop."""
    return b"".join(
        (keras.ops.convert_to_numpy(model(np.ones((16, 4)), training=True)) == 0).tobytes()
        for _ in range(2)
    )


def differ(model):
    found = hvd.allgather_object(masks(model))
    return len(set(found)) == hvd.size()


def test_seeded_layers():
    found = []
    for n in (5, 5, 6):
        keras.backend.clear_session()  # layers of a new process have these names, too
        with hvd.seed(n):
            model = make()
        assert same_on_all_ranks(model.get_weights())
        found.append((model.get_weights()[0].tobytes(), masks(model)))
        assert differ(model)
        hvd.seed(n)  # generators of layers start over
        assert masks(model) == found[-1][1]
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[0][1] != found[2][1]


def test_dropout_differs_after_a_broadcast_of_the_same_seed():
    for broadcast in (
        lambda model: hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        lambda model: broadcast_all(model),
    ):
        keras.utils.set_random_seed(1)  # on all ranks, as in a script for one process
        # A layer without a seed would take PyTorch's global generator, where Keras runs on that.
        model = make(seed=1)
        before = hvd.allgather_object(masks(model))
        assert before == [before[0]] * hvd.size()
        callback = broadcast(model)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
        model.compile(optimizer, loss="mse", jit_compile=False)
        x = np.ones((8, 4), np.float32)
        y = np.ones((8, 8), np.float32)
        # Three steps: the second compares the ranks.
        model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[callback] if callback else [])
        assert same_on_all_ranks(model.get_weights())
        assert differ(model)


def broadcast_all(model):
    """Broadcast seeds, too, as scripts do with ``model.variables``."""
    from hvdlite.keras._values import broadcast_variables

    if keras.backend.backend() == "tensorflow":
        import hvdlite.tensorflow as tf_hvd

        tf_hvd.broadcast_variables(model.variables, root_rank=0)
    else:
        broadcast_variables(model.variables, 0)
