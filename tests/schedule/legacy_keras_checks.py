"""Test schedules with legacy Keras (``tf_keras``) in processes with TF_USE_LEGACY_KERAS=1."""

import pytest
import tensorflow as tf

from hvdlite.gradients.keras_replica import variables_of
from tests.keras import close, same_on_all_ranks
from tests.keras.models import BATCH, KINDS, LossScaling, data, fit, hvd, make_model, own


def test_schedules_of_local_steps():
    mean = sum(1.0 + rank for rank in range(hvd.size())) / hvd.size()
    for kind in KINDS:
        for mode in (lambda step: step, tf.function):
            for schedule, outer in (
                (hvd.Schedule.PartialSync(parts=1, momentum=True), None),
                (hvd.Schedule.LocalSGD(every=3, start=1), None),
                (hvd.Schedule.DiLoCo(every=2), 0.7),
            ):
                weight, other = tf.Variable(0.0), tf.Variable(tf.zeros(2))
                optimizer = hvd.DistributedOptimizer(kind(0.1, momentum=0.9), schedule=schedule)

                @mode
                def step(slope, weight=weight, other=other, optimizer=optimizer):
                    optimizer.apply_gradients([(slope, weight), (slope * tf.ones(2), other)])

                for _ in range(4):
                    step(tf.constant(1.0 + hvd.rank()))
                # With a constant gradient the average moves as the average gradient says.
                moved = [-0.1 * mean * total for total in (1.0, 2.9, 5.61, 9.049)]
                if outer is None:
                    expected = moved[3]
                else:
                    first, second = moved[1], moved[3] - moved[1]
                    speed = 0.9 * first + second
                    expected = outer * (1.9 * first + second + 0.9 * speed)
                assert close([weight.numpy(), other.numpy()], [expected] * 3)
                assert same_on_all_ranks([weight.numpy(), other.numpy()])
                kept = [v.numpy() for v in variables_of(optimizer) if v.shape == (2,)]
                assert kept
                assert same_on_all_ranks(kept) == (outer is None and schedule.momentum)


def test_schedules_and_loss_scaling():
    schedule = hvd.Schedule.LocalSGD(every=2)
    for kind in KINDS:
        with pytest.raises(ValueError, match="a LossScaleOptimizer leaves out the step"):
            hvd.DistributedOptimizer(LossScaling(kind(0.1)), schedule=schedule)
        inside = LossScaling(hvd.DistributedOptimizer(kind(0.1), schedule=schedule))
        with pytest.raises(ValueError, match="a LossScaleOptimizer leaves out the step"):
            inside.apply_gradients([(tf.ones(1), tf.Variable([0.0]))])


def test_replicas_may_differ():
    for kind in KINDS:
        optimizer = hvd.DistributedOptimizer(kind(0.1), schedule=hvd.Schedule.LocalSGD(every=3))
        fit(make_model(seed=hvd.rank()), optimizer, *map(own, data()), BATCH)
