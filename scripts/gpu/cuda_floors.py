# SPDX-License-Identifier: Apache-2.0
"""The least time that benchmark cases can take on a GPU, by the figures of its data sheet.

They are what the makers state, not what was measured, and leave out what a launch takes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tir_kernels.layout import row_bytes, rows_per_slot
from tir_kernels.spec import ITEMSIZE, KernelSpec

CONTEXT, CHUNK = 4096, 8192
BATCHES = (16, 64)


@dataclass(frozen=True)
class DataSheet:
    """Peak rates of a GPU.

    Parameters
    ----------
    name : str
    bandwidth : float
        Bytes per second of its memory.
    tensor_rate, float_rate : float
        Floating-point operations per second: on tensor cores with dense float16 or bfloat16
        operands and float32 sums, and in float32 without them.
    """

    name: str
    bandwidth: float
    tensor_rate: float
    float_rate: float


DATA_SHEETS = {
    "80": DataSheet("A100 SXM 80 GB", 2.0e12, 312e12, 19.5e12),
    "90": DataSheet("H200 SXM", 4.8e12, 989e12, 67e12),
}


@dataclass(frozen=True)
class Work:
    """Bytes that a case has to move, and floating-point operations that it has to do."""

    label: str
    num_bytes: int
    flops: int = 0

    def floor(self, sheet: DataSheet, dtype: str) -> float:
        """Seconds."""
        rate = sheet.float_rate if dtype == "float32" else sheet.tensor_rate
        return max(self.num_bytes / sheet.bandwidth, self.flops / rate)


def _attention(
    label: str, spec: KernelSpec, batch: int, rows: int, context: int, is_causal: bool = True
) -> Work:
    """Attention: K and V and Q are read once, O is written, and the products are done."""
    k_and_v = spec.qk_head_dim + (0 if spec.kind == "mla" else spec.v_head_dim)
    width = spec.qk_head_dim + spec.v_head_dim
    if spec.codec:
        slot_bytes = rows_per_slot(spec) * row_bytes(spec)
    else:
        slot_bytes = spec.num_kv_heads * k_and_v * ITEMSIZE[spec.kv_dtype]
    pages = context * slot_bytes
    steps = rows * spec.num_qo_heads * width * ITEMSIZE[spec.dtype]
    hidden = rows * (rows - 1) // 2 if is_causal else 0
    seen = rows * context - hidden
    return Work(label, batch * (pages + steps), batch * 2 * spec.num_qo_heads * width * seen)


def _decode(spec: KernelSpec) -> list[Work]:
    return [_attention(f"decode {b} x 4k", spec, b, 1, CONTEXT) for b in BATCHES]


def _prefill(spec: KernelSpec) -> list[Work]:
    return [_attention("prefill 8k", spec, 1, CHUNK, CHUNK)]


def _shared(spec: KernelSpec) -> list[Work]:
    """Rows of a decode step over one prefix; O is read, too, for they are merged into it."""
    works = []
    for rows in BATCHES:
        work = _attention(f"{rows} rows on 8k", spec, 1, rows, CHUNK, is_causal=False)
        o_bytes = rows * spec.num_qo_heads * spec.v_head_dim * ITEMSIZE[spec.dtype]
        works.append(replace(work, num_bytes=work.num_bytes + o_bytes))
    return works


def _move(spec: KernelSpec) -> list[Work]:
    """Rows of a decode step, read once and written once."""
    q = spec.num_qo_heads * spec.qk_head_dim
    size = ITEMSIZE[spec.dtype]
    num_bytes = 2 * q * size + rows_per_slot(spec) * (spec.qk_head_dim * size + row_bytes(spec))
    return [Work(f"{b} rows", b * num_bytes) for b in BATCHES]


# Which function a benchmark case is for; others have no floor.
CASES = {
    "decode": _decode,
    "prefill": _prefill,
    # Fresh K and V are never quantized.
    "prefill_ragged": lambda spec: _prefill(replace(spec.non_absorbed, kv_dtype=spec.dtype)),
    "prefill_shared": _shared,
    "mla_prefill_shared": _shared,
    "mla_prefill": lambda spec: _decode(spec) + _prefill(spec),
    "rope_append": _move,
}


def floors(name: str, spec: KernelSpec, arch: str) -> str:
    """The floors of a function in microseconds, as text; empty where there are none."""
    arch = arch.rstrip("a")
    if name not in CASES or arch not in DATA_SHEETS:
        return ""
    sheet = DATA_SHEETS[arch]
    works = CASES[name](spec)
    return ", ".join(f"{w.label}: {w.floor(sheet, spec.dtype) * 1e6:.3g}" for w in works)
