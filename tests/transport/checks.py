"""Checks of all that a transport must do; each is collective."""

from __future__ import annotations

import contextlib
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from hvdlite.base.interrupts import Interrupted
from hvdlite.base.reduction import Adasum, Average, Max, Min, Product, Scaling, Sum
from hvdlite.errors import HorovodInternalError, RankGoneError
from hvdlite.transport import Transport
from tests.references import INTEGERS, Digest, cases, check_reduction, dtype_of, sample, samples


def on_wait(elapsed: float) -> None:
    """End waits that should be short, because every rank is on its way."""
    if elapsed > 20:
        raise TimeoutError(f"waited {elapsed} s for another rank")


def agree(transport: Transport, what: bytes) -> None:
    """Assert that every rank has the same."""
    assert len(set(transport.gather(what))) == 1


def meet(transport: Transport) -> None:
    """One digest, equal or not, wherever they differ."""
    word = bytes(range(16))
    assert transport.meet([word], on_wait) == 1
    assert transport.meet([bytes(16)], on_wait) == 1
    assert transport.meet([b"\xff" * 16], on_wait) == 1
    for odd in range(transport.size):
        for position in (0, 7, 8, 15):
            other = bytearray(word)
            other[position] ^= 0x80
            mine = bytes(other) if odd == transport.rank else word
            assert transport.meet([mine], on_wait) == (transport.size == 1)


def meet_with_several_digests(transport: Transport) -> None:
    """The common prefix counts, up to the largest number of digests."""
    many = [bytes([number % 251]) * 15 + b"!" for number in range(transport.max_digests + 3)]
    assert transport.meet(many, on_wait) == transport.max_digests
    for alike in range(min(transport.max_digests, 5)):
        mine = list(many)
        if transport.rank == transport.size - 1 and transport.size > 1:
            mine[alike] = b"another one, yes"
        expected = alike if transport.size > 1 else transport.max_digests
        assert transport.meet(mine, on_wait) == expected
        fewer = many[: alike + 1] if transport.rank == 0 else many
        found = transport.meet(fewer, on_wait)
        assert found == (alike + 1 if transport.size > 1 else len(fewer))


def interrupted_meet(transport: Transport) -> None:
    """A wait that is interrupted is resumed, in another thread, and the data are those sent."""
    with ThreadPoolExecutor(1) as other_thread:
        for late in {0, transport.size - 1}:
            # Under load an early rank may be the last; then nothing is interrupted.
            attempts = (_interrupted(transport, late, other_thread) for _ in range(20))
            assert any(attempts) or transport.size == 1


def _interrupted(transport: Transport, late: int, other_thread: ThreadPoolExecutor) -> bool:
    """Meet with a late rank; return whether the waits of all others were interrupted."""
    interruptions, meeting = 0, True

    def interrupt(elapsed: float) -> None:
        nonlocal interruptions
        on_wait(elapsed)
        if meeting and interruptions < 2:
            interruptions += 1
            raise Interrupted

    if transport.rank == late:
        time.sleep(0.2)
    send, result = np.full(3, transport.rank + 1.0), np.zeros(3)
    arguments = [bytes([late + 1]) * 16], interrupt, [send]
    try:
        found = transport.meet(*arguments)
    except Interrupted:
        found = 0
    while not found:
        with contextlib.suppress(Interrupted):
            found = other_thread.submit(transport.meet, *arguments).result()
    meeting = False
    assert found == 1
    transport.allreduce_all([send], [result], Sum, Scaling())
    assert result.tolist() == [transport.size * (transport.size + 1) / 2] * 3
    interrupted = transport.gather(b"%d" % interruptions)
    return all(int(times) > 0 for rank, times in enumerate(interrupted) if rank != late)


def living_ranks(transport: Transport) -> None:
    """All ranks are alive, before a collective and after it."""
    for _ in range(2):
        transport.check_alive()
        assert transport.meet([bytes(16)], on_wait) == 1
        agree(transport, b"")


def leave(transport: Transport) -> None:
    """Ranks that wait for one that leaves, now or later, get an error; it is the last check.

    Afterwards the transport is not closed, since that may be collective.
    """
    assert transport.meet([bytes(16)], on_wait) == 1
    if transport.rank == 0:
        time.sleep(0.3)
        transport.leave()
        transport.leave()  # does no harm
        return
    if transport.rank == transport.size - 1:
        time.sleep(0.6 if transport.size > 2 else 0.0)
    start = time.monotonic()
    with pytest.raises(HorovodInternalError, match="has ended"):
        transport.meet([bytes(16)], on_wait)
    assert time.monotonic() - start < 10
    with contextlib.suppress(RankGoneError):  # a transport may not know
        transport.check_alive()
    transport.leave()


def gather(transport: Transport) -> None:
    messages = transport.gather(b"x" * transport.rank)
    assert messages == [b"x" * rank for rank in range(transport.size)]
    assert transport.gather(b"") == [b""] * transport.size


def reductions(transport: Transport, sizes: tuple[int, ...]) -> bytes:
    """Check every reduction of every dtype; return a digest of the results."""
    digest = Digest()
    for dtype, op in cases((Sum, Min, Max, Product, Adasum)):
        for size in sizes:
            digest.add(_reduced(transport, dtype, op, size))
    agree(transport, digest.value())
    return digest.value()


def some_reductions(transport: Transport) -> None:
    """Every reduction of every dtype, of no elements and of a few."""
    reductions(transport, (0, 7))


def allreduce(
    transport: Transport,
    send: Any,
    result: Any,
    op: Any,
    scaling: Scaling = Scaling(),  # noqa: B008 - frozen
) -> None:
    """Do any of the reductions of one array."""
    if op is Adasum:
        transport.adasum(send, result, scaling, [0, send.size])
    else:
        transport.allreduce(send, result, op, scaling)


def _reduced(transport: Transport, dtype: str, op: Any, size: int) -> Any:
    arrays = samples(transport.size, dtype, size, seed=size)
    send = arrays[transport.rank].copy()
    send.flags.writeable = False
    result = np.empty_like(send)
    with np.errstate(over="ignore"):
        allreduce(transport, send, result, op)
        check_reduction(result, arrays, op)
        assert send.tobytes() == arrays[transport.rank].tobytes()
        in_place = arrays[transport.rank].copy()
        allreduce(transport, in_place, in_place, op)
    assert in_place.tobytes() == result.tobytes()
    return result


def large_reductions(transport: Transport, size: int = 10**6) -> bytes:
    digest = Digest()
    for dtype in ("float32", "uint8", "bfloat16"):
        arrays = samples(transport.size, dtype, size)
        result = np.empty_like(arrays[0])
        transport.allreduce(arrays[transport.rank], result, Sum, Scaling())
        check_reduction(result, arrays, Sum)
        digest.add(result)
    agree(transport, digest.value())
    return digest.value()


def narrow_integers_wrap(transport: Transport) -> None:
    for dtype, value in (("uint8", 200), ("int8", 100), ("uint16", 65000), ("int16", -32000)):
        for size in (1, 16, 64, 333):
            array = np.full(size, value, dtype)
            result = np.empty_like(array)
            transport.allreduce(array, result, Sum, Scaling())
            expected = np.array(value * transport.size).astype(dtype)  # 200 + 200 = 144
            np.testing.assert_array_equal(result, expected)


def scaling(transport: Transport) -> None:
    """An average divides, in a type that is fit for it, on every path."""
    size = transport.size
    for dtype in ("int8", "int64", "float16", "bfloat16", "float32", "float64", "complex64"):
        array = np.full(5, transport.rank + 1).astype(dtype_of(dtype))
        result = np.empty_like(array)
        transport.allreduce(array, result, Sum, Scaling(1.0, size))
        mean = (size + 1) / 2
        np.testing.assert_array_equal(result, np.array(mean).astype(dtype_of(dtype)))
        transport.allreduce(array, result, Sum, Scaling(2.0, size))
        np.testing.assert_allclose(result.astype(np.complex128), size + 1, rtol=1e-2)
    # The sum is beyond a float16, the average is not.
    array = np.full(3, 60000, np.float16)
    result = np.empty_like(array)
    transport.allreduce(array, result, Sum, Scaling(1.0, size))
    np.testing.assert_array_equal(result, array)


def means_of_integers(transport: Transport) -> None:
    """Exact and cut towards zero, also where the sum is out of range."""
    for dtype in INTEGERS:
        limits = np.iinfo(dtype)
        for size in (1, 7, 9000 if dtype == "int64" else 6):
            arrays = samples(transport.size, dtype, size, seed=size)
            for array in arrays:  # the same on all ranks
                array[: size // 2] = (limits.max, limits.min)[size % 3 == 0]
            check_reduction(_mean(transport, arrays), arrays, Average)
    # Both are rounded to the same float64; and -1 / size is no whole number.
    for values in ([2**63 - 1, 2**63 - 2], [-(2**63), -(2**63) + 1], [-1, 0]):
        arrays = [np.array([values[rank % 2]], np.int64) for rank in range(transport.size)]
        check_reduction(_mean(transport, arrays), arrays, Average)


def _mean(transport: Transport, arrays: Any) -> Any:
    """The mean by every way there is, which all have the same bits."""
    scaling = Scaling(1.0, transport.size)
    own = arrays[transport.rank]
    result = np.empty_like(own)
    transport.allreduce(own, result, Sum, scaling)
    together = [own.copy(), own.copy()]
    transport.allreduce_all(together, together, Sum, scaling)
    shared = transport.empty(own.size, own.dtype)
    shared[...] = own
    transport.allreduce(shared, shared, Sum, scaling)
    assert {array.tobytes() for array in (*together, shared)} == {result.tobytes()}
    rows = np.array_split(arrays[transport.rank], transport.size)
    part = np.empty_like(rows[transport.rank])
    transport.reducescatter(rows, part, Sum, scaling)
    assert part.tobytes() == np.array_split(result, transport.size)[transport.rank].tobytes()
    return result


def nan_passes_through(transport: Transport) -> None:
    """Whatever rank it comes from, and to every rank."""
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        for op in (Min, Max, Sum, Product):
            for size in (1, 7, 2000):
                for source in range(transport.size):
                    array = np.full(size, 1.0 + transport.rank).astype(dtype_of(dtype))
                    if source == transport.rank:
                        array[size // 2] = np.nan
                    result = np.empty_like(array)
                    transport.allreduce(array, result, op, Scaling())
                    where = np.flatnonzero(np.isnan(result.astype(np.float64)))
                    assert where.tolist() == [size // 2], (dtype, op, size, source)


def booleans(transport: Transport) -> None:
    """Sum and Max tell whether any is true, Min and Product whether all are."""
    mine = np.array([True, False, transport.rank == 0])
    expected = {Sum: 1, Max: 1, Min: transport.size == 1, Product: transport.size == 1}
    for op, last in expected.items():
        result = np.empty_like(mine)
        transport.allreduce(mine, result, op, Scaling())
        assert result.tolist() == [True, False, bool(last)]


def adasum_of_known_vectors(transport: Transport) -> None:
    """Equal vectors give themselves, orthogonal ones their sum, zeros change nothing."""
    rank, size = transport.rank, transport.size
    for dtype, rough in (("float16", 1e-3), ("bfloat16", 1e-2), ("float32", 1e-6)):
        vector = np.linspace(-2, 3, 11).astype(dtype_of(dtype))
        _check_adasum(transport, vector, vector, rough)
        own = np.zeros(9, vector.dtype)
        own[2 * rank : 2 * rank + 2] = rank + 1, -3
        total = np.zeros(9)
        for other in range(size):
            total[2 * other : 2 * other + 2] = other + 1, -3
        _check_adasum(transport, own, total, rough)
        only_last = vector if rank == size - 1 else np.zeros_like(vector)
        _check_adasum(transport, only_last, vector, rough)
        _check_adasum(transport, np.zeros_like(vector), np.zeros_like(vector), rough)


def _check_adasum(transport: Transport, own: Any, expected: Any, rough: float) -> None:
    result = np.empty_like(own)
    transport.adasum(own, result, Scaling(), [0, own.size])
    wanted = np.asarray(expected).astype(np.float64)
    np.testing.assert_allclose(result.astype(np.float64), wanted, rtol=rough, atol=rough)


def alltoall(transport: Transport) -> None:
    """Pieces of all lengths, some of them empty."""
    rank, size = transport.rank, transport.size

    def piece(source: int, target: int, scale: int) -> Any:
        length = (3 * source + 5 * target) % 7 * scale
        return sample(source, "uint8", length, seed=target)

    for scale in (0, 1, 1000):
        pieces = [piece(rank, target, scale) for target in range(size)]
        expected = [piece(source, rank, scale) for source in range(size)]
        result = [np.zeros_like(array) for array in expected]
        transport.alltoall(pieces, result)
        for found, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def allgather(transport: Transport) -> None:
    for scale in (0, 1, 1000):
        expected = [sample(rank, "uint8", rank * scale) for rank in range(transport.size)]
        result = [np.zeros_like(array) for array in expected]
        transport.allgather(expected[transport.rank], result)
        for found, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(found, wanted)


def broadcast(transport: Transport) -> None:
    for size in (0, 1, 1023):
        for root in range(transport.size):
            array = sample(transport.rank, "uint8", size)
            transport.broadcast(array, root)
            np.testing.assert_array_equal(array, sample(root, "uint8", size))


def arrays_of_its_own(transport: Transport) -> None:
    """Arrays from `empty` can be written, exchanged and viewed, and outlive their name."""
    for dtype in ("float32", "bfloat16", "int8", "bool"):
        for size in (0, 1, 7, 100_003):
            arrays = samples(transport.size, dtype, size)
            send = transport.empty(size, arrays[0].dtype)
            result = transport.empty(size, arrays[0].dtype)
            assert send.shape == (size,)
            assert send.dtype == arrays[0].dtype
            send[...] = arrays[transport.rank]
            transport.allreduce(send, result, Sum, Scaling())
            check_reduction(result, arrays, Sum)
            assert send.tobytes() == arrays[transport.rank].tobytes()
            kept, tail = result.tobytes(), result[size // 2 :]
            transport.allreduce(send, send, Sum, Scaling())
            assert send.tobytes() == kept
            del result
            others = transport.empty(size, arrays[0].dtype)
            others[...] = 0
            assert tail.tobytes() == kept[len(kept) - tail.nbytes :]


def unaligned_arrays(transport: Transport) -> None:
    """Numbers may begin at any address, as those of a file that is read as a whole."""
    for dtype in ("float16", "float32", "complex64", "int64"):
        for size in (7, 100_003):
            arrays = samples(transport.size, dtype, size)
            own = arrays[transport.rank]
            array = np.empty(own.nbytes + 1, np.uint8)[1:].view(own.dtype)
            array[...] = own
            transport.allreduce(array, array, Sum, Scaling())
            check_reduction(array, arrays, Sum)


def again_and_again(transport: Transport) -> None:
    """A prepared allreduce serves for other values, and after other collectives."""
    for dtype, size in itertools.product(("float32", "bfloat16"), (0, 1, 1777)):
        send, wide = (np.empty(size, dtype_of(dtype)) for _ in range(2))
        elsewhere = transport.allreduce_init(send, wide, Sum, Scaling())
        in_place = transport.allreduce_init(send, send, Max, Scaling())
        for seed in range(5):
            arrays = samples(transport.size, dtype, size, seed=seed)
            send[...] = arrays[transport.rank]
            elsewhere()
            check_reduction(wide, arrays, Sum)
            if seed % 2:
                agree(transport, wide.tobytes())
            in_place()
            check_reduction(send, arrays, Max)


def zero_copy_parts(transport: Transport) -> None:
    """Parts of an array that lie elsewhere count, and not what is in their place."""
    digest = Digest()
    for (dtype, op), size in itertools.product(cases((Sum,)), (0, 1, 777)):
        zero_copy = transport.zero_copy_range(size)
        assert 0 <= zero_copy.start <= zero_copy.stop <= size
        arrays = samples(transport.size, dtype, size)
        own = arrays[transport.rank]
        send = transport.empty(size, own.dtype)
        for cuts, in_place in (((0, 0.3, 0.4, 1), False), ((0, 1), True), ((0.2, 0.9), False)):
            bounds = [
                zero_copy.start + int(cut * (zero_copy.stop - zero_copy.start)) for cut in cuts
            ]
            parts = [(a, own[a:b].copy()) for a, b in zip(bounds[::2], bounds[1::2], strict=True)]
            send[...] = own
            for start, part in parts:
                send[start : start + part.size].view(np.uint8)[...] = own.dtype != bool
            result = send if in_place else transport.empty(size, own.dtype)
            with np.errstate(all="ignore"):
                transport.allreduce_zero_copy(send, parts, result, op, Scaling())
                check_reduction(result, arrays, op)
            digest.add(result)
    agree(transport, digest.value())


def several_at_once(transport: Transport) -> None:
    """Arrays that are reduced together, in place or not, whatever their sizes."""
    sizes = (3, 0, 1, 1000, 0, 7, 2048, 1)
    for dtype in ("float32", "bfloat16", "int8", "bool", "complex128"):
        arrays = [samples(transport.size, dtype, size, seed=size) for size in sizes]
        for count in range(1, len(sizes) + 1):
            sends = [ranks[transport.rank].copy() for ranks in arrays[:count]]
            results = [np.empty_like(send) for send in sends]
            transport.allreduce_all(sends, results, Sum, Scaling())
            for send, result, ranks in zip(sends, results, arrays, strict=False):
                check_reduction(result, ranks, Sum)
                assert send.tobytes() == ranks[transport.rank].tobytes()
            transport.allreduce_all(sends, sends, Sum, Scaling())
            assert [send.tobytes() for send in sends] == [result.tobytes() for result in results]
            agree(transport, b"".join(result.tobytes() for result in results))
    float16s = [np.full(size, 60000, np.float16) for size in sizes]
    transport.allreduce_all(float16s, float16s, Sum, Scaling(1.0, transport.size))
    assert all((array == 60000).all() for array in float16s)


def announced_arrays(transport: Transport) -> None:
    """Announced arrays are reduced as ever, in the order of the announcement, or not at all."""
    float32 = np.dtype(np.float32)
    for size in (3, 30_011):
        pairs = [(transport.empty(size, float32), transport.empty(size, float32)) for _ in range(6)]
        pairs[2] = np.empty(size, float32), pairs[2][1]
        for turn, used in enumerate([(0, 1, 2, 3, 4, 5), (), (1, 3), (5, 0), (4, 2)]):
            arrays = [samples(transport.size, "float32", size, seed=turn + n) for n in range(6)]
            for (send, result), ranks in zip(pairs, arrays, strict=True):
                send[...], result[...] = ranks[transport.rank], turn
            fewer = transport.rank == transport.size - 1
            transport.announce(pairs[: 6 - turn - fewer])
            word = bytes([transport.rank * (turn == 3)]) * 16
            found = transport.meet([word] * 6, on_wait)
            assert bool(found) == (turn != 3 or transport.size == 1)
            for number in used:
                transport.allreduce(*pairs[number], Sum, Scaling())
            transport.complete()
            for number in used:
                check_reduction(pairs[number][1], arrays[number], Sum)
            # The first again, moved to another place, which no rank knows of.
            send, result = pairs[0] = pairs[0][0], transport.empty(size, float32)
            transport.allreduce(send, result, Sum, Scaling())
            check_reduction(result, arrays[0], Sum)
            transport.allreduce(result, result, Sum, Scaling())


EVERYTHING = (
    meet,
    meet_with_several_digests,
    interrupted_meet,
    living_ranks,
    gather,
    narrow_integers_wrap,
    scaling,
    means_of_integers,
    nan_passes_through,
    booleans,
    adasum_of_known_vectors,
    alltoall,
    allgather,
    broadcast,
    arrays_of_its_own,
    unaligned_arrays,
    again_and_again,
    zero_copy_parts,
    several_at_once,
    announced_arrays,
)
