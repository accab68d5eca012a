"""Events for TensorBoard: one writer, averaged values."""

from __future__ import annotations

import sys
import types

import pytest

from tests import events
from tests.harness import ranks

pytest.importorskip("torch")
pytest.importorskip("tensorboard")

import hvdlite.torch as hvd


@pytest.mark.slow
@ranks(2, fresh=True)  # tensorboard remembers whether it is without TensorFlow
def test_rank_0_writes_averages(tmp_path, monkeypatch):
    # With this module, tensorboard does without TensorFlow, which takes long to import.
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", types.ModuleType("notf"))
    hvd.init()
    folder = hvd.broadcast_object(tmp_path)
    with hvd.summary_writer(folder, flush_secs=1) as writer:
        for step in range(3):
            loss = hvd.average_metrics({"loss": hvd.rank() + step})["loss"]
            writer.add_scalar("loss", loss, step)
        with pytest.raises(AttributeError, match="add_scalarr"):
            writer.add_scalarr("loss", 0)
        writer.flush()
    hvd.barrier()
    assert len(events.files(folder)) == 1
    mean = (hvd.size() - 1) / 2
    assert events.scalars(folder) == {"loss": [(step, mean + step) for step in range(3)]}
