"""Every kind of error of the collectives, and a collective that works after each."""

import time

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd

BOTH = ranks(2, 3)


def still_works():
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    handle = hvd.allreduce_async(torch.ones(1), name="still works", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()]


def mismatches():
    """For each what the ranks disagree on, what this rank does, and what the message says."""
    odd = hvd.rank() % 2 == 1
    ones = torch.ones(hvd.size())
    wide, narrow = torch.ones(hvd.size(), dtype=torch.float64), ones
    kind = hvd.allgather if odd else hvd.broadcast
    arguments = () if odd else (0,)
    return {
        "shape": (lambda name: hvd.allreduce(ones[: 1 + odd], name=name), "shape is"),
        "number of axes": (
            lambda name: hvd.allreduce(ones.reshape((1, -1) if odd else (-1,)), name=name),
            "shape is",
        ),
        "dtype": (lambda name: hvd.allreduce(wide if odd else narrow, name=name), "dtype is"),
        "operation": (lambda name: kind(ones, *arguments, name=name), "the operation is"),
        "op": (lambda name: hvd.allreduce(ones, op=[hvd.Sum, hvd.Max][odd], name=name), "op is"),
        "root": (lambda name: hvd.broadcast(ones, int(odd), name=name), "root_rank is"),
        "prescale factor": (
            lambda name: hvd.allreduce(ones, prescale_factor=1.0 + odd, name=name),
            "prescale_factor is",
        ),
        "postscale factor": (
            lambda name: hvd.allreduce(ones, postscale_factor=1.0 + odd, name=name),
            "postscale_factor is",
        ),
        "compression": (
            lambda name: hvd.allreduce(
                ones, compression=[hvd.Compression.none, hvd.Compression.fp16][odd], name=name
            ),
            "compression is",
        ),
        "rows of an allgather": (
            lambda name: hvd.allgather(torch.ones(2, 2 + odd), name=name),
            "the shape after its first axis is",
        ),
        "rows of an alltoall": (
            lambda name: hvd.alltoall(torch.ones(hvd.size(), 2 + odd), name=name),
            "the shape after its first axis is",
        ),
        "op of a reducescatter": (
            lambda name: hvd.reducescatter(ones, op=[hvd.Sum, hvd.Max][odd], name=name),
            "op is",
        ),
        "group": (
            lambda name: hvd.grouped_allreduce([ones] * (1 + odd), name=name),
            "the number of arrays is",
        ),
    }


@BOTH
def test_ranks_that_disagree():
    hvd.init()
    for what, (call, message) in mismatches().items():
        with pytest.raises(hvd.HorovodInternalError, match=message) as caught:
            call(f"mismatch of {what}")
        assert f"'mismatch of {what}'" in str(caught.value)
        assert "rank 0" in str(caught.value) or "ranks 0" in str(caught.value)
        assert "rank 1" in str(caught.value)
        still_works()


@BOTH
def test_ranks_that_disagree_on_asynchronous_operations():
    hvd.init()
    odd = hvd.rank() % 2 == 1
    good = hvd.allreduce_async(torch.ones(3), name="good", op=hvd.Sum)
    bad = hvd.allreduce_async(torch.ones(3 + odd), name="bad", op=hvd.Sum)
    later = hvd.allgather_async(torch.ones(1), name="later")
    with pytest.raises(hvd.HorovodInternalError, match="'bad'"):
        hvd.synchronize(bad)
    with pytest.raises(ValueError, match="synchronized before"):
        hvd.synchronize(bad)
    assert hvd.synchronize(good).tolist() == [hvd.size()] * 3
    assert hvd.synchronize(later).tolist() == [1.0] * hvd.size()
    still_works()


@BOTH
def test_a_duplicate_name_is_refused_and_the_first_stays_valid():
    hvd.init()
    calls = {
        "allreduce": lambda name: hvd.allreduce_async(torch.ones(2), name=name, op=hvd.Sum),
        "allgather": lambda name: hvd.allgather_async(torch.ones(2), name=name),
        "broadcast": lambda name: hvd.broadcast_async(torch.ones(2), 0, name=name),
        "alltoall": lambda name: hvd.alltoall_async(torch.ones(hvd.size()), name=name),
        "reducescatter": lambda name: hvd.reducescatter_async(torch.ones(6), name=name),
        "grouped": lambda name: hvd.grouped_allreduce_async([torch.ones(2)], name=name),
    }
    for kind, call in calls.items():
        if hvd.rank() == 0:  # the others come when it has been refused
            first = call(kind)
            with pytest.raises(ValueError, match=f"rank 0: an operation named '{kind}'"):
                call(kind)
            hvd.barrier()
        else:
            hvd.barrier()
            first = call(kind)
        hvd.synchronize(first)
        hvd.synchronize(call(kind))  # the name is free again
        still_works()


@BOTH
def test_bad_arguments_are_told_to_the_caller_at_once():
    hvd.shutdown()
    hvd.init()
    size = hvd.size()
    outside = hvd.add_process_set([size - 1])
    unknown, removed = hvd.ProcessSet([0]), hvd.add_process_set([0])
    hvd.remove_process_set(removed)
    ones = torch.ones(size)
    local = {
        "no member": (lambda: hvd.allreduce(ones, process_set=outside), "is not in ProcessSet"),
        "no member, asynchronous": (
            lambda: hvd.allgather_async(ones, process_set=outside),
            "is not in ProcessSet",
        ),
        "unknown set": (lambda: hvd.allreduce(ones, process_set=unknown), "not a registered"),
        "removed set": (lambda: hvd.allreduce(ones, process_set=removed), "registered"),
        "bad root": (lambda: hvd.broadcast(ones, size), f"root_rank={size} is not a rank"),
        "bad root, in place": (lambda: hvd.broadcast_(ones, -1), "root_rank=-1 is not a rank"),
        "bad splits": (lambda: hvd.alltoall(ones, [size] * size), "splits must"),
        "too few splits": (lambda: hvd.alltoall_async(ones, [size]), "splits must be"),
        "op and average": (
            lambda: hvd.allreduce(ones, average=True, op=hvd.Sum),
            "op= or average=, not both",
        ),
        "unknown op": (lambda: hvd.allreduce(ones, op=17), "op=17 is not a reduction"),
        "op without meaning": (
            lambda: hvd.allreduce(torch.ones(1, dtype=torch.complex64), op=hvd.Max),
            "Max is not defined",
        ),
        "no handle": (lambda: hvd.synchronize("handle"), "is not a handle"),
    }
    for what, (call, message) in local.items():
        start = time.monotonic()
        if not (what.startswith("no member") and outside.included()):
            with pytest.raises(ValueError, match=message):
                call()
        assert time.monotonic() - start < 5
        still_works()
    assert hvd.allgather(torch.tensor([hvd.rank()])).tolist() == list(range(size))
    assert hvd.broadcast(torch.tensor([hvd.rank()]), size - 1).tolist() == [size - 1]


@pytest.mark.slow
@ranks(2, 3, settings={"HVDLITE_STALL_CHECK_TIME_SECONDS": "0.4"})
def test_a_stall_is_reported_and_only_delays(monkeypatch):
    from tests.test_stall import collect_warnings

    hvd.init()
    hvd.barrier()
    messages = collect_warnings(monkeypatch)
    last = hvd.size() - 1
    if hvd.rank() == last:
        time.sleep(1.5)
    assert hvd.allreduce(torch.ones(1), name="late", op=hvd.Sum).tolist() == [hvd.size()]
    if hvd.rank() != last:
        assert any(f"rank {last}" in text and "'late'" in text for text in messages), messages
    still_works()


@pytest.mark.slow
@ranks(2, 3, settings={"HVDLITE_STALL_SHUTDOWN_TIME_SECONDS": "0.5"})
def test_a_stall_that_lasts_too_long_is_an_error():
    hvd.init()
    if hvd.rank() == 0:
        time.sleep(1.5)
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(1), name="too late")
    else:
        with pytest.raises(hvd.HorovodInternalError, match="'too late'"):
            hvd.allreduce(torch.ones(1), name="too late")
    hvd.shutdown()
    hvd.init()
    still_works()
