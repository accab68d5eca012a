import pytest

import hvdlite
from hvdlite.transport.gpu import cuda
from tests.harness import ranks


class Cupy:
    """A pretended cupy of one kind."""

    def __init__(self, is_hip):
        self.is_hip = is_hip

    def is_rocm(self):
        return self.is_hip

    def nccl_version(self):
        return 22707


def test_without_cupy(monkeypatch):
    """Scripts ask for Horovod's ways to communicate, and have to be told the truth."""

    def missing():
        raise ImportError("cupy")

    monkeypatch.setattr(cuda, "Cuda", missing)
    assert hvdlite.mpi_built() is hvdlite.mpi_enabled() is True
    assert hvdlite.gloo_built() is hvdlite.gloo_enabled() is False
    assert hvdlite.ddl_built() is hvdlite.ccl_built() is False
    assert hvdlite.cuda_built() is hvdlite.rocm_built() is False
    assert (hvdlite.nccl_built(), type(hvdlite.nccl_built())) == (0, int)


@pytest.mark.parametrize("is_hip", [False, True])
def test_with_cupy(monkeypatch, is_hip):
    monkeypatch.setattr(cuda, "Cuda", lambda: Cupy(is_hip))
    assert (hvdlite.cuda_built(), hvdlite.rocm_built()) == (not is_hip, is_hip)
    assert hvdlite.nccl_built() == 22707


def test_cupy_whose_libraries_are_missing(monkeypatch):
    def broken():
        raise RuntimeError("libcudart.so.12")

    monkeypatch.setattr(cuda, "Cuda", broken)
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
