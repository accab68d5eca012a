"""torch's conversion of 16-bit floats, which takes the place of numpy's, gives the same bits."""

import importlib

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from hvdlite.base import float16
from hvdlite.torch.tensors import convert

KINDS = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]


@pytest.fixture(autouse=True)
def with_torch(monkeypatch):
    monkeypatch.setattr(float16, "_convert", convert)


@pytest.fixture(params=[False, True], ids=["", "flushing"])
def flushing(request):
    """The processor may have been told to take subnormal numbers for 0."""
    torch.set_flush_denormal(request.param)
    yield
    torch.set_flush_denormal(False)


def expected(values, kind):
    with np.errstate(all="ignore"):
        return values.astype(kind)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.usefixtures("flushing")
def test_widening_all_there_are(kind):
    values = np.arange(2**16, dtype=np.uint16).view(kind)
    torch.set_flush_denormal(False)
    wanted = expected(values, np.float32)
    check(float16.widen(values), wanted, np.uint32)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("mask", [0xFFFFFFFF, 0x80FFFFFF, 0xBFFFE000])
def test_narrowing(kind, mask, flushing):
    bits = np.random.default_rng(mask).integers(0, 2**32, 2**18, dtype=np.uint32) & np.uint32(mask)
    values, found = bits.view(np.float32), np.empty(2**18, kind)
    float16.narrow(values, found)
    check(found, expected(values, kind), np.uint16)


def check(found, wanted, bits):
    is_number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.isnan(found), ~is_number)
    np.testing.assert_array_equal(found.view(bits)[is_number], wanted.view(bits)[is_number])


def test_what_torch_cannot_take():
    """Arrays that are read-only, not contiguous, or of other types, go numpy's way."""
    values = np.linspace(-1, 1, 2**14, dtype=np.float32)
    values.flags.writeable = False
    found = np.empty(2**14, np.float16)
    float16.narrow(values, found)
    np.testing.assert_array_equal(found, values.astype(np.float16))
    float16.narrow(values[::2], found[::2])
    np.testing.assert_array_equal(found[::2], values[::2].astype(np.float16))
    float16.narrow(values.astype(np.float64), found)
    np.testing.assert_array_equal(found, values.astype(np.float16))


def test_importing_the_adapter_puts_it_there(monkeypatch):
    import hvdlite.torch

    monkeypatch.setattr(float16, "_convert", None)
    importlib.reload(hvdlite.torch)
    assert float16._convert is convert
