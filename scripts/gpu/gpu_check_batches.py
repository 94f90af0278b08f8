# SPDX-License-Identifier: Apache-2.0
"""Batches for the timings on a GPU: random pages in random order, and what is right."""

from __future__ import annotations

import dataclasses

import torch
import tvm_ffi
from gpu_check_codes import numbers, random_pages

from tests.support.harness import tolerances

THETA = 1e4


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads, width, type and page size of a layer; MLA: V are the first `v_head_dim` columns."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int = 16
    v_head_dim: int = 0
    codec: str = ""

    @property
    def is_mla(self) -> bool:
        return self.v_head_dim > 0

    @property
    def out_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    @property
    def label(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        name += f", {self.codec}" if self.codec else ""
        return f"{name} {self.num_qo_heads}/{self.num_kv_heads} x {self.head_dim}"


class Batch:
    """Queries of a step over paged K and V, with everything that kernels take.

    Parameters
    ----------
    shape : Shape
    rows, contexts : list of int
        Of each sequence: rows of the step, and positions with them.
    device : torch.device
    """

    def __init__(self, shape: Shape, rows: list[int], contexts: list[int], device):
        self.shape, self.rows, self.contexts, self.device = shape, rows, contexts, device
        page = shape.page_size
        counts = [-(-context // page) for context in contexts]
        self.num_pages = sum(counts)
        planes = () if shape.is_mla else (2, shape.num_kv_heads)
        self.page_rows = (self.num_pages, *planes, page)
        if shape.codec:
            self.pages = random_pages(shape.codec, self.page_rows, shape.head_dim, device)
        else:
            self.pages = self.normal(*self.page_rows, shape.head_dim)
        self.q = self.normal(sum(rows), shape.num_qo_heads, shape.head_dim)
        self.o = torch.full((*self.q.shape[:2], shape.out_dim), torch.nan, dtype=shape.dtype,
                            device=device)  # fmt: skip
        self.lse = torch.full(self.q.shape[:2], torch.nan, device=device)
        self.page_ids = torch.randperm(self.num_pages, device=device).to(torch.int32)
        self.indptr = self.starts(counts)
        self.query_indptr = self.starts(rows)
        last = [c - (n - 1) * page for c, n in zip(contexts, counts, strict=True)]
        self.last_page_len = self.integers(last)
        self.offsets = self.integers([0] * len(rows))
        ends = zip(rows, contexts, strict=True)
        self.positions = self.integers([p for n, end in ends for p in range(end - n, end)])
        self.scale = shape.head_dim**-0.5

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self.shape.dtype, device=self.device)

    def integers(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def starts(self, lengths: list[int]) -> torch.Tensor:
        return self.integers([0, *torch.tensor(lengths).cumsum(0).tolist()])

    def arguments(self, name: str) -> list:
        """Return the arguments of the kernel decode, prefill or mla_prefill."""
        table = [self.indptr, self.page_ids, self.last_page_len]
        q = [self.q] if name == "decode" else [self.q, self.query_indptr]
        if name == "mla_prefill":
            given, scalars = [*q, self.pages, *table, self.o, self.lse], [1, self.scale]
        else:
            given = [*q, self.pages, *table, self.offsets, self.positions, self.o, self.lse]
            scalars = [0, 1.0, THETA, self.scale]
            scalars = scalars if name == "decode" else [1, *scalars]
        return [*map(tvm_ffi.from_dlpack, given), *scalars]

    @property
    def num_bytes(self) -> int:
        """K and V and the queries in, the outputs out: each once."""
        shape = self.shape
        kv = shape.head_dim if shape.is_mla else 2 * shape.num_kv_heads * shape.head_dim
        rows = shape.num_qo_heads * (shape.head_dim + shape.out_dim)
        if shape.codec:
            own = self.pages.shape[1] * sum(self.contexts) // shape.page_size
            return own + self.q.element_size() * rows * sum(self.rows)
        return self.q.element_size() * (kv * sum(self.contexts) + rows * sum(self.rows))

    @property
    def flops(self) -> int:
        """Return the operations of the two products, over what the causal mask leaves."""
        pairs = sum(
            n * (c - n) + n * (n + 1) // 2 for n, c in zip(self.rows, self.contexts, strict=True)
        )
        return 2 * self.shape.num_qo_heads * (self.shape.head_dim + self.shape.out_dim) * pairs

    def dense(self, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V ``[context, heads, dim]`` of a sequence."""
        begin, end = self.indptr[sequence : sequence + 2].tolist()
        held = self.pages[self.page_ids[begin:end].long()]
        if self.shape.codec:
            held = numbers(self.shape.codec, held, self.page_rows, self.shape.head_dim)
        context = self.contexts[sequence]
        if self.shape.is_mla:
            rows = held.reshape(-1, 1, self.shape.head_dim)[:context]
            return rows, rows[..., : self.shape.v_head_dim]
        k, v = held.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :context]
        return k, v

    def error(self, out: torch.Tensor | None = None) -> float:
        """The largest error of some rows, in tolerances of the type; NaN counts as infinite."""
        dtype = str(self.shape.dtype).removeprefix("torch.")
        out = self.o if out is None else out
        worst, sequences = 0.0, sorted({0, len(self.rows) // 2, len(self.rows) - 1})
        for sequence in sequences:
            k, v = (x.double() for x in self.dense(sequence))
            begin, n = int(self.query_indptr[sequence]), self.rows[sequence]
            for row in sorted({0, n // 2, n - 1}):
                seen = self.contexts[sequence] - n + row + 1
                q = self.q[begin + row].double().unflatten(0, (k.shape[1], -1))
                logits = torch.einsum("kgd,skd->kgs", q, k[:seen])
                weights = (logits * self.scale).softmax(-1)
                want = torch.einsum("kgs,skd->kgd", weights, v[:seen]).flatten(0, 1)
                found = out[begin + row].double().cpu().numpy()
                worst = max(worst, float(tolerances.errors(found, want.cpu().numpy(), dtype).max()))
        return worst
