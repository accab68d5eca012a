"""Many operations of every kind, on tensors of every dtype and layout, from several threads."""

import itertools

import numpy as np
import pytest

from tests import test_random_operations as operations
from tests.harness import ranks

pytest.importorskip("torch")

import torch

import hvdlite.torch as hvd
from hvdlite.torch.tensors import to_array, to_tensor


def contiguous(tensor):
    return tensor


def transposed(tensor):
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def with_gaps(tensor):
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


def conjugated(tensor):
    return tensor.conj().resolve_conj().conj() if tensor.is_complex() else tensor


LAYOUTS = (contiguous, transposed, with_gaps, conjugated)


IN_PLACE = {
    "allreduce_async": hvd.allreduce_async_,
    "broadcast_async": hvd.broadcast_async_,
    "grouped_allreduce_async": hvd.grouped_allreduce_async_,
}


class OfTensors:
    """The package as `tests.test_random_operations` calls it, with arrays in and out.

    Args:
        produce: Returns what stands for a tensor, on a device say.
        read: Returns the tensor that such a one has become.
    """

    def __init__(self, produce=contiguous, read=contiguous):
        self.produce, self.read, self.numbers = produce, read, itertools.count()
        self.checks = {}

    def __getattr__(self, name):
        if not name.endswith("_async"):
            return getattr(hvd, name)
        return lambda *given, **options: self._submit(name, given, options)

    def add_process_set(self, members):
        """One rank has no halves."""
        return hvd.add_process_set(members) if hvd.size() > 1 else hvd.global_process_set

    def allreduce(self, array, **options):
        return self.synchronize(self.allreduce_async(array, **options))

    def _submit(self, name, given, options):
        number = next(self.numbers)
        layout, in_place = LAYOUTS[number % 4], number // 4 % 2 == 1 and name in IN_PLACE
        is_group, (what, *rest) = isinstance(given[0], list), given
        plain = [layout(to_tensor(np.array(each))) for each in (what if is_group else [what])]
        tensors = [self.produce(tensor) for tensor in plain]
        before = [(a.clone(), b._version) for a, b in zip(plain, tensors, strict=True)]
        call = IN_PLACE[name] if in_place else getattr(hvd, name)
        handle = call(tensors if is_group else tensors[0], *rest, **options)

        def check(results):
            """Only operations in place change what they are given, and count as a change."""
            for tensor, (value, version), result in zip(tensors, before, results, strict=False):
                assert (result is tensor) == in_place
                now = self.read(tensor)
                assert tensor._version > version if in_place else torch.equal(now, value)

        self.checks[handle] = check
        return handle

    def synchronize(self, handle):
        found = hvd.synchronize(handle)
        results = found if isinstance(found, (list, tuple)) else [found]
        self.checks[handle](results)
        assert hvd.poll(handle)
        arrays = [to_array(self.read(each).resolve_conj().contiguous()) for each in results]
        return arrays if isinstance(found, (list, tuple)) else arrays[0]


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")
@ranks(2, 3)
def test_operations_on_tensors_of_every_kind(monkeypatch):
    monkeypatch.setattr(operations, "hvd", OfTensors())
    operations.run(400)
