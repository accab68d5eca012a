"""Advice on compression, on links of known speed."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.compression import DENSE, Strategy
from hvdlite.tools.bench.compression_ranks import (
    CANDIDATES,
    Advice,
    Measurement,
    _choose,
    advise,
    parameters_of,
)
from tests.harness import ranks

SHAPES = {"a": (300, 400), "b": (1000,), "c": (50, 50)}


@dataclass(frozen=True, repr=False)
class Link(Strategy):
    """A strategy that sends nothing, but takes as long as a link of so many bytes per second."""

    bytes_per_second: float
    sends: float = 1.0

    def exchange(self, bucket, transport):
        time.sleep(self.sends * bucket.send.nbytes / self.bytes_per_second)
        bucket.result[...] = bucket.send


@ranks(2)
def test_the_fastest_is_advised():
    hvd.init()
    dense, tenth = Link(2e7), Link(2e7, 0.1)
    advice = advise(SHAPES, [dense, tenth])
    assert advice.compression == tenth
    assert len(set(hvd.allgather_object(str(advice)))) == 1
    expected = 4 * (300 * 400 + 1000 + 50 * 50) / 2e7
    assert advice.measurements[0].seconds == pytest.approx(expected, rel=0.5)
    assert "2 ranks, 0.5 MB of gradients in a step; a rank sends " in str(advice)
    assert advice.bandwidth == pytest.approx(2e7, rel=0.5)
    assert "use compression=Link(20000000.0, sends=0.1)" in str(advice)


@pytest.mark.parametrize(("seconds", "wins"), [(0.97, False), (0.88, False), (0.86, True)])
def test_of_two_of_nearly_the_same_speed_the_gentler_one(seconds, wins):
    """Times are given: measured ones differ by more than that on a busy machine."""
    candidates = {"dense": Link(1.0), "other": Link(1.0, 0.5)}
    times = {"dense": np.array([1.0, 9.0, 0.1]), "other": np.array([seconds, 9.0, 0.1])}
    advice = _choose(2, parameters_of(SHAPES), 1.0, candidates, times)
    assert advice.compression == candidates["other" if wins else "dense"]


@pytest.mark.slow
@ranks(2)
def test_it_keeps_to_its_time():
    """All gradients would take two seconds for each exchange."""
    hvd.init()
    shapes = {str(number): (25_000,) for number in range(20)}
    link = Link(1e6)
    began = time.monotonic()
    advice = advise(shapes, [link, Link(1e6, 0.5)], seconds=1.5)
    assert time.monotonic() - began < 8
    assert 0 < advice.measured < 1
    assert advice.measurements[0].seconds == pytest.approx(2.0, rel=0.5)
    assert "measured on" in str(advice)


@ranks(2)
def test_the_candidates_that_there_are_anyway():
    """Which of them is the fastest here is for a benchmark to say."""
    hvd.init()
    advice = advise({"weights": (1000, 2000), "more": (500, 3000)}, seconds=2)
    assert [each.strategy for each in advice.measurements] == list(CANDIDATES.values())
    (chosen,) = [m.seconds for m in advice.measurements if m.strategy == advice.compression]
    fastest = min(each.seconds for each in advice.measurements)
    assert 0 < fastest <= chosen <= 1.15 * fastest  # that much for the gentler one
    assert len(set(hvd.allgather_object(str(advice)))) == 1


@ranks(1)
def test_one_rank():
    hvd.init()
    advice = advise(SHAPES)
    assert advice.compression == DENSE
    assert str(advice) == "one rank exchanges nothing: use no compression"
    with pytest.raises(ValueError, match="candidates is empty"):
        advise(SHAPES, [])


def test_the_sentence_for_none():
    measured = (Measurement(DENSE, 0.01), Measurement(Link(1.0), 0.02))
    text = str(Advice(2, 4_000_000, 1.0, measured, DENSE))
    assert "a rank sends 400 MB/s" in text
    assert "10.0 ms" in text
    assert "0.50 x as fast" in text


class TestModels:
    def test_shapes_and_arrays(self):
        found = parameters_of({"a": (2, 3), "b": np.zeros(4), "c": np.zeros(2, np.float16)})
        assert [(p.name, p.shape, p.dtype.name) for p in found] == [
            ("a", (2, 3), "float32"),
            ("b", (4,), "float64"),
            ("c", (2,), "float16"),
        ]

    def test_a_module_of_pytorch(self):
        torch = pytest.importorskip("torch")
        model = torch.nn.Linear(3, 2).to(torch.bfloat16)
        model.bias.requires_grad_(False)
        (weight,) = parameters_of(model)
        assert (weight.name, weight.shape, weight.dtype.name) == ("weight", (2, 3), "bfloat16")

    def test_a_module_of_tensorflow(self):
        tf = pytest.importorskip("tensorflow")

        class Model(tf.Module):
            def __init__(self):
                self.kernel = tf.Variable(tf.zeros((2, 3)), name="kernel")
                self.table = tf.Variable(tf.zeros(4, tf.int64), trainable=False)

        (kernel,) = parameters_of(Model())
        assert (kernel.shape, kernel.dtype.name) == ((2, 3), "float32")

    def test_what_is_no_model_or_has_no_parameters(self):
        for model in (3, "resnet", [1, 2]):
            with pytest.raises(TypeError, match="expected a model with named_parameters"):
                parameters_of(model)
        with pytest.raises(ValueError, match="has no trainable parameters yet"):
            parameters_of({})
