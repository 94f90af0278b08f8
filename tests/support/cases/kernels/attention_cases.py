# SPDX-License-Identifier: Apache-2.0
"""Batches for the attention kernels: ragged, in shuffled pages, with NaN wherever nothing lies.

Every array starts at an odd element of a larger allocation that is filled with garbage.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence

import ml_dtypes  # noqa: F401  (registers bfloat16 with NumPy)
import numpy as np
import pytest
import tvm
from tvm.target import Target

from tir_kernels import build_kernel
from tir_kernels.spec import CudaTarget, KernelSpec
from tvm_pagedkv.compiler.build import load_kernels
from tvm_pagedkv.compiler.cuda.source import cuda_source
from tvm_pagedkv.compiler.lowering import compile_kernel

from .... import reference
from ....reference import quantized
from ...emulators.cuda_emulator import emulated
from ...harness import fast_compilation
from . import two_widths
from .quantized_pages import quantized_pool

PAST_THE_END = 1 << 20  # what the int32 arrays hold outside of their views
SPARE_PAGES = 3
K_ROPE_STEP = 7  # sequence b starts at position 7 * b, as after a window has slid


def compiled(name: str, spec: KernelSpec, cpu: str = "native"):
    """Compile the kernel `name`, or load it from the disk cache that all workers share.

    Kernels for GPUs run on the emulator, or on the GPU within `gpu.kernels_on_gpu`.
    """
    if isinstance(spec.target, CudaTarget):
        return emulated(cuda_text(name, spec)).get_function(name)
    return _compiled_for_cpu(name, spec, str(fast_compilation.resolve_target(cpu)))


@functools.lru_cache(maxsize=256)
def _compiled_for_cpu(name: str, spec: KernelSpec, target: str):
    builders = {name: functools.partial(build_kernel, name, spec)}
    return load_kernels(builders, (name, repr(spec)), Target(target))[name]


@contextlib.contextmanager
def altered_kernels():
    """Compile kernels in memory within, and forget them at the end.

    For tests that change what builds a kernel: `compiled` and the disk cache know kernels by their
    specs. It gives a function that forgets what was built so far.
    """

    def compile_all(builders, key, target) -> dict:
        return {n: compile_kernel(build(), n, target)[n] for n, build in builders.items()}

    def forget() -> None:
        _compiled_for_cpu.cache_clear()
        cuda_text.cache_clear()

    forget()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{__name__}.load_kernels", compile_all)
        yield forget
    forget()


@functools.lru_cache(maxsize=256)
def cuda_text(name: str, spec: KernelSpec) -> str:
    """The CUDA C++ of the kernel `name`."""
    return cuda_source({name: build_kernel(name, spec)})


def tensor(array: np.ndarray, shift: int = 3):
    """`array` at element `shift` of a larger tensor; quantized pages start at four bytes."""
    array = np.asarray(array)
    shift += array.dtype == np.uint8 and -shift % 4
    garbage = {"i": PAST_THE_END, "u": 0xA5}.get(array.dtype.kind, np.nan)
    whole = np.full(array.size + 2 * shift, garbage, array.dtype)
    whole[shift : shift + array.size] = array.reshape(-1)
    whole = tvm.runtime.tensor(whole)
    return whole._create_view(array.shape, str(array.dtype), shift * array.dtype.itemsize)


def tensors_for(spec: KernelSpec, place: Callable = tensor) -> Callable:
    """`place`, as the spec's target asks for: what is not int32 starts at 16 bytes for GPUs."""
    if not isinstance(spec.target, CudaTarget):
        return place

    def place_aligned(array: np.ndarray, *shift: int):
        array = np.asarray(array)
        return place(array, *([16 // array.itemsize] if array.dtype != np.int32 else shift))

    return place_aligned


def random_reach(rng: np.random.Generator, num_rows: Sequence[int]) -> np.ndarray:
    """How far rows see behind themselves, where each sequence has spans and rows between them."""
    reach, starts = np.zeros(sum(num_rows), np.int32), indptr(num_rows)
    for row, end in zip(starts, starts[1:], strict=False):
        while row < end:
            span = min(int(rng.choice([1, 2, 7, 40, 90])), end - row)
            reach[row : row + span] = np.arange(span)[::-1]
            row += span + int(rng.integers(3))
    return reach


def indptr(lengths) -> np.ndarray:
    """``[B + 1]`` starts."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def normal(rng, shape, dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32).astype(dtype)


def sink_logits(num_heads: int) -> np.ndarray:
    """Learned sinks that weigh something, none for some heads, and for others nothing else."""
    sinks = np.linspace(-1.0, 4.0, num_heads, dtype=np.float32)
    sinks[1::5], sinks[3::7] = -np.inf, 60.0
    return sinks


def page_dtype(spec: KernelSpec) -> str:
    """Type of the pages of the reference."""
    return spec.kv_dtype if spec.codec is None else "float32"


def random_pages(rng, shape, spec: KernelSpec) -> np.ndarray:
    """Pages of random rows; those that a quantized cache gives back, as float32, with a codec."""
    if spec.codec is None:
        return normal(rng, shape, spec.kv_dtype)
    return quantized.keep_pages(spec.codec, normal(rng, shape, "float32"), spec.v_head_dim)


def pool_of(spec: KernelSpec, pages: np.ndarray) -> np.ndarray:
    """Return the pages for a kernel; with a codec, rows of NaN are slots full of garbage."""
    if spec.has_two_widths:
        return two_widths.flat(spec, pages)
    return pages if spec.codec is None else quantized_pool(spec, pages)


class AttentionCase:
    """Outputs of a kernel, and what they must be by `expected`, which each kind of case has."""

    is_inline = False  # whether the kernel has rotated Q and K
    has_single_rows = True  # whether some rows may be attended to as in decode

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The types whose rounding shows in the outputs."""
        return (self.spec.dtype,) if self.spec.codec else (self.spec.dtype, self.spec.kv_dtype)

    def verify(self, *args, **how) -> None:
        """Compare `o` and `lse` with the reference; the arguments are those of `expected`."""
        self.compare(self.expected(*args, **how), *self.dtypes)

    def compare(self, expected, *dtypes: str) -> None:
        """Compare what the kernel wrote with the expected pair."""
        # With bfloat16 rows, K is rounded to pairs after its codes were multiplied with scales.
        is_rounded = self.spec.codec is not None and self.spec.dtype == "bfloat16"
        how = {"rounds_qk": self.is_inline or is_rounded}
        if self.spec.sink_logits:
            expected = reference.apply_sinks(*expected, sink_logits(self.spec.num_qo_heads))
        multiplies_codes = self.spec.codec and "float8" not in self.spec.kv_dtype
        has_dots = self.has_single_rows and any(
            getattr(self.spec.target, name, False) for name in ("has_byte_dot", "has_word_dot")
        )
        if multiplies_codes and has_dots:
            how["times"] = 8.0  # integers of 16 bits multiply codes: 2.3e-4 of the row was measured
        reference.assert_state_close(self.state(), expected, *dtypes, **how)

    def last_arguments(self, window: int | None = None) -> list:
        """The window and the sinks, for kernels that take them."""
        sinks = [self.tensor(sink_logits(self.spec.num_qo_heads))] if self.spec.sink_logits else []
        return ([] if window is None else [window]) + sinks

    def state(self):
        """Return the `(o, lse)` that the kernel wrote."""
        return self.o.numpy(), self.lse.numpy()


class Batch(AttentionCase):
    """The part that batches of paged and of ragged kernels share.

    Parameters
    ----------
    spec : KernelSpec
    lengths : (rows of the step, positions of K and V) per sequence
    seed : int
    """

    def __init__(self, spec: KernelSpec, lengths, seed: int):
        self.spec, self.rng = spec, np.random.default_rng(seed)
        self.tensor = tensors_for(spec)
        self.num_rows, self.kv_lens = (list(x) for x in zip(*lengths, strict=True))
        self.query_indptr = indptr(self.num_rows)
        shape = (sum(self.num_rows), spec.num_qo_heads)
        self.q = normal(self.rng, (*shape, spec.qk_head_dim), spec.dtype)
        self.k_offsets = (K_ROPE_STEP * np.arange(len(lengths))).astype(np.int32)
        self.q_positions = np.concatenate(
            [
                o + np.arange(kv - n, kv)
                for o, n, kv in zip(self.k_offsets, self.num_rows, self.kv_lens, strict=True)
            ]
        ).astype(np.int32)
        self.sm_scale = spec.qk_head_dim**-0.5
        self.o = self.tensor(np.full((*shape, spec.v_head_dim), np.nan, spec.dtype))
        self.lse = self.tensor(np.full(shape, np.nan, np.float32))

    def scalars(self, *, causal: bool | None, inline: bool) -> list:
        """The trailing arguments of a kernel."""
        self.is_inline = inline
        rope = self.spec.rope
        flags = [int(inline), rope.scale, rope.theta, self.sm_scale]
        return flags if causal is None else [int(causal), *flags]

    def reference_rope(self, inline: bool):
        rope = self.spec.rope
        table = reference.Rope(rope.theta, rope.scale, rope.rotary_dim, dict(rope.scaling or ()))
        return (table, self.q_positions, self.k_offsets) if inline else None

    def reference_alibi(self):
        slopes = self.spec.alibi_slopes
        return slopes and (slopes, self.q_positions, self.k_offsets)


class PagedBatch(Batch):
    """A batch whose K and V lie in shuffled pages."""

    def __init__(self, spec: KernelSpec, lengths, seed: int):
        super().__init__(spec, lengths, seed)
        page = spec.page_size
        num_pages = [-(-kv // page) for kv in self.kv_lens]
        pool = sum(num_pages) + SPARE_PAGES
        self.page_indptr = indptr(num_pages)
        self.page_ids = self.rng.permutation(pool)[: sum(num_pages)].astype(np.int32)
        self.last_page_len = np.array(
            [kv - max(n - 1, 0) * page for kv, n in zip(self.kv_lens, num_pages, strict=True)],
            np.int32,
        )
        shape = two_widths.padded_shape(spec, pool)
        self.pages = random_pages(self.rng, shape, spec)
        used = np.zeros((pool, page), bool)
        for b in range(len(lengths)):
            page_ids = self.page_ids[self.page_indptr[b] : self.page_indptr[b + 1]]
            slots = reference.sequence_slots(page_ids, self.last_page_len[b], page)
            used[slots // page, slots % page] = True
        self.pages[~np.broadcast_to(used[:, None, None, :, None], shape)] = np.nan

    def _table(self) -> list:
        arrays = (self.page_indptr, self.page_ids, self.last_page_len, self.k_offsets)
        return [self.tensor(x) for x in (*arrays, self.q_positions)]

    def decode(self, cpu: str = "native", inline: bool = False, window=None) -> None:
        """Run `decode`, or with a window `decode_sliding`; every sequence has one row."""
        kernel = compiled("decode" if window is None else "decode_sliding", self.spec, cpu)
        outputs = [self.o, self.lse, *self.scalars(causal=None, inline=inline)]
        outputs += self.last_arguments(window)
        pages = self.tensor(pool_of(self.spec, self.pages))
        kernel(self.tensor(self.q), pages, *self._table(), *outputs)

    def prefill(
        self,
        causal: bool = True,
        cpu: str = "native",
        inline: bool = False,
        window=None,
        reach=None,
    ) -> None:
        """Run `prefill`, or with a window `prefill_sliding`; with `reach` those for spans."""
        name = "prefill" if reach is None else "prefill_spans"
        kernel = compiled(name if window is None else f"{name}_sliding", self.spec, cpu)
        outputs = [self.o, self.lse, *self.scalars(causal=causal, inline=inline)]
        outputs += [] if reach is None else [self.tensor(reach)]
        outputs += self.last_arguments(window)
        q = (self.tensor(self.q), self.tensor(self.query_indptr))
        kernel(*q, self.tensor(pool_of(self.spec, self.pages)), *self._table(), *outputs)

    def expected(self, causal: bool = True, inline: bool = False, window=None, reach=None):
        """Return the reference's `(o, lse)`."""
        return reference.paged_attention(
            self.q,
            self.query_indptr,
            self.pages,
            self.page_indptr,
            self.page_ids,
            self.last_page_len,
            self.sm_scale,
            causal=causal,
            inline=self.reference_rope(inline),
            window=window,
            k_offsets=self.k_offsets,
            reach=reach,
            softcap=self.spec.logit_softcap,
            alibi=self.reference_alibi(),
            v_width=self.spec.v_head_dim,
        )


class RaggedBatch(Batch):
    """A batch whose K and V are ragged arrays."""

    def __init__(self, spec: KernelSpec, lengths, seed: int):
        super().__init__(spec, lengths, seed)
        rows = (sum(self.kv_lens), spec.num_kv_heads)
        self.kv_indptr = indptr(self.kv_lens)
        self.k = normal(self.rng, (*rows, spec.qk_head_dim), spec.dtype)
        self.v = normal(self.rng, (*rows, spec.v_head_dim), spec.dtype)

    def prefill(
        self, causal: bool = True, cpu: str = "native", inline: bool = False, window=None
    ) -> None:
        """Run `prefill_ragged`, or with a window `prefill_ragged_sliding`."""
        name = "prefill_ragged" if window is None else "prefill_ragged_sliding"
        arrays = (self.q, self.query_indptr, self.k, self.v, self.kv_indptr)
        arrays = [self.tensor(x) for x in (*arrays, self.q_positions, self.k_offsets)]
        scalars = self.scalars(causal=causal, inline=inline)
        scalars += self.last_arguments(window)
        compiled(name, self.spec, cpu)(*arrays, self.o, self.lse, *scalars)

    @property
    def dtypes(self) -> tuple[str, ...]:
        return (self.spec.dtype,)  # there are no pages

    def expected(self, causal: bool = True, inline: bool = False, window=None):
        """Return the reference's `(o, lse)`."""
        return reference.ragged_attention(
            self.q,
            self.query_indptr,
            self.k,
            self.v,
            self.kv_indptr,
            self.sm_scale,
            causal=causal,
            inline=self.reference_rope(inline),
            softcap=self.spec.logit_softcap,
            alibi=self.reference_alibi(),
            window=window,
            k_offsets=self.k_offsets,
        )
