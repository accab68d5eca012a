from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest

from hvdlite.transport.gpu import cuda
from tests.transport.gpu.fake_cuda import FakeCuda
from tests.transport.gpu.fake_nccl import FakeCommunicator


def test_importing_the_core_does_not_load_cupy():
    code = "import sys; import hvdlite, hvdlite.transport.gpu.nccl; print('cupy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_fake_offers_what_the_real_one_does():
    """All that transports use of it, with the same arguments."""
    only_real = {"device_count", "view", "is_rocm"}
    for name, real in vars(cuda.Cuda).items():
        if name.startswith("_") or name in only_real:
            continue
        fake = getattr(FakeCuda, name)
        assert list(inspect.signature(fake).parameters) == list(
            inspect.signature(real).parameters
        ), name


def test_an_event_tells_an_error_from_not_yet():
    class CUDARuntimeError(RuntimeError):
        pass

    status = [600, 0, 700]
    runtime = SimpleNamespace(CUDARuntimeError=CUDARuntimeError, eventQuery=lambda ptr: status[ptr])
    pending, passed, failed = (
        cuda._Event(runtime, SimpleNamespace(ptr=number)) for number in range(3)
    )
    assert not pending.done
    assert passed.done
    with pytest.raises(CUDARuntimeError, match="700"):
        _ = failed.done


def test_an_old_cupy_is_refused(monkeypatch):
    """Its broadcast would send the number of elements modulo 2**32."""
    for version in ("13.3.0", "12.4", "9.0.0rc1"):
        with pytest.raises(ImportError, match=rf"cupy {version} is older than 13.4.*cuda13"):
            cuda._check_version(version)
    for version in ("13.4.0", "14.0.0rc1", "14.2"):
        cuda._check_version(version)


@pytest.fixture
def nccl():
    pytest.importorskip("cupy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from cupy.cuda import nccl
    if not nccl.available:
        pytest.skip("cupy finds no NCCL library")
    return nccl


def test_cupy_has_the_calls_that_the_transport_makes(nccl):
    for name in ("get_unique_id", "get_version", "groupStart", "groupEnd"):
        assert callable(getattr(nccl, name))
    for name in vars(FakeCommunicator):
        if not name.startswith("_") and name != "send_off":
            assert callable(getattr(nccl.NcclCommunicator, name)), name
    assert cuda.Cuda().nccl_version() >= 21000
    assert len(cuda.Cuda().unique_id()) == 128


def test_the_oldest_nccl_has_bfloat16_and_averages(monkeypatch):
    pytest.importorskip("cupy")
    devices = cuda.Cuda()

    class Old:
        @staticmethod
        def get_version():
            return 20900

    monkeypatch.setattr(devices, "nccl", Old)
    assert devices.nccl_version() == 0


def test_ids_are_bytes_whatever_cupy_makes_of_them(monkeypatch):
    pytest.importorskip("cupy")
    devices = cuda.Cuda()
    signed = tuple(range(-64, 64))

    class Before14:
        @staticmethod
        def get_unique_id():
            return signed

        @staticmethod
        def NcclCommunicator(size, unique_id, rank):  # noqa: N802
            if not isinstance(unique_id, tuple):
                raise TypeError("Expected tuple, got bytes")
            assert unique_id == signed
            return size, rank

    monkeypatch.setattr(devices, "nccl", Before14)
    made = devices.unique_id()
    assert isinstance(made, bytes)
    assert devices.communicator(4, made, 2) == (4, 2)


def test_without_a_driver_there_are_no_devices():
    pytest.importorskip("cupy")
    devices = cuda.Cuda()
    assert devices.device_count() >= 0
