"""Sharded data as a ``tf.data.Dataset``."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from hvdlite import recipe
from hvdlite.base.arguments import check_count
from hvdlite.engine import runtime
from hvdlite.recipe import Sharding
from hvdlite.recipe._tree import map_leaves
from hvdlite.recipe.seeding import own_number
from hvdlite.tensorflow.tensors import unconverted
from hvdlite.world import membership, parts, world

_SEEDS = 2**31 - 1  # to which TensorFlow reduces a seed
_divided = 0  # the checksum of what `sharded` was applied to, in the order of the calls


def shard(
    data: Any,
    batch_size: int,
    shuffle: bool = True,
    seed: int = 0,
    first_epoch: int = 0,
    *,
    allow_empty: bool = False,
    state: Mapping[str, Any] | None = None,
) -> tf.data.Dataset:
    """Deal arrays to the ranks, as a dataset of this rank's batches.

    Every rank makes the same number of steps, no batch is empty, and every sample comes
    exactly once per epoch over all ranks, the remainder included (see `Sharding`).

    Each iteration over the dataset is one epoch. When its last batch has been taken, the next
    iteration is the next epoch, in a new order; an iteration that is abandoned before
    (a look at the first batch, say, on one rank) changes nothing. All ranks must end the same
    epochs. ``prefetch(n)`` takes ``n`` batches ahead, so a look at an epoch with no more batches
    than that takes all of them: look at the data another way.

    Args:
        data: An array or tensor (first axis: samples), or a tuple or dict of them, arbitrarily
            nested; the data are not copied, and batches are gathered by index. Or a
            ``tf.data.Dataset`` of samples, to which `sharded` is applied.
        batch_size, seed, allow_empty: As for `hvdlite.shard`.
        shuffle: Shuffle each epoch; False for evaluation, and for a dataset, whose own
            ``shuffle`` needs the same seed on all ranks.
        first_epoch: The epoch, from 0, of the first iteration; to resume training, or to
            continue, with a new dataset, after an epoch that was ended early.
        state: A position from `Sharding.position`, in the place of ``first_epoch``: the first
            iteration is the rest of that epoch, on any number of ranks.

    Returns:
        A dataset of batches in the structure of ``data``, of known types and, unless it begins
        within an epoch, known cardinality.

    Raises:
        ValueError: Lengths disagree, or there are fewer samples than ranks and not
            ``allow_empty``; ``state`` belongs to other data (see `Sharding.at`), or is given
            together with ``first_epoch``; or a dataset comes with another option than the batch
            size and ``shuffle=False``.

    Example::

        dataset = hvd.shard((images, labels), batch_size=64).prefetch(2)
        sharding = hvd.Sharding(len(images), batch_size=64)
        for step, batch in enumerate(dataset, start=1):
            ...
        checkpoint.save({"weights": ..., "data": sharding.position(epoch, step)})
    """
    if isinstance(data, tf.data.Dataset):
        if shuffle or first_epoch or allow_empty or state is not None:
            raise ValueError(
                "data is a tf.data.Dataset, which has an order of its own: pass shuffle=False, and "
                "no first_epoch, allow_empty and state"
            )
        return data.apply(sharded(batch_size))
    arrays = map_leaves(_as_array, data, is_leaf=lambda part: isinstance(part, list))
    batches = recipe.shard(arrays, batch_size, shuffle, seed, allow_empty=allow_empty)
    batches.is_ahead = True
    if state is None:
        batches.set_epoch(first_epoch)
    elif first_epoch:
        raise ValueError(f"first_epoch={first_epoch} and state: give one of them")
    else:
        batches.load_state_dict(state)
    signature = tf.nest.map_structure(
        lambda array: tf.TensorSpec((None, *array.shape[1:]), array.dtype), arrays
    )
    dataset = tf.data.Dataset.from_generator(lambda: batches, output_signature=signature)
    may_grow = parts.current.are_fixed and runtime.engine().settings.elastic
    if batches.sharding.done or may_grow:
        return dataset  # the first iteration has fewer batches than the others, or a later one more
    cardinality = len(batches) * len(parts.current.share)
    return dataset.apply(tf.data.experimental.assert_cardinality(cardinality))


def _as_array(part: Any) -> Any:
    return part if hasattr(part, "chunks") else np.asarray(part)  # in a file (h5py) it stays there


def sharded(batch_size: int) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    """Return a transformation of a dataset of samples into one of this rank's batches.

    Every rank reads all samples, so put expensive transformations behind it. All ranks make the
    same number of steps, and every sample comes once per epoch. Where the cardinality is known,
    batches are those of `shard` without shuffling; where it is unknown or infinite, sample ``i`` is
    that of rank ``i % size``, and at the end the last batch is smaller or, on some ranks, has one
    sample more.

    ``dataset.shuffle(n, seed=...)`` before it gives each epoch a new order, if all ranks use the
    same seed there and the same global one: call both inside ``with hvd.seed(n):``, or leave out
    ``hvd.seed``, ``tf.random.set_seed`` and ``keras.utils.set_random_seed``.

    Args:
        batch_size: Samples per rank and step.

    Returns:
        A transformation for ``dataset.apply``. The dataset must be in the same order on all ranks.

    Raises:
        ValueError: From ``apply``: there are fewer samples than ranks; a ``shuffle`` before it
            has no seed, or the one of this rank; or what is before it has deterministic=False.
        tf.errors.InvalidArgumentError: From the iteration: the same, of unknown cardinality.

    Example::

        dataset = files.shuffle(1000, seed=1).apply(hvd.sharded(64)).map(decode)
    """

    @unconverted
    def apply(dataset: tf.data.Dataset) -> tf.data.Dataset:
        parts.current.refuse("hvd.sharded", "give hvd.shard arrays")
        seeds = _seeds_of_shuffles(dataset) if world.size() > 1 else []
        samples = int(dataset.cardinality())
        global _divided
        _divided = zlib.crc32(repr((samples, batch_size, *seeds)).encode(), _divided)
        membership.division = _divided
        if samples < 0:
            return _by_turns(dataset, batch_size)
        sharding = Sharding(samples, batch_size, shuffle=False)
        own = sharding.indices(0)
        step_of = np.full(samples, -1)
        for step, indices in enumerate(own):
            step_of[indices] = step
        steps = tf.constant(step_of, tf.int64)
        sizes = tf.constant([len(indices) for indices in own], tf.int64)

        # Windows are keyed by the step, so each holds one batch of its own size.
        batches = (
            dataset.enumerate()
            .filter(lambda number, _: steps[number] >= 0)
            .group_by_window(
                key_func=lambda number, _: steps[number],
                reduce_func=lambda step, window: window.batch(sizes[step]),
                window_size_func=lambda step: sizes[step],
            )
            .map(lambda _, sample: sample)
        )
        return batches.apply(tf.data.experimental.assert_cardinality(sharding.steps))

    return apply


def _seeds_of_shuffles(dataset: Any) -> list[Any]:
    """Return the seeds of a dataset's shuffles; refuse an order that differs by rank.

    Some samples would come twice then, and others never.
    """
    found = [seed for source in dataset._inputs() for seed in _seeds_of_shuffles(source)]
    chosen = dataset.options().deterministic, getattr(dataset, "_deterministic", None)
    if False in chosen or "false" in chosen:
        raise ValueError(
            "a dataset before hvd.sharded has deterministic=False, so that some samples would come "
            "twice and others never; leave that out, or give it to what is behind"
        )
    if type(dataset).__name__ != "_ShuffleDataset":
        return found
    seeds = tf.get_static_value(dataset._seed), tf.get_static_value(dataset._seed2)
    own = own_number()
    wrong = "has no seed" if seeds == (0, 0) else ""
    if seeds[0] in (own % _SEEDS, own % 2**32 % _SEEDS):  # 32 bits: Keras has set it again
        wrong = "has the seed of this rank, from hvd.seed"
    if wrong:
        raise ValueError(
            f"a shuffle before hvd.sharded {wrong}, so each rank would read the samples in another "
            "order, and some would come twice and others never: give it a seed, as in "
            "dataset.shuffle(1000, seed=1) or list_files(pattern, seed=1), and call it before "
            "hvd.seed(n) or inside of `with hvd.seed(n):`"
        )
    return [*found, str(seeds)]


def _by_turns(dataset: tf.data.Dataset, batch_size: int) -> tf.data.Dataset:
    """Return this rank's batches of a dataset of unknown cardinality, as `recipe.Stream`."""
    check_count("batch_size", batch_size)
    rank, size = world.rank(), world.size()
    whole = batch_size * size

    def own(step: tf.Tensor, window: Any) -> tf.data.Dataset:
        # A window has a step's samples and one more for each rank: if these are there, the step is
        # not the last, and they come again. If some are missing, the rest belongs to this step.
        samples = tf.data.Dataset.zip(window) if isinstance(window, (tuple, dict)) else window
        found = samples.reduce(tf.constant(0, tf.int64), lambda count, *_: count + 1)
        is_rest = (found < size) & (step > 0)  # which the step before has taken
        enough = tf.debugging.Assert(
            (found >= size) | is_rest,
            [tf.strings.format("{} samples cannot give each of %d ranks one" % size, found)],  # noqa: UP031
        )
        with tf.control_dependencies([enough]):
            wanted = tf.where(found == whole + size, batch_size, batch_size + 1)
        wanted = tf.where(is_rest, 0, wanted)
        return samples.shard(size, rank).take(tf.cast(wanted, tf.int64)).batch(batch_size + 1)

    windows = dataset.window(whole + size, shift=whole).enumerate()
    return windows.flat_map(own)
