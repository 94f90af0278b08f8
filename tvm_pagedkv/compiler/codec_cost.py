# SPDX-License-Identifier: Apache-2.0
"""Warnings of the logger ``tvm_pagedkv.compiler`` where a codec is slow on a target."""

from __future__ import annotations

import functools
import logging

from tir_kernels.codec import Codec, CodecPair
from tir_kernels.spec import KernelSpec, VectorTarget

_log = logging.getLogger("tvm_pagedkv.compiler")


def warn_if_slow(spec: KernelSpec) -> None:
    """Log a warning, once per codec and target, if the target lacks what makes a codec fast."""
    if spec.codec is not None and isinstance(spec.target, VectorTarget):
        _warn(spec.codec, spec.target)


@functools.cache
def _warn(codec: Codec | CodecPair, target: VectorTarget) -> None:
    missing = _missing(codec, target)
    if missing:
        _log.warning(
            "kv_dtype %r on a CPU target without %s: attention converts every code to float32, so "
            "the cache takes less memory, but decode is not faster than with 16-bit pages where "
            "arithmetic is the limit; choose a target that has it, or kv_dtype None",
            codec.name,
            missing,
        )


def _missing(codec: Codec | CodecPair, target: VectorTarget) -> str:
    """Return the instructions that the target lacks, or an empty string."""
    codecs = codec.k, codec.v
    integers = [each.is_integer for each in codecs]
    has_dots = target.has_byte_dot or (
        target.has_word_dot and not any(each.has_high_bits for each in codecs)
    )
    if any(integers) and not has_dots:
        return "byte dot products (AVX512-VNNI, or dotprod of AArch64)"
    if not all(integers) and not target.has_f16_convert:
        return "conversion of float16 (F16C, AVX-512F or AArch64)"
    return ""
