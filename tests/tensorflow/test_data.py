import collections

import numpy as np
import pytest

from tests.harness import ranks

pytest.importorskip("tensorflow")

import h5py  # which Keras needs
import keras
import tensorflow as tf

import hvdlite.tensorflow as hvd
from hvdlite import recipe


def everywhere(batches):
    """Return the batches of all ranks, by step and rank."""
    return list(zip(*hvd.allgather_object([batch.tolist() for batch in batches]), strict=True))


@ranks(2, 3)
@pytest.mark.parametrize("samples", [4, 11, 24, 29])
def test_every_sample_once_per_epoch(size, samples):
    hvd.init()
    labels = np.arange(samples)
    dataset = hvd.shard({"x": (np.repeat(labels[:, None], 3, axis=1), labels * 2.0)}, 3, seed=5)
    x_spec, y_spec = dataset.element_spec["x"]
    assert x_spec == tf.TensorSpec((None, 3), tf.int64)
    assert y_spec == tf.TensorSpec((None,), tf.float64)
    sharding = hvd.Sharding(samples, 3, seed=5)
    assert dataset.cardinality().numpy() == sharding.steps
    for epoch in range(2):
        batches = []
        for batch in dataset.prefetch(1):
            x, y = (part.numpy() for part in batch["x"])
            assert (x == x[:, :1]).all()
            assert (y == 2.0 * x[:, 0]).all()
            batches.append(x[:, 0])
        assert [b.tolist() for b in batches] == [i.tolist() for i in sharding.indices(epoch)]
        steps = everywhere(batches)
        counted = collections.Counter(n for step in steps for own in step for n in own)
        assert counted == collections.Counter(range(samples))


@ranks(2)
def test_first_epoch_resumes_and_evaluation_keeps_the_order(size):
    hvd.init()
    data = tf.range(10)
    epochs = [[b.numpy().tolist() for b in hvd.shard(data, 2, first_epoch=n)] for n in (0, 1)]
    dataset = hvd.shard(data, 2)
    assert [[b.numpy().tolist() for b in dataset] for _ in range(2)] == epochs
    assert epochs[0] != epochs[1]
    in_order = everywhere(batch.numpy() for batch in hvd.shard(data, 2, shuffle=False))
    assert in_order == [([0, 1], [2, 3]), ([4, 5], [6, 7]), ([8], [9])]


@ranks(2)
def test_a_dataset_goes_on_in_the_middle_of_an_epoch(size):
    """Each rank count goes on where 4 ranks stopped, in the same epoch and in the next one."""
    hvd.init()
    before = [hvd.Sharding(50, 4, rank, 4) for rank in range(4)]
    taken = [index for each in before for batch in each.indices(1)[:2] for index in batch]
    state = before[0].position(1, 2)
    dataset = hvd.shard(np.arange(50), 3, state=state).prefetch(2)
    for seen in (taken, []):
        mine = [batch.numpy().tolist() for batch in dataset]
        everyone = hvd.allgather_object(mine)
        assert len({len(batches) for batches in everyone}) == 1
        flat = [index for batches in everyone for batch in batches for index in batch]
        assert sorted([*flat, *seen]) == list(range(50))
    assert int(dataset.cardinality()) < 0
    start = hvd.Sharding(50, 3).position(2, 0)
    assert int(hvd.shard(np.arange(50), 3, state=start).cardinality()) > 0
    with pytest.raises(ValueError, match="first_epoch=1 and state: give one of them"):
        hvd.shard(np.arange(50), 3, first_epoch=1, state=state)
    with pytest.raises(ValueError, match="samples=51, but the state is one of samples=50"):
        hvd.shard(np.arange(51), 3, state=state)


@ranks(2)
def test_a_file_is_read_batch_by_batch(size):
    hvd.init()
    rows = np.arange(40.0).reshape(20, 2)
    with h5py.File("rows", "w", driver="core", backing_store=False) as file:
        stored = file.create_dataset("x", data=rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(h5py.Dataset, "__array__", lambda *_: pytest.fail("all of it is read"))
            found = [batch.numpy().tolist() for batch in hvd.shard(stored, 3, seed=4)]
    assert found == [batch.numpy().tolist() for batch in hvd.shard(rows, 3, seed=4)]


@ranks(2)
def test_a_look_at_the_first_batch_on_one_rank_leaves_the_epochs_alone(size):
    hvd.init()
    dataset = hvd.shard(np.arange(24 * size), 4).prefetch(2)
    if hvd.rank() == size - 1:
        next(iter(dataset))
    sharding = hvd.Sharding(24 * size, 4)
    for epoch in range(2):
        mine = [batch.numpy().tolist() for batch in dataset]
        assert mine == [indices.tolist() for indices in sharding.indices(epoch)]
        everyone = hvd.allgather(tf.reshape(mine, [-1]))
        assert sorted(everyone.numpy().tolist()) == list(range(24 * size))


@ranks(1)
def test_fit_of_keras_sees_each_epoch_in_its_own_order():
    """``fit`` counts the steps, so it never asks for more after the last batch."""
    hvd.init()
    seen = []

    class Recorder(keras.Model):
        def train_step(self, data):
            seen.append(data.numpy().tolist())
            return {"loss": 0.0}

    model = Recorder()
    model.compile(run_eagerly=True)
    model.fit(hvd.shard(np.arange(12.0), 4), epochs=3, shuffle=False, verbose=0)
    sharding = hvd.Sharding(12, 4)
    assert seen == [own.tolist() for epoch in range(3) for own in sharding.indices(epoch)]


@ranks(2)
def test_evaluation_with_fewer_samples_than_ranks():
    hvd.init()
    with pytest.raises(ValueError, match="allow_empty=True"):
        hvd.shard(np.zeros((1, 3)), 4)
    (batch,) = hvd.shard(np.zeros((1, 3)), 4, allow_empty=True)
    assert batch.shape == (1 if hvd.rank() == 0 else 0, 3)


@ranks(2)
def test_strings_half_floats_and_a_training_function():
    hvd.init()
    names = np.array(["a", "b", "c", "d"])
    dataset = hvd.shard((names, np.ones(4, tf.bfloat16.as_numpy_dtype)), 2, shuffle=False)
    ((found, ones),) = dataset
    assert found.numpy().tolist() == ([b"a", b"b"], [b"c", b"d"])[hvd.rank()]
    assert ones.dtype == tf.bfloat16

    @tf.function
    def count(dataset):
        total = tf.constant(0)
        for _, ones in dataset:
            total += tf.size(ones)
        return total

    assert count(dataset).numpy() == 2


@ranks(2)
def test_bad_data_is_refused():
    hvd.init()
    with pytest.raises(ValueError, match="same number of samples"):
        hvd.shard((np.zeros(4), np.zeros(5)), 2)
    with pytest.raises(ValueError, match="1 samples cannot give each of 2 ranks one"):
        hvd.shard(np.zeros(1), 2)


@ranks(2)
@pytest.mark.parametrize("samples", [4, 11, 24, 29])
def test_pipeline_is_dealt_as_arrays_are(size, samples):
    hvd.init()
    pipeline = tf.data.Dataset.range(samples).map(lambda n: (n, {"half": n / 2}))
    dataset = pipeline.apply(hvd.sharded(3))
    assert dataset.cardinality().numpy() == hvd.Sharding(samples, 3).steps
    assert dataset.element_spec[0] == tf.TensorSpec((None,), tf.int64)
    found = []
    for number, rest in dataset:
        assert (rest["half"].numpy() == number.numpy() / 2).all()
        found.append(number.numpy().tolist())
    expected = hvd.Sharding(samples, 3, shuffle=False).indices(0)
    assert found == [indices.tolist() for indices in expected]


@ranks(2)
def test_pipeline_with_a_shared_seed_is_shuffled_alike(size):
    hvd.init()
    tf.random.set_seed(5)  # it counts too, and other tests leave one that differs by rank
    dataset = tf.data.Dataset.range(20).shuffle(20, seed=3).apply(hvd.sharded(4))
    epochs = [everywhere(batch.numpy() for batch in dataset) for _ in range(2)]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(n for step in epoch for own in step for n in own) == list(range(20))


@ranks(1, 2)
def test_an_order_that_differs_by_rank_is_refused(size):
    hvd.init()
    numbers = tf.data.Dataset.range(20)
    with hvd.seed(3):
        alike = [numbers.shuffle(20), numbers.shuffle(20, seed=3)]
    tf.random.set_seed(None)
    without = [numbers.shuffle(20), numbers.shuffle(20).filter(lambda n: n < 9)]
    hvd.seed(3)
    own = [numbers.shuffle(20, seed=3), tf.data.Dataset.zip((numbers, numbers.shuffle(20)))]
    for dataset in alike:
        seen = everywhere(batch.numpy() for batch in dataset.apply(hvd.sharded(4)))
        assert sorted(n for step in seen for own in step for n in own) == list(range(20))
    options = tf.data.Options()
    options.deterministic = False
    free = [
        numbers.with_options(options).batch(2).unbatch(),
        numbers.map(lambda n: n, num_parallel_calls=2, deterministic=False).take(9),
    ]
    all_refused = {"has no seed": without, "of this rank": own, "deterministic=False": free}
    for found, datasets in all_refused.items():
        for dataset in datasets:
            if size == 1:
                assert len(list(hvd.shard(dataset, 4, shuffle=False))) > 1
                continue
            with pytest.raises(ValueError, match=found):
                hvd.shard(dataset, 4, shuffle=False)
    tf.random.set_seed(None)
    hvd.shard(numbers.shuffle(20, seed=3), 4, shuffle=False)


@ranks(1, 2)
def test_pipeline_of_unknown_length_is_dealt_by_turns(size):
    hvd.init()
    makes = [lambda n: n, lambda n: (n, {"x": n}), lambda n: {"x": (n,)}]
    # Around the ends of steps of 2 * size samples.
    ends = [size, 2 * size + 1, 3 * size - 1, 4 * size, 5 * size - 1, 5 * size]
    for make, samples in zip(makes * 2, ends, strict=True):
        pipeline = tf.data.Dataset.range(99).take_while(lambda n, last=samples: n < last).map(make)
        assert pipeline.cardinality() == tf.data.UNKNOWN_CARDINALITY
        dataset = hvd.shard(pipeline, 2, shuffle=False)
        found = [[part.numpy().tolist() for part in tf.nest.flatten(batch)] for batch in dataset]
        expected = recipe.shard(iter(range(samples)), 2, shuffle=False)
        assert found == [[batch] * len(found[0]) for batch in expected]
    endless = hvd.shard(tf.data.Dataset.range(4).repeat(), 3, shuffle=False).take(5)
    first = next(iter(endless)).numpy().tolist()
    assert first == [n % 4 for n in range(hvd.rank(), 3 * size, size)]
    assert len(list(endless)) == 5
    with pytest.raises(ValueError, match="pass shuffle=False"):
        hvd.shard(pipeline, 2)
    if size > 1:
        few = tf.data.Dataset.range(size - 1).filter(lambda n: True)
        with pytest.raises(tf.errors.InvalidArgumentError, match="samples cannot give each"):
            list(few.apply(hvd.sharded(2)))
