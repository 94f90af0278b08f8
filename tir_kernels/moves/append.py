# SPDX-License-Identifier: Apache-2.0
"""A step's Q, K and V: split, rotated, and written to the pages.

`rope_append` does it in one pass. `split_rotary` and `transpose_append` are its two halves, for the
runtime inside apache-tvm.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm.script import tirx as T

from .. import vectors
from ..backend import backend_of
from ..layout import K_PLANE, V_PLANE
from ..semantics.rope import base_inverse_frequencies
from ..spec import ITEMSIZE, KernelSpec


def transpose_append(spec: KernelSpec):
    """Build the kernel that writes K and V rows to their slots.

    Arguments: pages ``[P, 2, Hk, page, D]``, k and v ``[T, Hk, D]``, position_map int32 ``[T]``
    (slots; a negative one: do not write).
    """
    backend = backend_of(spec)
    row_bytes = 2 * spec.num_kv_heads * spec.qk_head_dim * _copy_bytes(spec)

    def body(pages_handle, k_handle, v_handle, map_handle) -> None:
        num_rows = T.int64()
        shape = (num_rows, spec.num_kv_heads, spec.qk_head_dim)
        pages = backend.match_pages(pages_handle, spec)
        planes = (
            (K_PLANE, backend.match_rows(k_handle, shape, spec.dtype)),
            (V_PLANE, backend.match_rows(v_handle, shape, spec.dtype)),
        )
        position_map = backend.match(map_handle, (num_rows,), "int32")

        def append_row(n, worker, known) -> None:
            slot = backend.read_index(position_map[n])
            with T.If(slot >= 0), T.Then():
                where = worker.slot(slot)
                for plane, source in planes:
                    worker.copy_rows(
                        spec.num_kv_heads,
                        lambda h, source=source: (source, (n, h)),
                        lambda h, plane=plane: (pages, where.row(plane, h)),
                    )

        backend.for_items(spec, num_rows, lambda known: row_bytes, append_row)

    names = ("pages", "k", "v", "position_map")
    return backend.define_kernel(dict.fromkeys(names, T.handle), body)


def split_rotary(spec: KernelSpec):
    """Build the kernel that splits fused rows and rotates Q and K.

    Arguments: qkv ``[T, Hq + 2 * Hk, D]``, position_map int32 ``[T]`` (positions), q
    ``[T, Hq, D]``, k and v ``[T, Hk, D]``, apply_rope int64. longrope: in place of the last one,
    float32 ``[rotary_dim]``, the long factors, then the short ones.
    """
    backend = backend_of(spec)
    has_factors = spec.rope.kind == "longrope"

    def body(qkv_handle, map_handle, q_handle, k_handle, v_handle, last) -> None:
        num_rows = T.int64()
        step = _Step(spec, num_rows, qkv_handle, map_handle, q_handle)
        kv_shape = (num_rows, spec.num_kv_heads, spec.qk_head_dim)
        k = backend.match_rows(k_handle, kv_shape, spec.dtype)
        v = backend.match_rows(v_handle, kv_shape, spec.dtype)
        if has_factors:
            step.take_factors(last)
        else:
            step.apply_rope = last > 0

        def split_row(n, worker, first_factor) -> None:
            rotation = step.rotation(n, worker, first_factor)
            rotation.write_q()
            rotation.write_k(lambda h: (k, (n, h)))
            rotation.write_v(lambda h: (v, (n, h)))

        def split_rows(once=tuple) -> None:
            backend.for_items(
                spec,
                num_rows,
                lambda known: step.row_bytes,
                split_row,
                computed=[step.qkv, step.q, k],
                once=once,
            )

        if not has_factors:
            split_rows()
            return
        # Without a table of sequences the whole call is taken for one.
        with backend.maximum(step.positions, num_rows) as last_position:
            split_rows(lambda: step.first_factor(last_position()))

    arguments = dict.fromkeys(("qkv", "position_map", "q", "k", "v"), T.handle)
    arguments |= {"ext_factors": T.handle} if has_factors else {"apply_rope": T.int64}
    return backend.define_kernel(arguments, body)


def rope_append(spec: KernelSpec):
    """Build the kernel that splits fused rows, rotates, and writes K and V to the pages.

    Arguments: qkv ``[T, Hq + 2 * Hk, D]``, q_indptr int32 ``[B + 1]``, q_rope_position int32
    ``[T]``, position_map int32 ``[T]`` (slots; a negative one: do not write K and V), q
    ``[T, Hq, D]``, pages ``[P, 2, Hk, page, D]``, apply_rope int64; longrope: also float32
    ``[rotary_dim]``, the long factors, then the short ones.
    """
    backend = backend_of(spec)
    handles = ("qkv", "q_indptr", "q_rope_position", "position_map", "q", "pages")

    def body(*given) -> None:
        qkv_handle, indptr_handle, positions_handle, map_handle, q_handle, pages_handle = given[:6]
        apply_rope, *factors = given[6:]
        num_rows, num_bounds = T.int64(), T.int64()
        q_indptr = backend.match(indptr_handle, (num_bounds,), "int32")
        step = _Step(spec, num_rows, qkv_handle, positions_handle, q_handle)
        position_map = backend.match(map_handle, (num_rows,), "int32")
        pages = backend.match_pages(pages_handle, spec)
        step.apply_rope = apply_rope > 0
        for handle in factors:
            step.take_factors(handle)

        def last_position(n):
            sequence = _sequence_of(backend, q_indptr, num_bounds, n)
            end = backend.read_index(q_indptr[sequence + 1])
            return step.positions[T.cast(end - 1, "int64")]

        def append_row(n, worker, known) -> None:
            first_factor = step.first_factor(last_position(n)) if factors else None
            rotation = step.rotation(n, worker, first_factor)
            rotation.write_q()
            slot = backend.read_index(position_map[n])
            with T.If(slot >= 0), T.Then():
                where = worker.slot(slot)
                rotation.write_k(lambda h: (pages, where.row(K_PLANE, h)))
                rotation.write_v(lambda h: (pages, where.row(V_PLANE, h)))

        backend.for_items(
            spec,
            num_rows,
            lambda known: step.row_bytes,
            append_row,
            computed=[step.qkv, step.q, pages],
        )

    arguments = dict.fromkeys(handles, T.handle) | {"apply_rope": T.int64}
    if spec.rope.kind == "longrope":
        arguments["ext_factors"] = T.handle
    return backend.define_kernel(arguments, body)


def _copy_bytes(spec: KernelSpec) -> int:
    return ITEMSIZE[spec.dtype] + ITEMSIZE[spec.kv_dtype]


class _Step:
    """The fused rows of a step, their positions, and whether and how they are rotated."""

    def __init__(self, spec: KernelSpec, num_rows, qkv_handle, positions_handle, q_handle):
        backend, num_heads = backend_of(spec), spec.num_qo_heads + 2 * spec.num_kv_heads
        self.spec, self.backend = spec, backend
        self.row_bytes = num_heads * spec.qk_head_dim * _copy_bytes(spec)
        qkv_shape = (num_rows, num_heads, spec.qk_head_dim)
        self.qkv = backend.match_rows(qkv_handle, qkv_shape, spec.dtype)
        self.positions = backend.match(positions_handle, (num_rows,), "int32")
        q_shape = (num_rows, spec.num_qo_heads, spec.qk_head_dim)
        self.q = backend.match_rows(q_handle, q_shape, spec.dtype)
        self.apply_rope = None  # None: always
        self.factors = None

    def take_factors(self, handle) -> None:
        """longrope: the factors."""
        self.factors = self.backend.match(handle, (self.spec.rope.rotary_dim,), vectors.F32)

    def first_factor(self, last_position):
        """longrope: where the factors of a sequence that ends at `last_position` begin."""
        limit = dict(self.spec.rope.scaling)["original_max_position_embeddings"]
        half = self.spec.rope.rotary_dim // 2
        return self.backend.read_index(T.Select(last_position >= limit, 0, half))

    def rotation(self, n, worker, first_factor=None) -> _Rotation:
        """Row `n`, its cosines and sines computed for all heads."""
        cos_sin = worker.cos_sin(self.spec.rope)

        def fill() -> None:
            frequencies = None
            if self.factors is not None:
                frequencies = self._scaled_frequencies(worker, first_factor)
            cos_sin.fill(self.positions[n], frequencies)

        if self.apply_rope is None:
            fill()
        else:
            with T.If(self.apply_rope), T.Then():
                fill()
        return _Rotation(self, n, worker, cos_sin)

    def _scaled_frequencies(self, worker, first) -> Callable:
        base = base_inverse_frequencies(self.spec.rope)

        def frequencies(start, lanes: int):
            wide, narrow = (vectors.vector_type(t, lanes) for t in ("float64", vectors.F32))
            factors = T.cast(vectors.load(self.factors, (first + start,), lanes), wide)
            unscaled = worker.constants(base, start, lanes, "float64")
            return T.cast(unscaled / factors, narrow)

        return frequencies


class _Rotation:
    """One fused row with its cosines and sines; each method writes one kind of head."""

    def __init__(self, step: _Step, n, worker, cos_sin):
        self.step, self.n, self.worker, self.cos_sin = step, n, worker, cos_sin

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
        first_head = spec.num_qo_heads + spec.num_kv_heads
        self.worker.copy_rows(spec.num_kv_heads, self._heads_from(first_head), sink)

    def _heads_from(self, first_head: int) -> Callable:
        return lambda h: (self.step.qkv, (self.n, first_head + h))

    def _write_rotated(self, num_heads: int, first_head: int, sink: Callable) -> None:
        rows = (num_heads, self._heads_from(first_head), sink)
        if self.step.apply_rope is None:
            self.cos_sin.rotate_rows(*rows)
            return
        with T.If(self.step.apply_rope):
            with T.Then():
                self.cos_sin.rotate_rows(*rows)
            with T.Else():
                self.worker.copy_rows(*rows)


def _sequence_of(backend, indptr, num_bounds, row):
    """The sequence b with ``indptr[b] <= row < indptr[b + 1]``, found by halving."""
    low = backend.variable(T.int32(0))
    high = backend.variable(T.cast(num_bounds, "int32") - 1)
    with T.While(high.get() - low.get() > 1):
        middle = backend.read_index((low.get() + high.get()) // 2)
        with T.If(T.cast(indptr[middle], "int64") <= row):
            with T.Then():
                low.set(middle)
            with T.Else():
                high.set(middle)
    return low.get()
