"""`hvdlite.transport.gpu.cuda` over cupy, on a real device."""

from __future__ import annotations

import numpy as np
import pytest

from hvdlite.base.reduction import Max, Min, Product, Scaling, Sum
from hvdlite.transport.gpu.base import FlatArray
from tests.references import FLOATS, INTEGERS, dtype_of, samples
from tests.transport.gpu.test_kernels import _reduce

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS, "bool"])
def test_reductions_are_numpy_s_to_the_bit(cuda, dtype):
    import cupy

    kind = dtype_of(dtype)
    stored = {"bfloat16": np.dtype(np.uint16)}.get(dtype, kind)
    for op in (Sum, Min, Max, Product):
        for scaling in (Scaling(), Scaling(1.0, 3), Scaling(2.5, 3)):
            if dtype == "bool" and not scaling.is_identity:
                continue
            for count, size in ((1, 1000), (3, 1000), (3, 1), (2, 0)):
                rows = np.stack(samples(count, dtype, size))
                sent = cupy.asarray(rows.reshape(-1).view(stored))
                result = cupy.zeros(size, stored)
                cuda.reduce(FlatArray(sent, kind), FlatArray(result, kind), op, scaling)
                found = cupy.asnumpy(result).view(kind)
                with np.errstate(all="ignore"):
                    expected = _reduce(rows, op, scaling)
                same = (found == expected) | ((found != found) & (expected != expected))
                assert same.all(), (op, scaling, rows[:, ~same][:, :3], found[~same][:3])


def test_a_row_may_be_scaled_in_place(cuda):
    import cupy

    array = cupy.arange(7, dtype=cupy.float32)
    cuda.reduce(array, array, Sum, Scaling(3.0))
    assert array.tolist() == [0, 3, 6, 9, 12, 15, 18]


def test_pinned_memory_goes_to_the_device_and_back(cuda):
    import cupy

    outgoing, incoming = cuda.pinned(1000), cuda.pinned(1000)
    outgoing[:] = np.arange(1000) % 251
    array = cuda.empty(1000, np.dtype(np.uint8))
    cuda.copy(array, outgoing)
    cuda.copy(incoming, array)
    cupy.cuda.get_current_stream().synchronize()
    np.testing.assert_array_equal(incoming, outgoing)


def test_a_view_shares_the_memory_of_its_owner(cuda):
    import cupy

    owner = cupy.arange(10, dtype=cupy.float32)
    view = cuda.view(0, owner.data.ptr, 10, np.dtype(np.float32), owner)
    view *= 2
    assert owner.tolist() == list(range(0, 20, 2))


def test_torch_s_memory_and_streams(cuda):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    import cupy

    tensor = torch.arange(6, device="cuda", dtype=torch.bfloat16)
    view = cuda.view(0, tensor.data_ptr(), 6, np.dtype(np.uint16), tensor)
    event = cuda.record(0, torch.cuda.current_stream().cuda_stream)
    stream = cuda.stream(0)
    cuda.wait_event(0, stream.ptr, event)
    with cuda.on(0, stream):
        doubled = FlatArray(view, dtype_of("bfloat16"))
        cuda.reduce(doubled, doubled, Sum, Scaling(2.0))
        stream.synchronize()
    assert tensor.tolist() == [0, 2, 4, 6, 8, 10]
    assert cupy.asnumpy(view).view(dtype_of("bfloat16"))[5] == 10


def test_the_device_tells_its_place(cuda):
    assert cuda.bus_id(0).count(":") == 2
