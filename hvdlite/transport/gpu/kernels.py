"""CUDA C code of the loops by which device transports reduce, scale and convert.

One loop both reduces the ranks' rows and scales a sum: with a single row it only scales. Every
element is read once and written once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from hvdlite.base.reduction import ReduceOp, Scaling

#: Functions that the loop's body may call.
PREAMBLE = """
__device__ inline float from_bfloat16(unsigned short bits) {
    return __uint_as_float((unsigned int)bits << 16);
}
__device__ inline unsigned short to_bfloat16(float value) {
    const unsigned int bits = __float_as_uint(value);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)(bits >> 16 | 0x40u);
    return (unsigned short)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}
"""

_FLOATS = {"float16": "float", "bfloat16": "float", "float32": "float", "float64": "double"}
_COMBINE = {
    ReduceOp.SUM: "total + next",
    ReduceOp.PRODUCT: "total * next",
    # A comparison with NaN is false, so that a NaN stays once it is in the total.
    ReduceOp.MIN: "(next < total || next != next) ? next : total",
    ReduceOp.MAX: "(next > total || next != next) ? next : total",
}
_COMBINE_BOOLS = {
    ReduceOp.SUM: "total | next",
    ReduceOp.MAX: "total | next",
    ReduceOp.MIN: "total & next",
    ReduceOp.PRODUCT: "total & next",
}


@lru_cache  # a program reduces the same way step after step
def body(dtype: np.dtype[Any], op: ReduceOp, scaling: Scaling) -> str:
    """Return the code for element ``i`` of ``out``.

    It uses ``T`` (the stored type), ``rows`` (``count`` rows of ``T``, ``stride`` elements
    from one to the next), ``factor`` (float64) and ``divisor`` (int64).
    """
    is_mean = scaling.factor == 1.0 and not scaling.is_identity
    if is_mean and op is ReduceOp.SUM and dtype.kind in "iu":
        return _integer_mean(dtype)
    wide, load, store = _conversion(dtype, op)
    combine = (_COMBINE_BOOLS if dtype.kind == "b" else _COMBINE)[op]
    return f"""
        {wide} total = {load.format("rows[i]")};
        for (long long row = 1; row < count; ++row) {{
            const {wide} next = {load.format("rows[i + row * stride]")};
            total = {combine};
        }}
        {_scale(dtype, scaling, wide)}
        out = {store.format("value")};
    """


def _integer_mean(dtype: np.dtype[Any]) -> str:
    """Return the code for a mean, cut towards zero, whose sum may be out of range."""
    whole = "unsigned long long" if dtype.kind == "u" else "long long"
    return f"""
        const {whole} by = ({whole})divisor;
        {whole} mean = 0, rest = 0;
        for (long long row = 0; row < count; ++row) {{
            const {whole} next = ({whole})(rows[i + row * stride]);
            mean += next / by;
            rest += next % by;
        }}
        mean += rest / by;
        rest %= by;
        if (mean > 0 && rest < 0) --mean;
        if (mean < 0 && rest > 0) ++mean;
        out = T(mean);
    """


@lru_cache
def conversion(dtype: np.dtype[Any], target: np.dtype[Any], scaling: Scaling) -> str:
    """Return the code that scales the float ``source`` and rounds it to ``out``.

    It uses ``T`` (the type that ``out`` is stored in), ``factor`` and ``divisor`` as `body`.
    """
    wide, load, _ = _conversion(dtype, ReduceOp.SUM)
    target_wide, _, store = _conversion(target, ReduceOp.SUM)
    return f"""
        const {wide} total = {load.format("source")};
        {_scale(dtype, scaling, wide)}
        const {target_wide} converted = ({target_wide})value;
        out = {store.format("converted")};
    """


def _conversion(dtype: np.dtype[Any], op: ReduceOp) -> tuple[str, str, str]:
    """Return a type of numbers, and the code that turns an element into one, and back."""
    if dtype.name == "bfloat16":
        return "float", "from_bfloat16({})", "to_bfloat16({})"
    if dtype.name in _FLOATS:
        wide = _FLOATS[dtype.name]
        return wide, f"({wide})({{}})", "T({})"
    if dtype.kind == "b":
        return "int", "({}) != 0", "T({} != 0)"
    # Sums and products wrap, which only unsigned arithmetic of 32 bits and more does in C.
    wraps = op in (ReduceOp.SUM, ReduceOp.PRODUCT) or dtype.kind == "u"
    wide = "unsigned long long" if wraps else "long long"
    return wide, f"({wide})({{}})", "{}"


def _scale(dtype: np.dtype[Any], scaling: Scaling, wide: str) -> str:
    """Return the code that does the same as `Scaling.apply`."""
    if dtype.name in _FLOATS:
        if scaling.is_identity:
            return f"const {wide} value = total;"
        if scaling.factor == 1.0:
            return f"const {wide} value = total / ({wide})divisor;"
        return f"const {wide} value = total * ({wide})(factor / (double)divisor);"
    narrowed = "const T sum = T(total);" if dtype.kind != "b" else "const int sum = total;"
    if scaling.is_identity:
        return f"{narrowed} const T value = T(sum);"
    if scaling.factor == 1.0:
        whole = "unsigned long long" if dtype.kind == "u" else "long long"
        return f"{narrowed} const T value = T(({whole})sum / ({whole})divisor);"
    return f"{narrowed} const T value = T(trunc((double)sum * factor / (double)divisor));"
