# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: frequency tables made on the host, and fragments that rotate rows.

The angle of dimension pair i at position p is the float32 product ``(p * scale) * inv_freq[i]``,
as models compute it. Its sine and cosine are accurate to 3e-7 for positions up to four million.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm.script import tirx as T

from ..spec import KernelSpec, RopeSpec
from ..vectors import F32, vector_type

# --- tables, on the host ------------------------------------------------------------------------


@dataclass(frozen=True)
class RopeTable:
    """The frequencies and scale of a rotation.

    Parameters
    ----------
    inv_freq : float32 ``[rotary_dim / 2]``
        Inverse frequencies.
    attention_factor : float
        Factor on every sine and cosine.
    """

    inv_freq: np.ndarray
    attention_factor: float


def base_inverse_frequencies(rope: RopeSpec) -> np.ndarray:
    """Unscaled inverse frequencies, float64 ``[rotary_dim / 2]``."""
    exponent = np.arange(0, rope.rotary_dim, 2, dtype=np.float64) / rope.rotary_dim
    return rope.theta**-exponent


def inverse_frequencies(rope: RopeSpec, use_long: bool = False) -> RopeTable:
    """Make the table of a rotation, computed in float64, with the meaning of Hugging Face fields.

    Parameters
    ----------
    rope : RopeSpec
        Fields of its scaling that the type does not use are ignored, such as the ones that other
        TVM front ends add.
    use_long : bool
        longrope: take the factors for sequences beyond the original length.

    Raises
    ------
    ValueError
        For a type that is not known, or a field that it needs and does not have.
    """
    scaling = dict(rope.scaling or ())
    if rope.kind not in _SCALED:
        raise ValueError(f"rope_type must be one of {', '.join(_SCALED)}; got {rope.kind!r}")
    try:
        inverse, attention_factor = _SCALED[rope.kind](rope, scaling, use_long)
    except KeyError as missing:
        raise ValueError(f"rope scaling of type {rope.kind!r} needs {missing}") from None
    return RopeTable(inverse.astype(np.float32), float(attention_factor))


def _default(rope: RopeSpec, scaling: dict, use_long: bool):
    return base_inverse_frequencies(rope), 1.0


def _linear(rope: RopeSpec, scaling: dict, use_long: bool):
    return base_inverse_frequencies(rope) / scaling["factor"], 1.0


def _llama3(rope: RopeSpec, scaling: dict, use_long: bool):
    inverse = base_inverse_frequencies(rope)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    if high == low:
        keep = (rotations >= low).astype(np.float64)
    else:
        keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return inverse * (keep + (1 - keep) / scaling["factor"]), 1.0


def _yarn(rope: RopeSpec, scaling: dict, use_long: bool):
    inverse, dim = base_inverse_frequencies(rope), rope.rotary_dim
    original, factor = scaling["original_max_position_embeddings"], _length_factor(scaling)

    def dimension_of(rotations: float) -> float:
        """Return the dimension whose wave turns `rotations` times within the original length."""
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    interpolated = np.clip((np.arange(dim // 2) - low) / (high - low), 0.0, 1.0)
    inverse = inverse * (1 - interpolated) + inverse / factor * interpolated

    def magnitude(mscale: float = 1.0) -> float:
        return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = scaling.get("mscale"), scaling.get("mscale_all_dim")
        both = mscale and mscale_all
        attention_factor = magnitude(mscale) / magnitude(mscale_all) if both else magnitude()
    return inverse, attention_factor


def _longrope(rope: RopeSpec, scaling: dict, use_long: bool):
    factors = np.float32(scaling["long_factor" if use_long else "short_factor"])
    if factors.shape != (rope.rotary_dim // 2,):
        raise ValueError(
            f"longrope factors must be {rope.rotary_dim // 2} numbers (rotary_dim / 2), "
            f"got shape {factors.shape}"
        )
    original, factor = scaling["original_max_position_embeddings"], _length_factor(scaling)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        grown = math.log(factor) / math.log(original) if factor > 1 else 0.0
        attention_factor = math.sqrt(1 + grown)
    return base_inverse_frequencies(rope) / factors.astype(np.float64), attention_factor


def _proportional(rope: RopeSpec, scaling: dict, use_long: bool):
    inverse = base_inverse_frequencies(rope)
    inverse[int(scaling.get("partial_rotary_factor", 1.0) * rope.rotary_dim // 2) :] = 0.0
    return inverse / scaling.get("factor", 1.0), 1.0


def _length_factor(scaling: dict) -> float:
    """Return by how much the context grew: `factor`, or the ratio of the two lengths."""
    original = scaling["original_max_position_embeddings"]
    return scaling.get("factor") or scaling.get("max_position_embeddings", original) / original


_SCALED: dict[str, Callable] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def first_factor(rope: RopeSpec, last_position):
    """Return where the longrope factors of a sequence begin: long ones, or short ones behind."""
    limit = dict(rope.scaling)["original_max_position_embeddings"]
    return T.Select(last_position >= limit, 0, rope.rotary_dim // 2)


# --- fragments, in kernels ----------------------------------------------------------------------

# pi / 2 as the sum of two float32 numbers; with fused multiply-adds the first subtraction is exact.
_HALF_PI = (1.5707963705062866, -4.371139000186241e-08)
# Taylor coefficients, in powers of the square; 1e-8 at the ends of [-0.9, 0.9].
_SIN = (1.0, -1 / 6, 1 / 120, -1 / 5040, 1 / 362880)
_COS = (1.0, -1 / 2, 1 / 24, -1 / 720, 1 / 40320, -1 / 3628800)


@dataclass(frozen=True)
class SinCos:
    """Sine and cosine, as vectors of float32."""

    sin: object
    cos: object


def _polynomial(coefficients, x, lanes: int, arithmetic):
    value = arithmetic.constant(coefficients[-1], lanes)
    for c in reversed(coefficients[:-1]):
        value = arithmetic.fused_multiply_add(value, x, arithmetic.constant(c, lanes), lanes)
    return arithmetic.temp(value, lanes)


def sin_cos(angle, lanes: int, arithmetic) -> SinCos:
    """Sine and cosine of float32 angles; error below 3e-7 up to 4e6.

    `arithmetic` is `cpu.simd`, or `gpu.isa` for one lane.
    """
    int_type, float_type = (vector_type(t, lanes) for t in ("int32", F32))

    def integer(value: int):
        return arithmetic.broadcast(T.int32(value), lanes)

    def with_sign_of_bit_1(value, bits):
        sign = T.shift_left(T.bitwise_and(bits, integer(2)), integer(30))
        return T.reinterpret(float_type, T.bitwise_xor(T.reinterpret(int_type, value), sign))

    angle = arithmetic.temp(angle, lanes)
    turns = angle * arithmetic.constant(2 / math.pi, lanes)
    turns = arithmetic.temp(arithmetic.rint(turns, lanes), lanes)
    rest = angle
    for part in _HALF_PI:
        rest = arithmetic.fused_multiply_add(turns, arithmetic.constant(-part, lanes), rest, lanes)
    rest = arithmetic.temp(rest, lanes)
    square = arithmetic.temp(rest * rest, lanes)
    sin = arithmetic.temp(_polynomial(_SIN, square, lanes, arithmetic) * rest, lanes)
    cos = _polynomial(_COS, square, lanes, arithmetic)
    quadrant = arithmetic.temp(T.cast(turns, int_type), lanes, "int32")
    odd = T.bitwise_and(quadrant, integer(1)) != integer(0)
    return SinCos(
        sin=arithmetic.temp(with_sign_of_bit_1(T.Select(odd, cos, sin), quadrant), lanes),
        cos=arithmetic.temp(
            with_sign_of_bit_1(T.Select(odd, sin, cos), quadrant + integer(1)), lanes
        ),
    )


# --- whether a call may ask for the rotation inside attention: ``rotary_mode`` 1 ------------------


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
