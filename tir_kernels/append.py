# SPDX-License-Identifier: Apache-2.0
"""A step's Q, K and V: split, rotated, and written to the pages.

`rope_append` does it in one pass. `split_rotary` and `transpose_append` are its two halves, for the
runtime inside apache-tvm.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from .cpu import moves, simd
from .cpu.row_numbers import RowNumbers
from .layout import K_PLANE, V_PLANE
from .rope import CosSin, base_inverse_frequencies
from .spec import ITEMSIZE, KernelSpec


def transpose_append(spec: KernelSpec):
    """Build the kernel that writes K and V rows to their slots.

    Arguments: pages ``[P, 2, Hk, page, D]``, k and v ``[T, Hk, D]``, position_map int32 ``[T]``
    (slots; a negative one: do not write).
    """
    row_bytes = 2 * spec.num_kv_heads * spec.qk_head_dim * _copy_bytes(spec)

    def body(pages_handle, k_handle, v_handle, map_handle) -> None:
        num_rows = T.int64()
        shape = (num_rows, spec.num_kv_heads, spec.qk_head_dim)
        pages = moves.match_pages(pages_handle, spec)
        planes = (
            (K_PLANE, moves.match(k_handle, shape, spec.dtype)),
            (V_PLANE, moves.match(v_handle, shape, spec.dtype)),
        )
        position_map = moves.match(map_handle, (num_rows,), "int32")

        def append_row(n) -> None:
            following = position_map[T.min(n + 1, num_rows - 1)]
            moves.Slot(T.max(following, 0), spec).expect_rows(pages)
            slot = simd.index_temp(position_map[n])
            with T.If(slot >= 0), T.Then():
                where = moves.Slot(slot, spec)
                for plane, source in planes:
                    with T.serial(spec.num_kv_heads) as h:
                        moves.copy_row(
                            source, (n, h), pages, where.row(plane, h), spec.target.lanes
                        )

        moves.for_each(num_rows, row_bytes, append_row)

    @T.prim_func(s_tir=True, private=True)
    def kernel(pages: T.handle, k: T.handle, v: T.handle, position_map: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
        body(pages, k, v, position_map)

    return kernel


def split_rotary(spec: KernelSpec):
    """Build the kernel that splits fused rows and rotates Q and K.

    Arguments: qkv ``[T, Hq + 2 * Hk, D]``, position_map int32 ``[T]`` (positions), q
    ``[T, Hq, D]``, k and v ``[T, Hk, D]``, apply_rope int64. longrope: in place of the last one,
    float32 ``[rotary_dim]``, the long factors, then the short ones.
    """

    def body(qkv_handle, map_handle, q_handle, k_handle, v_handle, last) -> None:
        num_rows = T.int64()
        step = _Step(spec, num_rows, qkv_handle, map_handle, q_handle)
        kv_shape = (num_rows, spec.num_kv_heads, spec.qk_head_dim)
        k = moves.match(k_handle, kv_shape, spec.dtype)
        v = moves.match(v_handle, kv_shape, spec.dtype)
        if spec.rope.kind == "longrope":
            # Without a table of sequences the whole call is taken for one.
            first = step.first_factor(_maximum(step.positions, num_rows))
            step.take_factors(last, lambda n: first)
        else:
            step.apply_rope = last > 0

        def split_row(n) -> None:
            rotation = step.rotation(n)
            rotation.write_q()
            rotation.write_k(lambda h: (k, (n, h)))
            rotation.write_v(lambda h: (v, (n, h)))

        step.numbers = RowNumbers(spec.target, [step.qkv, step.q, k])
        with step.numbers.scope():
            moves.for_each(num_rows, step.row_bytes, split_row)

    if spec.rope.kind == "longrope":

        @T.prim_func(s_tir=True, private=True)
        def kernel(
            qkv: T.handle,
            position_map: T.handle,
            q: T.handle,
            k: T.handle,
            v: T.handle,
            ext_factors: T.handle,
        ):
            T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
            body(qkv, position_map, q, k, v, ext_factors)
    else:

        @T.prim_func(s_tir=True, private=True)
        def kernel(
            qkv: T.handle,
            position_map: T.handle,
            q: T.handle,
            k: T.handle,
            v: T.handle,
            apply_rope: T.int64,
        ):
            T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
            body(qkv, position_map, q, k, v, apply_rope)

    return kernel


def rope_append(spec: KernelSpec):
    """Build the kernel that splits fused rows, rotates, and writes K and V to the pages.

    Arguments: qkv ``[T, Hq + 2 * Hk, D]``, q_indptr int32 ``[B + 1]``, q_rope_position int32
    ``[T]``, position_map int32 ``[T]`` (slots; a negative one: do not write K and V), q
    ``[T, Hq, D]``, pages ``[P, 2, Hk, page, D]``, apply_rope int64; longrope: also float32
    ``[rotary_dim]``, the long factors, then the short ones.
    """

    def body(handles, apply_rope, factors_handle=None) -> None:
        qkv_handle, indptr_handle, positions_handle, map_handle, q_handle, pages_handle = handles
        num_rows, num_bounds = T.int64(), T.int64()
        q_indptr = moves.match(indptr_handle, (num_bounds,), "int32")
        step = _Step(spec, num_rows, qkv_handle, positions_handle, q_handle)
        position_map = moves.match(map_handle, (num_rows,), "int32")
        pages = moves.match_pages(pages_handle, spec)
        step.apply_rope = apply_rope > 0
        if factors_handle is not None:

            def last_position(n):
                end = simd.index_temp(q_indptr[_sequence_of(q_indptr, num_bounds, n) + 1])
                return step.positions[T.cast(end - 1, "int64")]

            step.take_factors(factors_handle, lambda n: step.first_factor(last_position(n)))

        def append_row(n) -> None:
            following = position_map[T.min(n + 1, num_rows - 1)]
            moves.Slot(T.max(following, 0), spec).expect_rows(pages)
            rotation = step.rotation(n)
            rotation.write_q()
            slot = simd.index_temp(position_map[n])
            with T.If(slot >= 0), T.Then():
                where = moves.Slot(slot, spec)
                rotation.write_k(lambda h: (pages, where.row(K_PLANE, h)))
                rotation.write_v(lambda h: (pages, where.row(V_PLANE, h)))

        step.numbers = RowNumbers(spec.target, [step.qkv, step.q, pages])
        with step.numbers.scope():
            moves.for_each(num_rows, step.row_bytes, append_row)

    if spec.rope.kind == "longrope":

        @T.prim_func(s_tir=True, private=True)
        def kernel(
            qkv: T.handle,
            q_indptr: T.handle,
            q_rope_position: T.handle,
            position_map: T.handle,
            q: T.handle,
            pages: T.handle,
            apply_rope: T.int64,
            ext_factors: T.handle,
        ):
            T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
            body((qkv, q_indptr, q_rope_position, position_map, q, pages), apply_rope, ext_factors)
    else:

        @T.prim_func(s_tir=True, private=True)
        def kernel(
            qkv: T.handle,
            q_indptr: T.handle,
            q_rope_position: T.handle,
            position_map: T.handle,
            q: T.handle,
            pages: T.handle,
            apply_rope: T.int64,
        ):
            T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True})
            body((qkv, q_indptr, q_rope_position, position_map, q, pages), apply_rope)

    return kernel


def _copy_bytes(spec: KernelSpec) -> int:
    return ITEMSIZE[spec.dtype] + ITEMSIZE[spec.kv_dtype]


class _Step:
    """The fused rows of a step, their positions, and whether and how they are rotated."""

    def __init__(self, spec: KernelSpec, num_rows, qkv_handle, positions_handle, q_handle):
        num_heads = spec.num_qo_heads + 2 * spec.num_kv_heads
        self.spec = spec
        self.row_bytes = num_heads * spec.qk_head_dim * _copy_bytes(spec)
        self.qkv = moves.match(qkv_handle, (num_rows, num_heads, spec.qk_head_dim), spec.dtype)
        self.positions = moves.match(positions_handle, (num_rows,), "int32")
        q_shape = (num_rows, spec.num_qo_heads, spec.qk_head_dim)
        self.q = moves.match(q_handle, q_shape, spec.dtype)
        self.apply_rope = None  # None: always
        self.factors, self.first_factor_of = None, None

    def take_factors(self, handle, first_factor_of: Callable) -> None:
        """longrope: the factors; those of row n begin at ``first_factor_of(n)``."""
        self.factors = moves.match(handle, (self.spec.rope.rotary_dim,), simd.F32)
        self.first_factor_of = first_factor_of

    def first_factor(self, last_position):
        """longrope: where the factors of a sequence that ends at `last_position` begin."""
        limit = dict(self.spec.rope.scaling)["original_max_position_embeddings"]
        half = self.spec.rope.rotary_dim // 2
        return simd.index_temp(T.Select(last_position >= limit, 0, half))

    def rotation(self, n) -> _Rotation:
        """Row `n`, its cosines and sines computed for all heads."""
        cos_sin = CosSin(self.spec.rope, self.spec.target.lanes)

        def fill() -> None:
            inv_freq = None if self.factors is None else self._scaled_frequencies(n)
            cos_sin.fill(self.positions[n], inv_freq)
            cos_sin.reorder(self.numbers)

        if self.apply_rope is None:
            fill()
        else:
            with T.If(self.apply_rope), T.Then():
                fill()
        return _Rotation(self, n, cos_sin)

    def _scaled_frequencies(self, n) -> Callable:
        base = base_inverse_frequencies(self.spec.rope)
        first = self.first_factor_of(n)

        def frequencies(start: int, lanes: int):
            wide, narrow = (simd.vector_type(t, lanes) for t in ("float64", simd.F32))
            factors = T.cast(simd.load(self.factors, (first + start,), lanes), wide)
            unscaled = simd.literal(base[start : start + lanes], "float64")
            return T.cast(unscaled / factors, narrow)

        return frequencies


class _Rotation:
    """One fused row with its cosines and sines; each method writes one kind of head."""

    def __init__(self, step: _Step, n, cos_sin: CosSin):
        self.step, self.n, self.cos_sin = step, n, cos_sin

    def write_q(self) -> None:
        step, n = self.step, self.n
        self._write_rotated(step.spec.num_qo_heads, 0, lambda h: (step.q, (n, h)))

    def write_k(self, sink: Callable) -> None:
        """``sink(h)`` gives the buffer and the indices of head h's row."""
        spec = self.step.spec
        self._write_rotated(spec.num_kv_heads, spec.num_qo_heads, sink)

    def write_v(self, sink: Callable) -> None:
        """As `write_k`, without a rotation."""
        spec = self.step.spec
        self._copy(spec.num_kv_heads, spec.num_qo_heads + spec.num_kv_heads, sink)

    def _write_rotated(self, num_heads: int, first_head: int, sink: Callable) -> None:
        if self.step.apply_rope is None:
            self._rotate(num_heads, first_head, sink)
            return
        with T.If(self.step.apply_rope):
            with T.Then():
                self._rotate(num_heads, first_head, sink)
            with T.Else():
                self._copy(num_heads, first_head, sink)

    def _copy(self, num_heads: int, first_head: int, sink: Callable, begin: int = 0) -> None:
        with T.serial(num_heads) as h:
            buffer, row = sink(h)
            source_row = (self.n, first_head + h)
            lanes = self.step.spec.target.lanes
            moves.copy_row(self.step.qkv, source_row, buffer, row, lanes, begin)

    def _rotate(self, num_heads: int, first_head: int, sink: Callable) -> None:
        spec, qkv = self.step.spec, self.step.qkv
        with T.serial(num_heads) as h:
            buffer, row = sink(h)
            source_row = (self.n, first_head + h)
            self.cos_sin.rotate_chunks(self.step.numbers, (qkv, source_row), (buffer, row))
            moves.copy_row(qkv, source_row, buffer, row, spec.target.lanes, spec.rope.rotary_dim)


def _maximum(values, count):
    """Largest of `count` int32 values, at least -1."""
    largest = simd.Register(1, "int32", init=T.int32(-1))
    with T.serial(count) as i:
        largest.set(T.max(largest.get(), values[i]))
    return largest.get()


def _sequence_of(indptr, num_bounds, row):
    """The sequence b with ``indptr[b] <= row < indptr[b + 1]``, found by halving."""
    low = simd.Register(1, "int32", init=T.int32(0))
    high = simd.Register(1, "int32", init=T.cast(num_bounds, "int32") - 1)
    with T.While(high.get() - low.get() > 1):
        middle = simd.index_temp((low.get() + high.get()) // 2)
        with T.If(T.cast(indptr[middle], "int64") <= row):
            with T.Then():
                low.set(middle)
            with T.Else():
                high.set(middle)
    return low.get()
