# SPDX-License-Identifier: Apache-2.0
"""Batches for the MLA kernels: latent rows in shuffled pages, with NaN wherever nothing lies."""

from __future__ import annotations

import numpy as np

from tir_kernels.spec import KernelSpec, RopeSpec
from tvm_pagedkv.compiler.build import vector_target

from .... import reference
from .attention_cases import (
    SPARE_PAGES,
    AttentionCase,
    compiled,
    indptr,
    normal,
    page_dtype,
    pool_of,
    random_pages,
    tensors_for,
)


def make_spec(
    num_heads: int,
    dims,
    dtypes=("float32", "float32"),
    page: int = 16,
    original=(0, 0),
    cpu=None,
    **fields,
) -> KernelSpec:
    """A spec of MLA layers; `dims` are Dckv and Dkpe, `original` those before absorption."""
    ckv, kpe = dims
    fields.setdefault("kind", "mla")
    return KernelSpec(
        num_heads,
        1,
        ckv + kpe,
        ckv,
        *dtypes,
        page_size=page,
        rope=RopeSpec(rotary_dim=0),
        target=vector_target(cpu or "native"),
        original_qk_head_dim=original[0],
        original_v_head_dim=original[1],
        **fields,
    )


class LatentBatch(AttentionCase):
    """A batch whose latent rows lie in shuffled pages.

    Parameters
    ----------
    spec : KernelSpec
    lengths : (rows of the step, positions in the pages) per sequence
    seed : int
    """

    has_single_rows = False

    def __init__(self, spec: KernelSpec, lengths, seed: int):
        self.spec, self.rng = spec, np.random.default_rng(seed)
        self.tensor = tensors_for(spec)
        self.num_rows, self.kv_lens = (list(x) for x in zip(*lengths, strict=True))
        page = spec.page_size
        num_pages = [-(-kv // page) for kv in self.kv_lens]
        pool = sum(num_pages) + SPARE_PAGES
        self.query_indptr, self.page_indptr = indptr(self.num_rows), indptr(num_pages)
        self.page_ids = self.rng.permutation(pool)[: sum(num_pages)].astype(np.int32)
        self.last_page_len = np.array(
            [kv - max(n - 1, 0) * page for kv, n in zip(self.kv_lens, num_pages, strict=True)],
            np.int32,
        )
        self.pages = np.full((pool, page, spec.qk_head_dim), np.nan, page_dtype(spec))
        for b in range(len(lengths)):
            slots = self.slots(b)
            rows = random_pages(self.rng, (len(slots), spec.qk_head_dim), spec)
            self.pages[slots // page, slots % page] = rows
        shape = (sum(self.num_rows), spec.num_qo_heads)
        self.q = normal(self.rng, (*shape, spec.qk_head_dim), spec.dtype)
        self.sm_scale = spec.qk_head_dim**-0.5
        self.o = self.tensor(np.full((*shape, spec.v_head_dim), np.nan, spec.dtype))
        self.lse = self.tensor(np.full(shape, np.nan, np.float32))

    def slots(self, b: int) -> np.ndarray:
        """Slots of a sequence, in order of position."""
        page_ids = self.page_ids[self.page_indptr[b] : self.page_indptr[b + 1]]
        return reference.sequence_slots(page_ids, self.last_page_len[b], self.spec.page_size)

    def run(self, causal: bool = True, cpu: str = "native", window: int | None = None) -> None:
        """Run `mla_prefill`, or with a window `mla_prefill_sliding`."""
        table = (self.page_indptr, self.page_ids, self.last_page_len)
        name = "mla_prefill" if window is None else "mla_prefill_sliding"
        compiled(name, self.spec, cpu)(
            *(
                self.tensor(x)
                for x in (self.q, self.query_indptr, pool_of(self.spec, self.pages), *table)
            ),
            self.o,
            self.lse,
            int(causal),
            self.sm_scale,
            *self.last_arguments(window),
        )

    def expected(self, causal: bool = True, window: int | None = None):
        """Return the reference's `(o, lse)`."""
        return reference.mla_paged_attention(
            self.q,
            self.query_indptr,
            self.pages,
            self.page_indptr,
            self.page_ids,
            self.last_page_len,
            self.spec.v_head_dim,
            self.sm_scale,
            causal=causal,
            window=window,
        )
