import pytest

from tests import events
from tests.harness import ranks

pytest.importorskip("tensorflow")
pytest.importorskip("tensorboard")

import tensorflow as tf

import hvdlite.tensorflow as hvd


@ranks(2)
def test_rank_0_writes_averages_also_from_graphs(tmp_path):
    hvd.init()
    folder = hvd.broadcast_object(tmp_path)
    writer = hvd.summary_writer(folder)

    @tf.function
    def step(number, loss):
        with writer.as_default(step=number):
            tf.summary.scalar("loss", hvd.allreduce(loss))
        return hvd.allreduce(2 * loss)

    for number in range(2):
        for _ in range(2):  # the graphs of the ranks differ, the names of their exchanges do not
            found = step(tf.constant(number, tf.int64), tf.constant(float(hvd.rank() + number)))
        assert float(found) == hvd.size() - 1 + 2 * number
    writer.flush()
    hvd.barrier()
    assert len(events.files(folder)) == 1
    mean = (hvd.size() - 1) / 2
    expected = [(0, mean)] * 2 + [(1, mean + 1)] * 2
    assert events.scalars(folder) == {"loss": expected}
