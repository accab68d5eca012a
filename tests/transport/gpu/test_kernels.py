"""The kernels' loop: compiled for the host, as plain C but for three functions, and for devices."""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from hvdlite.base.reduction import UFUNCS, Max, Min, Product, Scaling, Sum, accumulator
from hvdlite.transport.gpu import kernels
from hvdlite.transport.gpu.cuda import _stored_as
from hvdlite.transport.reduce import is_integer_mean
from tests.references import FLOATS, INTEGERS, dtype_of, integer_mean, samples

_ELEMENTS = 1000
_HEAD = """
#include <cmath>
#include <cstring>
#define __device__
using std::trunc;
static float __uint_as_float(unsigned bits) { float f; std::memcpy(&f, &bits, 4); return f; }
static unsigned __float_as_uint(float f) { unsigned bits; std::memcpy(&bits, &f, 4); return bits; }
"""
_TYPES = {
    "int8": "signed char",
    "uint8": "unsigned char",
    "int16": "short",
    "uint16": "unsigned short",
    "int32": "int",
    "uint32": "unsigned",
    "int64": "long long",
    "uint64": "unsigned long long",
    "float16": "_Float16",
    "float32": "float",
    "float64": "double",
}
_SCALINGS = [Scaling(), Scaling(1.0, 3), Scaling(2.5, 3)]
_CASES = [
    *itertools.product([*INTEGERS, *FLOATS], [Sum, Min, Max, Product], _SCALINGS),
    *itertools.product(["bool"], [Sum, Min, Max, Product], [Scaling()]),
]
_CONVERSIONS = list(itertools.product(FLOATS, FLOATS, _SCALINGS))


# The types for which cupy has classes of its own; the array of a kernel's rows is one, too.
_DEVICE_TYPES = {**_TYPES, "float16": "float16"}
_DEVICE_HEAD = """
#include <cupy/complex.cuh>
#include <cupy/carray.cuh>
#if __has_include(<cupy/float16.cuh>)  // from cupy 14 on
#include <cupy/float16.cuh>
#endif
template <typename T> using Array = CArray<T, 1, true, true>;
"""
# Folders of headers that cupy's own need, and which it finds by itself for its kernels.
_CCCL = ["cub", "thrust", "libcudacxx"]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    code = [_HEAD, kernels.PREAMBLE]
    code += [_function(number, *case) for number, case in enumerate(_CASES)]
    code += [_conversion(number, *case) for number, case in enumerate(_CONVERSIONS)]
    (folder / "kernels.cpp").write_text("\n".join(code))
    command = [compiler, "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", "kernels.cpp"]
    done = subprocess.run(
        [*command, "-o", "kernels.so"], cwd=folder, capture_output=True, text=True
    )
    if done.returncode and "_Float16" in done.stderr:
        pytest.skip("the C++ compiler has no _Float16")
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "kernels.so"))


def _function(number, dtype, op, scaling):
    stored, element = _stored_as(dtype_of(dtype))
    stored = _TYPES[stored.name]
    return f"""extern "C" void kernel{number}(const {stored}* rows, long long count,
        long long stride, double factor, long long divisor, {stored}* results) {{
        typedef {stored} T;
        for (long long i = 0; i < stride; ++i) {{
            T& out = results[i];
            {kernels.body(element, op, scaling)}
        }}
    }}"""


def _conversion(number, source, target, scaling):
    stored = [_TYPES[_stored_as(dtype_of(name))[0].name] for name in (source, target)]
    return f"""extern "C" void convert{number}(const {stored[0]}* sources, long long size,
        double factor, long long divisor, {stored[1]}* results) {{
        typedef {stored[1]} T;
        for (long long i = 0; i < size; ++i) {{
            const {stored[0]} source = sources[i];
            T& out = results[i];
            {kernels.conversion(dtype_of(source), dtype_of(target), scaling)}
        }}
    }}"""


def _device_function(number, dtype, op, scaling):
    """Return a kernel with the arguments of `Cuda.reduce`, as cupy makes it from the body."""
    stored, element = _stored_as(dtype_of(dtype))
    stored = _DEVICE_TYPES[stored.name]
    return f"""extern "C" __global__ void kernel{number}(const Array<{stored}> rows,
        const long long count, const long long stride, const double factor,
        const long long divisor, Array<{stored}> results) {{
        typedef {stored} T;
        const ptrdiff_t i = (ptrdiff_t)blockIdx.x * blockDim.x + threadIdx.x;
        T& out = results[i];
        {kernels.body(element, op, scaling)}
    }}"""


def _device_conversion(number, source, target, scaling):
    """Return a kernel with the arguments of `Cuda.convert`."""
    stored = [_DEVICE_TYPES[_stored_as(dtype_of(name))[0].name] for name in (source, target)]
    return f"""extern "C" __global__ void convert{number}(const Array<{stored[0]}> sources,
        const double factor, const long long divisor, Array<{stored[1]}> results) {{
        typedef {stored[1]} T;
        const ptrdiff_t i = (ptrdiff_t)blockIdx.x * blockDim.x + threadIdx.x;
        const {stored[0]} source = sources[i];
        T& out = results[i];
        {kernels.conversion(dtype_of(source), dtype_of(target), scaling)}
    }}"""


def _find_cuda_headers(toolkit):
    """Return the folder of CUDA's headers, in a wheel of NVIDIA's or in a toolkit."""
    wheels = importlib.util.find_spec("nvidia")
    roots = [
        *(wheels.submodule_search_locations if wheels else ()),
        *([toolkit] if toolkit else ()),
    ]
    found = [path for root in roots if root for path in Path(root).glob("**/include/cuda_fp16.h")]
    if not found:
        pytest.skip("no headers of CUDA; install nvidia-cuda-runtime")
    return [found[0].parent]


@pytest.mark.parametrize("architecture", ["sm_75", "sm_90", "sm_100"])
def test_every_kernel_compiles_for_devices(architecture):
    """NVIDIA's compiler needs no device; `make test-device-api` installs it."""
    cupy = pytest.importorskip("cupy")
    try:
        nvrtc = cupy.cuda.nvrtc
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"no NVRTC: {error}")
    code = [_DEVICE_HEAD, kernels.PREAMBLE]
    code += [_device_function(number, *case) for number, case in enumerate(_CASES)]
    code += [_device_conversion(number, *case) for number, case in enumerate(_CONVERSIONS)]
    headers = Path(cupy.__file__).parent / "_core" / "include"
    folders = [headers, *(headers / "cupy" / "_cccl" / name for name in _CCCL)]
    folders += _find_cuda_headers(cupy.cuda.get_cuda_path())
    options = [f"-arch={architecture}", "--std=c++17", "-w", *(f"-I{path}" for path in folders)]
    program = nvrtc.createProgram("\n".join(code), "kernels.cu", (), ())
    try:
        nvrtc.compileProgram(program, options)
    except nvrtc.NVRTCError as error:
        pytest.fail(f"{error}:\n{nvrtc.getProgramLog(program)}")
    compiled = nvrtc.getCUBIN(program)
    for name in [f"kernel{len(_CASES) - 1}", f"convert{len(_CONVERSIONS) - 1}"]:
        assert name.encode() in compiled


def test_every_conversion(library):
    for number, (source, target, scaling) in enumerate(_CONVERSIONS):
        (values,) = samples(1, source, _ELEMENTS)
        values[:6] = [np.nan, np.inf, -np.inf, -0.0, 60000, -60000]
        result = np.zeros(_ELEMENTS, dtype_of(target))
        getattr(library, f"convert{number}")(
            ctypes.c_void_p(values.ctypes.data),
            ctypes.c_longlong(_ELEMENTS),
            ctypes.c_double(scaling.factor),
            ctypes.c_longlong(scaling.divisor),
            ctypes.c_void_p(result.ctypes.data),
        )
        with np.errstate(all="ignore"):
            scaled = scaling.apply(values.astype(accumulator(values.dtype)))
            expected = scaled.astype(accumulator(result.dtype)).astype(result.dtype)
        same = (result == expected) | ((result != result) & (expected != expected))
        assert same.all(), (source, target, scaling, values[~same][:3], result[~same][:3])


@pytest.mark.parametrize("count", [1, 3])
def test_every_reduction(library, count):
    for number, (dtype, op, scaling) in enumerate(_CASES):
        rows = np.stack(samples(count, dtype, _ELEMENTS))
        if dtype in FLOATS:
            rows[0, :5] = [np.nan, np.inf, -np.inf, -0.0, 60000]
            rows[-1, 5:8] = [np.nan, 60000, -60000]
        result = np.zeros(_ELEMENTS, rows.dtype)
        getattr(library, f"kernel{number}")(
            ctypes.c_void_p(rows.ctypes.data),
            ctypes.c_longlong(count),
            ctypes.c_longlong(_ELEMENTS),
            ctypes.c_double(scaling.factor),
            ctypes.c_longlong(scaling.divisor),
            ctypes.c_void_p(result.ctypes.data),
        )
        with np.errstate(all="ignore"):
            expected = _reduce(rows, op, scaling)
        same = (result == expected) | ((result != result) & (expected != expected))
        assert same.all(), (dtype, op, scaling, rows[:, ~same][:, :3], result[~same][:3])


def _reduce(rows, op, scaling):
    """In the order of the rows, to the bit."""
    if rows.dtype.kind == "b":
        return rows.any(axis=0) if op in (Sum, Max) else rows.all(axis=0)
    if is_integer_mean(rows.dtype, op, scaling):
        return integer_mean(rows.astype(object).sum(axis=0), scaling.divisor).astype(rows.dtype)
    total = rows[0].astype(accumulator(rows.dtype))
    for row in rows[1:]:
        total = UFUNCS[op](total, row.astype(total.dtype))
    return scaling.apply(total).astype(rows.dtype)
