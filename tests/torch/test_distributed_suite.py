"""PyTorch's own tests of torch.distributed pass on hvdlite's groups."""

import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("expecttest")  # which the suite imports

from tests.torch import distributed_suite

WORDS = "expects gloo's words for a barrier that times out"
LEFT_OUT = {
    "test_barrier_timeout_full_group": WORDS,
    "test_barrier_timeout_global": WORDS,
    "test_barrier_timeout_group": WORDS,
    "test_monitored_barrier_gloo_rank_0_timeout": "a timeout of 0, and a method of gloo's groups",
}
# What runs with gloo in the place of hvdlite differs by the name of the backend alone.
UNDER_ITS_NAME = ("test_all_to_all", "test_ddp_logging_data_cpu")
OF_FOUR = ("test_gather_object", "test_new_subgroups_with_group_param")
PICKLES = sys.version_info < (3, 14)
if not PICKLES:
    for name in ("test_gather_object", "test_gather_object_subgroup"):
        LEFT_OUT[name] = "expects the error of pickle before Python 3.14"


# Tests that need a CUDA device or another backend skip themselves.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "gate", "size", "names", "count"),
    [
        pytest.param("gloo", "gloo", 3, ("test_",), 107, id="as gloo"),
        pytest.param("hvdlite", "mpi", 3, UNDER_ITS_NAME, 13, id="by name"),
        pytest.param("hvdlite", "gloo", 4, OF_FOUR, 3 if PICKLES else 1, id="four ranks"),
    ],
)
def test_all_but_a_few_pass(backend, gate, size, names, count):
    def is_chosen(name):
        others = LEFT_OUT if backend == "hvdlite" else (*LEFT_OUT, *UNDER_ITS_NAME)
        return name.startswith(names) and name not in others

    results = dict(
        distributed_suite.run(backend, size, is_chosen, gate=gate, substitute=backend == "gloo")
    )
    failed = [f"{name}: {each.text}" for name, each in results.items() if each.outcome == "failed"]
    assert not failed, "\n".join(failed)
    assert sum(each.outcome == "passed" for each in results.values()) >= count
