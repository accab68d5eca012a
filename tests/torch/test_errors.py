"""Every kind of error of the collectives, and a collective that works after each."""

import time

import pytest

from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd


def still_works():
    assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [hvd.size()] * 2
    handle = hvd.allreduce_async(torch.ones(1), name="still works", op=hvd.Sum)
    assert hvd.synchronize(handle).tolist() == [hvd.size()]


@ranks(2)
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


@ranks(2)
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
