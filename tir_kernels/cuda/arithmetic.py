# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of a thread: vectors have one lane."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from tvm.script import tirx as T

from ..gpu.registers import F32, I32, Registers
from .ptx import ptx


def _result(instruction: str, *operands):
    register = Registers(1, F32, "t")
    ptx(instruction, register[0], *operands)
    return register[0]


def fused_multiply_add(a, b, c, lanes: int = 1):
    """``a * b + c`` rounded once."""
    return _result("fma.rn.f32", a, b, c)


def rint(x, lanes: int = 1):
    """The nearest whole number, as a float; even ones at ties."""
    return _result("cvt.rni.f32.f32", x)


def exp2(x, lanes: int = 1):
    """``2 ** x``; relative error 2e-7, 0 where it would be subnormal."""
    return _result("ex2.approx.ftz.f32", x)


def log2(x):
    """Base-2 logarithm; absolute error 1e-7 between 0.5 and 2, else a relative one."""
    return _result("lg2.approx.ftz.f32", x)


def divide(a, b):
    """``a / b`` rounded to nearest, which `/` is not with fast arithmetic."""
    return _result("div.rn.f32", a, b)


def opaque(value):
    """An int32 value that the compiler takes for another one each time it gets here."""
    register = Registers(1, I32, "opaque")
    ptx("mov.b32", register[0], value)
    return register[0]


def lookup(values: Sequence[float], i, dtype: str = F32):
    """Element `i`, any expression, of a table of constants."""
    kind, suffix = ("double", "") if dtype == "float64" else ("float", "f")
    text = ", ".join(f"{float(v)!r}{suffix}" for v in values)
    name = f"pagedkv_table_{_digest(text)}"
    source = (
        f"__device__ __forceinline__ {kind} {name}(int i) {{\n"
        f"  static const {kind} values[] = {{{text}}};\n"
        "  return values[i];\n"
        "}\n"
    )
    return T.cuda.func_call(name, T.cast(i, "int32"), source_code=source, return_type=dtype)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
