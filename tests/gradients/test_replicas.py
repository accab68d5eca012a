"""The rolling comparison of replicas; ranks are threads that meet by a simulated transport."""

import logging

import numpy as np
import pytest

from hvdlite.base.settings import Settings
from hvdlite.compression import Bucket, Compression, Parameter, Reduction
from hvdlite.engine.operation import Signature
from hvdlite.errors import MismatchError
from hvdlite.gradients import metadata, replicas
from hvdlite.gradients.bucket import GradientBucket
from hvdlite.gradients.replicas import ReplicaCheck, state_label, weight_label
from tests.simulation import Simulation, on_all_ranks


class Rank:
    """A rank whose replica is two dicts, of options and of arrays.

    Attributes:
        messages: of the differences that it has been told of, with the number of the step.
    """

    def __init__(self, transport, arrays, options=None, stride=1, **settings):
        self.transport = transport
        self.arrays = dict(arrays)
        self.options = dict(options or {"rate": 0.1})
        self.settings = Settings(**settings)
        self.messages = {}
        self.check = ReplicaCheck(
            lambda: [(f"the optimizer's {name}", value) for name, value in self.options.items()],
            lambda: [(label, lambda label=label: self.arrays.get(label)) for label in self.arrays],
            "broadcast()",
            stride=lambda: stride,
        )

    def exchange(self, number, present=True):
        """Exchange digests as the metadata of a bucket does; stand in if it is not present."""
        snapshot = self.check.begin(self.transport, self.settings) if present else None
        digests = self.transport.gather(b"" if snapshot is None else snapshot.digest)
        try:
            if any(digests):
                replicas.compare(digests, snapshot, self.transport)
        except MismatchError as error:
            self.messages[number] = str(error)
        else:
            if present:
                self.check.end()


def arrays_of(sizes, dtype=np.float32):
    names = [f"w{number}" for number in range(len(sizes))]
    weights = {
        weight_label(name): np.arange(np.prod(shape), dtype=dtype).reshape(shape)
        for name, shape in zip(names, sizes, strict=True)
    }
    moments = {
        state_label("momentum", name): np.ones(shape, dtype)
        for name, shape in zip(names, sizes, strict=True)
    }
    return {**weights, **moments}


def train(steps, arrays, before=lambda rank, number: None, size=3, present=None, **options):
    """Let ranks make steps, counted from 1; return them."""
    present = present or (lambda rank, number: True)

    def run(transport):
        copies = {label: np.array(array) for label, array in arrays.items()}
        rank = Rank(transport, copies, **options)
        for number in range(1, steps + 1):
            before(rank, number)
            rank.exchange(number, present(transport.rank, number))
        return rank

    ranks = on_all_ranks(run, Simulation(size).transports)
    assert all(rank.messages == ranks[0].messages for rank in ranks) or present
    return ranks


def is_last(rank):
    return rank.transport.rank == rank.transport.size - 1


SMALL = arrays_of([(3, 4), (), (5,)])
LARGE = arrays_of([(100, 700), (), (2, 30000), (0, 3), (7,)])


def test_equal_replicas_are_left_alone():
    def change(rank, number):
        rank.options["rate"] = 0.1 / number
        for array in rank.arrays.values():
            array += number

    for rank in train(40, LARGE, change):
        assert rank.messages == {}


def test_an_option_is_compared_in_every_step():
    def change(rank, number):
        if number == 9 and is_last(rank):
            rank.options["rate"] = 0.2

    for rank in train(9, LARGE, change):
        assert "the optimizer's rate is 0.1 on ranks 0, 1, 0.2 on rank 2" in rank.messages[9]
        assert "(equal in step 8, apart in step 9)" in rank.messages[9]
        assert "average the metric over the ranks first" in rank.messages[9]


@pytest.mark.parametrize("stride", [1, 16])
@pytest.mark.parametrize("label", [*LARGE])
def test_every_element_is_compared_once_in_a_rotation(label, stride):
    """Wherever a rank changes a bit, it is found in a bounded number of steps, and in its place."""
    size = LARGE[label].size
    length = max(1, train(2, LARGE, stride=stride)[0].check.rotation.length)
    assert length <= replicas.ROTATION
    for element in {0, size - 1} if size else ():

        def change(rank, number, element=element):
            if number == 5 and is_last(rank):
                rank.arrays[label].reshape(-1).view(np.uint32)[element] ^= 1 << 20

        for rank in train(5 + length - 1, LARGE, change, size=2, stride=stride):
            (number, message), *_ = rank.messages.items()
            assert 5 <= number < 5 + length
            index = [int(each) for each in np.unravel_index(element, LARGE[label].shape)]
            assert (f"element {index} of {label} is " if index else f": {label} is ") in message
            values = [str(LARGE[label].reshape(-1)[element])]
            values.append(str(rank.arrays[label].reshape(-1)[element]))
            if is_last(rank):
                assert f"is {values[0]} on rank 0, {values[1]} on rank 1 (equal in step" in message
            since, apart = message.partition("(equal in step ")[2].split(", apart in step ")
            assert int(since) < 5 <= number == int(apart.partition(")")[0])
            assert "no broadcast is missing" in message


@pytest.mark.parametrize("arrays", [SMALL, LARGE], ids=["small", "large"])
def test_a_broadcast_that_is_missing(arrays):
    """The first exchange compares nothing; then there is an error until it is mended."""

    def change(rank, number):
        array = rank.arrays[weight_label("w0")]
        if number == 1:
            array += rank.transport.rank
        if number == 5:
            array -= rank.transport.rank

    for rank in train(8, arrays, change):
        assert [*rank.messages] == [2, 3, 4]
        assert (
            "the weight 'w0' is 0.0 on rank 0, 1.0 on rank 1, 2.0 on rank 2; 1 of"
            in (rank.messages[2])
        )
        assert "Probably they were not broadcast" in rank.messages[2]
        assert "equal in step" not in rank.messages[2]


def test_an_array_that_one_rank_lacks_or_that_has_another_shape_or_dtype():
    label = state_label("momentum", "w0")

    def change(rank, number):
        if is_last(rank):
            if number == 4:
                rank.arrays[label] = None
            if number == 8:
                rank.arrays[label] = np.ones(12, np.float32)
            if number == 10:
                rank.arrays[label] = np.ones((3, 4))
        if number in (6, 12):
            rank.arrays[label] = np.ones((3, 4), np.float32)

    for rank in train(14, SMALL, change, size=2):
        last = [rank.messages[number] for number in (5, 9, 11)]
        for text, message in zip(["absent", "float32[12]", "float64[3, 4]"], last, strict=True):
            assert f"{label} is float32[3, 4] on rank 0, {text} on rank 1 (equal" in message
        assert not {3, 6, 7, 13, 14} & {*rank.messages}


def test_state_that_comes_later():
    late = state_label("moment", "w1")

    def change(rank, number):
        if number == 3:
            rank.arrays[late] = np.full(3, number)
        if number == 25 and is_last(rank):
            rank.arrays[late][1] += 1

    for rank in train(35, SMALL, change):
        (number, message), *_ = rank.messages.items()
        assert 25 <= number <= 25 + rank.check.rotation.length
        assert f"element [1] of {late} is 3 on ranks 0, 1, 4 on rank 2 (equal in" in message
        assert "1 of 4 arrays of the optimizer's state differ" in message


@pytest.mark.parametrize("mended", [True, False])
def test_a_rank_that_has_been_away_is_compared_when_it_is_back(mended):
    def change(rank, number):
        if (number in range(6, 15) and not is_last(rank)) or (number == 15 and mended):
            rank.arrays[weight_label("w0")][...] = min(number, 14)

    away = lambda rank, number: rank < 2 or number not in range(6, 15)  # noqa: E731
    for rank in train(40, SMALL, change, present=away):
        assert bool(rank.messages) == (not mended)
        for number in rank.messages:
            assert "rank 2 took part in fewer steps than the others" in rank.messages[15]
            assert "with a root_rank that has made all steps" in rank.messages[number]
        assert (15 in rank.messages) == (not mended)


def test_ranks_that_lack_a_step_find_together():
    """Where an exchange has failed on one rank alone, positions differ once."""

    def change(rank, number):
        if number in (7, 8) and is_last(rank):
            rank.check._steps -= 1
            rank.check._position = 0
        if number == 30 and is_last(rank):
            rank.arrays[weight_label("w0")][0, 0] = 5

    for rank in train(40, SMALL, change):
        assert min(rank.messages) in range(30, 30 + rank.check.rotation.length)
        assert {rank.check._steps for _ in range(1)} == {min(rank.messages) - 1}


def test_a_new_world_begins_anew():
    def change(rank, number):
        if number == 10:
            rank.transport.next_world = rank.world = Simulation(1)
            rank.arrays[weight_label("w0")] += rank.transport.rank
        if number == 11:
            rank.arrays[weight_label("w0")] -= rank.transport.rank

    for rank in train(20, SMALL, change):
        assert rank.messages == {}


def test_everything_again_on_request():
    def change(rank, number):
        if number == 5 and is_last(rank):
            rank.arrays[state_label("momentum", "w4")] += 1

    for rank in train(8, LARGE, change, check_ranks_every=4):
        assert min(rank.messages) == 6


def test_a_warning_comes_once_and_again_on_request(caplog):
    def change(rank, number):
        if number == 4:
            rank.options["rate"] = 0.1 * (1 + rank.transport.rank)

    with caplog.at_level(logging.WARNING, "hvdlite"):
        train(20, SMALL, change, check_ranks="warn")
        assert len(caplog.messages) == 1
        train(14, SMALL, change, check_ranks="warn", check_ranks_every=5)
        assert len(caplog.messages) == 4
    train(5, SMALL, change, check_ranks="off")


def test_a_rotation_costs_the_same_in_every_step():
    """Slices are equal in bytes, but for arrays so small that their number counts."""
    for sizes in ([(1000, 1000)], [(3,)] * 1000, [(50, 70)] * 40 + [(10**6,)], []):
        arrays = arrays_of(sizes)
        rotation = replicas.Rotation(
            [(label, lambda array=array: array) for label, array in arrays.items()],
            np.asarray,
            1,
            None,
        )
        total = sum(array.nbytes + replicas._OVERHEAD for array in arrays.values())
        slices = [[*rotation._parts(position)] for position in range(rotation.length)]
        assert rotation.length <= replicas.ROTATION
        seen = {label: np.zeros(array.size, int) for label, array in arrays.items()}
        most = max(replicas._LEAST, total / replicas.ROTATION + 8)
        for parts in slices:
            assert len(parts) <= 2 + most / replicas._OVERHEAD
            assert sum((stop - start) * entry.itemsize for entry, start, stop in parts) <= most
            for entry, start, stop in parts:
                seen[entry.label][start:stop] += 1
        assert all((counts == 1).all() for counts in seen.values())


def test_buckets_of_the_usual_step_are_decoded_once(monkeypatch):
    """Where all ranks have all gradients, their digests alone are compared."""
    transport = Simulation(1).transports[0]
    rank = Rank(transport, SMALL)
    parameters = [Parameter(f"p{n}", (2,), np.dtype("f4")) for n in range(3)]
    arrays = Bucket(parameters, Reduction(), np.empty)
    bucket = GradientBucket("bucket 0", Signature(()), arrays, Compression.none)
    decoded = []
    decode = metadata.decode
    monkeypatch.setattr(metadata, "decode", lambda *given: decoded.append(1) or decode(*given))
    for number in range(1, 9):
        bucket.begin_step()
        bucket.snapshot = rank.check.begin(transport, rank.settings)
        bucket.mark()
        bucket.prepare_submission()
        assert len(bucket.payload) == 3 + (replicas.REPLICA_DIGEST_SIZE if number > 1 else 0)
        bucket.receive_metadata([bucket.payload] * 4, transport)
        assert bucket.all_arrived
        assert bucket.kinds.tolist() == [[1, 1, 1]] * 4
        rank.check.end()
    assert len(decoded) == 1
    assert rank.check.equal_since(None, 0) == 8


def test_memory_of_any_order_is_compared_by_its_elements():
    ordered = np.arange(4000.0).reshape(40, 10, 10)
    other = np.asfortranarray(ordered)

    def change(rank, number):
        if number == 1 and is_last(rank):
            rank.arrays["the weight 'w'"] = other

    for rank in train(30, {"the weight 'w'": ordered}, change, size=2):
        assert rank.messages == {}
