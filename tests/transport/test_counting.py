from __future__ import annotations

import numpy as np
import pytest

import hvdlite as hvd
from hvdlite.base.reduction import Max, Scaling, Sum
from hvdlite.compression import DENSE, Parameter, Reduction
from hvdlite.engine import runtime
from hvdlite.gradients.exchange import GradientExchange
from hvdlite.transport import Transport
from hvdlite.transport.counting import CountingTransport
from tests.benchmarks import traffic
from tests.harness import ranks
from tests.simulation import Simulation, on_all_ranks
from tests.transport import checks, worlds

SIZES = [1, 2, 3, 4]


def counted(size, use):
    """Return the bytes that each rank has sent, by collective, after a use of its transport."""

    def on_rank(inner):
        transport = CountingTransport(inner)
        use(transport)
        assert transport.sent == sum(transport.by_collective.values())
        return dict(transport.by_collective)

    return on_all_ranks(on_rank, Simulation(size).transports)


def total(size, use):
    """The sum over all ranks, of the one collective that was used."""
    (name,) = {name for sent in counted(size, use) for name in sent}
    return name, sum(sent[name] for sent in counted(size, use))


@pytest.mark.parametrize(
    "check", [*checks.EVERYTHING, checks.some_reductions], ids=lambda check: check.__name__
)
def test_what_goes_through_it_is_what_went_through_the_inner_one(check):
    on_all_ranks(lambda inner: check(CountingTransport(inner)), Simulation(3).transports)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", [0, 1, 7, 12, 1000])
def test_an_allreduce_counts_what_it_takes_by_slices(size, length):
    """The implementation in `Transport` moves as many bytes as a ring, by other collectives."""

    def directly(transport):
        array = np.ones(length, np.float32)
        transport.allreduce(array, array, Sum, Scaling())

    def by_slices(transport):
        array = np.ones(length, np.float32)
        Transport.allreduce(transport, array, array, Sum, Scaling())

    for whole, parts in zip(counted(size, directly), counted(size, by_slices), strict=True):
        assert whole == {"allreduce": parts["alltoall"] + parts["allgather"]}
    assert total(size, directly) == ("allreduce", 2 * (size - 1) * 4 * length)


@pytest.mark.parametrize("size", SIZES)
def test_arrays_that_travel_together_count_as_one(size):
    def use(transport):
        arrays = [np.ones(length, np.float64) for length in (3, 0, 8, 1)]
        transport.allreduce_all(arrays, arrays, Max, Scaling())

    assert total(size, use) == ("allreduce", 2 * (size - 1) * 8 * 12)
    each = {sent["allreduce"] for sent in counted(size, use)}
    assert each == {2 * (size - 1) * 8 * 12 // size}  # 12 are equal slices for all sizes here


@pytest.mark.parametrize("size", SIZES)
def test_pieces_for_others(size):
    def alltoall(transport):
        lengths = [10 * transport.rank + target for target in range(size)]
        pieces = [np.ones(length, np.uint8) for length in lengths]
        result = [np.empty(10 * source + transport.rank, np.uint8) for source in range(size)]
        transport.alltoall(pieces, result)

    def reducescatter(transport):
        pieces = [np.ones(target + 1, np.float32) for target in range(size)]
        transport.reducescatter(pieces, np.empty(transport.rank + 1, np.float32), Sum, Scaling())

    for rank, sent in enumerate(counted(size, alltoall)):
        assert sent == {
            "alltoall": sum(10 * rank + other for other in range(size) if other != rank)
        }
    for rank, sent in enumerate(counted(size, reducescatter)):
        assert sent == {"reducescatter": 4 * sum(n + 1 for n in range(size) if n != rank)}


@pytest.mark.parametrize("size", SIZES)
def test_what_goes_to_all(size):
    def allgather(transport):
        piece = np.ones(5 + transport.rank, np.uint8)
        transport.allgather(piece, [np.empty(5 + rank, np.uint8) for rank in range(size)])

    def gather(transport):
        transport.gather(b"x" * (5 + transport.rank))

    for use in (allgather, gather):
        found = [sent[use.__name__] for sent in counted(size, use)]
        assert found == [(size - 1) * (5 + rank) for rank in range(size)]


@pytest.mark.parametrize("size", SIZES)
def test_a_broadcast_reaches_each_other_rank_once(size):
    for root in range(size):
        found = counted(size, lambda made, root=root: made.broadcast(np.ones(9, np.uint8), root))
        sent = [each["broadcast"] for each in found]
        assert sum(sent) == 9 * (size - 1)
        assert set(sent) <= {0, 9}
        assert sent[root] == (9 if size > 1 else 0)


@pytest.mark.parametrize("size", SIZES)
def test_a_meeting_counts_the_words_that_are_looked_at(size):
    for count in (1, 3, 9):
        words = [bytes(16)] * count
        name, sent = total(size, lambda made, words=words: made.meet(words, checks.on_wait))
        assert (name, sent) == ("meet", size * (size - 1) * 16 * min(count, 4))


def test_what_a_meeting_brings_is_counted_once():
    """With a transport that lets it come along with the words."""

    def use(inner):
        transport = CountingTransport(inner)
        array = np.ones(100, np.float32)
        assert transport.meet([bytes(16)], checks.on_wait, [array]) == 1
        transport.allreduce_all([array], [array], Sum, Scaling())
        assert array.tolist() == [2.0] * 100
        transport.close()
        return dict(transport.by_collective)

    assert on_all_ranks(use, worlds.threads(2)) == [{"meet": 16, "allreduce": 400}] * 2


def test_it_is_asked_what_the_inner_one_is_asked():
    simulation = Simulation(3)
    inner = simulation.transports[2]
    inner.members = [4, 5, 6]
    transport = CountingTransport(inner)
    assert (transport.rank, transport.size, transport.max_digests) == (2, 3, inner.max_digests)
    assert transport.members == [4, 5, 6]
    transport.leave()
    with pytest.raises(Exception, match="rank 2 has ended"):
        simulation.transports[0].meet([bytes(16)], checks.on_wait)


def test_memory_is_the_inner_ones():
    (first, second) = worlds.threads(2)
    made = CountingTransport(first).empty(1000, np.dtype(np.float32))
    assert type(made) is type(first.empty(1000, np.dtype(np.float32)))
    assert made.base is not None  # a part of what the ranks share
    for each in (first, second):
        each.close()


@ranks(1, 2, 3)
def test_what_a_process_has_sent(size):
    """Gradients, and compressed arrays; beside what they would take uncompressed."""
    hvd.init()
    elements = 600  # equal slices
    parameters = [Parameter("a", (elements,), np.dtype(np.float32))]
    uncompressed = 2 * (size - 1) * 4 * elements // size
    top = (size - 1) * 8 * 6  # the values and positions of six elements, to each other rank
    for strategy, sent in (
        (DENSE, uncompressed),
        (hvd.Compression.fp16, uncompressed // 2),
        (hvd.Compression.TopK(0.01), top),
    ):
        exchange = GradientExchange(
            runtime.engine(), repr(strategy), parameters, strategy, Reduction()
        )
        before = hvd.traffic()
        exchange.begin()
        exchange.buckets.slot(0)[...] = np.arange(elements)
        exchange.mark(0)
        exchange.finish()
        after = hvd.traffic()
        assert after.uncompressed - before.uncompressed == uncompressed
        # Sparse strategies also tell each other a few lengths.
        assert sent <= after.sent - before.sent <= sent + 64 * (size - 1)
    before = hvd.traffic()
    hvd.allreduce(np.ones(elements, np.float32), compression=hvd.Compression.fp16)
    assert hvd.traffic().sent - before.sent == uncompressed // 2


@ranks(2, 3)
def test_a_lane_that_counts(size):
    """The exchange of gradients, with what the ranks tell each other for it."""
    hvd.shutdown()
    with traffic.counting() as counter:
        hvd.init()
    try:
        engine = runtime.engine()
        parameters = [Parameter("a", (1200,), np.dtype(np.float32))]
        exchange = GradientExchange(engine, "model", parameters, DENSE, Reduction())
        sent = []
        for _ in range(3):
            before = counter.sent()
            exchange.begin()
            exchange.buckets.slot(0)[...] = np.full(1200, hvd.rank(), np.float32)
            exchange.mark(0)
            exchange.finish()
            assert exchange.buckets.result_slot(0)[0] == (size - 1) / 2
            sent.append(counter.sent() - before)
    finally:
        hvd.shutdown()
    dense = 2 * (size - 1) * 4 * 1200 // size
    # A step after the first: that, one word, and the presence of one gradient.
    assert dense < sent[-1] <= dense + (size - 1) * 100
