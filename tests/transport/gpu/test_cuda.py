from __future__ import annotations

import ast
import inspect
import subprocess
import sys
import warnings
from importlib import import_module
from types import SimpleNamespace

import pytest

from hvdlite.transport.gpu import cuda
from hvdlite.transport.gpu import nccl as transport
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
        cuda.Event(runtime, SimpleNamespace(ptr=number)) for number in range(3)
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


# What the modules call cupy's objects, and where these are in cupy.
_ROOTS = {
    "self._cupy": "cupy",
    "self._runtime": "cupy.cuda.runtime",
    "self.nccl": "cupy.cuda.nccl",
    "self._cuda.nccl": "cupy.cuda.nccl",
    "self._communicator": "cupy.cuda.nccl.NcclCommunicator",
    "communicator": "cupy.cuda.nccl.NcclCommunicator",
}


def _uses_of_cupy(module):
    """Return pairs of a dotted name of cupy and its call, or None where it is only read."""
    tree = ast.parse(inspect.getsource(module))
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        roots = [root for root in _ROOTS if text.startswith(f"{root}.")]
        if roots and id(node) not in inner and "(" not in text:
            root = max(roots, key=len)
            yield _ROOTS[root] + text[len(root) :], calls.get(id(node))


def _parameters(function):
    """Return the names of the parameters, in a list, and how many of them have to be given.

    Compiled functions have no signature, but a docstring that begins with one:
    ``copy(intptr_t target, size_t size=0) -> int``.
    """
    try:
        found = list(inspect.signature(function).parameters.values())
        positional = [each for each in found if each.kind is not each.VAR_KEYWORD]
        names = [each.name for each in positional if each.kind is not each.VAR_POSITIONAL]
        takes_any = len(names) < len(positional)
        needed = sum(
            each.default is each.empty and each.kind is not each.VAR_POSITIONAL
            for each in positional
        )
    except ValueError:
        line = function.__doc__.split("\n")[0]
        inside = line[line.index("(") + 1 : line.rindex(")")]
        texts = [text for text in inside.split(", ") if text and text != "self"]
        names = [text.split("=")[0].split(" ")[-1] for text in texts]
        takes_any = any(name.startswith("*") for name in names)
        needed = sum("=" not in text and "*" not in text for text in texts)
    return names, needed, takes_any


@pytest.mark.parametrize("module", [cuda, transport])
def test_cupy_has_what_the_transport_uses(nccl, module):
    """Every name, with the arguments that it gets."""
    uses = list(_uses_of_cupy(module))
    assert len(uses) > 8
    for name, call in uses:
        found = _find(name)
        if call is None or name == "cupy.ndarray":  # whose constructor is (*args, **kwargs)
            continue
        names, needed, takes_any = _parameters(found)
        keywords = {keyword.arg for keyword in call.keywords}
        assert keywords <= {*names}, name
        if not any(isinstance(argument, ast.Starred) for argument in call.args):
            given = len(call.args) + len(keywords)
            assert needed <= given, name
            assert given <= len(names) or takes_any, name


def _find(name):
    found = import_module("cupy")
    import_module("cupy.cuda.nccl")
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    return found


def test_the_fake_communicator_takes_what_the_real_one_does(nccl):
    for name, fake in vars(FakeCommunicator).items():
        if not name.startswith("_") and name != "send_off":
            names, needed, _ = _parameters(getattr(nccl.NcclCommunicator, name))
            taken = len(inspect.signature(fake).parameters) - 1  # without self
            assert needed <= taken <= len(names), name


def test_the_installed_nccl_can_be_used(nccl):
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
