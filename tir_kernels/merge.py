# SPDX-License-Identifier: Apache-2.0
"""Two attention states over disjoint positions become one."""

from __future__ import annotations

from tvm.script import tirx as T

from .cpu import simd
from .family import family_of
from .spec import ITEMSIZE, KernelSpec

# log2(x) is the sum of these times t, t^3, t^5, ... with t = (x - 1) / (x + 1). On [1, 2] t is
# at most 1/3 and the error 2e-7.
_LOG2 = tuple(2.8853900817779268 / n for n in (1, 3, 5, 7, 9, 11))

_FAR = -125.0  # the smaller part weighs at least 2**_FAR of the other one, never 0


def merge(spec: KernelSpec):
    """Build the kernel that merges a second state into the first.

    Arguments: o ``[T, H, D]``, lse float32 ``[T, H]`` (base 2), o_other, lse_other. A part with an
    lse of -inf counts for nothing, whatever its o holds; two of them give ``o = 0`` and -inf. An
    lse that is NaN or +inf makes the row's o and lse NaN.
    """
    family = family_of(spec)
    num_heads, head_dim = spec.num_qo_heads, spec.v_head_dim
    row_bytes = num_heads * (3 * head_dim * ITEMSIZE[spec.dtype] + 12)

    def body(o_handle, lse_handle, o_other_handle, lse_other_handle) -> None:
        num_rows = T.int64()
        states = [
            (
                family.match_rows(o, (num_rows, num_heads, head_dim), spec.dtype),
                family.match(lse, (num_rows, num_heads), simd.F32),
            )
            for o, lse in ((o_handle, lse_handle), (o_other_handle, lse_other_handle))
        ]
        (o, lse), (o_other, lse_other) = states

        def merge_row(n, team, known) -> None:
            weights = team.table(2, num_heads)

            def weigh(h, lanes):
                parts = (simd.load(x, (n, h), lanes) for x in (lse, lse_other))
                merged = MergedLse(*parts, lanes, team.arithmetic)
                simd.store(lse, (n, h), lanes, merged.lse)
                for i, weight in enumerate(merged.weights):
                    simd.store(weights, (i, h), lanes, weight)

            team.for_elements(num_heads, weigh)
            team.meet()
            team.blend_rows(
                num_heads,
                [lambda h: (o, (n, h)), lambda h: (o_other, (n, h))],
                lambda h: [team.arithmetic.temp(weights[i, h]) for i in range(2)],
            )

        family.for_items(spec, num_rows, lambda known: row_bytes, merge_row, computed=[o, o_other])

    return family.define_kernel(dict.fromkeys(("o", "lse", "o_other", "lse_other"), T.handle), body)


class MergedLse:
    """The lse of two parts together, and the weight of each: vectors of float32.

    A weight is 0 for an lse of -inf only, so that NaN in the o of another part is not taken for
    that of a part which has seen nothing. An lse of NaN or +inf makes all of them NaN. `family` has
    the arithmetic: `cpu.simd`, or `cuda.scalars` for one lane.
    """

    def __init__(self, a, b, lanes: int, family=simd):
        a, b = family.temp(a, lanes), family.temp(b, lanes)
        zero, one = (family.constant(x, lanes) for x in (0.0, 1.0))
        lowest = family.constant(-3.0e38, lanes)
        top = family.temp(T.max(a, b), lanes)
        base = family.temp(T.max(top, lowest), lanes)  # finite, so that -inf - base is not NaN
        far, least = (family.constant(x, lanes) for x in (_FAR, 2.0**_FAR))

        def part_of(x):
            distance = family.temp(x - base, lanes)
            power = T.Select(distance < far, least, family.exp2(distance, lanes))
            return family.temp(T.Select(x < lowest, zero, power), lanes)

        parts = [part_of(x) for x in (a, b)]
        total = family.temp(parts[0] + parts[1], lanes)
        empty = total == zero  # it is at least 1 otherwise, or NaN
        inverse = family.temp(one / T.Select(empty, one, total), lanes)
        self.weights = [family.temp(part * inverse, lanes) for part in parts]
        self.lse = family.temp(T.Select(empty, top, base + _log2(total, lanes, family)), lanes)


def _log2(x, lanes: int, family):
    """Base-2 logarithm of values in [1, 2]."""
    one = family.constant(1.0, lanes)
    t = family.temp((x - one) / (x + one), lanes)
    square = family.temp(t * t, lanes)
    value = family.constant(_LOG2[-1], lanes)
    for c in reversed(_LOG2[:-1]):
        value = value * square + family.constant(c, lanes)
    return value * t
