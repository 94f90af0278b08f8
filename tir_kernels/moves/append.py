# SPDX-License-Identifier: Apache-2.0
"""A step's Q, K and V: split, rotated, and written to the pages.

`rope_append` does it in one pass. `split_rotary` and `transpose_append` are its two halves, for the
runtime inside apache-tvm.
"""

from collections.abc import Callable

from tvm.script import tirx as T

from .. import vectors
from ..backend import backend_of
from ..define import F32, I32, aligned, attributes
from ..layout import K_PLANE, V_PLANE, match_pages, row_bytes, view_pages
from ..script import prim_func
from ..semantics.rope import base_inverse_frequencies
from ..spec import ITEMSIZE, KernelSpec


def transpose_append(spec: KernelSpec):
    """Build the kernel that writes K and V rows to their slots.

    Arguments: pages ``[P, 2, Hk, page, D]``, k and v ``[T, Hk, D]``, position_map int32 ``[T]``
    (slots; a negative one: do not write).
    """
    rows = aligned(spec, spec.dtype)
    row = (spec.num_kv_heads, spec.qk_head_dim)

    @prim_func
    def transpose_append(
        var_pages: T.handle, var_k: T.handle, var_v: T.handle, var_position_map: T.handle
    ):
        T.func_attr(attributes(spec))
        num_pages, n = T.int32(), T.int64()
        pages = match_pages(var_pages, num_pages, spec)
        k = T.match_buffer(var_k, (n, *row), elem_offset=T.int64(), **rows)
        v = T.match_buffer(var_v, (n, *row), elem_offset=T.int64(), **rows)
        position_map = T.match_buffer(var_position_map, (n,), elem_offset=T.int64(), **I32)
        _append_rows(spec, n, pages, {K_PLANE: k, V_PLANE: v}, position_map)

    return transpose_append


def _append_rows(spec: KernelSpec, num_rows, pages, planes: dict, position_map) -> None:
    backend, pages = backend_of(spec), view_pages(pages, spec)

    def append_row(n, worker, known) -> None:
        slot = backend.read_index(position_map[n])
        with T.If(slot >= 0), T.Then():
            where = worker.slot(slot)
            for plane, source in planes.items():
                worker.copy_rows(
                    spec.num_kv_heads,
                    lambda h, source=source: (source, (n, h)),
                    lambda h, plane=plane: (pages, where.row(plane, h)),
                )

    bytes_each = 2 * spec.num_kv_heads * _copy_bytes(spec)
    backend.for_items(spec, num_rows, lambda known: bytes_each, append_row)


def split_rotary(spec: KernelSpec):
    """Build the kernel that splits fused rows and rotates Q and K.

    Arguments: qkv ``[T, Hq + 2 * Hk, D]``, position_map int32 ``[T]`` (positions), q
    ``[T, Hq, D]``, k and v ``[T, Hk, D]``, apply_rope int64. longrope: in place of the last one,
    float32 ``[rotary_dim]``, the long factors, then the short ones.
    """
    num_qo_heads, num_kv_heads, dim = spec.num_qo_heads, spec.num_kv_heads, spec.qk_head_dim
    num_heads, rows = num_qo_heads + 2 * num_kv_heads, aligned(spec, spec.dtype)
    if spec.rope.kind == "longrope":
        return _split_rotary_longrope(spec)

    @prim_func
    def split_rotary(
        var_qkv: T.handle,
        var_position_map: T.handle,
        var_q: T.handle,
        var_k: T.handle,
        var_v: T.handle,
        apply_rope: T.int64,
    ):
        T.func_attr(attributes(spec))
        n = T.int64()
        qkv = T.match_buffer(var_qkv, (n, num_heads, dim), elem_offset=T.int64(), **rows)
        position_map = T.match_buffer(var_position_map, (n,), elem_offset=T.int64(), **I32)
        q = T.match_buffer(var_q, (n, num_qo_heads, dim), elem_offset=T.int64(), **rows)
        k = T.match_buffer(var_k, (n, num_kv_heads, dim), elem_offset=T.int64(), **rows)
        v = T.match_buffer(var_v, (n, num_kv_heads, dim), elem_offset=T.int64(), **rows)
        _split_rows(_Step(spec, n, qkv, position_map, q, apply_rope=apply_rope > 0), k, v)

    return split_rotary


def _split_rotary_longrope(spec: KernelSpec):
    num_qo_heads, num_kv_heads, dim = spec.num_qo_heads, spec.num_kv_heads, spec.qk_head_dim
    num_heads, rows = num_qo_heads + 2 * num_kv_heads, aligned(spec, spec.dtype)

    @prim_func
    def split_rotary(
        var_qkv: T.handle,
        var_position_map: T.handle,
        var_q: T.handle,
        var_k: T.handle,
        var_v: T.handle,
        var_ext_factors: T.handle,
    ):
        T.func_attr(attributes(spec))
        n = T.int64()
        qkv = T.match_buffer(var_qkv, (n, num_heads, dim), elem_offset=T.int64(), **rows)
        position_map = T.match_buffer(var_position_map, (n,), elem_offset=T.int64(), **I32)
        q = T.match_buffer(var_q, (n, num_qo_heads, dim), elem_offset=T.int64(), **rows)
        k = T.match_buffer(var_k, (n, num_kv_heads, dim), elem_offset=T.int64(), **rows)
        v = T.match_buffer(var_v, (n, num_kv_heads, dim), elem_offset=T.int64(), **rows)
        ext_factors = T.match_buffer(
            var_ext_factors, (spec.rope.rotary_dim,), elem_offset=T.int64(), **F32
        )
        _split_rows(_Step(spec, n, qkv, position_map, q, factors=ext_factors), k, v)

    return split_rotary


def _split_rows(step: "_Step", k, v) -> None:
    backend = step.backend

    def split_row(n, worker, first_factor) -> None:
        rotation = step.rotation(n, worker, first_factor)
        rotation.write_q()
        rotation.write_k(lambda h: (k, (n, h)))
        rotation.write_v(lambda h: (v, (n, h)))

    def split_rows(once=tuple) -> None:
        backend.for_items(
            step.spec,
            step.num_rows,
            lambda known: step.row_bytes,
            split_row,
            computed=[step.qkv, step.q, k],
            once=once,
        )

    if step.factors is None:
        split_rows()
        return
    # Without a table of sequences the whole call is taken for one.
    with backend.maximum(step.positions, step.num_rows) as last_position:
        split_rows(lambda: step.first_factor(last_position()))


def rope_append(spec: KernelSpec):
    """Build the kernel that splits fused rows, rotates, and writes K and V to the pages.

    Arguments: qkv ``[T, Hq + 2 * Hk, D]``, q_indptr int32 ``[B + 1]``, q_rope_position int32
    ``[T]``, position_map int32 ``[T]`` (slots; a negative one: do not write K and V), q
    ``[T, Hq, D]``, pages ``[P, 2, Hk, page, D]``, apply_rope int64; longrope: also float32
    ``[rotary_dim]``, the long factors, then the short ones.
    """
    num_qo_heads, dim = spec.num_qo_heads, spec.qk_head_dim
    num_heads = num_qo_heads + 2 * spec.num_kv_heads
    rows = aligned(spec, spec.dtype)
    if spec.rope.kind == "longrope":
        return _rope_append_longrope(spec)

    @prim_func
    def rope_append(
        var_qkv: T.handle,
        var_q_indptr: T.handle,
        var_q_rope_position: T.handle,
        var_position_map: T.handle,
        var_q: T.handle,
        var_pages: T.handle,
        apply_rope: T.int64,
    ):
        T.func_attr(attributes(spec))
        num_pages, num_starts, n = T.int32(), T.int64(), T.int64()
        qkv = T.match_buffer(var_qkv, (n, num_heads, dim), elem_offset=T.int64(), **rows)
        q_indptr = T.match_buffer(var_q_indptr, (num_starts,), elem_offset=T.int64(), **I32)
        q_rope_position = T.match_buffer(var_q_rope_position, (n,), elem_offset=T.int64(), **I32)
        position_map = T.match_buffer(var_position_map, (n,), elem_offset=T.int64(), **I32)
        q = T.match_buffer(var_q, (n, num_qo_heads, dim), elem_offset=T.int64(), **rows)
        pages = match_pages(var_pages, num_pages, spec)
        step = T.meta_var(_Step(spec, n, qkv, q_rope_position, q, apply_rope=apply_rope > 0))
        _rotate_and_append(step, q_indptr, num_starts, position_map, pages)

    return rope_append


def _rope_append_longrope(spec: KernelSpec):
    num_qo_heads, dim = spec.num_qo_heads, spec.qk_head_dim
    num_heads = num_qo_heads + 2 * spec.num_kv_heads
    rows = aligned(spec, spec.dtype)

    @prim_func
    def rope_append(
        var_qkv: T.handle,
        var_q_indptr: T.handle,
        var_q_rope_position: T.handle,
        var_position_map: T.handle,
        var_q: T.handle,
        var_pages: T.handle,
        apply_rope: T.int64,
        var_ext_factors: T.handle,
    ):
        T.func_attr(attributes(spec))
        num_pages, num_starts, n = T.int32(), T.int64(), T.int64()
        qkv = T.match_buffer(var_qkv, (n, num_heads, dim), elem_offset=T.int64(), **rows)
        q_indptr = T.match_buffer(var_q_indptr, (num_starts,), elem_offset=T.int64(), **I32)
        q_rope_position = T.match_buffer(var_q_rope_position, (n,), elem_offset=T.int64(), **I32)
        position_map = T.match_buffer(var_position_map, (n,), elem_offset=T.int64(), **I32)
        q = T.match_buffer(var_q, (n, num_qo_heads, dim), elem_offset=T.int64(), **rows)
        pages = match_pages(var_pages, num_pages, spec)
        ext_factors = T.match_buffer(
            var_ext_factors, (spec.rope.rotary_dim,), elem_offset=T.int64(), **F32
        )
        step = T.meta_var(
            _Step(
                spec,
                n,
                qkv,
                q_rope_position,
                q,
                apply_rope=apply_rope > 0,
                factors=ext_factors,
            )
        )
        _rotate_and_append(step, q_indptr, num_starts, position_map, pages)

    return rope_append


def _rotate_and_append(step: "_Step", q_indptr, num_starts, position_map, pages) -> None:
    """Write Q of each row, and K and V to the row's slot, if it has one."""
    spec, backend = step.spec, step.backend
    pages = view_pages(pages, spec)

    def last_position(n):
        sequence = _sequence_of(backend, q_indptr, num_starts, n)
        end = backend.read_index(q_indptr[sequence + 1])
        return step.positions[T.cast(end - 1, "int64")]

    def append_row(n, worker, known) -> None:
        first_factor = None if step.factors is None else step.first_factor(last_position(n))
        rotation = step.rotation(n, worker, first_factor)
        rotation.write_q()
        slot = backend.read_index(position_map[n])
        with T.If(slot >= 0), T.Then():
            where = worker.slot(slot)
            rotation.write_k(lambda h: (pages, where.row(K_PLANE, h)))
            rotation.write_v(lambda h: (pages, where.row(V_PLANE, h)))

    backend.for_items(
        spec,
        step.num_rows,
        lambda known: step.row_bytes,
        append_row,
        computed=[step.qkv, step.q, pages],
    )


def _copy_bytes(spec: KernelSpec) -> int:
    """Bytes that the copy of one row to the pages reads and writes."""
    return spec.qk_head_dim * ITEMSIZE[spec.dtype] + row_bytes(spec)


class _Step:
    """The fused rows of a step, their positions, and whether and how they are rotated.

    Parameters
    ----------
    spec : KernelSpec
    num_rows : int64 expression
    qkv, positions, q : Buffers
        Fused rows, their RoPE positions, and where rows of Q go.
    apply_rope : bool expression, optional
        None: rows are rotated always.
    factors : Buffer, optional
        longrope: the long factors, then the short ones.
    """

    def __init__(
        self, spec: KernelSpec, num_rows, qkv, positions, q, *, apply_rope=None, factors=None
    ):
        self.spec, self.backend, self.num_rows = spec, backend_of(spec), num_rows
        self.qkv, self.positions, self.q = qkv, positions, q
        self.apply_rope, self.factors = apply_rope, factors
        self.row_bytes = int(qkv.shape[1]) * _copy_bytes(spec)

    def first_factor(self, last_position):
        """longrope: where the factors of a sequence that ends at `last_position` begin."""
        limit = dict(self.spec.rope.scaling)["original_max_position_embeddings"]
        half = self.spec.rope.rotary_dim // 2
        return self.backend.read_index(T.Select(last_position >= limit, 0, half))

    def rotation(self, n, worker, first_factor=None) -> "_Rotation":
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

    def __init__(self, step: "_Step", n, worker, cos_sin):
        self.step, self.n, self.worker, self.cos_sin = step, n, worker, cos_sin

    def write_q(self) -> None:
        step, n = self.step, self.n
        self._write_rotated(step.spec.num_qo_heads, 0, lambda h: (step.q, (n, h)))

    def write_k(self, sink: Callable) -> None:
        """``sink(h)`` gives the buffer and the indices of head h's row."""
        spec = self.step.spec
        self._write_rotated(spec.num_kv_heads, spec.num_qo_heads, sink)

    def write_v(self, sink: Callable) -> None:
        """Do what `write_k` does, without a rotation."""
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
