"""The order of turns, the statistics, the texts and the models of the benchmarks."""

import importlib
from itertools import pairwise

import numpy as np
import pytest

from hvdlite.tools.bench import measurement, report, training_ranks
from hvdlite.tools.bench.measurement import order


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
@pytest.mark.parametrize(
    ("workload", "tensors", "elements"),
    [("layers", 400, 828_490), ("resnet", 62, 11_173_962), ("mlp", 10, 49_999_894)],
)
def test_models(framework, workload, tensors, elements):
    pytest.importorskip(framework)
    models = importlib.import_module(f"hvdlite.{framework}.benchmark")
    model = models.build(workload)
    weights = list(model.parameters()) if framework == "torch" else model.trainable_variables
    assert len(weights) == tensors
    assert sum(np.prod(tuple(weight.shape)) for weight in weights) == elements


def test_each_has_each_place_equally_often():
    for count in range(1, 6):
        rounds = [order(count, turn) for turn in range(2 * count)]
        for place in range(count):
            assert sorted(row[place] for row in rounds) == sorted(2 * list(range(count)))
        before_0 = {before for row in rounds for before, after in pairwise(row) if after == 0}
        assert count <= 2 or len(before_0) == 2


def test_overheads_are_differences_within_a_round():
    alone = np.array([1.0, 5.0, 3.0])
    times = {"alone": alone, "hvdlite": alone + np.array([0.5, 0.5, 0.7])}
    added = training_ranks._compare_overheads(times)["overhead_seconds"]
    assert added["hvdlite"]["median"] == pytest.approx(0.5)
    ratio = measurement.overhead_ratio(alone + 0.5, alone + 2, alone)
    assert ratio == pytest.approx({"median": 0.25, "p10": 0.25, "p90": 0.25})
    compared = measurement.compare({"hvdlite": alone, "mpi": alone * [1.0, 2.0, 7.0]})
    assert compared["ratios"]["mpi"]["median"] == 2
    spread = measurement.summary(np.arange(11.0))
    assert spread == pytest.approx({"median": 5.0, "p10": 1.0, "p90": 9.0})


def test_times_and_sizes_for_people():
    times = {8.7e-7: "0.87 us", 1.234e-3: "1.23 ms", -0.0123: "-12.3 ms", 126.4: "126 s"}
    assert [report.time_text(each) for each in times] == [*times.values()]
    assert [report.size_text(size) for size in (12, 4096, 3 * 2**20)] == ["12 B", "4 KiB", "3 MiB"]
