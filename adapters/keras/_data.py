"""Sharded data that ``fit`` of Keras 3 takes, on TensorFlow and on PyTorch."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from hvdlite import recipe
from hvdlite.keras._values import batches_per_call, to_array
from hvdlite.recipe import Sharding
from hvdlite.recipe._tree import map_leaves
from hvdlite.recipe.batches import Batches, take
from hvdlite.world import parts


def shard(
    data: Any,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    rank: int | None = None,
    size: int | None = None,
    allow_empty: bool = False,
) -> Any:
    """Distribute a data set over the ranks, as `hvdlite.shard`, for ``fit`` and for loops.

    ``fit``, ``evaluate`` and ``predict`` take what this returns. A pair of inputs and targets gets
    weights of samples as a third part there: 1, except at the end of an epoch, where a remainder
    may give one rank a sample more than another. They make the mean over the ranks that of all
    samples. Weights of your own are a third part of the data, in the place of ``class_weight``, and
    are multiplied by these. A loop over it is one over `hvdlite.recipe.batches.Batches`.

    With ``steps_per_epoch``, the next epoch of ``fit`` goes on with the samples that are left. Each
    ``fit`` begins at the start of an epoch of the data, also after ``load_state_dict``, since all
    epochs of ``fit`` are equally long: let `elastic.UpdateBatchStateCallback` leave out its first
    batches, or take the rest of it in a loop before.

    Args:
        data: As for `hvdlite.shard`, like all other arguments.

    Returns:
        A ``keras.utils.PyDataset`` of this rank's batches, in a new order in each epoch, the same
        on all ranks, whether or not ``fit`` shuffles; of an iterable without a length its
        `hvdlite.recipe.Stream`.

    Raises:
        ValueError, TypeError: As `hvdlite.shard`.

    Example::

        model.fit(hvd.shard((images, labels), batch_size=64), epochs=10)
    """
    data = map_leaves(_as_array, data, is_leaf=lambda part: isinstance(part, list))
    batches = recipe.shard(data, batch_size, shuffle, seed, rank, size, allow_empty)
    _keep_order()
    return ShardedData(data, batches) if isinstance(batches, Batches) else batches


@functools.cache
def _keep_order() -> None:
    """Let ``fit`` take the steps of `ShardedData` in their order, which is that of all ranks."""
    original = keras.Model.fit
    signature = inspect.signature(original)

    @functools.wraps(original)
    def fit(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        data = given.get("x")
        if isinstance(data, ShardedData):
            given["shuffle"] = False
            begin = keras.callbacks.LambdaCallback(on_epoch_begin=data.begin_epoch)
            others = given.get("callbacks")
            if isinstance(others, keras.callbacks.CallbackList):
                others.callbacks.append(begin)
            else:
                given["callbacks"] = [*keras.tree.flatten(others or []), begin]
            data.begin_fit(given.get("steps_per_epoch"), batches_per_call(given["self"]))
        return original(**given)

    keras.Model.fit = fit


def _as_array(part: Any) -> Any:
    return to_array(part) if keras.ops.is_tensor(part) else part  # TensorFlow's take no indices


class ShardedData(keras.utils.PyDataset):
    """One rank's batches, by their number in the epoch; other attributes are those of `Batches`."""

    def __init__(self, data: Any, batches: Batches) -> None:
        super().__init__()
        self._data = data
        self._batches = batches
        self._order: tuple[int, Sharding, list[Any]] | None = None  # of one epoch
        self._per_epoch: int | None = None  # steps that an epoch of `fit` takes; None: all
        self._done = 0  # steps that such epochs have taken
        self._has_begun = True  # the first epoch of `fit`; Keras ends one before it

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def __getitem__(self, step: int) -> Any:
        parts.current.refuse("a hvdlite.keras.shard in fit", "use hvdlite.tensorflow.shard")
        epoch, sharding = self._batches.ask(step + 1)  # those of the ranks that live
        order = self._order
        if order is None or order[:2] != (epoch, sharding):
            order = self._order = epoch, sharding, sharding.indices(epoch)
        _, sharding, all_indices = order  # with what it has computed
        indices = all_indices[step]
        batch = take(self._data, indices)
        if not isinstance(batch, tuple) or len(batch) not in (2, 3):
            return batch
        factor = sharding.weights[step]
        given = batch[2] if batch[2:] else np.ones(len(indices), np.float32)
        return (*batch[:2], keras.tree.map_structure(lambda each: each * factor, given))

    def begin_fit(self, steps_per_epoch: int | None, per_call: int) -> None:
        """Begin a ``fit`` at the start of an epoch; ``per_call`` steps are taken at once."""
        ahead = self.workers > 1 or self.use_multiprocessing
        if ahead and keras.backend.backend() == "torch":
            raise ValueError(
                f"the data have workers={self.workers} and use_multiprocessing="
                f"{self.use_multiprocessing}, with which Keras on PyTorch takes batches from one "
                "epoch into the next; leave them at 1 and False"
            )
        epoch = self._batches.position()[0]
        # To set the epoch at which it stands changes nothing; so first to another one.
        self.set_epoch(epoch + 1)
        if not self._done:
            self.set_epoch(epoch)
        self._done, self._has_begun = 0, False
        self._per_epoch = steps_per_epoch and -(-steps_per_epoch // per_call) * per_call

    def begin_epoch(self, epoch: int, logs: Any = None) -> None:
        self._has_begun = True

    def on_epoch_end(self) -> None:
        if not self._has_begun:
            return
        # Not the steps that were asked for: Keras asks for some ahead, on each rank for others.
        self._done += self._per_epoch or len(self)
        if self._done >= len(self):
            self._done = 0
            self._batches.set_epoch(self._batches.position()[0] + 1)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._batches, name)


Batches.register(ShardedData)  # for `hvdlite.elastic`: it has all that those have
