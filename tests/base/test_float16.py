from __future__ import annotations

import itertools
import threading

import ml_dtypes
import numpy as np
import pytest

from hvdlite.base import float16
from hvdlite.base.reduction import UFUNCS, Max, Min, Product, Scaling, Sum
from hvdlite.transport.reduce import reduce_into

KINDS = [np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)]
PATTERNS = np.arange(2**16, dtype=np.uint16)
SIZES = [0, 1, 7, 4095, 4096, 4097, float16.PIECE - 1, float16.PIECE, 2 * float16.PIECE + 3]


@pytest.fixture(autouse=True)
def numbers_may_overflow():
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def no_framework(monkeypatch):
    monkeypatch.setattr(float16, "_convert", None)


@pytest.fixture
def only_fast(monkeypatch):
    """Arrays of any size take the way of large ones."""
    monkeypatch.setattr(float16, "_FEW", 0)


def check_widened(values, out=None):
    found = float16.widen(values, out)
    assert out is None or found is out
    assert found.dtype == np.float32
    check_same(found, values.astype(np.float32), np.uint32)


def check_narrowed(values, kind, out=None):
    found = np.empty(values.size, kind) if out is None else out
    float16.narrow(values, found)
    check_same(found, values.astype(kind), np.uint16)


def check_same(found, expected, bits):
    """The same bits, signs of zeros included; a NaN may be any NaN."""
    nan = np.isnan(expected)
    np.testing.assert_array_equal(np.isnan(found), nan)
    np.testing.assert_array_equal(found.view(bits)[~nan], expected.view(bits)[~nan])


def finite(kind):
    values = PATTERNS.view(kind)
    return values[np.isfinite(values)]


def in_chunks(values):
    """All values together, and few at a time, so that a rare one does not decide for all."""
    yield values
    yield from np.array_split(values, 64)


def views(array):
    """Off the alignment of its type, with gaps, backwards."""
    raw = np.empty(array.nbytes + 1, np.uint8)[1:].view(array.dtype)
    raw[...] = array
    assert not raw.flags.aligned
    yield from (array, raw, array[::2], array[::-1])


def among_others(specials, count):
    """Yield ordinary numbers, among which there is one special one, of either sign."""
    for special in specials:
        for sign in (1, -1):
            values = np.linspace(-2, 2, count, dtype=np.float32)
            values[1234] = sign * special
            yield values


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.usefixtures("only_fast")
class TestConversion:
    def test_every_value_is_widened_and_narrowed_to_itself(self, kind):
        for values in in_chunks(PATTERNS.view(kind)):
            check_widened(values)
            found = np.empty(values.size, kind)
            float16.narrow(values.astype(np.float32), found)
            check_same(found, values, np.uint16)
        check_widened(finite(kind))

    def test_middles_between_neighbours_and_what_is_next_to_them(self, kind):
        magnitudes = np.sort(finite(kind).astype(np.float64))
        middles = ((magnitudes[1:] + magnitudes[:-1]) / 2).astype(np.float32)
        for values in (middles, np.nextafter(middles, -np.inf), np.nextafter(middles, np.inf)):
            for part in in_chunks(values.astype(np.float32)):
                check_narrowed(part, kind)

    def test_random_bits(self, kind):
        generator = np.random.default_rng(0)
        bits = generator.integers(0, 2**32, 2**21, np.uint32)
        check_narrowed(bits.view(np.float32), kind)
        # Most floats of 32 bits are beyond those of 16; these are not.
        smallest, overflow = np.array([2.0**-27, 65520], np.float32).view(np.uint32)
        bits = generator.integers(smallest, overflow, 2**21, np.uint32)
        signs = generator.integers(0, 2, bits.size, np.uint32) << 31
        check_narrowed((bits | signs).view(np.float32), kind)

    def test_the_end_of_the_range_nan_and_zeros_among_others(self, kind):
        for values in among_others((np.inf, np.nan), 5000):
            check_widened(values.astype(kind))
        for values in among_others(
            (65519.99, 65520, 65536, 3.39e38, 3.4e38, np.inf, np.nan, 0.0), 5001
        ):
            check_narrowed(values, kind)

    def test_sizes(self, kind):
        for size in SIZES:
            wide = np.random.default_rng(size).standard_normal(size, np.float32)
            check_narrowed(wide, kind)
            check_widened(wide.astype(kind), np.full(size, 5, np.float32))

    def test_views(self, kind):
        for values in views(finite(kind)):
            values.flags.writeable = False
            check_widened(values)
            for out in views(np.zeros(3 * values.size, np.float32)):
                check_widened(values, out[: values.size])
        for values in views(np.random.default_rng(2).standard_normal(10_000, np.float32)):
            values.flags.writeable = False
            check_narrowed(values, kind)
            for out in views(np.zeros(3 * values.size, kind)):
                check_narrowed(values, kind, out[: values.size])


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_accumulate(kind):
    for size, ufunc in itertools.product(SIZES, (np.add, np.multiply, np.minimum, np.maximum)):
        generator = np.random.default_rng(size)
        total = generator.standard_normal(size, np.float32)
        values = generator.standard_normal(size).astype(kind)
        expected = ufunc(total, values.astype(np.float32))
        float16.accumulate(ufunc, total, values)
        assert total.tobytes() == expected.tobytes()


def test_numpy_converts_other_types_and_rounds_once():
    for kind in (np.float64, np.float32, np.int16):
        values = np.arange(-5000, 5000).astype(kind)
        np.testing.assert_array_equal(float16.widen(values), values.astype(np.float32))
        found = np.empty(values.size, kind)
        float16.narrow(values.astype(np.float32), found)
        np.testing.assert_array_equal(found, values)
        wide = np.empty(values.size, np.float64)
        float16.widen(values.astype(np.float16), wide)
        np.testing.assert_array_equal(wide, values.astype(np.float16))
    # Rounded to float32 first, it would lie in the middle and go to the even one, which is 1.
    values = np.full(5000, 1 + 2**-11 + 2**-40)
    found = np.empty(values.size, np.float16)
    float16.narrow(values, found)
    assert (found == 1 + 2**-10).all()


def test_threads_do_not_disturb_each_other():
    failures = []

    def convert(seed):
        values = np.random.default_rng(seed).standard_normal(300_000, np.float32)
        expected = values.astype(np.float16)
        found, wide = np.empty_like(expected), float16.scratch(1000)
        wide[...] = seed
        for _ in range(20):
            float16.narrow(values, found)
            same = found.tobytes() == expected.tobytes()
            if not (same and (float16.widen(found) == expected).all() and (wide == seed).all()):
                failures.append(seed)

    threads = [threading.Thread(target=convert, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_subnormal_numbers_survive_a_processor_that_is_told_to_drop_them():
    torch = pytest.importorskip("torch")
    values = (np.arange(-5000, 5000) * 2.0**-24).astype(np.float16)
    expected = values.astype(np.float32)
    found = []

    def convert():
        if torch.set_flush_denormal(True):
            narrowed = np.empty_like(values)
            float16.narrow(expected, narrowed)
            found.extend([float16._flushes_subnormals(), float16.widen(values), narrowed])

    thread = threading.Thread(target=convert)  # the mode is the thread's
    thread.start()
    thread.join()
    if not found:
        pytest.skip("this processor has no such mode")
    flushes, widened, narrowed = found
    assert flushes
    assert not float16._flushes_subnormals()
    assert widened.tobytes() == expected.tobytes()
    assert narrowed.tobytes() == values.tobytes()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("op", [Sum, Min, Max, Product])
def test_reductions_of_large_arrays(kind, op):
    generator = np.random.default_rng(4)
    size = float16.PIECE + 9000
    drawn = [(generator.standard_normal(size) * 1e-3).astype(kind) for _ in range(3)]
    scalings = (Scaling(), Scaling(1.0, 2), Scaling(1.0, 3), Scaling(0.3, 2))
    for special, scaling in itertools.product((1.0, 65504.0, np.inf, np.nan), scalings):
        parts = [part.copy() for part in drawn]
        parts[0][100] = parts[1][100] = special
        total = parts[0].astype(np.float32)
        for part in parts[1:]:
            total = UFUNCS[op](total, part.astype(np.float32))
        factor = np.float32(scaling.factor / scaling.divisor)
        scaled = total * factor if scaling.factor != 1.0 else total / np.float32(scaling.divisor)
        reduce_into(parts[0], parts, op, scaling)
        check_same(parts[0], scaled.astype(kind), np.uint16)
