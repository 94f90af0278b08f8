# SPDX-License-Identifier: Apache-2.0
"""Whether a call may ask for the rotation of Q and K inside attention: ``rotary_mode`` 1."""

from __future__ import annotations

from tvm.script import tirx as T

from ..spec import KernelSpec


def has_rope(spec: KernelSpec) -> bool:
    """Whether the spec's rotation fits its heads; the kernel refuses rotary_mode 1 where not."""
    return 0 < spec.rope.rotary_dim <= spec.qk_head_dim


def require_own_rotation(spec: KernelSpec, a) -> None:
    """Refuse a call with rotary_mode 1 and another rotation than that of the spec."""
    if has_rope(spec):
        same = T.And(
            a.rope_theta == T.float32(spec.rope.theta), a.rope_scale == T.float32(spec.rope.scale)
        )
        message = "rope_theta or rope_scale differ from those that the kernel was built for"
    else:
        same, message = T.bool(False), "the kernel was built without a rotation"
    with T.Assert(T.Or(a.rotary_mode != 1, same), message, "ValueError"):
        T.evaluate(0)


def refuse_inline(spec: KernelSpec, a) -> None:
    """Refuse a call with rotary_mode 1 where pages keep K multiplied with Hadamard matrices."""
    if a.rotary_mode is not None:
        message = (
            f"kv_dtype {spec.kv_dtype!r} keeps K multiplied with a Hadamard matrix, which cannot "
            "be rotated any more; append rotated K, or choose 'int8' or 'float8_e4m3fn'"
        )
        with T.Assert(a.rotary_mode != 1, message, "ValueError"):
            T.evaluate(0)


def refuse_longrope(spec: KernelSpec, a) -> None:
    """Refuse a call with rotary_mode 1 where a sequence's length decides the rotation."""
    if spec.rope.kind == "longrope":
        message = "with longrope, rows of several sequences may need K rotated differently"
        with T.Assert(a.rotary_mode != 1, message, "ValueError"):
            T.evaluate(0)
