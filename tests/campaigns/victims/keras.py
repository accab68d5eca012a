"""Optimizers of Keras 3 that can part, on TensorFlow and on PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

import hvdlite.keras as hvd
from tests.campaigns.divergence import Parting

KINDS = ("SGD", "Adam", "AdamW", "RMSprop")
_OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "RMSprop": {"momentum": 0.5}}
# Of the configuration; numbers that an optimizer keeps as attributes.
_NAMES = ("momentum", "beta_1", "beta_2", "rho", "epsilon", "weight_decay")


class Victim:
    """A small model; see `tests.campaigns.divergence.Victim`."""

    def __init__(self, kind: str, options: Mapping[str, Any], wraps: bool) -> None:
        keras.utils.set_random_seed(0)
        self.model: Any = keras.Sequential(
            [
                keras.Input((4,)),
                keras.layers.Dense(16, activation="relu", name="first"),
                keras.layers.Dense(2, name="last"),
            ]
        )
        chosen = {"learning_rate": 0.01, **_OPTIONS.get(kind, {})}
        self.optimizer: Any = getattr(keras.optimizers, kind)(**chosen)
        if wraps:
            self.optimizer = hvd.DistributedOptimizer(self.optimizer, **options)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.model.compile(optimizer=self.optimizer, loss=loss)

    def step(self, number: int, samples: int | None = None) -> None:
        """Make a step; batches of different sizes have no weights here."""
        is_done = False
        while not is_done:
            generator = np.random.default_rng((number, hvd.virtual_rank()))
            x = generator.normal(size=(samples or 4, 4)).astype(np.float32)
            self.model.train_on_batch(x, (x.sum(1) > 0).astype(np.int32))
            is_done = getattr(self.optimizer, "stepped", True)

    def broadcast(self, root: int) -> None:
        """Give all ranks the weights and the state of one."""
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(root)
        callback.set_model(self.model)
        callback.on_train_begin()

    def partings(self) -> dict[str, Parting]:
        """Return an option each, a weight, a state, a schedule and weights that are loaded."""
        options = {
            f"option {name}": Parting(self._changing(name), f"the optimizer's {name} ", True)
            for name in _NAMES
            if isinstance(getattr(self.optimizer, name, None), float)
        }
        any_array = "the (weight|optimizer's) "
        return {
            **options,
            "option learning_rate": Parting(self._rate, "the optimizer's learning_rate ", True),
            "a weight": Parting(self._change_weight, "the weight '[^']*last/bias'"),
            "a state": Parting(self._change_state, any_array, follows=True),
            "a schedule by its own loss": Parting(
                self._plateau, "the optimizer's learning_rate ", True
            ),
            "weights that are loaded": Parting(self._load, any_array),
        }

    def _changing(self, name: str) -> Any:
        return lambda: setattr(self.optimizer, name, 0.5 * getattr(self.optimizer, name))

    def _rate(self) -> None:
        self.optimizer.learning_rate = 0.5

    def _change_weight(self) -> None:
        bias = self.model.get_layer("last").bias
        bias.assign(bias + 1.0)

    def _change_state(self) -> None:
        state = next(each for each in reversed(self.optimizer.variables) if each.shape == (2,))
        state.assign(state + 1.0)

    def _plateau(self) -> None:
        callback = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1)
        callback.set_model(self.model)
        callback.on_train_begin()
        for epoch, loss in enumerate((1.0, 2.0, 3.0)):
            callback.on_epoch_end(epoch, {"loss": loss})

    def _load(self) -> None:
        self.model.set_weights([0.5 * weight for weight in self.model.get_weights()])


def make(kind: str, options: Mapping[str, Any], is_named: bool = False) -> Victim:
    """Return a victim; only the names of its partings are asked for if ``is_named``."""
    return Victim(kind, options, not is_named)
