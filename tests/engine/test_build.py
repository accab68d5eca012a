import pytest

import hvdlite
from hvdlite.engine import build
from hvdlite.transport.gpu import cuda
from tests.harness import ranks

QUERIES = [
    "mpi_enabled",
    "mpi_built",
    "gloo_enabled",
    "gloo_built",
    "nccl_built",
    "ddl_built",
    "ccl_built",
    "cuda_built",
    "rocm_built",
]


class Cupy:
    """A pretended cupy of one kind."""

    def __init__(self, is_hip):
        self.is_hip = is_hip

    def is_rocm(self):
        return self.is_hip

    def nccl_version(self):
        return 22707


@pytest.fixture
def no_cupy(monkeypatch):
    def missing():
        raise ImportError("cupy")

    monkeypatch.setattr(build, "Cuda", missing)


def test_without_cupy(no_cupy):
    found = {name: getattr(hvdlite, name)() for name in QUERIES}
    assert found == {**dict.fromkeys(QUERIES, False), "mpi_built": True, "mpi_enabled": True}
    assert type(found["nccl_built"]) is int
    assert {type(value) for name, value in found.items() if name != "nccl_built"} == {bool}


@pytest.mark.parametrize("is_hip", [False, True])
def test_with_cupy(monkeypatch, is_hip):
    monkeypatch.setattr(build, "Cuda", lambda: Cupy(is_hip))
    assert (hvdlite.cuda_built(), hvdlite.rocm_built()) == (not is_hip, is_hip)
    assert hvdlite.nccl_built() == 22707


def test_cupy_whose_libraries_are_missing(monkeypatch):
    def broken():
        raise RuntimeError("libcudart.so.12")

    monkeypatch.setattr(build, "Cuda", broken)
    assert (hvdlite.cuda_built(), hvdlite.nccl_built()) == (False, 0)


def test_without_mpi4py(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert (hvdlite.mpi_built(), hvdlite.mpi_enabled()) == (False, False)


def test_is_rocm():
    made = cuda.Cuda.__new__(cuda.Cuda)
    made._runtime = Cupy(True)
    assert made.is_rocm() is True


@ranks(1, 2)
def test_mpi_threads_supported():
    hvdlite.shutdown()
    with pytest.raises(ValueError, match="has not been initialized"):
        hvdlite.mpi_threads_supported()
    hvdlite.init()
    assert hvdlite.mpi_threads_supported() is True


def test_what_is_no_part_of_hvdlite():
    """Scripts ask for Horovod's other ways to communicate, and have to be told the truth."""
    assert hvdlite.gloo_built() is hvdlite.gloo_enabled() is False
    assert hvdlite.ddl_built() is hvdlite.ccl_built() is False
