# SPDX-License-Identifier: Apache-2.0
"""Kernels for CPUs with byte dot products, run on any CPU: plain arithmetic for the instructions.

LLVM legalises vectors of 16 lanes for the CPU at hand, so all but the instructions is what those
CPUs run.
"""

from __future__ import annotations

import re

import pytest

from tir_kernels import build_kernel
from tir_kernels.cpu.isa.bytes import dots, packing
from tir_kernels.cpu.rows.products import has_byte_products
from tir_kernels.spec import VectorTarget
from tvm_pagedkv.compiler import compile_kernel, resolve_target, vector_target

from ..support.cases.kernels.attention_cases import PagedBatch, altered_kernels
from ..support.cases.kernels.kernel_specs import BF16, DECODE_BATCHES, F16, F32, make_spec
from ..support.cases.kernels.quantized_cases import check_transpose_append
from ..support.harness.selections import with_slow

TARGET = VectorTarget(lanes=16, registers=32, has_f16_convert=True, has_vnni=True)
CASES = {
    "int8": ((4, 2), 64, (F32, "int8"), 8),
    "int4": ((5, 5), 96, (BF16, "int4"), 2),
    "int5": ((6, 2), 64, (F16, "int5"), 16),
    "int5-96": ((5, 5), 96, (F32, "int5"), 1),
    "int5-256": ((4, 2), 256, (BF16, "int5"), 16),
    "int5,int4": ((6, 2), 128, (F32, "int5,int4"), 16),
    "int8,int5": ((5, 1), 32, (F16, "int8,int5"), 4),
}
parametrize_cases = pytest.mark.parametrize(
    "case",
    with_slow(CASES.values(), *(CASES[name] for name in ("int5", "int5-96", "int5-256", "int4"))),
    ids=CASES,
)
BYTE_DOT = (
    """
define linkonce_odr <16 x i32> @pagedkv_byte_dot(<16 x i32> %sum, <16 x i32> %u, <16 x i32> %s) #0 {
  %u_bytes = bitcast <16 x i32> %u to <64 x i8>
  %s_bytes = bitcast <16 x i32> %s to <64 x i8>
  %x = zext <64 x i8> %u_bytes to <64 x i32>
  %y = sext <64 x i8> %s_bytes to <64 x i32>
  %p = mul <64 x i32> %x, %y
"""
    + "".join(
        f"  %p{n} = shufflevector <64 x i32> %p, <64 x i32> poison, <16 x i32> <"
        + ", ".join(f"i32 {4 * lane + n}" for lane in range(16))
        + ">\n"
        for n in range(4)
    )
    + """
  %a = add <16 x i32> %p0, %p1
  %b = add <16 x i32> %p2, %p3
  %c = add <16 x i32> %a, %b
  %r = add <16 x i32> %sum, %c
  ret <16 x i32> %r
}
attributes #0 = { alwaysinline nounwind readnone }
"""
)
PACK = (
    "define linkonce_odr <16 x i32> @pagedkv_pack("
    + ", ".join(f"<16 x i32> %{name}" for name in "abcd")
    + ") #0 {\n"
    + "".join(
        f"  %{to} = shufflevector <{lanes} x i32> %{a}, <{lanes} x i32> %{b}, <{2 * lanes} x i32> <"
        + ", ".join(f"i32 {lane}" for lane in range(2 * lanes))
        + ">\n"
        for to, a, b, lanes in (("ab", "a", "b", 16), ("cd", "c", "d", 16), ("all", "ab", "cd", 32))
    )
    + """
  %bytes = trunc <64 x i32> %all to <64 x i8>
  %r = bitcast <64 x i8> %bytes to <16 x i32>
  ret <16 x i32> %r
}
attributes #0 = { alwaysinline nounwind readnone }
"""
)


@pytest.fixture
def plain_instructions(monkeypatch):
    monkeypatch.setattr(dots, "VNNI_HELPERS", BYTE_DOT)
    monkeypatch.setattr(packing, "_LLVM_HELPERS", PACK)
    with altered_kernels():
        yield


@parametrize_cases
def test_decode(plain_instructions, case):
    spec = make_spec(*case, target=TARGET)
    assert has_byte_products(spec)
    batch = PagedBatch(spec, DECODE_BATCHES["mixed"], 0)
    batch.decode()
    batch.verify()


@parametrize_cases
def test_append(plain_instructions, case):
    check_transpose_append(make_spec(*case, target=TARGET), 40, 0)


def test_code_for_such_a_cpu():
    """Byte dot products, and a mask register that takes the fifth bits of 64 columns."""
    spec = make_spec((6, 2), 64, (F32, "int5,int4"), 16, target=vector_target("znver4"))
    assert has_byte_products(spec)
    module = compile_kernel(build_kernel("decode", spec), "decode", resolve_target("znver4"))
    assembly = module.inspect_source("s")
    assert "vpdpbusd" in assembly
    assert re.search(r"kmovq\s+\d*\(%r", assembly)


if __name__ == "__main__":
    import tvm.testing

    tvm.testing.main()
